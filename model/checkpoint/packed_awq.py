"""AWQ (Lin et al., 2023) as AutoAWQ writes it, version "gemm".

A matrix W [O, I] is stored transposed and in words of eight 4-bit numbers:

    qweight int32 [I, O / 8]        scales float16 [I / group, O]        qzeros int32 [I / group, O / 8]

    W[o, i] = (q[o, i] - zero[o, g]) * scale[o, g],  g = i // group

Bits 4 n to 4 n + 3 of a word hold the output 0, 2, 4, 6, 1, 3, 5, 7 of its eight for n = 0 to 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from model.checkpoint.packing import check, expect, group_of, numbers, tensor, words_of
from model.checkpoint.safetensors import SafetensorsSource
from model.checkpoint.source import TensorInfo
from model.quantize import Quantized, WeightFormat, pack

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the four bits that hold output 0, 1, 2...
_FLOATS = ("F16", "BF16", "F32")


class Awq:
    """`model.checkpoint.packing.Packing` for AWQ."""

    name = "AWQ"
    mark = "qweight"
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales")

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        layouts = (None, "gemm", "GEMM")
        allowed = {"bits": (4,), "zero_point": (None, True), "pack_dtype": (None, "int32")}
        # One thing by three names.
        expect(
            path, config, self.name, {**allowed, **dict.fromkeys(("version", "checkpoint_format", "format"), layouts)}
        )
        self.format = WeightFormat("int4", group_of(path, config, self.name), offsets=True)
        self._group = self.format.group or 0

    def is_packed(self, base: str, stored: Mapping[str, TensorInfo]) -> bool:
        return True

    def matrix(self, base: str, stored: Mapping[str, TensorInfo]) -> TensorInfo:
        info = tensor(base, "qweight", stored)
        columns, words = info.shape if len(info.shape) == 2 else (0, 0)
        groups = -(-columns // self._group)
        check(info, f"{base}.qweight", (columns, words), ["I32"])
        check(tensor(base, "qzeros", stored), f"{base}.qzeros", (groups, words), ["I32"])
        check(tensor(base, "scales", stored), f"{base}.scales", (groups, words * 8), _FLOATS)
        return TensorInfo((words * 8, columns), f"AWQ {self.format.name}", info.file)

    def read(self, source: SafetensorsSource, base: str, rows: slice, cols: slice) -> Quantized:
        words, own = words_of(rows, 8)
        groups = slice(cols.start // self._group, -(-cols.stop // self._group))
        codes = numbers(source.read(f"{base}.qweight", cols, words), 1, order=_ORDER)[:, own].T
        zeros = numbers(source.read(f"{base}.qzeros", groups, words), 1, order=_ORDER)[:, own].T
        scales = source.read(f"{base}.scales", groups, rows).T.astype(np.float32)
        return Quantized(pack(codes.astype(np.int8) - np.int8(8)), scales, (8 - zeros.astype(np.float32)) * scales)
