"""The definition: all scores at once, masked, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels.cache_attention.partial import MASKED, Partial, from_storage
from kernels.cache_attention.scaled import Scales


def cache_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    layer: jax.Array | int,
    positions: jax.Array,
    stride: int,
    offset: jax.Array | int,
    scales: Scales | None = None,
) -> Partial:
    """See ``kernels.cache_attention.cache_attention``."""
    k, v = (from_storage(cache[layer]).astype(jnp.float32) for cache in (keys, values))
    if scales is not None:
        k, v = k * scales.keys[layer][..., None], v * scales.values[layer][..., None]
    scale = q.shape[-1] ** -0.5
    scores = jnp.einsum("btkgh,bksh->btkgs", q.astype(jnp.float32), k, precision=lax.Precision.HIGHEST) * scale
    slot_positions = jnp.arange(k.shape[2]) * stride + offset
    seen = slot_positions <= positions[:, :, None, None, None]
    scores = jnp.where(seen, scores, MASKED)
    top = jnp.max(scores, axis=-1)
    weight = jnp.where(seen, jnp.exp(scores - top[..., None]), 0.0)
    # A slot never written may hold anything, NaN included: zero weight alone would not silence it.
    v = jnp.where((slot_positions <= jnp.max(positions, axis=1)[:, None])[:, None, :, None], v, 0.0)
    out = jnp.einsum("btkgs,bksh->btkgh", weight, v, precision=lax.Precision.HIGHEST)
    return Partial(out, top, jnp.sum(weight, axis=-1))
