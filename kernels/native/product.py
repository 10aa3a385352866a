"""What the native products share: which operands they take, and a weight as the arrays they are given."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.quantized import QuantizedWeight

DTYPES = (jnp.float32, jnp.bfloat16)
SCALES = (jnp.float16, *DTYPES)
GROUPS = (None, 32, 64, 128)

MOST_ROWS = {"float32": 16, "bfloat16": 512, "int8": 512, "uint8": 512}
"""Rows, by what the weight is stored in, above which XLA's own dot, which blocks for the caches, is the faster."""


def operands(weight: jax.Array | QuantizedWeight) -> tuple[list[jax.Array], dict[str, Any]]:
    """[O, I], or a quantised one -> arrays, and the attributes ``arrays`` and ``group`` (0: a scale for each row)."""
    if not isinstance(weight, QuantizedWeight):
        return [weight], {"arrays": np.int32(1), "group": np.int32(0)}
    arrays = [weight.values, weight.scales] + ([] if weight.offsets is None else [weight.offsets])
    return arrays, {"arrays": np.int32(len(arrays)), "group": np.int32(weight.group or 0)}


def not_taken(x: jax.Array, weight: jax.Array | QuantizedWeight, *others: jax.Array | None) -> str | None:
    """None, or what about a product of x [..., I] with weight [O, I] is not taken.

    others: what else the operation reads in a dtype of its own: a norm's scale, what is added to the product.
    """
    stored = weight.values if isinstance(weight, QuantizedWeight) else weight
    for array in (x, *others) if isinstance(weight, QuantizedWeight) else (x, weight, *others):
        if array is not None and array.dtype not in DTYPES:
            return f"takes float32 and bfloat16, not {array.dtype}"
    if reason := _format_not_taken(weight):
        return reason
    rows, most = math.prod(x.shape[:-1]), MOST_ROWS[str(stored.dtype)]
    return None if 1 <= rows <= most else f"takes 1 to {most} rows of a weight in {stored.dtype}, not {rows}"


def _format_not_taken(weight: jax.Array | QuantizedWeight) -> str | None:
    if not isinstance(weight, QuantizedWeight):
        return None
    if str(weight.values.dtype) not in ("int8", "uint8"):
        return f"takes quantised values in int8, and int4 packed in uint8, not {weight.values.dtype}"
    if weight.scales.dtype not in SCALES:
        return f"takes scales in float16, bfloat16 and float32, not {weight.scales.dtype}"
    if weight.group not in GROUPS:
        return f"takes groups of 32, 64 and 128 and one a row, not {weight.group}"
    groups = 1 if weight.group is None else -(-weight.shape[-1] // weight.group)
    if weight.scales.shape[-1] != groups:
        return f"takes {groups} scales a row for groups of {weight.group}, not {weight.scales.shape[-1]}"
    return None


def multiply(
    x: jax.Array, weight: jax.Array | QuantizedWeight, out_dtype: jnp.dtype, add: jax.Array | None = None
) -> jax.Array:
    """x [M, I] times weight [O, I], plus ``add`` [M, O] -> [M, O] in ``out_dtype``, float32 or bfloat16."""
    arrays, attributes = operands(weight)
    shape = jax.ShapeDtypeStruct((x.shape[0], arrays[0].shape[0]), out_dtype)
    if add is not None:
        arrays.append(add)
    return jax.ffi.ffi_call("shardstream_matmul", shape)(x, *arrays, **attributes)
