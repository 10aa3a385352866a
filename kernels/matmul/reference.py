"""The definition: everything in float32 at full precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [M, I] times weight [O, I] -> float32 [M, O]."""
    return jnp.einsum("mi,oi->mo", x.astype(jnp.float32), weight.astype(jnp.float32), precision=lax.Precision.HIGHEST)
