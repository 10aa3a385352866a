"""GPTQ (Frantar et al., 2022) as AutoGPTQ and GPTQModel write it, with groups in their natural order.

A matrix W [O, I] is stored transposed and in words of eight 4-bit numbers, the first in the lowest bits:

    qweight int32 [I / 8, O]    scales float16 [I / group, O]    qzeros int32 [I / group, O / 8]    g_idx int32 [I]

    W[o, i] = (q[o, i] - zero[o, g]) * scale[o, g],  g = g_idx[i] = i // group

The format "gptq_v2" stores zero in `qzeros`, and "gptq" stores zero - 1: GPTQModel subtracts 1 from all eight numbers
of a word at once, so that one below 0 borrows from the next, and only adding to the word brings both back. A symmetric
matrix has zero = 8 throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from model.checkpoint.errors import CheckpointError
from model.checkpoint.packing import check, expect, group_of, numbers, tensor, words_of
from model.checkpoint.safetensors import SafetensorsSource
from model.checkpoint.source import TensorInfo
from model.quantize import Quantized, WeightFormat, pack

_FORMATS = (None, "gptq", "gptq_v2")
_FLOATS = ("F16", "BF16", "F32")
_ONES = np.uint32(0x11111111)
"""1 in each of a word's eight numbers."""


class Gptq:
    """`model.checkpoint.packing.Packing` for GPTQ."""

    name = "GPTQ"
    mark = "qweight"
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        allowed: dict[str, tuple[Any, ...]] = {
            "bits": (4,),
            # With it columns were quantised in the order of their activations, and a group's are anywhere, save where
            # groups were fixed before (static_groups).
            "desc_act": (None, False, True) if config.get("static_groups") else (None, False),
            "checkpoint_format": _FORMATS,
            "format": _FORMATS,  # its newer name
            "is_marlin_format": (None, False),
            "pack_dtype": (None, "int32"),
            "sym": (True, False),
            "dynamic": (None, {}),
        }
        expect(path, config, self.name, allowed)
        self._symmetric: bool = config["sym"]
        self._zeros_less_one = "gptq_v2" not in (config.get("checkpoint_format"), config.get("format"))
        self.format = WeightFormat("int4", group_of(path, config, self.name), offsets=not self._symmetric)
        self._group = self.format.group or 0

    def is_packed(self, base: str, stored: Mapping[str, TensorInfo]) -> bool:
        return True

    def matrix(self, base: str, stored: Mapping[str, TensorInfo]) -> TensorInfo:
        info = tensor(base, "qweight", stored)
        words, rows = info.shape if len(info.shape) == 2 else (0, 0)
        groups = -(-words * 8 // self._group)
        check(info, f"{base}.qweight", (words, rows), ["I32"])
        check(tensor(base, "qzeros", stored), f"{base}.qzeros", (groups, rows // 8), ["I32"])
        check(tensor(base, "scales", stored), f"{base}.scales", (groups, rows), _FLOATS)
        if f"{base}.g_idx" in stored:
            check(stored[f"{base}.g_idx"], f"{base}.g_idx", (words * 8,), ["I32"])
        return TensorInfo((rows, words * 8), f"GPTQ {self.format.name}", info.file)

    def read(self, source: SafetensorsSource, base: str, rows: slice, cols: slice) -> Quantized:
        groups = slice(cols.start // self._group, -(-cols.stop // self._group))
        if f"{base}.g_idx" in source.tensors:
            order = source.read(f"{base}.g_idx", cols)
            if not np.array_equal(order, np.arange(cols.start, cols.stop) // self._group):
                raise CheckpointError(
                    f"{source.path}: {base}.g_idx puts columns into groups out of order (desc_act), which is not read"
                )
        words, own = words_of(cols, 8)
        codes = numbers(source.read(f"{base}.qweight", words, rows), 0)[own].T
        scales = source.read(f"{base}.scales", groups, rows).T.astype(np.float32)
        words, own = words_of(rows, 8)
        stored = np.ascontiguousarray(source.read(f"{base}.qzeros", groups, words)).view(np.uint32)
        zeros = numbers(stored + _ONES if self._zeros_less_one else stored, 1)[:, own].T
        shift = 8 - zeros.astype(np.float32)
        values = pack(codes.astype(np.int8) - np.int8(8))
        if not self._symmetric:
            return Quantized(values, scales, shift * scales)
        if shift.any():
            raise CheckpointError(
                f"{source.path}: quantization_config says sym, but {base}.qzeros has zero points other than 8"
            )
        return Quantized(values, scales)
