"""Attention over pages for GPU: the contiguous kernel, whose programs find each slot through the block table."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels.cache_attention import pallas_gpu
from kernels.cache_attention.pallas_gpu import LEAST, Tile, Where
from kernels.cache_attention.partial import Partial, from_storage
from kernels.cache_attention.rows import blocks_needed, by_position
from kernels.cache_attention.scaled import Scales


def not_taken(q: jax.Array, keys: jax.Array, values: jax.Array, tables: jax.Array, *, scaled: bool) -> str | None:
    """None, or what about the operands this implementation does not take."""
    if keys.dtype != values.dtype:
        return f"takes keys and values of one dtype, not {keys.dtype} and {values.dtype}"
    if q.shape[1] < 1:
        return "takes at least one new position"
    if _tile(q, keys, tables) is None:
        return f"takes heads of a multiple of {LEAST}, not {keys.shape[4]}"
    return None


def paged_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    tables: jax.Array,
    *,
    layer: jax.Array | int,
    positions: jax.Array,
    stride: int,
    offset: jax.Array | int,
    scales: Scales | None = None,
    interpret: bool = False,
) -> Partial:
    """See ``kernels.paged_attention.paged_attention``."""
    T, G, S, P = q.shape[1], q.shape[3], keys.shape[3], tables.shape[1]
    keys, values = from_storage(keys), from_storage(values)
    tile = _tile(q, keys, tables)
    assert tile is not None, "the caller asks not_taken"

    def locate(where: Where, tables: Any) -> tuple[Any, ...]:
        slots = where.block * tile.slots + jnp.arange(tile.slots, dtype=jnp.int32)
        # What a block has past the sequence's last page is looked for in that one, and masked.
        used = jnp.minimum(blocks_needed(where.last, stride, where.offset, S), P)
        pages = tables[where.row, jnp.minimum(slots // S, used - 1)]
        inside = slots % S
        return slots, None, (where.layer, pages, where.head, inside), (where.layer, 0, where.head, pages * S + inside)

    part = pallas_gpu.run(
        q,
        keys,
        values,
        layer=layer,
        positions=positions,
        stride=stride,
        offset=offset,
        scales=scales,
        interpret=interpret,
        tile=tile,
        locate=locate,
        name="paged_attention",
        tables=tables,
    )
    return by_position(part, T, G)


def _tile(q: jax.Array, keys: jax.Array, tables: jax.Array) -> Tile | None:
    B, T, K, G, H = q.shape
    slots = max(LEAST, tables.shape[1] * keys.shape[3])
    return pallas_gpu.choose(B, K, T * G, slots, H, keys.dtype.itemsize, q.dtype.itemsize)
