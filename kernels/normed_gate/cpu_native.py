"""A thread computes the same rows of gate and up, so that they meet in its cache."""

from __future__ import annotations

import jax
import numpy as np

from kernels.native.product import operands
from kernels.quantized import QuantizedWeight


def normed_gate(x: jax.Array, scale: jax.Array, eps: float, weight: jax.Array | QuantizedWeight) -> jax.Array:
    """x [M, I], scale [I], weight [2F, I] with gate first -> [M, F] in x's dtype; each float32 or bfloat16, or the
    weight quantised."""
    arrays, attributes = operands(weight)
    shape = jax.ShapeDtypeStruct((x.shape[0], arrays[0].shape[0] // 2), x.dtype)
    return jax.ffi.ffi_call("shardstream_normed_gate", shape)(x, scale, *arrays, eps=np.float32(eps), **attributes)
