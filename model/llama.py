"""The Llama decoder as Flax NNX modules: one forward for prefill and decode, written for one device's shards.

Shape letters: B batch, T new positions, D hidden, N query heads, K KV heads, G = N / K, H head size, F feed-forward,
V vocabulary, L layers. A module is built abstract: its parameters are shapes with logical axes, and a loader places
each device's slice. It runs inside ``jax.shard_map`` over the mesh of ``sharding.mesh``, where K, F, V and the rows of
a head group are this device's share. Two all-reduces a layer: after the attention output and after the down
projection. With the "scatter" form of them the residual between two norms is this device's share of D.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from kernels.cache_attention import Partial
from kernels.cache_attention.partial import merge
from kernels.matmul import matmul
from kernels.normed_gate import gate, normed_gate
from kernels.normed_matmul import normed_matmul
from kernels.quantized import QuantizedWeight
from kernels.rms_norm import normalize, sum_of_squares
from model.config import LlamaConfig
from model.quantize import WIDE, Quantization, WeightFormat
from model.rope import inverse_frequencies, rope_tables, rotate
from sharding.collectives import DEFAULT_COLLECTIVES, Collectives, axis_size, tensor_index
from sharding.layout import InUnits, LogicalAxis
from sharding.mesh import KV_SEQ, TENSOR

LayersForm = Literal["unrolled", "scan"]


@dataclass(frozen=True)
class Build:
    """How modules are built: the dtype of parameters, the platform the program is compiled for, how many layers are
    stacked in front of each parameter (None: one module a layer), the kernels chosen by
    hand for products and for attention (None: the platform's best), how devices add up their parts, and which matrices
    are kept in fewer bits.
    """

    dtype: Any
    platform: str
    stack: int | None = None
    matmul: str | None = None
    attention: str | None = None
    collectives: Collectives = DEFAULT_COLLECTIVES
    quantization: Quantization = WIDE

    def kernel(self) -> dict[str, Any]:
        """What every product is told."""
        return {"platform": self.platform, "implementation": self.matmul}


class Cache(Protocol):
    """What the model needs of a KV cache; ``decode.cache.KVCache`` is one. Functional: ``write`` returns a new one."""

    def write(self, layer: jax.Array | int, k: jax.Array, v: jax.Array, positions: jax.Array, *, platform: str) -> Self:
        """Store k and v [B, T, K, H] of ``layer`` at positions [B, T]."""
        ...

    def attend(
        self,
        layer: jax.Array | int,
        q: jax.Array,
        positions: jax.Array,
        *,
        platform: str,
        implementation: str | None = None,
    ) -> Partial:
        """q [B, T, K, G, H] against what this device holds of ``layer``."""
        ...


@runtime_checkable
class ExtendableCache(Cache, Protocol):
    """A cache that may turn, store and attend to new positions in one call."""

    def extend(
        self,
        layer: jax.Array | int,
        heads: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        positions: jax.Array,
        *,
        platform: str,
        implementation: str | None = None,
    ) -> tuple[jax.Array, Self] | None:
        """heads [B, T, K, G + 2, H] -> attention [B, T, K, G, H] in heads' dtype, or None where it takes several."""
        ...


C = TypeVar("C", bound=Cache)


class Linear(nnx.Module):
    """A weight stored [out..., in...] for streaming, and a bias or ``None``. Leading ``stack`` layers where scanned.

    Where the build keeps the module called ``name`` in fewer bits, ``weight`` holds the small numbers, and ``scales``
    and ``offsets`` what turns them back; see ``kernels.quantized``.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        axes: Sequence[LogicalAxis],
        build: Build,
        *,
        out_dims: int = 1,
        bias: bool = False,
    ):
        self.build, self.out_dims = build, out_dims
        self.bias = _param(shape[:out_dims], axes[:out_dims], build.dtype, build) if bias else None
        self.format = build.quantization.of(name)
        if self.format is None:
            self.weight = _param(shape, axes, build.dtype, build)
            return
        self.format.check_columns(name, shape[-1])
        values, scales = _quantized_shapes(self.format, shape, axes, out_dims, build.platform)
        self.weight = _param(*values, build)
        self.scales = _param(*scales, build)
        if self.format.offsets:
            self.offsets = _param(*scales, build)

    def __call__(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        """x [B, T, in] -> [B, T, out], the product alone: the caller adds the bias where it belongs."""
        return matmul(x, self.flat(), out_dtype=out_dtype, **self.build.kernel())

    def onto(self, residual: jax.Array, x: jax.Array) -> jax.Array:
        """residual + the product of x, bias included, summed over the devices: rounded once."""
        collectives = self.build.collectives
        if axis_size(TENSOR) == 1 and self.bias is None:  # nothing happens between the product and the sum
            return matmul(x, self.flat(), add=residual, **self.build.kernel())
        out = collectives.reduce_hidden(self(x, out_dtype=jnp.float32))
        if self.bias is not None:
            out = out + collectives.hidden_share(self.bias[...])
        return (residual.astype(jnp.float32) + out).astype(residual.dtype)

    def of_normed(self, x: jax.Array, norm: RMSNorm) -> jax.Array:
        """The product of ``norm(x)``, x the residual or this device's share of it."""
        if self.build.collectives.splits_hidden():
            return self(norm(x))
        return normed_matmul(x, norm.weight[...], norm.eps, self.flat(), **self.build.kernel())

    @property
    def columns(self) -> int:
        """This device's size of the last contraction axis, padding included."""
        return self._array().shape[-1]

    def flat(self) -> jax.Array | QuantizedWeight:
        """The weight as products take it, [out, in]."""
        weight = self._array()
        if isinstance(weight, QuantizedWeight):
            return weight.flat(self.out_dims)
        return weight.reshape(math.prod(weight.shape[: self.out_dims]), -1)

    def _array(self) -> jax.Array | QuantizedWeight:
        if self.format is None:
            return self.weight[...]
        offsets = self.offsets[...] if self.format.offsets else None
        return QuantizedWeight(self.weight[...], self.scales[...], offsets, self.format.group)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight: its parameter, and ``kernels.rms_norm``."""

    def __init__(self, size: int, eps: float, build: Build):
        self.size, self.eps, self.build = size, eps, build
        self.weight = _param((size,), (None,), build.dtype, build)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The residual, or this device's share of it -> [B, T, D]."""
        x, square = self.build.collectives.whole_hidden(x, sum_of_squares(x), self.size)
        return normalize(x, square, self.weight[...], self.eps)


class Attention(nnx.Module):
    """Grouped-query attention. q, k and v are one product; each kv_seq member attends to its own cache positions."""

    def __init__(self, name: str, config: LlamaConfig, build: Build):
        D, K, G, H = config.hidden_size, config.num_kv_heads, config.group_size, config.head_dim
        self.build, self.group, self.head_dim, bias = build, G, H, config.attention_bias
        rows = ("kv_heads", "head_rows", None)
        self.qkv = Linear(f"{name}.qkv", (K, (G + 2) * H, D), rows, build, out_dims=2, bias=bias)
        self.out = Linear(f"{name}.out", (D, K, G * H), (None, "kv_heads", "head_columns"), build, bias=bias)

    def __call__(
        self,
        x: jax.Array,
        norm: RMSNorm,
        rope: tuple[jax.Array, jax.Array],
        positions: jax.Array,
        cache: C,
        layer: jax.Array | int,
    ) -> tuple[jax.Array, C]:
        """The residual [B, T, D] -> the same with attention added, and the cache with k and v of these positions."""
        B, T, _ = x.shape
        G, H = self.group, self.head_dim
        fused = self.qkv.of_normed(x, norm).reshape(B, T, *self.qkv.weight.shape[:2])  # [B, T, K, this device's rows]
        if self.qkv.bias is not None:
            fused = fused + self.qkv.bias[...]
        fused = self.build.collectives.gather(fused, KV_SEQ, axis=3)[..., : (G + 2) * H]
        heads = fused.reshape(B, T, -1, G + 2, H)
        mixed, cache = self._attend(heads, rope, positions, cache, layer)
        return self.out.onto(x, mixed.reshape(B, T, -1)), cache

    def _attend(
        self,
        heads: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        positions: jax.Array,
        cache: C,
        layer: jax.Array | int,
    ) -> tuple[jax.Array, C]:
        """heads [B, T, K, G + 2, H] -> this device's columns [B, T, K, columns] in heads' dtype, and the cache."""
        how: dict[str, Any] = {"platform": self.build.platform, "implementation": self.build.attention}
        if (
            axis_size(KV_SEQ) == 1
            and isinstance(cache, ExtendableCache)
            and (extended := cache.extend(layer, heads, rope, positions, **how)) is not None
        ):
            out, cache = extended
            return self._padded(out.reshape(*out.shape[:3], -1)), cache
        turned = rotate(heads[..., :-1, :], *rope)
        q, k, v = turned[..., :-1, :], turned[..., -1, :], heads[..., -1, :]
        cache = cache.write(layer, k, v, positions, platform=self.build.platform)
        return self._merge_members(cache.attend(layer, q, positions, **how)).astype(heads.dtype), cache

    def _padded(self, columns: jax.Array) -> jax.Array:
        """[..., G * H] with zeros up to what the members hold together."""
        missing = self.out.columns * axis_size(KV_SEQ) - columns.shape[-1]
        return jnp.pad(columns, ((0, 0), (0, 0), (0, 0), (0, missing)))

    def _merge_members(self, partial: Partial) -> jax.Array:
        """Partial results of each kv_seq member -> this device's columns of every head group, [B, T, K, columns].

        One all-to-all: each member gets its own columns from every other, with the maxima and sums to weigh them.
        """
        B, T, K, G, H = partial.out.shape
        members = axis_size(KV_SEQ)
        columns = self.out.columns
        if members == 1:
            return self._padded(partial.finish().reshape(B, T, K, G * H))
        blocks = self._padded(partial.out.reshape(B, T, K, G * H)).reshape(B, T, K, members, columns)
        stats = jnp.stack([partial.max, partial.sum], axis=-1).reshape(B, T, K, 1, 2 * G)
        sent = jnp.concatenate([blocks, jnp.broadcast_to(stats, (B, T, K, members, 2 * G))], axis=-1)
        got = self.build.collectives.exchange_heads(jnp.moveaxis(sent, 3, 0))  # [members, B, T, K, columns + 2G]
        top, total = jnp.moveaxis(got[..., columns:].reshape(members, B, T, K, G, 2), -1, 0)
        # Which of the group's heads each of our columns belongs to; padding columns repeat the last head and are 0.
        column = lax.axis_index(KV_SEQ) * columns + jnp.arange(columns)
        head = jnp.minimum(column // H, G - 1)
        per_column = Partial(got[..., :columns, None], top[..., head], total[..., head])
        return merge(per_column).finish()[..., 0]


class MLP(nnx.Module):
    """SwiGLU (Shazeer, 2020): down(silu(gate(x)) * up(x)), gate and up as one product."""

    def __init__(self, name: str, config: LlamaConfig, build: Build):
        D, F, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.build = build
        # What one makes the other takes, so both are split in whole groups of the one that has groups along it.
        format = build.quantization.of(f"{name}.down")
        ff = "ff" if format is None or format.group is None else InUnits("ff", format.group)
        self.gate_up = Linear(f"{name}.gate_up", (2, F, D), (None, ff, None), build, out_dims=2, bias=bias)
        self.down = Linear(f"{name}.down", (D, F), (None, ff), build, bias=bias)

    def __call__(self, x: jax.Array, norm: RMSNorm) -> jax.Array:
        """The residual [B, T, D] -> the same with what this makes of it added."""
        weight, bias = self.gate_up.flat(), None if self.gate_up.bias is None else self.gate_up.bias[...]
        if self.build.collectives.splits_hidden():
            inner = gate(norm(x), weight, bias, **self.build.kernel())
        else:
            inner = normed_gate(x, norm.weight[...], norm.eps, weight, bias, **self.build.kernel())
        return self.down.onto(x, inner)


class Block(nnx.Module):
    """One decoder layer: attention and MLP, each behind a norm and added to the residual."""

    def __init__(self, name: str, config: LlamaConfig, build: Build):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        self.attention = Attention(f"{name}.attention", config, build)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        self.mlp = MLP(f"{name}.mlp", config, build)

    def __call__(
        self,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        positions: jax.Array,
        cache: C,
        layer: jax.Array | int,
    ) -> tuple[jax.Array, C]:
        with jax.named_scope("attention"):
            x, cache = self.attention(x, self.attention_norm, rope, positions, cache, layer)
        with jax.named_scope("mlp"):
            return self.mlp(x, self.mlp_norm), cache


class Llama(nnx.Module):
    """The whole decoder. ``layers="unrolled"`` inlines every layer; ``"scan"`` compiles one and loops over a stack.

    Unrolled is the default: a scan copies each layer's slice of the stack on CPU before using it.
    """

    def __init__(
        self,
        config: LlamaConfig,
        dtype: Any,
        *,
        platform: str,
        layers: LayersForm = "unrolled",
        matmul: str | None = None,
        attention: str | None = None,
        collectives: Collectives = DEFAULT_COLLECTIVES,
        quantization: Quantization = WIDE,
    ):
        self.config = config
        build = Build(
            dtype, platform, matmul=matmul, attention=attention, collectives=collectives, quantization=quantization
        )
        vocabulary = ((config.vocab_size, config.hidden_size), ("vocab", None), build)
        self.embed = Linear("embed", *vocabulary)
        self.layers: nnx.List | Block
        if layers == "unrolled":
            self.layers = nnx.List([Block(f"layers.{i}", config, build) for i in range(config.num_layers)])
        else:
            self.layers = Block("layers", config, replace(build, stack=config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build)
        self.head = None if config.tie_word_embeddings else Linear("head", *vocabulary)

    def __call__(self, tokens: jax.Array, positions: jax.Array, cache: C) -> tuple[jax.Array, C]:
        """Run new tokens through every layer.

        Args:
            tokens: int32 [B, T] ids, each below the vocabulary size.
            positions: int32 [B, T], each token's place in its row.
            cache: holds every earlier position of each row.

        Returns:
            The hidden states after the final norm [B, T, D], and the cache with these positions written.
        """
        with jax.named_scope("embed"):
            x = self._look_up(tokens)
        rope = rope_tables(inverse_frequencies(self.config), positions)
        if isinstance(self.layers, Block):
            x, cache = self._scan(self.layers, x, rope, positions, cache)
        else:
            for index, block in enumerate(self.layers):
                x, cache = block(x, rope, positions, cache, index)
        return self.norm(x), cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., D] -> this device's slice of the logits, float32 [..., V / tp]. Padding rows give 0."""
        with jax.named_scope("head"):
            return (self.embed if self.head is None else self.head)(hidden, out_dtype=jnp.float32)

    def _look_up(self, tokens: jax.Array) -> jax.Array:
        """Rows of the vocabulary-split table: the device that holds a row sends it, all others send zeros."""
        # The barrier keeps XLA:CPU from widening the whole bf16 table to float32 ahead of the decode loop.
        table, tokens = lax.optimization_barrier((self.embed.flat(), tokens))

        def look_up(rows: jax.Array) -> jax.Array:
            if isinstance(table, QuantizedWeight):
                return table.take(rows).astype(self.norm.build.dtype)
            return jnp.take(table, rows, axis=0, mode="clip")

        if axis_size(TENSOR) == 1:
            return look_up(tokens)
        local = tokens - tensor_index() * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        rows = look_up(jnp.where(mine, local, 0))
        return self.norm.build.collectives.reduce_hidden(jnp.where(mine[..., None], rows, 0))

    def _scan(
        self, stack: Block, x: jax.Array, rope: tuple[jax.Array, jax.Array], positions: jax.Array, cache: C
    ) -> tuple[jax.Array, C]:
        graph, state = nnx.split(stack)
        weights, tree = jax.tree.flatten(state)
        shapes = [weight.shape[1:] for weight in weights]
        # Stacked as products take them: out of [L, out, in] XLA:TPU reads a layer in the product itself, out of
        # [L, 2, F, D] it copies the layer first.
        flat = [weight.reshape(len(weight), *rest) for weight, rest in zip(weights, _flat_shapes(stack), strict=True)]

        def body(
            carry: tuple[jax.Array, C], one: tuple[list[jax.Array], jax.Array]
        ) -> tuple[tuple[jax.Array, C], None]:
            (x, cache), (weights, layer) = carry, one
            weights = [weight.reshape(shape) for weight, shape in zip(weights, shapes, strict=True)]
            block = nnx.merge(graph, jax.tree.unflatten(tree, weights))
            return block(x, rope, positions, cache, layer), None

        (x, cache), _ = lax.scan(body, (x, cache), (flat, jnp.arange(self.config.num_layers)))
        return x, cache


def _flat_shapes(stack: Block) -> list[tuple[int, ...]]:
    """For each leaf of a stack of layers its shape without the stack, matrices as [out, in]."""
    out_dims = {path: one.out_dims for path, one in nnx.iter_modules(stack) if isinstance(one, Linear)}
    _, state = nnx.split(stack)
    variables = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    paths = {id(variable): path for path, variable in nnx.to_flat_state(state)}
    found = []
    for variable in variables:
        shape, dims = variable.get_value().shape[1:], out_dims.get(paths[id(variable)][:-1])
        if dims is not None:
            shape = tuple(math.prod(part) for part in (shape[:dims], shape[dims:]) if part)
        found.append(shape)
    return found


def _param(shape: Sequence[int], axes: Sequence[LogicalAxis], dtype: Any, build: Build) -> nnx.Param:
    """An abstract parameter: its canonical shape, dtype and logical axes, with the stack of layers in front."""
    if build.stack is not None:
        shape, axes = (build.stack, *shape), ("layers", *axes)
    return nnx.Param(jax.ShapeDtypeStruct(tuple(shape), dtype), axes=tuple(axes))


_Shape = tuple[tuple[int, ...], tuple[LogicalAxis, ...], Any]


def _quantized_shapes(
    format: WeightFormat, shape: Sequence[int], axes: Sequence[LogicalAxis], out_dims: int, platform: str
) -> tuple[_Shape, _Shape]:
    """Shape, axes and dtype of a quantised weight's values and of its scales."""
    *lead, last = shape
    *lead_axes, axis = axes
    values, scales = format.values_dtype(platform), format.scales_dtype(platform)
    if format.group is None:
        ones = len(shape) - out_dims
        by_row = (*shape[:out_dims], *[1] * ones), (*axes[:out_dims], *[None] * ones), scales
        return (tuple(shape), tuple(axes), values), by_row
    groups = -(-last // format.group)
    split = axis.axis if isinstance(axis, InUnits) else axis
    pack = 2 if values == jnp.uint8 else 1
    if split is not None:  # whole groups, so that devices, and the heads of one device, can be told apart by group
        last, axis = groups * format.group, InUnits(split, format.group // pack)
    return (
        ((*lead, last // pack), (*lead_axes, axis), values),
        ((*lead, groups), (*lead_axes, split), scales),
    )
