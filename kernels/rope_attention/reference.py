"""The definition: turned in float32, rounded to heads' dtype as Llama does, stored one by one, then attended to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels.cache_attention import reference


def rope_attention(
    heads: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    layer: jax.Array | int,
    positions: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``kernels.rope_attention.rope_attention``."""
    B = heads.shape[0]
    first, second = jnp.split(heads[..., :-1, :].astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, None], sin[:, :, None, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(heads.dtype)

    def stored(cache: jax.Array, new: jax.Array) -> jax.Array:
        bits = cache.dtype == jnp.uint16
        new = lax.bitcast_convert_type(new.astype(jnp.bfloat16), jnp.uint16) if bits else new.astype(cache.dtype)
        return cache.at[layer, jnp.arange(B)[:, None], :, positions].set(new, mode="drop")

    keys, values = stored(keys, turned[..., -1, :]), stored(values, heads[..., -1, :])
    partial = reference.cache_attention(
        turned[..., :-1, :], keys, values, layer=layer, positions=positions, stride=1, offset=0
    )
    return partial.finish().astype(heads.dtype), keys, values
