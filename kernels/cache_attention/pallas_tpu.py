"""Attention for TPU: filled blocks of keys and values pass through VMEM once, for all queries of their heads.

One kernel serves decode steps (a few queries, all heads of a row at once) and prefill (many queries in blocks, a head
at a time). The grid's last axis runs over blocks of slots and is as long as the longest row needs; a row that needs
fewer points at the block it has, which is not copied again. Online softmax: Milakov and Gimelshein, 2018; blocks of
queries and keys: FlashAttention-2 (Dao, 2023).

A cache whose heads fill no register's lanes lies in memory with its positions along them, which is how XLA:TPU keeps
such an array, without padding. The kernel takes it as it lies: with heads of 64 half the bytes of padded ones.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.cache_attention.partial import MASKED, Partial, from_storage
from kernels.cache_attention.rows import blocks_needed, by_head, by_position
from kernels.cache_attention.scaled import Scales, widened
from kernels.pallas import LANES, SUBLANES, slots_along_lanes

BLOCK_BYTES = 1 << 20
"""About what one block of keys takes: copies long enough to run at memory speed, small enough to keep two of each."""

MOST_SLOTS, MOST_ROWS = 1024, 512
"""Slots of a block, and queries (positions times group) of one."""

VMEM_BYTES = 14 << 20
"""What a kernel may use: of the 16 MiB that compilers for v5e and v6e give one, a little is theirs."""


@dataclass(frozen=True)
class Tile:
    """What one grid step works on.

    heads: KV heads, a divisor of K.
    rows: queries of each, R in all: T positions of G heads.
    slots: of the cache.
    """

    heads: int
    rows: int
    slots: int

    def vmem_bytes(self, K: int, H: int, cache_bytes: int, q_bytes: int, *, scaled: bool) -> int:
        """VMEM of the two copies of each block, the scratch, and the scores, each padded to whole registers."""
        lanes, rows, slots = _up(H, LANES), _up(self.rows, 32 // q_bytes), _up(self.slots, LANES)
        blocks = 2 * self.heads * _up(self.slots, 32 // cache_bytes) * lanes * cache_bytes
        blocks += self.heads * rows * (lanes * (q_bytes + 4) + LANES * 4) + rows * LANES * 4
        blocks += 2 * _up(K, SUBLANES) * slots * 4 if scaled else 0
        scratch = self.heads * rows * (lanes + 2 * LANES) * 4
        # Scores, weights and the masks of one head; keys and values of one head widened.
        work = 4 * rows * slots * 4 + 2 * slots * lanes * 4
        return 2 * blocks + scratch + work


def choose(K: int, R: int, S: int, H: int, cache_bytes: int, q_bytes: int, *, scaled: bool) -> Tile | None:
    """The tile for a cache of K heads and S slots and R queries a head; None where none fits in VMEM."""
    rows = R if R <= MOST_ROWS else MOST_ROWS
    for heads in sorted((heads for heads in range(1, K + 1) if K % heads == 0), reverse=True):
        if heads > 1 and heads * rows > MOST_ROWS:
            continue
        slots = MOST_SLOTS
        while slots > LANES and heads * slots * _up(H, LANES) * cache_bytes > BLOCK_BYTES:
            slots //= 2
        tile = Tile(heads, rows, min(slots, S))
        if tile.vmem_bytes(K, H, cache_bytes, q_bytes, scaled=scaled) <= VMEM_BYTES:
            return tile
    return None


def not_taken(q: jax.Array, keys: jax.Array, values: jax.Array, *, scaled: bool) -> str | None:
    """None, or what about the operands this implementation does not take."""
    if keys.dtype != values.dtype:
        return f"takes keys and values of one dtype, not {keys.dtype} and {values.dtype}"
    if q.shape[1] < 1:
        return "takes at least one new position"
    if _tile(q, keys, scaled=scaled) is None:
        return f"finds no block of {keys.shape[2]} heads of {keys.shape[4]} that fits in VMEM"
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
    interpret: bool = False,
) -> Partial:
    """See ``kernels.cache_attention.cache_attention``."""
    B, T, K, G, H = q.shape
    keys, values = from_storage(keys), from_storage(values)
    tile = _tile(q, keys, scaled=scales is not None)
    assert tile is not None, "the caller asks not_taken"
    turned = slots_along_lanes(*keys.shape[3:])
    rows = by_head(q, positions, tile.rows)
    R, blocks_of_rows = rows.q.shape[2], rows.last.shape[1]
    offset = jnp.asarray(offset, jnp.int32)
    needed = blocks_needed(rows.last, stride, offset, tile.slots)

    def cache_block(b: Any, h: Any, j: Any, s: Any, layer: Any, *scalars: Any) -> tuple[Any, ...]:
        needed = scalars[-1]
        block = jnp.minimum(s, jnp.maximum(needed[b * blocks_of_rows + j] - 1, 0))
        return layer[0], b, h, *((0, block) if turned else (block, 0))

    def scale_block(*at: Any) -> tuple[Any, ...]:  # of every head: one alone is no whole register
        layer, b, _, *block = cache_block(*at)
        return layer, b, 0, block[turned]

    def row_block(b: Any, h: Any, j: Any, *_: Any) -> tuple[Any, ...]:
        return b, h, j, 0

    one_head = (H, tile.slots) if turned else (tile.slots, H)
    cache_spec = pl.BlockSpec((1, 1, tile.heads, *one_head), cache_block)
    scale_specs = [pl.BlockSpec((1, 1, K, tile.slots), scale_block)] * (0 if scales is None else 2)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=5,
        grid=(B, K // tile.heads, blocks_of_rows, jnp.maximum(jnp.max(needed), 1)),
        in_specs=[
            pl.BlockSpec((1, tile.heads, tile.rows, H), row_block),
            pl.BlockSpec((1, tile.rows, 1), lambda b, h, j, *_: (b, j, 0)),
            cache_spec,
            cache_spec,
            *scale_specs,
        ],
        out_specs=[
            pl.BlockSpec((1, tile.heads, tile.rows, H), row_block),
            pl.BlockSpec((1, tile.heads, tile.rows, 2), row_block),
        ],
        scratch_shapes=[
            pltpu.VMEM((tile.heads, tile.rows, H), jnp.float32),
            pltpu.VMEM((tile.heads, tile.rows, LANES), jnp.float32),
            pltpu.VMEM((tile.heads, tile.rows, LANES), jnp.float32),
        ],
    )
    if turned:
        keys, values = (jnp.swapaxes(each, 3, 4) for each in (keys, values))
    cache: tuple[jax.Array, ...] = (keys, values, *(scales or ()))
    if not interpret:
        # Left to itself the compiler fetches whole arrays to VMEM for their update, and writes them back whole.
        cache = tuple(pltpu.with_memory_space_constraint(each, pltpu.HBM) for each in cache)
    out, stats = pl.pallas_call(
        _kernel(tile, stride, blocks_of_rows, scaled=scales is not None, turned=turned),
        grid_spec=grid_spec,
        out_shape=[
            jax.ShapeDtypeStruct((B, K, R, H), jnp.float32),
            jax.ShapeDtypeStruct((B, K, R, 2), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"), vmem_limit_bytes=16 << 20
        ),
        interpret=interpret,
        name="cache_attention",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        offset.reshape(1),
        rows.first.reshape(-1),
        rows.last.reshape(-1),  # of one axis: SMEM pads a second to whole registers
        needed.reshape(-1),
        rows.q,
        rows.positions[..., None],
        *cache,
    )
    return by_position(Partial(out, stats[..., 0], stats[..., 1]), T, G)


def _tile(q: jax.Array, keys: jax.Array, *, scaled: bool) -> Tile | None:
    _, T, K, G, H = q.shape
    return choose(K, T * G, keys.shape[3], H, keys.dtype.itemsize, q.dtype.itemsize, scaled=scaled)


def _kernel(tile: Tile, stride: int, blocks_of_rows: int, *, scaled: bool, turned: bool) -> Any:
    def kernel(
        layer: Any, offset: Any, first: Any, last: Any, needed: Any, q: Any, row_positions: Any, *refs: Any
    ) -> None:
        keys, values = refs[:2]
        key_scales, value_scales = refs[2:4] if scaled else (None, None)
        out, stats, acc, top, total = refs[-5:]
        b, h, j, s = (pl.program_id(axis) for axis in range(4))
        at = b * blocks_of_rows + j

        @pl.when(s == 0)
        def _() -> None:
            acc[...] = jnp.zeros_like(acc)
            top[...] = jnp.full_like(top, MASKED)
            total[...] = jnp.zeros_like(total)

        def read(*, masked: bool) -> None:
            seen: Any = None
            held: Any = None
            if masked:
                slots = s * tile.slots + lax.broadcasted_iota(jnp.int32, (1, tile.slots), 1)
                seen = slots * stride + offset[0] <= row_positions[0]
                along = (1, tile.slots) if turned else (tile.slots, 1)
                slots = s * tile.slots + lax.broadcasted_iota(jnp.int32, along, int(turned))
                held = slots * stride + offset[0] <= last[at]
            for head in range(tile.heads):
                own = pl.ds(h * tile.heads + head, 1)
                absorb(
                    q[0, head],
                    keys[0, 0, head],
                    values[0, 0, head],
                    (key_scales[0, 0, own, :], value_scales[0, 0, own, :]) if scaled else None,
                    (seen, held) if masked else None,
                    (acc.at[head], top.at[head], total.at[head]),
                    turned=turned,
                )

        # Most blocks are seen whole by every query of theirs, and need no mask.
        whole = ((s + 1) * tile.slots - 1) * stride + offset[0] <= first[at]
        pl.when((s < needed[at]) & whole)(functools.partial(read, masked=False))
        pl.when((s < needed[at]) & ~whole)(functools.partial(read, masked=True))

        @pl.when(s == pl.num_programs(3) - 1)
        def _() -> None:
            out[0] = acc[...]
            stats[0] = jnp.concatenate([top[:, :, :1], total[:, :, :1]], axis=2)

    return kernel


def absorb(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scales: tuple[jax.Array, jax.Array] | None,
    masks: tuple[jax.Array, jax.Array] | None,
    state: tuple[Any, Any, Any],
    *,
    turned: bool = False,
) -> None:
    """One head's block of keys and values into the running softmax of its queries [rows, H].

    Args:
        k, v: [slots, H], or [H, slots] where ``turned``.
        scales: [1, slots] of keys and of values.
        masks: [rows, slots], which slots each query sees, and [slots, 1] or turned [1, slots], which ones hold
            anything; None: all.
        state: references to the output [rows, H], and to its maximum and sum, each in every lane of [rows, LANES].
    """
    acc, top, total = state
    scores = _dot(q, widened(k, q.dtype), ((1,), (int(not turned),))) * q.shape[-1] ** -0.5
    if scales is not None:
        scores = scores * scales[0]
    if masks is not None:
        scores = jnp.where(masks[0], scores, MASKED)
    before = top[...][:, :1]
    now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    weight = jnp.exp(scores - now)
    if masks is not None:
        weight = jnp.where(masks[0], weight, 0.0)
    decay = jnp.exp(before - now)
    total[...] = total[...] * decay + jnp.sum(weight, axis=1, keepdims=True)
    if scales is not None:
        weight = weight * scales[1]
    if masks is not None:
        # A slot never written may hold anything, NaN included: zero weight alone would not silence it.
        weight = jnp.where(masks[0], weight, 0.0) if scales is not None else weight
        meets = _meets(v.dtype, q.dtype)
        v = jnp.where(masks[1], v.astype(jnp.float32), 0.0).astype(meets)
    acc[...] = acc[...] * decay + _dot(weight, v.astype(_meets(v.dtype, q.dtype)), ((1,), (int(turned),)))
    top[...] = jnp.broadcast_to(now, top.shape)


def _meets(cache: jnp.dtype, q: jnp.dtype) -> jnp.dtype:
    """The dtype in which cache entries meet weights: their own, or where they have scales that of the queries."""
    return q if jnp.dtype(cache).itemsize == 1 else cache


def _dot(a: jax.Array, b: jax.Array, contract: tuple[tuple[int], tuple[int]]) -> jax.Array:
    """a and b, contracted over one axis of each, in b's dtype; float32 out."""
    return lax.dot_general(
        a.astype(b.dtype),
        b,
        (contract, ((), ())),
        precision=lax.Precision.HIGHEST if b.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
