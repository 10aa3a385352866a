"""Blocks of ggml's quantised types, taken apart into the small numbers and scales that `kernels.quantized` holds.

Nothing is decoded: 4-bit numbers stay two a byte, 8-bit ones are copied. Layouts (ggml's `block_q8_0`, `block_q4_0`,
`block_q4_1`, `block_q4_K`; d and m are float16):

    Q8_0    32 values: d, 32 int8 q                     value d * q
    Q4_0    32 values: d, 16 bytes of q                 value d * (q - 8)
    Q4_1    32 values: d, m, 16 bytes of q              value d * q + m = d * (q - 8) + (m + 8 d)
    Q4_K    256 values: d, m, 12 bytes, 128 bytes of q  value (d * s) * q - m * t, with 6-bit s and t for each 32 values

Byte j of 16 has value j in its low half and value j + 16 in its high half. In Q4_K byte j of 32 has value j of one 32
values and value j of the next.

Exact for Q8_0 and Q4_0, whose scales are float16 as ours are. An offset m + 8 d, and Q4_K's products, are rounded to
float16 where they are kept as such: by at most 2^-11 of themselves, which for a block that spans zero is below 1/250 of
the step between two of its values. TPUs keep scales in bfloat16, rounded by up to 2^-8 of themselves.
"""

from __future__ import annotations

import numpy as np

from kernels.quantized import BLOCK
from model.quantize import Quantized, WeightFormat, pack

_Q4_1 = WeightFormat("int4", 32, offsets=True)
FORMATS = {
    "Q8_0": WeightFormat("int8", 32),
    "Q4_0": WeightFormat("int4", 32),
    "Q4_1": _Q4_1,
    "Q4_K": _Q4_1,
}


def take_apart(kind: str, raw: np.ndarray, cols: slice) -> Quantized:
    """Stored bytes [rows, bytes] of a type in `FORMATS` -> values, and scales and offsets [rows, groups], of the
    columns `cols`, which are whole groups of 32."""
    rows = len(raw)
    raw = np.ascontiguousarray(raw)
    if kind == "Q4_K":
        groups = slice(cols.start // BLOCK, cols.stop // BLOCK)
        values, scales, offsets = _take_apart_k(raw.reshape(rows, -1, 144))
        return Quantized(values[:, cols.start // 2 : cols.stop // 2], scales[:, groups], offsets[:, groups])
    size = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[kind]
    blocks = raw.reshape(rows, -1, size)
    scales = _half(blocks, 0)
    if kind == "Q8_0":
        return Quantized(blocks[..., 2:].reshape(rows, -1).view(np.int8), scales)
    if kind == "Q4_0":
        return Quantized(blocks[..., 2:].reshape(rows, -1), scales)
    return Quantized(blocks[..., 4:].reshape(rows, -1), scales, _half(blocks, 2) + 8 * scales)


def _take_apart_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values, scales and offsets of Q4_K, [rows, blocks, 144].

    The 12 bytes hold s and t of the first four runs in the low 6 bits of bytes 0 to 3 and 4 to 7; those of the last
    four have their low 4 bits in the halves of bytes 8 to 11, and their high 2 bits in the high 2 of bytes 0 to 7.
    """
    rows = len(blocks)
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    s = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=-1)
    t = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=-1)
    scales = (_half(blocks, 0)[..., None] * s).reshape(rows, -1)
    offsets = 8 * scales - (_half(blocks, 2)[..., None] * t).reshape(rows, -1)
    runs = blocks[..., 16:].reshape(rows, -1, 32)
    codes = np.stack([runs & 15, runs >> 4], axis=-2).reshape(rows, -1)
    return pack(codes.astype(np.int8) - np.int8(8)), scales, offsets


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """float32 [rows, blocks] of the float16 at byte `at` of each block."""
    halves: np.ndarray = np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0].astype(np.float32)
    return halves
