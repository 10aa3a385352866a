"""What the native products share: which operands they take, and a weight as the arrays they are given."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.native.build import has_bf16_tiles
from kernels.quantized import QuantizedWeight

DTYPES = (jnp.float32, jnp.bfloat16)
SCALES = (jnp.float16, *DTYPES)
GROUPS = (None, 32, 64, 128)

MOST_ROWS = {"float32": 16, "bfloat16": 256, "int8": 512, "uint8": 512}
"""Rows, by what the weight is stored in, above which XLA's own dot, which blocks for the caches, is as fast.

Measured on 2 cores at [2048, 2048], times XLA's speed at 16, 64, 128 and 512 rows: f32 1.3, 0.8, 0.6, 0.5; bf16 5.9,
1.9, 1.4, 0.8; int8 12, 3.7, 2.1, 1.2; int4 in groups of 32 18, 6.5, 4.4, 2.1. Since then quantised weights go in tiles
where the CPU has them, from 8 rows on (``src/tiles.h``): 1.6 to 3.5 times as fast at 16 to 64 rows.
"""

TILED_ROWS = 8
"""Rows above which XLA's dot of two bf16 matrices is faster than ours, on a CPU that multiplies them in tiles.

Measured on 2 cores (AMX), XLA's GFLOP/s and ours at [1920, 576]: 8 rows 84, 79; 16 160, 100; 64 386, 134; 256 498, 143;
at [576, 1536]: 96, 80; 181, 98; 539, 143; 886, 149.
"""


def outrun(x: jax.Array, weight: jax.Array | QuantizedWeight) -> bool:
    """Whether XLA's own product is the faster one on this CPU, though ours takes x [..., I] and weight [O, I]."""
    wide = not isinstance(weight, QuantizedWeight) and weight.dtype == x.dtype == jnp.bfloat16
    return wide and math.prod(x.shape[:-1]) > TILED_ROWS and has_bf16_tiles()


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
