"""The product in plain XLA operations: the conversion is left to be fused into the dot."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels.quantized import QuantizedWeight
from kernels.tpu_rows import tpu_rows


def quantized_matmul(x: jax.Array, weight: QuantizedWeight, *, platform: str) -> jax.Array:
    """x [M, I] times weight [O, I] -> float32 [M, O]."""
    if platform == "tpu" and x.shape[0] == 1:
        return quantized_matmul(tpu_rows(x), weight, platform=platform)[:1]
    # XLA:CPU has no fast bf16 dot.
    dtype = jnp.dtype(jnp.float32) if platform == "cpu" else x.dtype
    if platform == "cpu":
        # On its own a weight's conversion is hoisted out of the decode loop, which writes a wide copy of the whole
        # model; the barrier ties it to x.
        x, weight = lax.optimization_barrier((x, weight))
    if weight.group is None and weight.offsets is None:
        # One scale a row: it multiplies the finished sums.
        return _dot(x.astype(dtype), weight.codes().astype(dtype)) * weight.scales.astype(jnp.float32)[:, 0]
    return _dot(x.astype(dtype), weight.wide().astype(dtype))


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    return lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
