"""One call of C++ for each layer, which writes the cache where it lies."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.cache_attention import Scales, cpu_native


def not_taken(heads: jax.Array, keys: jax.Array, values: jax.Array, *, scaled: bool = False) -> str | None:
    """None, or what about the operands this implementation does not take."""
    if heads.shape[-1] % 2:
        return f"takes heads of an even size, not {heads.shape[-1]}"
    return cpu_native.not_taken(heads, keys, values, scaled)


def rope_attention(
    heads: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    layer: jax.Array | int,
    positions: jax.Array,
    scales: Scales | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, Scales | None]:
    """See ``kernels.rope_attention.rope_attention``."""
    B, T, K, rows, H = heads.shape
    held = (keys, values, *(scales or ()))
    shapes = [jax.ShapeDtypeStruct((B, T, K, rows - 2, H), heads.dtype)]
    shapes += [jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in held]
    aliases = {3: 1, 4: 2, 7: 3, 8: 4}  # of the cache, and of its scales, which come last
    call = jax.ffi.ffi_call(
        "shardstream_rope_attention",
        shapes,
        input_output_aliases={given: back for given, back in aliases.items() if back <= len(held)},
    )
    place = (jnp.asarray(layer, jnp.int32), positions.astype(jnp.int32))
    out, keys, values, *own = call(heads, cos, sin, keys, values, *place, *(scales or ()))
    return out, keys, values, Scales(*own) if own else None
