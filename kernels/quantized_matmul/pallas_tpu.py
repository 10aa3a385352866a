"""The product with grouped scales for TPU: codes are widened and scaled in VMEM, a block of outputs at a time.

XLA fuses a plain conversion into its dot, but not scales that change along the contraction: it writes them out in
float32, one for each value. Here they are spread over their groups by a small matrix product, which is exact: each
column of the other factor holds a single one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.pallas import LANES
from kernels.quantized import QuantizedWeight

CHUNK = 512
"""Values of the contraction axis that are widened at once."""

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
    O, tile = weight.shape[0], _tile(x, weight)
    assert tile is not None, "the caller asks not_taken"
    scales = [weight.scales] if weight.offsets is None else [weight.scales, weight.offsets]
    per_output = pl.BlockSpec((tile.outputs, weight.scales.shape[1]), lambda m, o: (o, 0))
    return pl.pallas_call(
        _kernel(weight.group, I, offsets=weight.offsets is not None),
        grid=(pl.cdiv(M, tile.rows), pl.cdiv(O, tile.outputs)),
        in_specs=[
            pl.BlockSpec((tile.rows, I), lambda m, o: (m, 0)),
            pl.BlockSpec((tile.outputs, I), lambda m, o: (o, 0)),
            *[per_output] * len(scales),
        ],
        out_specs=pl.BlockSpec((tile.rows, tile.outputs), lambda m, o: (m, o)),
        out_shape=jax.ShapeDtypeStruct((M, O), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=16 << 20),
        interpret=interpret,
        name="quantized_matmul",
    )(x, weight.values, *scales)


def _tile(x: jax.Array, weight: QuantizedWeight) -> Tile | None:
    bits = 4 if weight.values.dtype == jnp.int4 else 8
    sizes = (*x.shape[:1], *weight.shape, bits, weight.scales.shape[1], x.dtype.itemsize)
    return choose(*sizes, offsets=weight.offsets is not None)


def _kernel(group: int | None, I: int, *, offsets: bool) -> Any:
    def kernel(x: Any, values: Any, *refs: Any) -> None:
        *scale_refs, out = refs
        scales = [scale[...] for scale in scale_refs]
        # A code is exact in bf16, so one product rounds once in either dtype; with an offset it would round twice.
        narrow = not offsets and group is not None and x.dtype == scales[0].dtype == jnp.bfloat16
        dtype = jnp.dtype(jnp.bfloat16 if narrow else jnp.float32)
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
    of_value = lax.div(lax.broadcasted_iota(jnp.int32, shape, 1), jnp.int32(group))
    ones = (lax.broadcasted_iota(jnp.int32, shape, 0) == of_value).astype(jnp.float32).astype(own.dtype)
    return _dot(own, ones, ((1,), (0,)))


def _dot(a: jax.Array, b: jax.Array, contract: tuple[tuple[int], tuple[int]]) -> jax.Array:
    return lax.dot_general(
        a,
        b,
        (contract, ((), ())),
        precision=lax.Precision.HIGHEST if b.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
