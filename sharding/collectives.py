"""Every collective of the decode step, written once. Each is the identity on axes of size one.

They are called inside ``jax.shard_map`` over the mesh of ``sharding.mesh``; the compiled program holds these
and no others, which ``sharding.hlo`` counts. ``Collectives`` says which form of all-reduce a program uses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from sharding.mesh import KV_SEQ, TENSOR, LayoutError

Axes = str | tuple[str, ...]
CollectiveForm = Literal["psum", "scatter", "one_shot", "one_shot_dma", "multimem"]
KERNEL_FORMS: Mapping[CollectiveForm, str] = MappingProxyType({"one_shot_dma": "tpu", "multimem": "gpu"})
"""Forms that are a kernel of one platform; all others run everywhere."""

COLLECTIVE_FORMS: tuple[CollectiveForm, ...] = ("psum", "scatter", "one_shot")


def axis_size(axes: Axes) -> int:
    """Devices along the named mesh axes, a Python int while tracing."""
    names = (axes,) if isinstance(axes, str) else axes
    return math.prod(lax.axis_size(name) for name in names)


def tensor_index() -> jax.Array:
    """This device's place among the tensor-parallel devices, int32."""
    return lax.axis_index(TENSOR)


def all_reduce_sum(x: jax.Array, axes: Axes = TENSOR) -> jax.Array:
    """Sum over devices; every device gets the result. In float32, rounding happens once, after the sum."""
    return x if axis_size(axes) == 1 else lax.psum(x, axes)


def all_reduce_max(x: jax.Array, axes: Axes = TENSOR) -> jax.Array:
    """The largest over devices; every device gets the result."""
    return x if axis_size(axes) == 1 else lax.pmax(x, axes)


def all_gather(x: jax.Array, axes: Axes, *, axis: int) -> jax.Array:
    """Concatenate every device's ``x`` along ``axis``, in device order."""
    return x if axis_size(axes) == 1 else lax.all_gather(x, axes, axis=axis, tiled=True)


def reduce_scatter_sum(x: jax.Array, axes: Axes, *, axis: int) -> jax.Array:
    """Sum over devices; device i gets the i-th of equal slices along ``axis``, which the devices must divide."""
    return x if axis_size(axes) == 1 else lax.psum_scatter(x, axes, scatter_dimension=axis, tiled=True)


def exchange(x: jax.Array, axes: Axes) -> jax.Array:
    """All-to-all: ``x`` [devices, ...] is a block for each device along ``axes``; returns what each sent us."""
    return x if axis_size(axes) == 1 else lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)


def exchange_heads(x: jax.Array) -> jax.Array:
    """All-to-all over ``kv_seq``: ``x`` [kv_seq, ...] is a block for each; returns what each sent us."""
    return exchange(x, KV_SEQ)


