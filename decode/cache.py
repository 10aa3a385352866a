"""The KV cache: a functional pytree, split by head and by position, donated and so written in place.

Position p of a row lives on ``kv_seq`` member ``p % kv_seq`` in slot ``p // kv_seq``, so at any length the
members' shares differ by at most one position. Nothing here knows how long a row is: lengths are small
integers that the caller keeps, and bounds are checked by ``check_fits`` on the host, since XLA clamps an
out-of-range write silently.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from kernels.cache_attention import Partial, Scales, cache_attention
from kernels.cache_attention.scaled import FP8, LIMITS, quantize
from kernels.cache_write import cache_write
from kernels.rope_attention import rope_attention, taken
from model.config import LlamaConfig
from model.wording import number_of, prompt_at
from sharding.collectives import axis_size
from sharding.layout import Layout
from sharding.mesh import KV_SEQ

AXES = (None, "batch", "kv_heads", "positions", None)
"""Logical axes of every cache array [layers, B, K, S, H]."""

PREFILL_CHUNK = 512
"""Positions of the longest prefill piece. Longer prompts run in several, which keeps activations small."""

UNROLLED_ROWS = 8
"""Up to this many rows a decode write is one in-place update a row; past it one ``cache_write`` (less code).

Where positions are split an update also reads what it may have to keep, and with more rows than one XLA:TPU changes the
layout of the whole cache for that, at every dispatch and once a step: there that serves from two rows on.
"""


class CacheOverflowError(ValueError):
    """More positions than the cache, or the model, has room for."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values, each a list of [layers, B, K, S, H] arrays: one a layer, or one stack.

    An int8 or fp8 cache has scales beside them, one a position and head: float32 [layers, B, K, S]. Others have none.
    """

    keys: list[jax.Array]
    values: list[jax.Array]
    key_scales: list[jax.Array] = field(default_factory=list)
    value_scales: list[jax.Array] = field(default_factory=list)

    def write(
        self, layer: jax.Array | int, k: jax.Array, v: jax.Array, positions: jax.Array, *, platform: str
    ) -> KVCache:
        """Store k and v [B, T, K, H] at int32 positions [B, T]: a run of T for each row.

        A row's run is one position, or starts at a multiple of ``kv_seq`` with T a multiple of it, the same
        for every row (prefill pieces).
        """
        array, slot_layer = self._place(layer)
        keys, key_scales = _store(self.keys, self.key_scales, array, slot_layer, k, positions, platform)
        values, value_scales = _store(self.values, self.value_scales, array, slot_layer, v, positions, platform)
        return KVCache(keys, values, key_scales, value_scales)

    def attend(
        self,
        layer: jax.Array | int,
        q: jax.Array,
        positions: jax.Array,
        *,
        platform: str,
        implementation: str | None = None,
    ) -> Partial:
        """q [B, T, K, G, H] against this device's slots of ``layer``; see ``kernels.cache_attention``."""
        array, slot_layer = self._place(layer)
        return cache_attention(
            q,
            self.keys[array],
            self.values[array],
            layer=slot_layer,
            positions=positions,
            stride=axis_size(KV_SEQ),
            offset=lax.axis_index(KV_SEQ),
            platform=platform,
            implementation=implementation,
            scales=self.scales(array),
        )

    def extend(
        self,
        layer: jax.Array | int,
        heads: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        positions: jax.Array,
        *,
        platform: str,
        implementation: str | None = None,
    ) -> tuple[jax.Array, KVCache] | None:
        """heads [B, T, K, G + 2, H], not turned yet -> attention [B, T, K, G, H] and the cache with k and v in it.

        None where this does not run as one call: the caller then rotates, writes and attends. For one ``kv_seq``
        member, which holds every position.
        """
        array, slot_layer = self._place(layer)
        keys, values = self.keys[array], self.values[array]
        scales = self.scales(array)
        how: dict[str, Any] = {"platform": platform, "implementation": implementation, "scaled": scales is not None}
        if not taken(heads, keys, values, **how):
            return None
        out, keys, values, scales = rope_attention(
            heads, *rope, keys, values, layer=slot_layer, positions=positions, platform=platform, scales=scales
        )
        return out, self.with_array(array, keys, values, scales)

    def scales(self, array: int) -> Scales | None:
        """Those beside the keys and values of one array."""
        return Scales(self.key_scales[array], self.value_scales[array]) if self.key_scales else None

    def with_array(self, array: int, keys: jax.Array, values: jax.Array, scales: Scales | None) -> KVCache:
        """The cache with these in place of one array's."""

        def changed(arrays: list[jax.Array], new: jax.Array) -> list[jax.Array]:
            return [new if index == array else one for index, one in enumerate(arrays)]

        beside = () if scales is None else map(changed, (self.key_scales, self.value_scales), scales)
        return KVCache(changed(self.keys, keys), changed(self.values, values), *beside)

    def _place(self, layer: jax.Array | int) -> tuple[int, jax.Array | int]:
        """Which array holds a layer, and where in it."""
        if len(self.keys) == 1:
            return 0, layer
        assert isinstance(layer, int), "unrolled layers are indexed by Python ints"
        return layer, 0


