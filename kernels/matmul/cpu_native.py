"""The product for a few rows, in C++: one thread-parallel pass over the weight, which is asked for ahead of its use."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.native.product import DTYPES, multiply


def matmul(x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype, add: jax.Array | None = None) -> jax.Array:
    """x [M, I] times weight [O, I], plus ``add`` [M, O] -> [M, O] in ``out_dtype``; each float32 or bfloat16.

    The sum is rounded once. A result dtype that C++ does not write is made from float32.
    """
    return multiply(x, weight, out_dtype if out_dtype in DTYPES else jnp.dtype(jnp.float32), add)
