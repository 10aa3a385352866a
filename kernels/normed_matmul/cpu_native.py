"""The norm is computed once by the calling thread, while it costs less than handing it round."""

from __future__ import annotations

import jax
import numpy as np

from kernels.native.product import operands
from kernels.quantized import QuantizedWeight


def normed_matmul(x: jax.Array, scale: jax.Array, eps: float, weight: jax.Array | QuantizedWeight) -> jax.Array:
    """x [M, I], scale [I], weight [O, I] -> [M, O] in x's dtype; each float32 or bfloat16, or the weight quantised."""
    arrays, attributes = operands(weight)
    shape = jax.ShapeDtypeStruct((x.shape[0], arrays[0].shape[0]), x.dtype)
    return jax.ffi.ffi_call("shardstream_normed_matmul", shape)(x, scale, *arrays, eps=np.float32(eps), **attributes)