def _store(
    arrays: list[jax.Array],
    scales: list[jax.Array],
    array: int,
    layer: jax.Array | int,
    new: jax.Array,
    positions: jax.Array,
    platform: str,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The arrays and scales with ``new`` [B, T, K, H] written to one of them."""
    arrays, scales = list(arrays), list(scales)
    if scales:
        new, own = quantize(new, held_dtype(arrays[array].dtype))
        scales[array] = _write(scales[array], layer, own, positions, platform)
    arrays[array] = _write(arrays[array], layer, to_storage(new, arrays[array].dtype), positions, platform)
    return arrays, scales


def _write(cache: jax.Array, layer: jax.Array | int, new: jax.Array, positions: jax.Array, platform: str) -> jax.Array:
    """new [B, T, K, H] into cache [L, B, K, S, H]; or, for scales, [B, T, K] into [L, B, K, S]."""
    B, T, K, *entry = new.shape
    members, me = axis_size(KV_SEQ), lax.axis_index(KV_SEQ)
    new = jnp.swapaxes(new, 1, 2)[None]  # [1, B, K, T, H]
    at_start = [0] * len(entry)
    if T > 1:
        if members > 1:
            by_member = new.reshape(1, B, K, T // members, members, *entry)
            new = lax.dynamic_index_in_dim(by_member, me, 4, keepdims=False)
        slot = lax.div(positions[0, 0], np.int32(members))
        return lax.dynamic_update_slice(cache, new, (layer, 0, 0, slot, *at_start))
    slots = lax.div(positions[:, 0], np.int32(members))
    mine = lax.rem(positions[:, 0], np.int32(members)) == me
    if (UNROLLED_ROWS if members == 1 else 1) < B:
        slots = jnp.where(mine, slots, cache.shape[3])  # past the end: dropped
        return cache_write(cache, new[0, :, :, 0], slots, layer=layer, platform=platform)
    for row in range(B):
        at = (layer, row, 0, slots[row], *at_start)
        one = new[:, row : row + 1]
        if members > 1:
            held = lax.dynamic_slice(cache, at, one.shape)
            one = jnp.where(mine[row], one, held)
        cache = lax.dynamic_update_slice(cache, one, at)
    return cache


def has_scales(dtype: jnp.dtype) -> bool:
    """Whether a cache of ``dtype`` keeps a scale beside each position of each head: int8 and fp8 do."""
    return jnp.dtype(dtype) in LIMITS


def storage_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """What the arrays of a cache of ``dtype`` are made of: on CPU, bf16 and fp8 are kept as their bits.

    XLA:CPU does their updates and slices in a wider float, which rewrites the whole cache for each new position.
    """
    dtype = jnp.dtype(dtype)
    return {numbers: bits for bits, numbers in _BITS.items()}.get(dtype, dtype) if platform == "cpu" else dtype


_BITS = {jnp.dtype(jnp.uint16): jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.uint8): FP8}
"""Storage that holds bits, and of what."""


def held_dtype(storage: jnp.dtype) -> jnp.dtype:
    """The dtype of what storage holds."""
    return _BITS.get(jnp.dtype(storage), jnp.dtype(storage))


def to_storage(x: jax.Array, storage: jnp.dtype) -> jax.Array:
    """Numbers of ``held_dtype(storage)``, or wider ones, as the cache keeps them: the same shape, in ``storage``."""
    x = x.astype(held_dtype(storage))
    return lax.bitcast_convert_type(x, storage) if storage in _BITS else x


def chunk_size(kv_seq: int) -> int:
    """The longest prefill piece on this mesh: ``PREFILL_CHUNK`` rounded up to a multiple of ``kv_seq``."""
    return -(-PREFILL_CHUNK // kv_seq) * kv_seq


def bucket(length: int, kv_seq: int) -> int:
    """The compiled length that a prefill piece of ``length`` tokens runs in: 16, 32, 64... or a whole chunk.

    It is a multiple of ``kv_seq``, so every member of it writes as many slots.
    """
    size = 16
    while size < length:
        size *= 2
    return min(-(-size // kv_seq) * kv_seq, chunk_size(kv_seq))


def capacity(max_len: int, kv_seq: int) -> int:
    """Positions a cache for ``max_len`` holds: room for the last prefill piece's padding past the end."""
    chunk = chunk_size(kv_seq)
    return bucket(max_len, kv_seq) if max_len <= chunk else -(-max_len // chunk) * chunk


def check_fits(config: LlamaConfig, prompt_lens: list[int], max_len: int) -> None:
    """Refuse on the host what would not fit.

    Raises:
        CacheOverflowError: a prompt leaves no room for a new token, or ``max_len`` exceeds the model's limit.
    """
    if max_len > config.max_position_embeddings:
        raise CacheOverflowError(
            f"max_len {max_len} is more than the {config.max_position_embeddings} positions this model was "
            f"made for (max_position_embeddings); use --max-len {config.max_position_embeddings} or less"
        )
    for row, length in enumerate(prompt_lens):
        if length >= max_len:
            raise CacheOverflowError(
                f"{prompt_at(row, len(prompt_lens))} has {number_of(length, 'token')}, which leaves no room for a new "
                f"one in max_len {max_len}; shorten it or raise --max-len (this model allows "
                f"{config.max_position_embeddings})"
            )


def cache_shape(config: LlamaConfig, batch: int, max_len: int, layout: Layout, *, stacked: bool) -> tuple[int, ...]:
    """Logical shape of each cache array [layers, B, K, S, H]."""
    layers = config.num_layers if stacked else 1
    return (layers, batch, config.num_kv_heads, capacity(max_len, layout.kv_seq), config.head_dim)


def cache_arrays(config: LlamaConfig, *, stacked: bool) -> int:
    """How many arrays hold the keys (and as many the values)."""
    return 1 if stacked else config.num_layers


def cache_specs(config: LlamaConfig, layout: Layout, dtype: jnp.dtype, *, stacked: bool) -> KVCache:
    """The partition of every array of a cache of ``dtype``."""
    specs: Any = [layout.spec(AXES)] * cache_arrays(config, stacked=stacked)
    scales: Any = [layout.spec(AXES[:-1])] * cache_arrays(config, stacked=stacked) if has_scales(dtype) else []
    return KVCache(specs, specs, scales, scales)


def abstract_cache(
    config: LlamaConfig, batch: int, max_len: int, layout: Layout, dtype: jnp.dtype, *, stacked: bool
) -> KVCache:
    """The padded, sharded shapes of a cache of ``dtype``: what a program is compiled for without one."""
    shape = cache_shape(config, batch, max_len, layout, stacked=stacked)

    def arrays(axes: tuple[str | None, ...], kind: jnp.dtype) -> Any:
        padded = layout.padded_shape(shape[: len(axes)], axes)
        leaf = jax.ShapeDtypeStruct(padded, kind, sharding=layout.sharding(axes))
        return [leaf] * cache_arrays(config, stacked=stacked)

    numbers = arrays(AXES, storage_dtype(dtype, layout.platform))
    scales = arrays(AXES[:-1], jnp.dtype(jnp.float32)) if has_scales(dtype) else []
    return KVCache(numbers, numbers, scales, scales)


def make_cache(
    config: LlamaConfig, batch: int, max_len: int, layout: Layout, dtype: jnp.dtype, *, stacked: bool
) -> KVCache:
    """A cache of zeros, each device making its own slice. Compiled at the first call with a shape."""
    return empty(abstract_cache(config, batch, max_len, layout, dtype, stacked=stacked))


def empty(abstract: KVCache) -> KVCache:
    """A cache of zeros of these sharded shapes."""
    leaves, tree = jax.tree.flatten(abstract)
    return jax.tree.unflatten(tree, _zeros(tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)))


@functools.partial(jax.jit, static_argnums=0)
def _zeros(leaves: tuple[tuple[tuple[int, ...], jnp.dtype, NamedSharding], ...]) -> list[jax.Array]:
    return [lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding) for shape, dtype, sharding in leaves]
