"""Writing new positions to pages, and attention over pages, in C++: each key and value of a tile is read once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kernels.cache_attention import cpu_native
from kernels.cache_attention.partial import Partial
from kernels.cache_attention.scaled import Scales


def not_taken(q: jax.Array, keys: jax.Array, values: jax.Array, scaled: bool) -> str | None:
    """None, or what about the operands this implementation does not take."""
    return cpu_native.not_taken(q, keys, values, scaled)


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
) -> Partial:
    """See ``kernels.paged_attention.paged_attention``."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (q.shape, q.shape[:-1], q.shape[:-1])]
    call = jax.ffi.ffi_call("shardstream_paged_attention", shapes)
    place = (jnp.asarray(layer, jnp.int32), positions.astype(jnp.int32), jnp.asarray(offset, jnp.int32))
    return Partial(*call(q, keys, values, tables, *place, *(scales or ()), stride=np.int32(stride)))


def paged_write(
    cache: jax.Array, new: jax.Array, pages: jax.Array, slots: jax.Array, layer: jax.Array | int
) -> jax.Array:
    """cache [L, pages, K, S, H] with new [N, K, H], of its dtype, at int32 pages and slots [N]; in place.

    A page outside the cache is one that another device holds, or padding: nothing is written.
    """
    call = jax.ffi.ffi_call(
        "shardstream_paged_write", jax.ShapeDtypeStruct(cache.shape, cache.dtype), input_output_aliases={0: 0}
    )
    return call(cache, new, pages, slots, jnp.asarray(layer, jnp.int32))


def paged_extend(
    heads: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    tables: jax.Array,
    *,
    layer: jax.Array | int,
    positions: jax.Array,
    rows: int,
    tile: int,
    scales: Scales | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, Scales | None]:
    """See ``kernels.paged_attention.paged_extend``."""
    _, N, K, group, H = heads.shape
    held = (keys, values, *(scales or ()))
    shapes = [jax.ShapeDtypeStruct((1, N, K, group - 2, H), heads.dtype)]
    shapes += [jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in held]
    aliases = {3: 1, 4: 2, 8: 3, 9: 4}  # of the cache, and of its scales, which come last
    call = jax.ffi.ffi_call(
        "shardstream_paged_extend",
        shapes,
        input_output_aliases={given: back for given, back in aliases.items() if back <= len(held)},
    )
    place = (tables, jnp.asarray(layer, jnp.int32), positions.astype(jnp.int32))
    out, keys, values, *own = call(
        heads, cos, sin, keys, values, *place, *(scales or ()), rows=np.int32(rows), tile=np.int32(tile)
    )
    return out, keys, values, Scales(*own) if own else None
