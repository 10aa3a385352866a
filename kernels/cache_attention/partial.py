"""Partial softmax results: what one device or one block knows, and how two such results merge.

The running maximum and sum are those of online softmax (Milakov and Gimelshein, 2018).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

MASKED = -1e30
"""Score of a masked pair. Finite, so that a fully masked row subtracts to 0 instead of NaN."""


class Partial(NamedTuple):
    """Attention over a subset of the keys, unnormalised. All float32.

    out: [..., H], the sum of exp(score - max) * value
    max: [...], the largest score seen (``MASKED`` where none was)
    sum: [...], the sum of exp(score - max)
    """

    out: jax.Array
    max: jax.Array
    sum: jax.Array

    def finish(self) -> jax.Array:
        """The softmax-weighted mean of the values; 0 where nothing was seen."""
        return self.out / jnp.maximum(self.sum, jnp.finfo(jnp.float32).tiny)[..., None]


def from_storage(x: jax.Array) -> jax.Array:
    """Cache entries as numbers: uint16 holds the bits of bf16, uint8 those of fp8, everything else is itself."""
    held = {"uint16": jnp.bfloat16, "uint8": jnp.float8_e4m3fn}.get(x.dtype.name)
    return x if held is None else lax.bitcast_convert_type(x, held)


def merge(parts: Partial, axis: int = 0) -> Partial:
    """Combine partial results stacked along ``axis`` (of ``max`` and ``sum``; the same axis of ``out``)."""
    top = jnp.max(parts.max, axis=axis, keepdims=True)
    weight = jnp.exp(parts.max - top)
    return Partial(
        out=jnp.sum(parts.out * weight[..., None], axis=axis),
        max=jnp.squeeze(top, axis),
        sum=jnp.sum(parts.sum * weight, axis=axis),
    )
