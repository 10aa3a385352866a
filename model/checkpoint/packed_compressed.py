"""compressed-tensors, as llm-compressor writes it: 8-bit integers and floats, and packed 4-bit and 8-bit integers.

A matrix W [O, I], by the `format` of its config:

    int-quantized     weight int8 [O, I],           weight_scale [O, 1] or [1]            W = q * scale
    float-quantized   weight float8_e4m3 [O, I],    weight_scale [O, 1] or [1]            W = q * scale
    naive-quantized   as one of the two
    pack-quantized    weight_packed int32 [O, I / n], weight_scale [O, I / group] or [O, 1], weight_shape [2], and
                      weight_zero_point int32 [O / n, I / group] where it is not symmetric
                      W = (q - half - zero) * scale, n numbers of 32 / n bits a word, the first in the lowest bits,
                      half = 8 or 128; zero is packed likewise, along O, and is stored with half added too

Activations are not quantised here, whatever the config says of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from model.checkpoint.errors import CheckpointError
from model.checkpoint.packing import check, expect, group_of, numbers, tensor, words_of
from model.checkpoint.safetensors import SafetensorsSource
from model.checkpoint.source import TensorInfo
from model.quantize import Quantized, WeightFormat, pack

_FLOATS = ("F16", "BF16", "F32")
_KINDS = {"int-quantized": ("int",), "float-quantized": ("float",), "naive-quantized": ("int", "float")}
_PACKED = "pack-quantized"
_EMPTY = ("kv_cache_scheme", "transform_config")
"""Parts of the config that ask for more than quantised matrices."""
_log = logging.getLogger(__name__)


class Compressed:
    """`model.checkpoint.packing.Packing` for compressed-tensors."""

    name = "compressed-tensors"

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        expect(path, config, self.name, {"format": (*_KINDS, _PACKED), **dict.fromkeys(_EMPTY, (None, {}))})
        sparsity = config.get("sparsity_config")
        if sparsity and sparsity.get("format") not in (None, "dense"):
            raise CheckpointError(f"{path}: sparsity_config of format {sparsity.get('format')!r} is not read")
        groups = config.get("config_groups") or {}
        if len(groups) != 1:
            raise CheckpointError(
                f"{path}: quantization_config has {len(groups)} config_groups; supported: one for all matrices"
            )
        (group,) = groups.values()
        expect(path, group, f"{self.name} config_groups", {"targets": (["Linear"],)})
        weights = group.get("weights") or {}
        self._packed = config["format"] == _PACKED
        allowed: dict[str, tuple[Any, ...]] = {
            "num_bits": (4, 8) if self._packed else (8,),
            "type": ("int",) if self._packed else _KINDS[config["format"]],
            "strategy": ("group", "channel") if self._packed else ("channel", "tensor"),
            "symmetric": (True, False) if self._packed else (True,),
            "actorder": (None, False, "weight", "static"),
            "block_structure": (None,),
        }
        expect(path, weights, f"{self.name} weights", allowed)
        self._bits, self._symmetric = int(weights["num_bits"]), bool(weights["symmetric"])
        self._float = weights["type"] == "float"
        grouped = weights["strategy"] == "group"
        self._group = group_of(path, weights, self.name) if grouped else None
        if self._packed and self._bits == 4 and not grouped:
            raise CheckpointError(f"{path}: 4-bit weights with one scale a row are not read; supported: groups")
        if not self._symmetric and not grouped:
            raise CheckpointError(f"{path}: zero points without groups are not read; supported: symmetric weights")
        kind = "fp8" if self._float else "int8" if self._bits == 8 else "int4"
        self.format = WeightFormat(kind, self._group, offsets=not self._symmetric)  # type: ignore[arg-type]
        if group.get("input_activations"):
            _log.info("%s asks for quantised activations; they stay in the dtype of the model here", path)
        self.mark = "weight_packed" if self._packed else "weight"
        self.parts: tuple[str, ...] = (
            self.mark,
            "weight_scale",
            "weight_shape",
            "weight_zero_point",
            "weight_g_idx",
            "input_scale",
        )

    def is_packed(self, base: str, stored: Mapping[str, TensorInfo]) -> bool:
        return self._packed or f"{base}.weight_scale" in stored

    def matrix(self, base: str, stored: Mapping[str, TensorInfo]) -> TensorInfo:
        info = tensor(base, self.mark, stored)
        if len(info.shape) != 2:
            raise CheckpointError(f"{info.file}: tensor {base}.{self.mark} is {list(info.shape)}; a matrix is expected")
        if f"{base}.weight_g_idx" in stored:
            raise CheckpointError(f"{info.file}: {base} has its groups out of order (weight_g_idx), which is not read")
        rows, columns = info.shape[0], info.shape[1] * (32 // self._bits if self._packed else 1)
        check(info, f"{base}.{self.mark}", info.shape, ["I32" if self._packed else "F8_E4M3" if self._float else "I8"])
        groups = 1 if self._group is None else -(-columns // self._group)
        scale = tensor(base, "weight_scale", stored)
        if groups > 1 or scale.shape not in ((), (1,), (1, 1), (rows,)):
            check(scale, f"{base}.weight_scale", (rows, groups), _FLOATS)
        zeros = stored.get(f"{base}.weight_zero_point")
        if not self._symmetric:
            zeros = tensor(base, "weight_zero_point", stored)
            check(zeros, f"{base}.weight_zero_point", (-(-rows * self._bits // 32), groups), ["I32"])
        return TensorInfo((rows, columns), f"compressed-tensors {self.format.name}", info.file)

    def read(self, source: SafetensorsSource, base: str, rows: slice, cols: slice) -> Quantized:
        values = self._values(source, base, rows, cols)
        name = f"{base}.weight_scale"
        groups = slice(0, 1)
        if self._group is not None:
            groups = slice(cols.start // self._group, -(-cols.stop // self._group))
        match source.tensors[name].shape:
            case () | (1,) | (1, 1):
                scales = np.broadcast_to(_whole(source, name).reshape(1, 1), (rows.stop - rows.start, 1))
            case (_,):
                scales = source.read(name, rows)[:, None]
            case _:
                scales = source.read(name, rows, groups)
        scales = scales.astype(np.float32)
        if self._symmetric:
            return Quantized(values, scales)
        words, own = words_of(rows, 32 // self._bits)
        zeros = numbers(source.read(f"{base}.weight_zero_point", words, groups), 0, self._bits)[own].astype(np.float32)
        return Quantized(values, scales, (2 ** (self._bits - 1) - zeros) * scales)

    def _values(self, source: SafetensorsSource, base: str, rows: slice, cols: slice) -> np.ndarray:
        if not self._packed:
            return source.read(f"{base}.weight", rows, cols)
        words, own = words_of(cols, 32 // self._bits)
        codes = numbers(source.read(f"{base}.weight_packed", rows, words), 1, self._bits)[:, own]
        if self._bits == 8:
            return (codes ^ 0x80).view(np.int8)
        return pack(codes.astype(np.int8) - np.int8(8))


def _whole(source: SafetensorsSource, name: str) -> np.ndarray:
    shape = source.tensors[name].shape
    if len(shape) == 2:
        return source.read(name, slice(0, 1), slice(0, 1))
    return source.read(name, slice(0, 1) if shape else slice(None))
