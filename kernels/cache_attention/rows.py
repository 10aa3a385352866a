"""Queries as the Pallas kernels take them: for each row of the batch and KV head, one matrix cut into blocks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels.cache_attention.partial import Partial


class Rows(NamedTuple):
    """Queries by head. R counts positions times group, padded to whole blocks with rows that see nothing.

    q: [B, K, R, H], position after position, the heads of its group within.
    positions: int32 [B, R], -1 in the padding.
    first, last: int32 [B, blocks], the first and the last position that a block holds, padding apart.
    """

    q: jax.Array
    positions: jax.Array
    first: jax.Array
    last: jax.Array


def by_head(q: jax.Array, positions: jax.Array, block: int) -> Rows:
    """q [B, T, K, G, H] at positions [B, T], in blocks of so many rows."""
    B, T, K, G, H = q.shape
    padding = -T * G % block
    rows = jnp.pad(q.transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, H), ((0, 0), (0, 0), (0, padding), (0, 0)))
    at = jnp.pad(jnp.repeat(positions.astype(jnp.int32), G, axis=1), ((0, 0), (0, padding)), constant_values=-1)
    blocks = at.reshape(B, -1, block)
    first = jnp.min(jnp.where(blocks < 0, jnp.iinfo(jnp.int32).max, blocks), axis=2)
    return Rows(rows, at, first, jnp.max(blocks, axis=2))


def by_position(part: Partial, T: int, G: int) -> Partial:
    """The partial of rows [B, K, R...] as [B, T, K, G...]."""

    def one(x: jax.Array) -> jax.Array:
        B, K = x.shape[:2]
        return jnp.moveaxis(x[:, :, : T * G].reshape(B, K, T, G, *x.shape[3:]), 1, 2)

    return Partial(*map(one, part))


def blocks_needed(last: jax.Array, stride: int, offset: jax.Array | int, slots: int) -> jax.Array:
    """How many blocks of slots hold the positions up to ``last`` (-1: none) that this member keeps."""
    return lax.div(lax.div(last - offset + stride, jnp.int32(stride)) + slots - 1, jnp.int32(slots))
