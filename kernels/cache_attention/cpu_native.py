"""Attention of a few queries in C++: each key and value is read once for all the queries of its head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kernels.cache_attention.partial import Partial
from kernels.cache_attention.scaled import FP8, Scales

DTYPES = (jnp.float32, jnp.bfloat16)
"""Of the queries. A cache may also be uint16, which holds the bits of bf16."""

SCALED = (jnp.int8, FP8, jnp.uint8)
"""Of caches with scales: uint8 holds the bits of fp8."""

MOST_QUERIES = 16
"""New positions a row, above which XLA's form, whose dots are larger then, is the faster."""


def not_taken(q: jax.Array, keys: jax.Array, values: jax.Array, scaled: bool = False) -> str | None:
    """None, or what about the operands this implementation does not take."""
    if not 1 <= q.shape[1] <= MOST_QUERIES:
        return f"takes 1 to {MOST_QUERIES} new positions, not {q.shape[1]}"
    if q.dtype not in DTYPES:
        return f"takes queries in float32 and bfloat16, not {q.dtype}"
    if keys.dtype not in (SCALED if scaled else (*DTYPES, jnp.uint16)) or keys.dtype != values.dtype:
        allowed = "int8, fp8 or uint8, with scales" if scaled else "float32, bfloat16 or uint16"
        return f"takes keys and values both in {allowed}, not {keys.dtype} and {values.dtype}"
    return None


def cache_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    layer: jax.Array | int,
    positions: jax.Array,
    stride: int,
    offset: jax.Array | int,
    scales: Scales | None = None,
) -> Partial:
    """See ``kernels.cache_attention.cache_attention``."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (q.shape, q.shape[:-1], q.shape[:-1])]
    call = jax.ffi.ffi_call("shardstream_cache_attention", shapes)
    place = (jnp.asarray(layer, jnp.int32), positions.astype(jnp.int32), jnp.asarray(offset, jnp.int32))
    return Partial(*call(q, keys, values, *place, *(scales or ()), stride=np.int32(stride)))
