"""RMSNorm (Zhang and Sennrich, 2019) in plain XLA operations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x [..., D] / rms(x) * scale [D], statistics in float32, in x's dtype as Llama rounds it."""
    wide = x.astype(jnp.float32)
    # A dot with itself: one small kernel, where XLA splits a reduction over D into three.
    square = jnp.einsum("...d,...d->...", wide, wide, precision=lax.Precision.HIGHEST)[..., None]
    wide = wide * lax.rsqrt(square / x.shape[-1] + eps)
    return scale * wide.astype(x.dtype)
