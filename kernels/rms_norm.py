"""RMSNorm (Zhang and Sennrich, 2019) in plain XLA operations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x [..., D] / rms(x) * scale [D], statistics in float32, in x's dtype as Llama rounds it."""
    return normalize(x, sum_of_squares(x), scale, eps)


def sum_of_squares(x: jax.Array) -> jax.Array:
    """x [..., D] -> float32 [..., 1]."""
    wide = x.astype(jnp.float32)
    # A dot with itself: one small kernel, where XLA splits a reduction over D into three.
    return jnp.einsum("...d,...d->...", wide, wide, precision=lax.Precision.HIGHEST)[..., None]


def normalize(x: jax.Array, square: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """``rms_norm`` of x [..., D] whose sum of squares [..., 1] is known."""
    wide = x.astype(jnp.float32) * lax.rsqrt(square / x.shape[-1] + eps)
    return (scale * wide.astype(x.dtype)).astype(x.dtype)
