"""Caches of int8 and fp8: each position of each head is stored divided by a scale of its own.

A scale multiplies a whole score, or a whole softmax weight, so attention applies it to those and never makes a wide
copy of the cache. int8 holds x / scale rounded to an integer of at most 127; fp8 (float8_e4m3fn) a number up to 448.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.cache_attention.partial import from_storage

FP8 = jnp.dtype(jnp.float8_e4m3fn)
LIMITS = {jnp.dtype(jnp.int8): 127.0, FP8: 448.0}
"""The dtypes that need scales, and the largest magnitude each stores."""


class Scales(NamedTuple):
    """What the stored keys and values are to be multiplied by: float32 [L, B, K, S] each."""

    keys: jax.Array
    values: jax.Array


def quantize(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """x [..., H] -> what is stored of it in ``dtype``, a key of ``LIMITS``, and float32 scales [...]: x ~ q * scale."""
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1) / LIMITS[jnp.dtype(dtype)]
    # Zeros, and numbers so small that their scale would be denormal, are stored as zeros.
    stored = wide / jnp.where(scale < jnp.finfo(jnp.float32).tiny, jnp.inf, scale)[..., None]
    return (jnp.round(stored) if dtype == jnp.int8 else stored).astype(dtype), scale


def widened(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Cache entries as numbers that meet queries of ``dtype`` in a dot: int8 and fp8 are exact in bf16 and float32."""
    x = from_storage(x)
    return x.astype(dtype) if x.dtype in LIMITS else x
