"""Hugging Face checkpoints whose matrices come in few bits, presented as if each were one `weight` tensor.

`config.json` says how under `quantization_config`. Read are AWQ and GPTQ in 4 bits, and compressed-tensors in 8-bit
integers, 8-bit floats, and packed 4-bit or 8-bit integers; everything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from model.checkpoint.errors import CheckpointError
from model.checkpoint.packed_awq import Awq
from model.checkpoint.packed_compressed import Compressed
from model.checkpoint.packed_gptq import Gptq
from model.checkpoint.packing import Packing
from model.checkpoint.safetensors import SafetensorsSource
from model.checkpoint.source import TensorInfo
from model.quantize import Quantized, WeightFormat, regroup, widen

_METHODS: dict[str, Callable[[Path, Mapping[str, Any]], Packing]] = {
    "awq": Awq,
    "gptq": Gptq,
    "compressed-tensors": Compressed,
}


def open_packed(path: Path, config: Mapping[str, Any]) -> PackedSource:
    """The checkpoint in folder `path` whose `quantization_config` is `config`.

    Raises CheckpointError for a method, or options of one, that are not read, and for tensors whose sizes do not go
    together.
    """
    method = config.get("quant_method")
    if method not in _METHODS:
        raise CheckpointError(
            f"{path}: quantization_config has quant_method {method!r}, which is not read; supported: "
            f"{', '.join(_METHODS)}. Use the model in 16 bits, and --quant to quantise it while it loads"
        )
    packing = _METHODS[method](path, config)
    return PackedSource(SafetensorsSource(path, packed=True), packing)


class PackedSource:
    """`model.checkpoint.source.QuantizedSource` over the tensors that a packed checkpoint stores."""

    def __init__(self, source: SafetensorsSource, packing: Packing) -> None:
        self._source, self._packing = source, packing
        stored = dict(source.tensors)
        marks = [name for name in stored if name.endswith(f".{packing.mark}")]
        bases = [base for base in (name.rpartition(".")[0] for name in marks) if packing.is_packed(base, stored)]
        self._bases = {f"{base}.weight": base for base in bases}
        if not bases:
            raise CheckpointError(
                f"{source.path}: quantization_config speaks of {packing.name}, but no tensor is called "
                f"*.{packing.mark}: the checkpoint is incomplete, or its weights are not packed"
            )
        found = {name: packing.matrix(base, stored) for name, base in self._bases.items()}
        for base in bases:
            for part in packing.parts:
                stored.pop(f"{base}.{part}", None)
        for name, info in stored.items():
            if info.dtype not in SafetensorsSource.PLAIN:
                raise CheckpointError(
                    f"{info.file}: tensor {name!r} is {info.dtype}, which {packing.name} has no use for"
                )
        self._tensors = {**stored, **found}

    @property
    def path(self) -> Path:
        return self._source.path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, rows: slice, cols: slice | None = None) -> np.ndarray:
        if name not in self._bases:
            return self._source.read(name, rows, cols)
        columns, step = self._tensors[name].shape[1], self._packing.format.group or 1
        cols = cols or slice(0, columns)
        start, stop = cols.start // step * step, min(-(-cols.stop // step) * step, columns)
        wide = widen(
            self._packing.read(self._source, self._bases[name], rows, slice(start, stop)), self._packing.format
        )
        return wide[:, cols.start - start : cols.stop - start]

    def stored_format(self, name: str) -> WeightFormat | None:
        return self._packing.format if name in self._bases else None

    def kept_format(self, name: str) -> WeightFormat | None:
        return self.stored_format(name)

    def read_stored(self, name: str, rows: slice, cols: slice, format: WeightFormat) -> Quantized:
        stored = self._packing.format
        if stored.group is None or stored.group == format.group:
            return self._packing.read(self._source, self._bases[name], rows, cols)
        assert format.group is not None  # what a group is made of
        # Whole groups of the file, of which these columns may be a part.
        columns = self._tensors[name].shape[1]
        start, stop = (
            cols.start // stored.group * stored.group,
            min(-(-cols.stop // stored.group) * stored.group, columns),
        )
        whole = self._packing.read(self._source, self._bases[name], rows, slice(start, stop))
        pack = 2 if stored.kind == "int4" else 1
        own = slice(cols.start - start, cols.stop - start)
        return Quantized(
            whole.values[:, own.start // pack : own.stop // pack],
            regroup(whole.scales, own, stored.group, format.group),
            None if whole.offsets is None else regroup(whole.offsets, own, stored.group, format.group),
        )
