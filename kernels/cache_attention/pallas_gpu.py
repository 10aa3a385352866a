"""Attention for GPU through Pallas' Triton backend: the filled cache is split over programs, whose partials merge.

One program holds a block of one head's queries and reads its share of that head's filled slots; a step of a few rows
still fills the machine, for its slots are spread over as many programs as there is room for (Flash-Decoding, Dao et
al., 2023). Prefill has many blocks of queries and needs no split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels.cache_attention.partial import MASKED, Partial, from_storage, merge
from kernels.cache_attention.rows import blocks_needed, by_head, by_position
from kernels.cache_attention.scaled import Scales, widened

PROGRAMS = 264
"""Programs to make at least, where the cache is long enough: two for each multiprocessor of an H100 (132)."""

LEAST = 16
"""The least rows, slots and columns that a Triton dot takes."""

MOST_SLOTS, MOST_ROWS = 128, 64

STAGES = 2
"""Blocks of keys and values in flight at once."""

SHARED_BYTES = 200 << 10
"""What a program may use of the 227 KiB of shared memory that Hopper and Blackwell give one."""


@dataclass(frozen=True)
class Tile:
    """What one program works on.

    rows: queries (positions times group), a power of two.
    slots: of the cache, in each iteration; a power of two.
    splits: programs that share the slots of a row.
    """

    rows: int
    slots: int
    splits: int

    def shared_bytes(self, H: int, cache_bytes: int, q_bytes: int) -> int:
        """Shared memory of the blocks in flight, the queries and the weights."""
        stored = self.slots * H * 2
        widened = stored * q_bytes if cache_bytes == 1 else 0
        return STAGES * stored * cache_bytes + widened + self.rows * (H + self.slots) * q_bytes


def choose(B: int, K: int, R: int, S: int, H: int, cache_bytes: int, q_bytes: int) -> Tile | None:
    """The tile for B rows of K heads, R queries a head and S slots; None where there is none."""
    if S < LEAST or H % LEAST:
        return None
    rows = min(MOST_ROWS, max(LEAST, pl.next_power_of_2(R)))
    slots = MOST_SLOTS
    while slots > S or (slots > LEAST and Tile(rows, slots, 1).shared_bytes(H, cache_bytes, q_bytes) > SHARED_BYTES):
        slots //= 2
    splits = max(1, min(-(-S // slots), PROGRAMS // (B * K * -(-R // rows))))
    tile = Tile(rows, slots, splits)
    return tile if tile.shared_bytes(H, cache_bytes, q_bytes) <= SHARED_BYTES else None


def not_taken(q: jax.Array, keys: jax.Array, values: jax.Array, *, scaled: bool) -> str | None:
    """None, or what about the operands this implementation does not take."""
    if keys.dtype != values.dtype:
        return f"takes keys and values of one dtype, not {keys.dtype} and {values.dtype}"
    if q.shape[1] < 1:
        return "takes at least one new position"
    if _tile(q, keys) is None:
        return (
            f"takes heads of a multiple of {LEAST} and {LEAST} or more slots, not {keys.shape[4]} and {keys.shape[3]}"
        )
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
    T, G = q.shape[1], q.shape[3]
    keys, values = from_storage(keys), from_storage(values)
    tile = _tile(q, keys)
    assert tile is not None, "the caller asks not_taken"
    S = keys.shape[3]

    def locate(where: Where, tables: Any) -> tuple[Any, ...]:
        # The last block is pulled back inside the cache; slots that an earlier block covered are masked.
        first = where.block * tile.slots
        start = jnp.minimum(first, S - tile.slots)
        slots = start + jnp.arange(tile.slots, dtype=jnp.int32)
        place = (where.layer, where.row, where.head, pl.ds(start, tile.slots))
        return slots, slots >= first, place, place

    part = run(
        q,
        keys,
        values,
        layer=layer,
        positions=positions,
        stride=stride,
        offset=offset,
        scales=scales,
        interpret=interpret,
        tile=tile,
        locate=locate,
        name="cache_attention",
    )
    return by_position(part, T, G)


class Where(NamedTuple):
    """Which slots a program wants next: block ``block`` of one row and head, whose last position is ``last``."""

    layer: Any
    row: Any
    head: Any
    block: Any
    last: Any
    offset: Any


Locate = Callable[[Where, Any], tuple[Any, ...]]
"""(where, tables) -> the slots int32 [n] as a row counts them, which of them are new (or None: all), and the indices of
their entries in keys and values and in scales, of all axes but H."""


def run(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    layer: jax.Array | int,
    positions: jax.Array,
    stride: int,
    offset: jax.Array | int,
    scales: Scales | None,
    interpret: bool,
    tile: Tile,
    locate: Locate,
    name: str,
    tables: jax.Array | None = None,
) -> Partial:
    """The partial of q [B, T, K, G, H] by head, [B, K, R...], wherever ``locate`` finds the slots of a row."""
    rows = by_head(q, positions, tile.rows)
    K, H = rows.q.shape[1], rows.q.shape[3]
    place = jnp.stack([jnp.asarray(layer, jnp.int32), jnp.asarray(offset, jnp.int32)])
    shape = (tile.splits, *rows.q.shape[:3])
    own = [] if tables is None else [tables.astype(jnp.int32)]
    parts = pl.pallas_call(
        _kernel(tile, K, H, stride, locate, scaled=scales is not None, paged=tables is not None),
        grid=(rows.q.shape[0] * K, rows.last.shape[1], tile.splits),
        out_shape=[
            jax.ShapeDtypeStruct((*shape, H), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=STAGES),
        interpret=interpret,
        name=name,
    )(place, rows.last, rows.positions, rows.q, keys, values, *own, *(scales or ()))
    return merge(Partial(*parts)) if tile.splits > 1 else Partial(*(x[0] for x in parts))


def _tile(q: jax.Array, keys: jax.Array) -> Tile | None:
    B, T, K, G, H = q.shape
    return choose(B, K, T * G, keys.shape[3], H, keys.dtype.itemsize, q.dtype.itemsize)


def _kernel(tile: Tile, K: int, H: int, stride: int, locate: Locate, *, scaled: bool, paged: bool) -> Any:
    pieces = _powers_of_two(H)

    def kernel(place: Any, last: Any, row_positions: Any, q: Any, keys: Any, values: Any, *refs: Any) -> None:
        tables = refs[0] if paged else None
        key_scales, value_scales = refs[paged : paged + 2] if scaled else (None, None)
        out, top_out, total_out = refs[-3:]
        b, h = pl.program_id(0) // K, pl.program_id(0) % K
        j, split = pl.program_id(1), pl.program_id(2)
        layer, offset, ending = place[0], place[1], last[b, j]
        own = pl.ds(j * tile.rows, tile.rows)
        sees = row_positions[b, own]
        queries = [q[b, h, own, piece] for piece in pieces]
        blocks = blocks_needed(ending, stride, offset, tile.slots)
        share = (blocks + tile.splits - 1) // tile.splits

        def step(index: Any, carry: Any) -> Any:
            accs, top, total = carry
            slots, new, here, scales_here = locate(Where(layer, b, h, index, ending, offset), tables)
            at = slots * stride + offset
            seen = at[None, :] <= sees[:, None]
            if new is not None:
                seen &= new[None, :]
            scores = jnp.zeros((tile.rows, tile.slots), jnp.float32)
            for query, piece in zip(queries, pieces, strict=True):
                scores += _dot(query, widened(keys[(*here, piece)], query.dtype).T)
            scores *= H**-0.5
            if scaled:
                scores *= key_scales[scales_here][None, :]
            scores = jnp.where(seen, scores, MASKED)
            now = jnp.maximum(top, jnp.max(scores, axis=1))
            weight = jnp.where(seen, jnp.exp(scores - now[:, None]), 0.0)
            decay = jnp.exp(top - now)
            total = total * decay + jnp.sum(weight, axis=1)
            if scaled:
                weight = jnp.where(seen, weight * value_scales[scales_here][None, :], 0.0)
            added = []
            for acc, query, piece in zip(accs, queries, pieces, strict=True):
                v = widened(values[(*here, piece)], query.dtype)
                # A slot never written may hold anything, NaN included: zero weight alone would not silence it.
                v = jnp.where((at <= ending)[:, None], v, jnp.zeros_like(v))
                added.append(acc * decay[:, None] + _dot(weight, v))
            return added, now, total

        empty = (
            [jnp.zeros((tile.rows, piece.size), jnp.float32) for piece in pieces],
            jnp.full((tile.rows,), MASKED, jnp.float32),
            jnp.zeros((tile.rows,), jnp.float32),
        )
        begin = split * share
        accs, top, total = lax.fori_loop(begin, jnp.minimum(blocks, begin + share), step, empty)
        for acc, piece in zip(accs, pieces, strict=True):
            out[split, b, h, own, piece] = acc
        top_out[split, b, h, own] = top
        total_out[split, b, h, own] = total

    return kernel


def _powers_of_two(size: int) -> list[Any]:
    """Slices of powers of two that make up ``size``: Triton's blocks are such. 80 is 64 and 16."""
    found, at = [], 0
    for bit in reversed(range(size.bit_length())):
        if size >> bit & 1:
            found.append(pl.ds(at, 1 << bit))
            at += 1 << bit
    return found


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a [M, J] with b [J, N] in b's dtype; float32 out."""
    return jnp.dot(
        a.astype(b.dtype),
        b,
        precision=lax.Precision.HIGHEST if b.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
