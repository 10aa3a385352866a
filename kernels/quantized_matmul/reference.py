"""The definition: the weight widened, everything in float32 at full precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels.quantized import QuantizedWeight


def quantized_matmul(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """x [M, I] times weight [O, I] -> float32 [M, O]."""
    return jnp.einsum("mi,oi->mo", x.astype(jnp.float32), weight.wide(), precision=lax.Precision.HIGHEST)
