"""Safetensors checkpoints: one `model.safetensors`, or an index that spreads the tensors over shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # also registers bfloat16 with numpy, which safetensors then returns
import numpy as np
from safetensors import SafetensorError, safe_open

from model.checkpoint.errors import CheckpointError
from model.checkpoint.source import TensorInfo

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_EIGHT_BITS = "F8_E4M3"


class SafetensorsSource:
    """Tensors of a folder (or of one `.safetensors` file), sliced lazily out of the mapped files."""

    PLAIN = ("F64", "F32", "F16", "BF16")
    PACKED = ("I32", "I64", "I8", _EIGHT_BITS)

    def __init__(self, path: Path | str, *, packed: bool = False) -> None:
        """Opens every file and reads its header.

        packed: take the types of `PACKED` too, of which packed matrices are made.

        Raises CheckpointError when there is no checkpoint at `path`, when a file is truncated or is not a
        safetensors file, when a shard of the index is absent, or when the index and the shards disagree.
        """
        self._path = Path(path)
        index = _read_index(self._path)
        files = [self._path] if self._path.is_file() else _files(self._path, index)
        self._dtypes = (*self.PLAIN, *self.PACKED) if packed else self.PLAIN
        self._handles: dict[Path, Any] = {}
        self._tensors: dict[str, TensorInfo] = {}
        for file in files:
            self._open(file)
        if index is not None:
            self._check_index(index)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, rows: slice, cols: slice | None = None) -> np.ndarray:
        info = self._tensors[name]
        try:
            # The library returns no 8-bit floats to numpy.
            eight = info.dtype == _EIGHT_BITS
            view = _mapped(info, name) if eight else self._handles[info.file].get_slice(name)
            return view[rows] if cols is None else view[rows, cols]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{info.file}: cannot read tensor {name!r}: {error}") from error

    def _open(self, file: Path) -> None:
        try:
            handle = safe_open(file, framework="numpy")
            names = list(handle.keys())
        except FileNotFoundError as error:
            raise CheckpointError(f"{file} is missing: the checkpoint is incomplete, download it again") from error
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{file} is damaged or is not a safetensors file ({error}): download it again"
            ) from error
        self._handles[file] = handle
        for name in names:
            if name in self._tensors:
                raise CheckpointError(f"tensor {name!r} is in both {self._tensors[name].file} and {file}")
            view = handle.get_slice(name)
            info = TensorInfo(tuple(view.get_shape()), str(view.get_dtype()), file)
            if info.dtype not in self._dtypes:
                raise CheckpointError(
                    f"{file}: tensor {name!r} is stored as {info.dtype}, which is not supported; "
                    f"supported: {', '.join(self._dtypes)}"
                )
            self._tensors[name] = info

    def _check_index(self, index: Mapping[str, str]) -> None:
        wrong = [
            f"{name!r} in {shard}"
            for name, shard in index.items()
            if name not in self._tensors or self._tensors[name].file != self._path / shard
        ]
        if wrong:
            more = f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""
            raise CheckpointError(
                f"{self._path / INDEX_FILE} lists tensors that the named files do not hold: "
                f"{', '.join(wrong[:10])}{more}. Download the checkpoint again"
            )


def _mapped(info: TensorInfo, name: str) -> np.ndarray:
    """A tensor of 8-bit floats as a view of its file: 8 bytes, the size of a JSON header; the header; the data."""
    with info.file.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        begin, _ = json.loads(file.read(size))[name]["data_offsets"]
    data = np.memmap(info.file, np.uint8, "r", offset=8 + size + begin, shape=info.shape)
    return data.view(ml_dtypes.float8_e4m3fn)


def has_safetensors(folder: Path) -> bool:
    """Whether a folder holds a safetensors checkpoint under either of its two usual names."""
    return (folder / INDEX_FILE).is_file() or (folder / SINGLE_FILE).is_file()


def _read_index(path: Path) -> dict[str, str] | None:
    """The `weight_map` of an index, or None when the checkpoint has no index."""
    file = path / INDEX_FILE
    if path.is_file() or not file.is_file():
        return None
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        shards_ok = bool(weight_map) and all(isinstance(shard, str) for shard in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a safetensors index ({error!r})") from error
    if not shards_ok:
        raise CheckpointError(f"{file}: 'weight_map' must map each tensor name to a file name")
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise CheckpointError(f"{file} names {shard!r}; a shard must be a file beside its index")
    return dict(weight_map)


def _files(folder: Path, index: Mapping[str, str] | None) -> list[Path]:
    if index is not None:
        return [folder / shard for shard in sorted(set(index.values()))]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist")
    found = sorted(file.name for file in folder.glob("*") if file.suffix in (".bin", ".pt", ".pth", ".safetensors"))
    hint = f"; it holds {', '.join(found[:5])}" if found else ""
    raise CheckpointError(
        f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}{hint}. "
        "Pickled weights (.bin, .pt) are not read: save the model as safetensors"
    )
