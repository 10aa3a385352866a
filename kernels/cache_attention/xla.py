"""Block after block of the filled cache through an online softmax, in plain XLA operations.

Memory is bounded by one block of scores, and a loop with a dynamic end reads only blocks that hold something.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels.cache_attention.partial import MASKED, Partial
from kernels.cache_attention.scaled import Scales, widened

BLOCK = 128
"""Slots read a loop iteration on CPU. Larger reads more past a short conversation; smaller loops more often."""

ACCELERATOR_BLOCK = 512
"""The same on TPU and GPU, where an iteration of 128 is nearly all overhead: a few us, for a read of less than one.

By the TPU compiler's estimate one layer of llama-3-70b over 8 devices, one row at context 8192, takes 1.27 million
cycles on v6e with blocks of 128, 0.55 with 512 and 0.43 with 1024 (which reads more past the end).
"""


def block_size(slots: int, platform: str) -> int:
    """Slots that one iteration reads of a cache of so many."""
    return min(BLOCK if platform == "cpu" else ACCELERATOR_BLOCK, slots)


def cache_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    layer: jax.Array | int,
    positions: jax.Array,
    stride: int,
    offset: jax.Array | int,
    platform: str,
    scales: Scales | None = None,
) -> Partial:
    """See ``kernels.cache_attention.cache_attention``."""
    B, T, K, G, H = q.shape
    S = keys.shape[3]
    block = block_size(S, platform)
    # One matrix of G*T rows for each (row, KV head): the queries of a group share every block that is read.
    rows = q.transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    row_positions = jnp.broadcast_to(positions[:, None, None, :], (B, 1, G, T)).reshape(B, 1, G * T, 1)
    row_last = jnp.max(positions, axis=1).reshape(B, 1, 1, 1)

    def read(cache: jax.Array, start: jax.Array | int) -> jax.Array:
        # Where the cache is one block the slice is all of it. XLA:CPU then drops the slice, moves the reading out of
        # the loop and into the cache's update, and copies the whole cache to do so; the barrier keeps it here.
        cache, start = lax.optimization_barrier((cache, start))
        return lax.dynamic_slice(cache, (layer, 0, 0, start, 0)[: cache.ndim], (1, B, K, block, H)[: cache.ndim])[0]

    def step(index: jax.Array | int, carry: Partial) -> Partial:
        # The last block is pulled back inside the cache; slots that an earlier block covered are masked.
        first = index * block
        start = jnp.minimum(first, S - block)
        slots = start + jnp.arange(block)
        slot_positions = slots * stride + offset
        seen = (slot_positions <= row_positions) & (slots >= first)
        scores = _dot(rows, widened(read(keys, start), q.dtype), ((3,), (3,)), platform) * H**-0.5
        if scales is not None:
            scores = scores * read(scales.keys, start)[:, :, None]
        scores = jnp.where(seen, scores, MASKED)
        top = jnp.maximum(carry.max, jnp.max(scores, axis=-1))
        weight = jnp.where(seen, jnp.exp(scores - top[..., None]), 0.0)
        decay = jnp.exp(carry.max - top)
        # A slot never written may hold anything, NaN included: zero weight alone would not silence it.
        v = jnp.where(slot_positions[:, None] <= row_last, widened(read(values, start), q.dtype), 0)
        total = carry.sum * decay + jnp.sum(weight, axis=-1)
        if scales is not None:
            weight = jnp.where(seen, weight * read(scales.values, start)[:, :, None], 0.0)
        out = carry.out * decay[..., None] + _dot(weight, v, ((3,), (2,)), platform)
        return Partial(out, top, total)

    shape = (B, K, G * T)
    empty = Partial(
        jnp.zeros((*shape, H), jnp.float32),
        jnp.full(shape, MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )
    if block == S and T > 1:
        done = step(0, empty)
    else:
        # A decode step loops even over one block, so that its reading stays apart from the cache's update (see read).
        # Slots of this device that hold a position up to the last of any row.
        filled = lax.div(jnp.max(positions) - offset + stride, np.int32(stride))
        done = lax.fori_loop(0, lax.div(filled + block - 1, np.int32(block)), step, empty)
    by_position = (x.reshape(B, K, G, T, *x.shape[3:]) for x in done)
    return Partial(*(x.transpose(0, 3, 1, 2, *range(4, x.ndim)) for x in by_position))


def _dot(a: jax.Array, b: jax.Array, contract: tuple[tuple[int], tuple[int]], platform: str) -> jax.Array:
    """a [B, K, M, J] with b [B, K, S, H], contracted over the named axes, in b's dtype; float32 out."""
    if platform == "cpu":
        # XLA:CPU has no fast bf16 dot, and a block is small enough to widen. Matrix units take bf16.
        b = b.astype(jnp.float32)
    return lax.dot_general(
        a.astype(b.dtype),
        b,
        (contract, ((0, 1), (0, 1))),
        precision=lax.Precision.HIGHEST,  # float32 stays float32 where the default is less; bf16 is as it is
        preferred_element_type=jnp.float32,
    )
