"""Every collective of the decode step, written once. Each is the identity on axes of size one.

They are called inside ``jax.shard_map`` over the mesh of ``sharding.mesh``; the compiled program holds these
and no others, which ``sharding.hlo`` counts.
"""

from __future__ import annotations

import math

import jax
from jax import lax

from sharding.mesh import KV_SEQ, TENSOR

Axes = str | tuple[str, ...]


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


def exchange_heads(x: jax.Array) -> jax.Array:
    """All-to-all over ``kv_seq``: ``x`` [kv_seq, ...] is a block for each; returns what each sent us."""
    return x if axis_size(KV_SEQ) == 1 else lax.all_to_all(x, KV_SEQ, split_axis=0, concat_axis=0, tiled=True)
