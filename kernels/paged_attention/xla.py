"""A few pages of every tile at a time through an online softmax, in plain XLA operations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels.cache_attention.partial import MASKED, Partial
from kernels.cache_attention.scaled import Scales, widened

BLOCK = 128
"""Slots read a loop iteration, in whole pages."""


def paged_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    tables: jax.Array,
    *,
    layer: jax.Array | int,
    positions: jax.Array,
    stride: int,
    offset: jax.Array | int,
    platform: str,
    scales: Scales | None = None,
) -> Partial:
    """See ``kernels.paged_attention.paged_attention``."""
    B, T, K, G, H = q.shape
    S = keys.shape[3]
    together = max(1, min(BLOCK // S, tables.shape[1]))
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % together)))
    block = together * S
    rows = q.transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    row_positions = jnp.broadcast_to(positions[:, None, None, :], (B, 1, G, T)).reshape(B, 1, G * T, 1)
    row_last = jnp.max(positions, axis=1).reshape(B, 1, 1, 1)

    def read(cache: jax.Array, pages: jax.Array) -> jax.Array:
        # The barrier keeps the reading in the loop: see kernels.cache_attention.xla.
        cache, pages = lax.optimization_barrier((cache, pages))
        got = jnp.moveaxis(cache[layer, pages], 2, 1)  # [B, K, together, S, H]
        return got.reshape(B, K, block, H)

    def read_scales(scale: jax.Array, pages: jax.Array) -> jax.Array:
        scale, pages = lax.optimization_barrier((scale, pages))
        one = jax.vmap(lambda page: lax.dynamic_slice(scale, (layer, 0, 0, page * S), (1, 1, K, S))[0, 0])
        got = one(pages.reshape(-1)).reshape(B, together, K, S)
        return jnp.moveaxis(got, 2, 1).reshape(B, K, block)

    def wide(cache: jax.Array, pages: jax.Array) -> jax.Array:
        numbers = widened(read(cache, pages), q.dtype)
        return numbers.astype(jnp.float32) if platform == "cpu" else numbers  # XLA:CPU has no fast bf16 dot

    def step(index: jax.Array, carry: Partial) -> Partial:
        pages = lax.dynamic_slice(tables, (0, index * together), (B, together))
        slot_positions = (index * block + jnp.arange(block)) * stride + offset
        seen = slot_positions <= row_positions
        scores = _dot(rows, wide(keys, pages), ((3,), (3,))) * H**-0.5
        if scales is not None:
            scores = scores * read_scales(scales.keys, pages)[:, :, None]
        scores = jnp.where(seen, scores, MASKED)
        top = jnp.maximum(carry.max, jnp.max(scores, axis=-1))
        weight = jnp.where(seen, jnp.exp(scores - top[..., None]), 0.0)
        decay = jnp.exp(carry.max - top)
        # A slot never written may hold anything, NaN included: zero weight alone would not silence it.
        v = jnp.where(slot_positions[:, None] <= row_last, wide(values, pages), 0)
        total = carry.sum * decay + jnp.sum(weight, axis=-1)
        if scales is not None:
            weight = jnp.where(seen, weight * read_scales(scales.values, pages)[:, :, None], 0.0)
        out = carry.out * decay[..., None] + _dot(weight, v, ((3,), (2,)))
        return Partial(out, top, total)

    shape = (B, K, G * T)
    empty = Partial(
        jnp.zeros((*shape, H), jnp.float32), jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    )
    filled = lax.div(jnp.max(positions) - offset + stride, np.int32(stride))
    done = lax.fori_loop(0, lax.div(filled + block - 1, np.int32(block)), step, empty)
    by_position = (x.reshape(B, K, G, T, *x.shape[3:]) for x in done)
    return Partial(*(x.transpose(0, 3, 1, 2, *range(4, x.ndim)) for x in by_position))


def _dot(a: jax.Array, b: jax.Array, contract: tuple[tuple[int], tuple[int]]) -> jax.Array:
    """a [B, K, M, J] with b [B, K, S, H], contracted over the named axes, in b's dtype; float32 out."""
    return lax.dot_general(
        a.astype(b.dtype),
        b,
        (contract, ((0, 1), (0, 1))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
