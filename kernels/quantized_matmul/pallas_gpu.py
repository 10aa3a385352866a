"""The product with grouped scales for GPU, through Pallas' Triton backend: codes are widened and scaled in registers.

XLA writes such a weight out in 16 bits before its dot, each step. A block of 32 packed codes holds values j and j + 16
in byte j, so the low halves of the bytes meet one half of x and the high halves the other: x is split once, and the
codes never change places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels.quantized import BLOCK, QuantizedWeight

LEAST = 16
"""The least rows, outputs and values that a Triton dot takes."""

MOST_ROWS, MOST_OUTPUTS, MOST_VALUES = 64, 64, 128
"""Of a block: rows of x, outputs, and stored values (bytes, where two codes share one) of each iteration."""

PROGRAMS = 264
"""Programs to make at least, where the contraction is long enough: two for each multiprocessor of an H100 (132)."""

STAGES = 3
"""Blocks in flight at once."""


@dataclass(frozen=True)
class Tile:
    """What a program works on: rows of x, outputs, and values an iteration; ``splits`` share the contraction."""

    rows: int
    outputs: int
    values: int
    splits: int

    def shared_bytes(self, x_bytes: int) -> int:
        """Shared memory of the blocks in flight: of x twice where codes are packed, of values, and of the widened."""
        stage = self.values * (2 * self.rows * x_bytes + self.outputs)
        return STAGES * stage + 2 * self.values * self.outputs * x_bytes


def choose(M: int, O: int, stored: int) -> Tile | None:
    """The tile for M rows and O outputs of so many stored values; None where there is none."""
    outputs, values = (min(most, size & -size) for most, size in ((MOST_OUTPUTS, O), (MOST_VALUES, stored)))
    if outputs < LEAST or values < LEAST:
        return None
    rows = min(MOST_ROWS, max(LEAST, pl.next_power_of_2(M)))
    blocks, programs = stored // values, -(-M // rows) * (O // outputs)
    splits = max(1, min(PROGRAMS // programs, blocks // 4))
    return Tile(rows, outputs, values, splits)


def not_taken(x: jax.Array, weight: QuantizedWeight) -> str | None:
    """None, or what about x [M, I] and weight [O, I] this implementation does not take."""
    if weight.values.dtype == jnp.int4:
        return "takes 4-bit codes two in a byte, not as int4"
    if _tile(x, weight) is None:
        return f"takes outputs and values in multiples of {LEAST} (packed {BLOCK}), not {weight.shape}"
    return None


def quantized_matmul(x: jax.Array, weight: QuantizedWeight, *, interpret: bool = False) -> jax.Array:
    """x [M, I] times weight [O, I] -> float32 [M, O]."""
    M, I = x.shape
    O, tile = weight.shape[0], _tile(x, weight)
    assert tile is not None, "the caller asks not_taken"
    x = jnp.pad(x, ((0, -M % tile.rows), (0, 0)))
    rows = x.shape[0]  # of the dots, which take 16 at least; no more than M are written
    if weight.packed:
        halves = x.reshape(rows, I // BLOCK, 2, BLOCK // 2)
        parts = [halves[:, :, half].reshape(rows, I // 2) for half in (0, 1)]
    else:
        parts = [x]
    scales = [weight.scales] if weight.offsets is None else [weight.scales, weight.offsets]
    out = pl.pallas_call(
        _kernel(tile, weight.values.shape[1], weight.group, packed=weight.packed, offsets=weight.offsets is not None),
        grid=(O // tile.outputs, rows // tile.rows, tile.splits),
        out_shape=jax.ShapeDtypeStruct((tile.splits, M, O), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=STAGES),
        interpret=interpret,
        name="quantized_matmul",
    )(weight.values, *parts, *scales)
    return out[0] if tile.splits == 1 else jnp.sum(out, axis=0)


def _tile(x: jax.Array, weight: QuantizedWeight) -> Tile | None:
    return choose(x.shape[0], *weight.values.shape)


def _kernel(tile: Tile, stored: int, group: int | None, *, packed: bool, offsets: bool) -> Any:
    blocks = stored // tile.values
    share = -(-blocks // tile.splits)
    together = 2 if packed else 1  # values that share a stored one

    def kernel(values: Any, *refs: Any) -> None:
        parts, rest = refs[:together], refs[together:]
        scale_ref, offset_ref, out = rest[0], rest[1] if offsets else None, rest[-1]
        own = pl.ds(pl.program_id(0) * tile.outputs, tile.outputs)
        rows = pl.ds(pl.program_id(1) * tile.rows, tile.rows)
        split = pl.program_id(2)
        outputs = pl.program_id(0) * tile.outputs + jnp.arange(tile.outputs, dtype=jnp.int32)
        row = pl.program_id(1) * tile.rows + jnp.arange(tile.rows, dtype=jnp.int32)[:, None]

        def of_group(ref: Any, start: Any) -> jax.Array:
            """Scales of a block of values, float32 [outputs, values] or [outputs, 1]."""
            if group is None:
                return ref[own, 0].astype(jnp.float32)[:, None]
            at = (start + jnp.arange(tile.values, dtype=jnp.int32)) // (group // together)
            return plgpu.load(ref.at[outputs[:, None], at[None, :]]).astype(jnp.float32)

        def step(index: Any, total: jax.Array) -> jax.Array:
            start = index * tile.values
            here = pl.ds(start, tile.values)
            held = values[own, here]
            scale = of_group(scale_ref, start)
            halves = [held & 0xF, held >> 4] if packed else [held]
            for x, half in zip(parts, halves, strict=True):
                wide = half.astype(jnp.float32)
                wide = (wide - 8.0 if packed else wide) * scale
                if offsets:
                    wide = wide + of_group(offset_ref, start)
                total += _dot(x[rows, here], wide.astype(x.dtype).T)
            return total

        begin = split * share
        end = jnp.minimum(blocks, begin + share)
        total = lax.fori_loop(begin, end, step, jnp.zeros((tile.rows, tile.outputs), jnp.float32))
        plgpu.store(out.at[split, row, outputs[None, :]], total, mask=row < out.shape[1])

    return kernel


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(
        a,
        b,
        precision=lax.Precision.HIGHEST if b.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
