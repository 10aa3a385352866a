"""Attention over pages for TPU: each page of a sequence passes through VMEM once, for all queries of its heads.

A page is small, so a step of the grid takes several, each through a block of its own whose place the block table gives.
The grid runs over the blocks that hold something, sequence after sequence: a batch of one long and many short ones
takes as many steps as its pages need, and the next sequence's pages are fetched while this one's are worked on.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.cache_attention.pallas_tpu import VMEM_BYTES, absorb
from kernels.cache_attention.partial import MASKED, Partial, from_storage
from kernels.cache_attention.rows import blocks_needed, by_head, by_position
from kernels.cache_attention.scaled import Scales, widened
from kernels.pallas import LANES, SUBLANES

BLOCK_BYTES = 1 << 20
"""About what the keys of one grid step take at most."""

MOST_PAGES, MOST_SLOTS = 16, 256
"""Pages of one grid step, and their slots."""

MOST_ROWS = 512
"""Queries (positions times group) of a head that one sequence may have."""

SMEM_BYTES = 768 << 10
"""What tables and the order of the grid may take of the 1 MiB of scalar memory."""


@dataclass(frozen=True)
class Tile:
    """What one grid step works on.

    heads: KV heads, a divisor of K.
    pages: of one sequence, each of all its slots.
    """

    heads: int
    pages: int

    def vmem_bytes(self, K: int, R: int, S: int, H: int, cache_bytes: int, q_bytes: int, *, scaled: bool) -> int:
        """VMEM of the two copies of each block, the scratch, and the scores, each padded to whole registers."""
        lanes, rows, slots = _up(H, LANES), _up(R, 32 // q_bytes), _up(self.pages * S, LANES)
        blocks = 2 * self.pages * self.heads * _up(S, 32 // cache_bytes) * lanes * cache_bytes
        blocks += self.heads * rows * (lanes * (q_bytes + 4) + LANES * 4) + rows * LANES * 4
        blocks += 2 * self.pages * _up(K, SUBLANES) * _up(S, LANES) * 4 if scaled else 0
        scratch = self.heads * rows * (lanes + 2 * LANES) * 4
        # Scores, weights and masks of one head; its keys and values in one piece, widened; scales of every head.
        work = 4 * rows * slots * 4 + 4 * slots * lanes * 4
        work += 2 * _up(K, SUBLANES) * slots * 4 if scaled else 0
        return 2 * blocks + scratch + work


class Order(NamedTuple):
    """Which pages each step of the grid takes. Block i of a sequence is its pages from ``i * pages`` on.

    tables: int32 [B, blocks, pages]; where a block has pages past the sequence's last, one that is in VMEM or of the
        sequence, so that nothing else is read.
    sequence: int32 [B * blocks], the sequence of each step.
    begin: int32 [B], its first step.
    needed: int32 [B], blocks of it that hold something, maybe none; it has one step even then, to write its result.
    steps: int32 [], of the grid.
    """

    tables: jax.Array
    sequence: jax.Array
    begin: jax.Array
    needed: jax.Array
    steps: jax.Array


def in_order(tables: jax.Array, last: jax.Array, S: int, pages: int, stride: int, offset: jax.Array) -> Order:
    """tables [B, P] of sequences whose last positions are ``last`` [B], as a grid of ``pages`` a step takes them."""
    B, P = tables.shape
    own = jnp.pad(tables.astype(jnp.int32), ((0, 0), (0, -P % pages))).reshape(B, -1, pages)
    blocks = own.shape[1]
    used = jnp.minimum(blocks_needed(last, stride, offset, S), P)
    # A place past the end keeps the page that the step before had there, which is not copied again.
    before = jnp.concatenate([jnp.broadcast_to(own[:, :1, :1], (B, 1, pages)), own[:, :-1]], axis=1)
    own = jnp.where(jnp.arange(blocks * pages).reshape(blocks, pages) < used[:, None, None], own, before)
    needed = lax.div(used + (pages - 1), jnp.int32(pages))
    ends = jnp.cumsum(jnp.maximum(needed, 1))
    sequence = jnp.sum(jnp.arange(B * blocks)[:, None] >= ends, axis=1, dtype=jnp.int32)
    return Order(own, sequence, ends - jnp.maximum(needed, 1), needed, ends[-1])


def choose(K: int, R: int, S: int, H: int, cache_bytes: int, q_bytes: int, *, scaled: bool) -> Tile | None:
    """The tile for pages of K heads and S slots and R queries a head; None where none fits in VMEM."""
    if R > MOST_ROWS:
        return None
    for heads in sorted((heads for heads in range(1, K + 1) if K % heads == 0), reverse=True):
        if heads > 1 and heads * R > 2 * MOST_ROWS:
            continue
        pages = max(1, min(MOST_PAGES, MOST_SLOTS // S))
        while pages > 1 and pages * heads * S * _up(H, LANES) * cache_bytes > BLOCK_BYTES:
            pages //= 2
        if scaled:
            pages = _up(pages, max(1, LANES // S))  # their scales fill whole registers
        tile = Tile(heads, pages)
        if tile.vmem_bytes(K, R, S, H, cache_bytes, q_bytes, scaled=scaled) <= VMEM_BYTES:
            return tile
    return None


def not_taken(q: jax.Array, keys: jax.Array, values: jax.Array, tables: jax.Array, *, scaled: bool) -> str | None:
    """None, or what about the operands this implementation does not take."""
    T, K, S, H = q.shape[1], *keys.shape[2:]
    if keys.dtype != values.dtype:
        return f"takes keys and values of one dtype, not {keys.dtype} and {values.dtype}"
    if T < 1:
        return "takes at least one new position"
    if scaled and ((S % LANES and LANES % S) or keys.shape[1] * S < LANES):
        return (
            f"takes scaled caches of {LANES} slots or more, in pages whose size divides {LANES} or is a multiple of "
            f"it, not {keys.shape[1]} pages of {S}"
        )
    tile = _tile(q, keys, scaled=scaled)
    if tile is None:
        return f"finds no block of {K} heads of {H} and {T} positions that fits in VMEM"
    B, blocks = tables.shape[0], -(-tables.shape[1] // tile.pages)
    if (used := 4 * B * (blocks * (tile.pages + 1) + 4)) > SMEM_BYTES:
        return f"keeps tables in scalar memory, which {B} of {tables.shape[1]} pages ({used} bytes) overflow"
    return None


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
    scales: Scales | None = None,
    interpret: bool = False,
) -> Partial:
    """See ``kernels.paged_attention.paged_attention``."""
    B, T, K, G, H = q.shape
    S = keys.shape[3]
    keys, values = from_storage(keys), from_storage(values)
    tile = _tile(q, keys, scaled=scales is not None)
    assert tile is not None, "the caller asks not_taken"
    R = T * G
    rows = by_head(q, positions, R)
    offset = jnp.asarray(offset, jnp.int32)
    last = jnp.max(positions.astype(jnp.int32), axis=1)
    order = in_order(tables, last, S, tile.pages, stride, offset)
    blocks = order.tables.shape[1]
    together = max(1, LANES // S)  # pages whose scales lie side by side in a register

    def page(n: int, w: Any, tables: Any, sequence: Any, begin: Any) -> Any:
        b = sequence[w]
        return tables[(b * blocks + w - begin[b]) * tile.pages + n]

    def page_block(n: int, h: Any, w: Any, layer: Any, _: Any, *order: Any) -> tuple[Any, ...]:
        return layer[0], page(n, w, *order[:3]), h, 0, 0

    def scale_block(n: int, h: Any, w: Any, layer: Any, _: Any, *order: Any) -> tuple[Any, ...]:
        return layer[0], 0, 0, lax.div(page(n, w, *order[:3]), together)

    def row_block(h: Any, w: Any, layer: Any, _: Any, tables: Any, sequence: Any, *__: Any) -> tuple[Any, ...]:
        return sequence[w], h, 0, 0

    def position_block(*at: Any) -> tuple[Any, ...]:
        return row_block(*at)[0], 0, 0

    def each(shape: tuple[int, ...], place: Any) -> list[Any]:
        return [pl.BlockSpec(shape, functools.partial(place, n)) for n in range(tile.pages)]

    pages = each((1, 1, tile.heads, S, H), page_block)
    lanes = min(_up(S, LANES), 0 if scales is None else scales.keys.shape[3])
    own_scales = [] if scales is None else each((1, 1, K, lanes), scale_block)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=8,
        grid=(K // tile.heads, order.steps),
        in_specs=[
            pl.BlockSpec((1, tile.heads, R, H), row_block),
            pl.BlockSpec((1, R, 1), position_block),
            *pages,
            *pages,
            *own_scales,
            *own_scales,
        ],
        out_specs=[
            pl.BlockSpec((1, tile.heads, R, H), row_block),
            pl.BlockSpec((1, tile.heads, R, 2), row_block),
        ],
        scratch_shapes=[
            pltpu.VMEM((tile.heads, R, H), jnp.float32),
            pltpu.VMEM((tile.heads, R, LANES), jnp.float32),
            pltpu.VMEM((tile.heads, R, LANES), jnp.float32),
            *[pltpu.VMEM((K, tile.pages * S), jnp.float32)] * (0 if scales is None else 2),
        ],
    )
    operands = [*[keys] * tile.pages, *[values] * tile.pages]
    operands += [] if scales is None else [*[scales.keys] * tile.pages, *[scales.values] * tile.pages]
    out, stats = pl.pallas_call(
        _kernel(tile, S, stride, blocks, scaled=scales is not None),
        grid_spec=grid_spec,
        out_shape=[
            jax.ShapeDtypeStruct((B, K, R, H), jnp.float32),
            jax.ShapeDtypeStruct((B, K, R, 2), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=16 << 20),
        interpret=interpret,
        name="paged_attention",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        offset.reshape(1),
        order.tables.reshape(-1),  # of one axis: SMEM pads a second to whole registers
        order.sequence,
        order.begin,
        order.needed,
        jnp.min(positions.astype(jnp.int32), axis=1),
        last,
        rows.q,
        rows.positions[..., None],
        *operands,
    )
    return by_position(Partial(out, stats[..., 0], stats[..., 1]), T, G)


def _tile(q: jax.Array, keys: jax.Array, *, scaled: bool) -> Tile | None:
    _, T, K, G, H = q.shape
    return choose(K, T * G, keys.shape[3], H, keys.dtype.itemsize, q.dtype.itemsize, scaled=scaled)


def _kernel(tile: Tile, S: int, stride: int, blocks: int, *, scaled: bool) -> Any:
    N = tile.pages
    slots = N * S

    def kernel(
        layer: Any,
        offset: Any,
        tables: Any,
        sequence: Any,
        begin: Any,
        needed: Any,
        first: Any,
        last: Any,
        q: Any,
        row_positions: Any,
        *refs: Any,
    ) -> None:
        keys, values = refs[:N], refs[N : 2 * N]
        key_scales, value_scales = refs[2 * N : 3 * N], refs[3 * N : 4 * N]
        key_rows, value_rows = refs[-2:] if scaled else (None, None)
        out, stats, acc, top, total = refs[4 * N : 4 * N + 5] if scaled else refs[-5:]
        h, w = pl.program_id(0), pl.program_id(1)
        b = sequence[w]
        s = w - begin[b]

        @pl.when(s == 0)
        def _() -> None:
            acc[...] = jnp.zeros_like(acc)
            top[...] = jnp.full_like(top, MASKED)
            total[...] = jnp.zeros_like(total)

        def gather(scales: Any, into: Any) -> None:
            """The pages' scales side by side, [K, slots]. A page shorter than a register lies in one with others."""
            lane = lax.broadcasted_iota(jnp.int32, scales[0].shape[2:], 1)
            for n in range(0, N, max(1, LANES // S)):
                if S >= LANES:
                    into[:, n * S : (n + 1) * S] = scales[n][0, 0]
                    continue
                filled: Any = None
                for place in range(0, LANES, S):
                    one = n + place // S
                    at = lax.rem(tables[(b * blocks + s) * N + one], LANES // S) * S
                    turned = pltpu.roll(scales[one][0, 0], lax.rem(place - at + LANES, LANES), 1)
                    filled = turned if filled is None else jnp.where(lane >= place, turned, filled)
                into[:, n * S : n * S + LANES] = filled

        def read(*, masked: bool) -> None:
            masks: Any = None
            if masked:
                across = s * slots + lax.broadcasted_iota(jnp.int32, (1, slots), 1)
                down = s * slots + lax.broadcasted_iota(jnp.int32, (slots, 1), 0)
                masks = across * stride + offset[0] <= row_positions[0], down * stride + offset[0] <= last[b]
            if scaled:
                gather(key_scales, key_rows)
                gather(value_scales, value_rows)
            for head in range(tile.heads):
                own = pl.ds(h * tile.heads + head, 1)
                absorb(
                    q[0, head],
                    _joined([one[0, 0, head] for one in keys], q.dtype),
                    _joined([one[0, 0, head] for one in values], q.dtype),
                    (key_rows[own, :], value_rows[own, :]) if scaled else None,
                    masks,
                    (acc.at[head], top.at[head], total.at[head]),
                )

        # Most blocks are seen whole by every query of theirs, and need no mask.
        whole = ((s + 1) * slots - 1) * stride + offset[0] <= first[b]
        pl.when((s < needed[b]) & whole)(functools.partial(read, masked=False))
        pl.when((s < needed[b]) & ~whole)(functools.partial(read, masked=True))

        @pl.when(s >= needed[b] - 1)
        def _() -> None:
            out[0] = acc[...]
            stats[0] = jnp.concatenate([top[:, :, :1], total[:, :, :1]], axis=2)

    return kernel


def _joined(pages: list[jax.Array], dtype: jnp.dtype) -> jax.Array:
    """Pages [S, H] one below the other, in the dtype that meets queries of ``dtype``."""
    pages = [widened(page, dtype) for page in pages]
    kind = pages[0].dtype
    if pages[0].shape[0] % (32 // kind.itemsize):  # half a register of bf16 is a whole one of float32
        pages = [page.astype(jnp.float32) for page in pages]
    return jnp.concatenate(pages, axis=0).astype(kind)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
