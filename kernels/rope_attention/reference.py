"""The definition: turned in float32, rounded to heads' dtype as Llama does, stored one by one, then attended to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels.cache_attention import Scales, reference
from kernels.cache_attention.partial import from_storage
from kernels.cache_attention.scaled import quantize


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
    B = heads.shape[0]
    first, second = jnp.split(heads[..., :-1, :].astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, None], sin[:, :, None, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(heads.dtype)

    def stored(cache: jax.Array, new: jax.Array) -> jax.Array:
        numbers = from_storage(cache).dtype
        new = new.astype(numbers)
        new = new if numbers == cache.dtype else lax.bitcast_convert_type(new, cache.dtype)
        return cache.at[layer, jnp.arange(B)[:, None], :, positions].set(new, mode="drop")

    new_keys, new_values = turned[..., -1, :], heads[..., -1, :]
    if scales is not None:
        numbers = from_storage(keys).dtype
        (new_keys, key_scales), (new_values, value_scales) = (quantize(x, numbers) for x in (new_keys, new_values))
        at = (layer, jnp.arange(B)[:, None], slice(None), positions)
        scales = Scales(
            scales.keys.at[at].set(key_scales, mode="drop"), scales.values.at[at].set(value_scales, mode="drop")
        )
    keys, values = stored(keys, new_keys), stored(values, new_values)
    partial = reference.cache_attention(
        turned[..., :-1, :], keys, values, layer=layer, positions=positions, stride=1, offset=0, scales=scales
    )
    return partial.finish().astype(heads.dtype), keys, values, scales
