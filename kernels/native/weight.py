"""A weight as the native products take it: arrays, and what they mean."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.quantized import QuantizedWeight

WIDE = (jnp.float32, jnp.bfloat16)
SCALES = (jnp.float16, *WIDE)
GROUPS = (None, 32, 64, 128)


def operands(weight: jax.Array | QuantizedWeight) -> tuple[list[jax.Array], dict[str, Any]]:
    """[O, I], or a quantised one -> arrays, and the attributes ``arrays`` and ``group`` (0: a scale for each row)."""
    if not isinstance(weight, QuantizedWeight):
        return [weight], {"arrays": np.int32(1), "group": np.int32(0)}
    arrays = [weight.values, weight.scales] + ([] if weight.offsets is None else [weight.offsets])
    return arrays, {"arrays": np.int32(len(arrays)), "group": np.int32(weight.group or 0)}


def not_taken(weight: jax.Array | QuantizedWeight) -> str | None:
    """None, or what about the weight the native products do not take."""
    if not isinstance(weight, QuantizedWeight):
        return None if weight.dtype in WIDE else f"takes float32 and bfloat16, not {weight.dtype}"
    if weight.values.dtype not in (jnp.int8, jnp.uint8):
        return f"takes quantised values in int8, and int4 packed in uint8, not {weight.values.dtype}"
    if weight.scales.dtype not in SCALES:
        return f"takes scales in float16, bfloat16 and float32, not {weight.scales.dtype}"
    if weight.group not in GROUPS:
        return f"takes groups of 32, 64 and 128 and one a row, not {weight.group}"
    return None