@dataclass(frozen=True)
class Collectives:
    """How the devices of one program talk: the form of its all-reduces, or not at all.

    collective: how partial sums of the hidden state [..., D] become the input of the next norm.

      - "psum": one all-reduce, whose algorithm the compiler picks.
      - "scatter": a reduce-scatter, after which each device adds to and keeps its own 1 / tp of the residual, and an
        all-gather ahead of each norm, which carries each share's sum of squares with it (sequence parallelism,
        Korthikanti et al., 2022, splits the residual over positions; one position leaves only D to split).
      - "one_shot": one all-gather of the partial sums, added up on every device: the fewest hops, tp times the bytes.
      - "one_shot_dma", on TPU: the same as one kernel, where each device writes into the memory of all others.
      - "multimem", on Hopper and later: the NVLink switch adds. Both are in ``sharding.kernel_sums``.

    removed: every collective becomes local work of the same shapes. Results are wrong: it measures the rest of a step.

    Raises:
        LayoutError: an unknown form.
    """

    collective: CollectiveForm = "psum"
    removed: bool = False

    def __post_init__(self) -> None:
        if self.collective not in (forms := get_args(CollectiveForm)):
            raise LayoutError(f"collective is {self.collective!r}; it must be one of {', '.join(forms)}")

    def check_platform(self, platform: str) -> None:
        """Refuse a form that is a kernel of another platform.

        Raises:
            LayoutError: it is.
        """
        own = KERNEL_FORMS.get(self.collective, platform)
        if own != platform:
            others = ", ".join(COLLECTIVE_FORMS)
            raise LayoutError(f"collective {self.collective} runs on {own}, not {platform}; use one of {others}")

    def sum(self, x: jax.Array, axes: Axes = TENSOR) -> jax.Array:
        """``all_reduce_sum``."""
        return _kept(x) if self.removed else all_reduce_sum(x, axes)

    def max(self, x: jax.Array, axes: Axes = TENSOR) -> jax.Array:
        """``all_reduce_max``."""
        return _kept(x) if self.removed else all_reduce_max(x, axes)

    def gather(self, x: jax.Array, axes: Axes, *, axis: int) -> jax.Array:
        """``all_gather``."""
        if self.removed:
            return _kept(jnp.concatenate([x] * axis_size(axes), axis))
        return all_gather(x, axes, axis=axis)

    def scatter(self, x: jax.Array, axes: Axes, *, axis: int) -> jax.Array:
        """``reduce_scatter_sum``."""
        if self.removed:
            return _kept(lax.slice_in_dim(x, 0, x.shape[axis] // axis_size(axes), axis=axis))
        return reduce_scatter_sum(x, axes, axis=axis)

    def exchange_heads(self, x: jax.Array) -> jax.Array:
        """``exchange_heads``."""
        return _kept(x) if self.removed else exchange_heads(x)

    def splits_hidden(self) -> bool:
        """Whether a device holds only its share of the residual between layers."""
        return self.collective == "scatter" and axis_size(TENSOR) > 1

    def reduce_hidden(self, partial: jax.Array) -> jax.Array:
        """Partial sums [..., D] -> their sum, or with "scatter" this device's share of it [..., ceil(D / tp)]."""
        if axis_size(TENSOR) == 1:
            return partial
        if self.splits_hidden():
            return self.scatter(_padded(partial), TENSOR, axis=partial.ndim - 1)
        if self.collective == "one_shot":
            return jnp.sum(self.gather(partial[None], TENSOR, axis=0), axis=0)
        if self.collective in KERNEL_FORMS and not self.removed:
            from sharding import kernel_sums  # Pallas takes a third of a second to import

            return getattr(kernel_sums, self.collective)(partial, TENSOR)
        return self.sum(partial)

    def hidden_share(self, vector: jax.Array) -> jax.Array:
        """What every device holds whole [..., D] -> what it adds to a result of ``reduce_hidden``."""
        if not self.splits_hidden():
            return vector
        padded = _padded(vector)
        size = padded.shape[-1] // axis_size(TENSOR)
        return lax.dynamic_slice_in_dim(padded, tensor_index() * size, size, axis=-1)

    def whole_hidden(self, x: jax.Array, square: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """The residual [..., D] and its sum of squares, float32 [..., 1], from each device's share of both.

        One gather carries them, as integers: the bits of a float32 are no bf16 number.
        """
        if not self.splits_hidden():
            return x, square
        share, word = x.shape[-1], {4: jnp.uint32, 2: jnp.uint16}[x.dtype.itemsize]
        bits = lax.bitcast_convert_type(square, word).reshape(*square.shape[:-1], -1)
        sent = jnp.concatenate([lax.bitcast_convert_type(x, word), bits], axis=-1)
        got = self.gather(sent[None], TENSOR, axis=0)  # [tp, ..., share + 1 or 2]
        whole = jnp.moveaxis(lax.bitcast_convert_type(got[..., :share], x.dtype), 0, -2)
        squares = got[..., share:] if word == jnp.uint16 else got[..., share]
        total = jnp.sum(lax.bitcast_convert_type(squares, jnp.float32), axis=0)
        return whole.reshape(*x.shape[:-1], -1)[..., :size], total[..., None]


DEFAULT_COLLECTIVES = Collectives()
"""psum, by measurement: a step of the demo model on two cores takes 36.7 ms with it, 39.1 with one_shot and 42.1 with
scatter (``scripts.bench_scaling --tp 1,2 --threads-per-device 1 --collective ...``)."""


def _padded(x: jax.Array) -> jax.Array:
    """``x`` with zeros after its last axis up to a multiple of the tensor-parallel devices."""
    extra = -x.shape[-1] % axis_size(TENSOR)
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, extra)]) if extra else x


def _kept(x: jax.Array) -> jax.Array:
    """``x``, where the compiler neither joins nor folds what stands on either side of a collective."""
    return lax.optimization_barrier(x)
