"""The file beside a draft's weights that lists the tokens it proposes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from model.checkpoint.errors import CheckpointError

VOCABULARY_FILE = "draft_vocabulary.json"


def to_bytes(ids: np.ndarray) -> bytes:
    return (json.dumps(ids.tolist()) + "\n").encode()


def read_vocabulary(folder: Path, vocab_size: int) -> np.ndarray | None:
    """Sorted token ids int32 [S], or None for a model without the file, which proposes every token.

    Raises:
        CheckpointError: not a list of different ids of this vocabulary.
    """
    file = folder / VOCABULARY_FILE
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text())
        ids = np.array(found)
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind != "i":
        raise CheckpointError(f"{file} must hold a list of token ids")
    if len(set(found)) != len(found) or ids.min() < 0 or ids.max() >= vocab_size:
        raise CheckpointError(f"{file} must hold different token ids from 0 to {vocab_size - 1}")
    return np.sort(ids).astype(np.int32)
