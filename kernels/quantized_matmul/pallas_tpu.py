"""The product with grouped scales for TPU: codes are widened in VMEM, a block of outputs at a time.

XLA fuses a plain conversion into its dot, but not scales that change along the contraction: it writes them out in
float32, one for each value. Here, with few rows, the scales wait until after the dot: a row of x is laid out as one row
for each group, zero outside it, so that the matrix unit keeps the sums of groups apart at no cost (with few rows it
waits for weights), and each sum is scaled once. Offsets times the sums of x over groups are a small product beside it.
With many rows that would be more work than scaling the weight, so each code is scaled: scales are spread over their
groups by a product that is exact, since each column of the other factor holds a single one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.pallas import LANES, SUBLANES
from kernels.quantized import QuantizedWeight

CHUNK, NARROW_CHUNK = 512, 256
"""Values of the contraction axis that are widened at once: with many rows; with few, what a matrix unit is deep."""

FEW_ROWS = 256
"""Rows that a row of x for each group may make for the matrix unit.

By the compiler's estimate for v6e, 32 rows against int4 [7168, 8192] in groups of 32 take 80,024 cycles so and 188,076
with scales spread; 128 rows in groups of 128 take 87,815 and 270,151.
"""

MOST_ROWS, LEAST_ROWS = 256, 16
"""Rows of x in a block, and the least to cut them to where a row is long; each block reads the weight again."""

VMEM_BYTES = 14 << 20
"""What a kernel may use: of the 16 MiB that compilers for v5e and v6e give one, a little is theirs."""


@dataclass(frozen=True)
class Tile:
    """rows of x and outputs of the weight that one grid step works on, over the whole contraction."""

    rows: int
    outputs: int

    def vmem_bytes(self, I: int, value_bits: int, groups: int, x_bytes: int, *, offsets: bool) -> int:
        """VMEM of the two copies of each block, and of one chunk while it is widened."""
        columns, chunk = -(-I // LANES) * LANES, min(CHUNK, -(-I // LANES) * LANES)
        scales = self.outputs * -(-groups // LANES) * LANES * 4 * (2 if offsets else 1)
        blocks = self.outputs * columns * value_bits // 8 + scales + self.rows * (columns * x_bytes + self.outputs * 4)
        work = self.outputs * chunk * 4 * (4 if offsets else 3) + 2 * self.rows * self.outputs * 4 + scales
        work += FEW_ROWS * self.outputs * 4
        return 2 * blocks + work


def choose(M: int, O: int, I: int, value_bits: int, groups: int, x_bytes: int, *, offsets: bool) -> Tile | None:
    """The tile for x [M, I] and a weight [O, I]; None where none fits in VMEM."""
    rows = min(M, MOST_ROWS)
    while True:
        for outputs in (512, 256, 128):
            tile = Tile(rows, O if outputs > O else outputs)
            if tile.vmem_bytes(I, value_bits, groups, x_bytes, offsets=offsets) <= VMEM_BYTES:
                return tile
        if rows <= LEAST_ROWS:
            return None
        rows = max(LEAST_ROWS, -(-rows // 2) // LEAST_ROWS * LEAST_ROWS)


def not_taken(x: jax.Array, weight: QuantizedWeight) -> str | None:
    """None, or what about x [M, I] and weight [O, I] this implementation does not take."""
    if weight.packed:
        return "takes int4 as such, not two in a byte"
    if weight.group is not None and CHUNK % weight.group:
        return f"takes groups that divide {CHUNK}, not {weight.group}"
    return None if _tile(x, weight) else f"finds no block of a weight {weight.shape} that fits in VMEM"


def quantized_matmul(x: jax.Array, weight: QuantizedWeight, *, interpret: bool = False) -> jax.Array:
    """x [M, I] times weight [O, I] -> float32 [M, O]."""
    M, I = x.shape
    O, tile, groups = weight.shape[0], _tile(x, weight), weight.scales.shape[1]
    assert tile is not None, "the caller asks not_taken"
    group = weight.group
    beside = [weight.scales] if weight.offsets is None else [weight.scales, weight.offsets]
    # XLA keeps an array that is narrower than a register with its longer axis along the lanes, as a parameter of the
    # program: turned, it is one for the kernel as it stands.
    turned = group is not None and groups % LANES != 0
    per_output = pl.BlockSpec((tile.outputs, groups), lambda m, o: (o, 0))
    if turned:
        beside = [each.T for each in beside]
        per_output = pl.BlockSpec((groups, tile.outputs), lambda m, o: (0, o))
    rows, height = x, tile.rows
    if group is not None and tile.rows == M <= _few_rows(group):
        if M > 1:  # whole registers of each group
            rows = jnp.pad(x, ((0, -M % SUBLANES), (0, 0)))
        height, kernel = rows.shape[0], _few(group, I, turned=turned)
    else:
        kernel = _many(group, I, offsets=weight.offsets is not None, turned=turned)
    out = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows.shape[0], height), pl.cdiv(O, tile.outputs)),
        in_specs=[
            pl.BlockSpec((height, I), lambda m, o: (m, 0)),
            pl.BlockSpec((tile.outputs, I), lambda m, o: (o, 0)),
            *[per_output] * len(beside),
        ],
        out_specs=pl.BlockSpec((height, tile.outputs), lambda m, o: (m, o)),
        out_shape=jax.ShapeDtypeStruct((rows.shape[0], O), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=16 << 20),
        interpret=interpret,
        name="quantized_matmul",
    )(rows, weight.values, *beside)
    return out[:M]


def _tile(x: jax.Array, weight: QuantizedWeight) -> Tile | None:
    bits = 4 if weight.values.dtype == jnp.int4 else 8
    sizes = (*x.shape[:1], *weight.shape, bits, weight.scales.shape[1], x.dtype.itemsize)
    return choose(*sizes, offsets=weight.offsets is not None)


def _few_rows(group: int) -> int:
    """Rows of x up to which sums of groups are kept apart: with more the matrix unit would wait for them."""
    return max(1, FEW_ROWS * group // NARROW_CHUNK)


def _few(group: int, I: int, *, turned: bool) -> Any:
    chunk = max(NARROW_CHUNK, group)

    def kernel(x: Any, values: Any, *refs: Any) -> None:
        *beside, out = refs
        M, own = x.shape[0], jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
        scales = _by_group(beside[0], turned)  # [groups, outputs]
        total = jnp.zeros(out.shape, jnp.float32)
        sums = []  # of x over each group
        for start in range(0, I, chunk):
            size = min(chunk, I - start)
            count = -(-size // group)
            rows = x[:, start : start + size].astype(jnp.float32)
            if M == 1:
                shape = (count, size)
                own_row = lax.broadcasted_iota(jnp.int32, shape, 0)
                split = [jnp.where(_group_of(shape, group) == own_row, jnp.broadcast_to(rows, shape), 0.0)]
            else:
                own_group = _group_of((M, size), group)
                split = [jnp.where(own_group == at, rows, 0.0) for at in range(count)]
            apart = jnp.concatenate(split, axis=0)
            weight = values[:, start : start + size].astype(own)
            partial = _dot(apart.astype(own), weight, ((1,), (1,)))  # [count * M, outputs]
            first = start // group
            if M == 1:
                total += jnp.sum(partial * scales[first : first + count], axis=0, keepdims=True)
            else:
                for at in range(count):
                    total += partial[at * M : (at + 1) * M] * scales[first + at : first + at + 1]
            if len(beside) > 1:  # [count, 1] or, with more rows, [M, 1] each
                sums += [jnp.sum(part, axis=1, keepdims=True) for part in split]
        if len(beside) > 1:
            offsets = _by_group(beside[1], turned)
            if M == 1:
                total += jnp.sum(jnp.concatenate(sums, axis=0) * offsets, axis=0, keepdims=True)
            else:
                total += _dot(jnp.concatenate(sums, axis=1), offsets, ((1,), (0,)))
        out[...] = total

    return kernel


def _group_of(shape: tuple[int, int], group: int) -> jax.Array:
    """Of each value along the last axis, which group it is in."""
    return lax.div(lax.broadcasted_iota(jnp.int32, shape, 1), jnp.int32(group))


def _by_group(ref: Any, turned: bool) -> jax.Array:
    """float32 [groups, outputs]."""
    wide = ref[...].astype(jnp.float32)
    return wide if turned else wide.T


def _many(group: int | None, I: int, *, offsets: bool, turned: bool) -> Any:
    def kernel(x: Any, values: Any, *refs: Any) -> None:
        *scale_refs, out = refs
        # A code is exact in bf16, so one product rounds once in either dtype; with an offset it would round twice.
        narrow = not offsets and group is not None and x.dtype == scale_refs[0].dtype == jnp.bfloat16
        dtype = jnp.dtype(jnp.bfloat16 if narrow else jnp.float32)
        scales = [
            scale[...].astype(jnp.float32).T.astype(scale.dtype) if turned else scale[...] for scale in scale_refs
        ]
        total = jnp.zeros(out.shape, jnp.float32)
        for start in range(0, I, CHUNK):
            size = min(CHUNK, I - start)
            spread = [_spread(scale, group, start, size).astype(dtype) for scale in scales]
            weight = values[:, start : start + size].astype(dtype) * spread[0]
            weight = weight + spread[1] if offsets else weight
            total += _dot(x[:, start : start + size], weight.astype(x.dtype), ((1,), (1,)))
        out[...] = total

    return kernel


def _spread(scales: jax.Array, group: int | None, start: int, size: int) -> jax.Array:
    """scales [O, groups] of the whole row -> float32 [O, size], each for every value of its group, or [O, 1]."""
    if group is None:
        return scales.astype(jnp.float32)
    first, last = start // group, -(-(start + size) // group)
    own = scales[:, first:last]
    own = own if own.dtype == jnp.bfloat16 else own.astype(jnp.float32)
    shape = (last - first, size)
    ones = (lax.broadcasted_iota(jnp.int32, shape, 0) == _group_of(shape, group)).astype(jnp.float32).astype(own.dtype)
    return _dot(own, ones, ((1,), (0,)))


def _dot(a: jax.Array, b: jax.Array, contract: tuple[tuple[int], tuple[int]]) -> jax.Array:
    return lax.dot_general(
        a,
        b,
        (contract, ((), ())),
        precision=lax.Precision.HIGHEST if b.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
