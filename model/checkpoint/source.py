"""What a checkpoint looks like to the loader: named matrices that are read a block at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np


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
