"""What a checkpoint looks like to the loader: named matrices that are read a block at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from model.quantize import Quantized, WeightFormat


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint, known from its header alone.

    `shape` is [out, in] for a matrix and [n] for a vector; `dtype` is the name the format gives to the stored
    type ("BF16", "Q4_1"); `file` is the file that holds the data.
    """

    shape: tuple[int, ...]
    dtype: str
    file: Path


class TensorSource(Protocol):
    """A checkpoint whose tensors carry Hugging Face names, whatever the format calls them."""

    @property
    def path(self) -> Path:
        """The file or folder the checkpoint was opened from."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name. Nothing but headers has been read to build it."""

    def read(self, name: str, rows: slice, cols: slice | None = None) -> np.ndarray:
        """The block [rows, cols] of a matrix, or [rows] of a vector, in a floating-point dtype.

        Slices have step 1 and lie inside the shape; `cols=None` means every column. Only the rows and
        columns asked for are read and converted. The result may be a read-only view of a mapped file: copy
        it to keep it.
        """


@runtime_checkable
class QuantizedSource(TensorSource, Protocol):
    """A checkpoint that keeps some matrices in few bits, in a form that `kernels.quantized` can hold as it is."""

    def stored_format(self, name: str) -> WeightFormat | None:
        """The format that holds this matrix's own small numbers; None where there is no such format."""

    def kept_format(self, name: str) -> WeightFormat | None:
        """The format for a matrix that the file keeps in few bits: `stored_format`, or else the smallest that its
        numbers can be rounded to without a loss to speak of. None for one in 16 bits or more."""

    def read_stored(self, name: str, rows: slice, cols: slice, format: WeightFormat) -> Quantized:
        """The block [rows, cols] of a matrix in `format`, its small numbers untouched; see `WeightFormat.holds`.

        `cols` begins where a group does. 4-bit numbers come two a byte; scales and offsets are float32, as exact as
        the file's, one for each group of `format` or one for each row.
        """
