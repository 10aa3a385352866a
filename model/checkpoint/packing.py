"""What the ways of packing a matrix into Hugging Face tensors have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kernels.quantized import BLOCK
from model.checkpoint.errors import CheckpointError
from model.checkpoint.safetensors import SafetensorsSource
from model.checkpoint.source import TensorInfo
from model.quantize import Quantized, WeightFormat


class Packing(Protocol):
    """One way of packing. name: for people. format: what its numbers are. mark: the tensor that every packed matrix
    has. parts: all that it may have. Both are without the matrix's own name in front."""

    name: str
    format: WeightFormat
    mark: str
    parts: tuple[str, ...]

    def is_packed(self, base: str, stored: Mapping[str, TensorInfo]) -> bool:
        """Whether the matrix called `base`, which has the mark, is packed."""

    def matrix(self, base: str, stored: Mapping[str, TensorInfo]) -> TensorInfo:
        """The matrix that the tensors called `base` stand for. CheckpointError where their sizes do not go together."""

    def read(self, source: SafetensorsSource, base: str, rows: slice, cols: slice) -> Quantized:
        """A block of it, `cols` whole groups: 4-bit numbers two a byte, scales and offsets float32 [rows, groups]."""


def expect(path: Path, config: Mapping[str, Any], method: str, allowed: Mapping[str, Sequence[Any]]) -> None:
    """Raises CheckpointError where a key of `config` has a value that is not allowed; None is a key left out."""
    for key, values in allowed.items():
        if config.get(key) not in values:
            told = ", ".join(repr(value) for value in values if value is not None)
            raise CheckpointError(
                f"{path}: quantization_config of {method} has {key} {config.get(key)!r}, which is not read; "
                f"supported: {told or 'none'}"
            )


def group_of(path: Path, config: Mapping[str, Any], method: str) -> int:
    """`group_size`; CheckpointError unless it is a positive multiple of 32."""
    group = config.get("group_size")
    if not isinstance(group, int) or isinstance(group, bool) or group < BLOCK or group % BLOCK:
        raise CheckpointError(
            f"{path}: quantization_config of {method} has group_size {group!r}; supported: multiples of {BLOCK}"
        )
    return group


def tensor(base: str, part: str, stored: Mapping[str, TensorInfo]) -> TensorInfo:
    """One part of a packed matrix; CheckpointError where it is missing or is not what `part` needs to be."""
    info = stored.get(f"{base}.{part}")
    if info is None:
        raise CheckpointError(f"{base} is packed, but the checkpoint has no {base}.{part}: download it again")
    return info


def check(info: TensorInfo, name: str, shape: tuple[int, ...], dtypes: Sequence[str]) -> None:
    """Raises CheckpointError for a tensor of another shape or type than its matrix needs."""
    if info.shape != shape:
        raise CheckpointError(f"{info.file}: tensor {name!r} is {list(info.shape)} instead of {list(shape)}")
    if info.dtype not in dtypes:
        raise CheckpointError(f"{info.file}: tensor {name!r} is {info.dtype}; expected {' or '.join(dtypes)}")


def numbers(packed: np.ndarray, axis: int, bits: int = 4, order: Sequence[int] | None = None) -> np.ndarray:
    """int32 words of which each holds 32 / `bits` numbers of `axis`, lowest bits first -> these, uint8.

    order: which bits hold number 0, 1, 2... of a word, where it is not the lowest, the next, and so on.
    """
    words = np.ascontiguousarray(packed).view(np.uint32)
    shifts = np.array(order if order is not None else range(32 // bits), np.uint32) * np.uint32(bits)
    axis %= words.ndim
    spread = np.expand_dims(words, axis + 1) >> shifts.reshape([-1, *[1] * (words.ndim - axis - 1)])
    shape = [*words.shape[:axis], words.shape[axis] * len(shifts), *words.shape[axis + 1 :]]
    return (spread & np.uint32(2**bits - 1)).astype(np.uint8).reshape(shape)


def words_of(span: slice, size: int) -> tuple[slice, slice]:
    """The words that hold the numbers `span` of an axis, `size` a word, and where in these words they begin and end."""
    words = slice(span.start // size, -(-span.stop // size))
    return words, slice(span.start - words.start * size, span.stop - words.start * size)
