"""The product for a few rows, in C++: one thread-parallel pass over the weight, which is asked for ahead of its use."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.native.weight import operands
from kernels.quantized import QuantizedWeight

DTYPES = (jnp.float32, jnp.bfloat16)
MOST_ROWS = 16
"""Above this many rows XLA's own dot, which blocks for the caches, is the faster."""


def matmul(
    x: jax.Array, weight: jax.Array | QuantizedWeight, out_dtype: jnp.dtype, add: jax.Array | None = None
) -> jax.Array:
    """x [M, I] times weight [O, I], plus ``add`` [M, O] -> [M, O] in ``out_dtype``; each float32 or bfloat16."""
    arrays, attributes = operands(weight)
    shape = jax.ShapeDtypeStruct((x.shape[0], arrays[0].shape[0]), out_dtype)
    arrays += [] if add is None else [add]
    return jax.ffi.ffi_call("shardstream_matmul", shape)(x, *arrays, **attributes)
