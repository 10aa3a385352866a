"""Reads the small JSON files that come with a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model.checkpoint.errors import CheckpointError


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError that names the file when there is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} does not exist") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a JSON {type(value).__name__}; it must hold an object")
    return value
