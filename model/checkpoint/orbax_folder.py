"""The folder an Orbax checkpoint lives in: the files beside the arrays, and how it appears all at once.

    NAME/
        shardstream.json   format version, dtype, tensor-parallel degree; written last, so that a folder
                           without it is not a checkpoint
        config.json        the model, as Hugging Face writes it
        params/            the arrays, as Orbax writes them: always one set per layer
        ...                tokenizer and generation files, under the names their own formats give them

All of it is written to `NAME.incomplete-XXXXXXXX` beside the destination, which is renamed once it is whole:
an interrupted save leaves nothing that loads.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from model.checkpoint.errors import CheckpointError
from model.checkpoint.json_file import read_object
from model.checkpoint.parameters import check_dtype
from model.config import LlamaConfig
from model.quantize import WIDE, Quantization, QuantizationError
from model.tokenizer import Tokenizer

MARKER_FILE = "shardstream.json"
CONFIG_FILE = "config.json"
ARRAYS_FOLDER = "params"
FORMAT_VERSION = 1
QUANTIZED_VERSION = 2
"""Of a checkpoint with quantised matrices, which programs of version 1 must not take for one without."""

_OWN_FILES = (MARKER_FILE, CONFIG_FILE, ARRAYS_FOLDER)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OrbaxInfo:
    """What a checkpoint says about itself; `dtype` and `tp` are those its arrays were saved with, `quantization` is how
    its matrices are kept."""

    path: Path
    config: LlamaConfig
    dtype: np.dtype
    tp: int
    quantization: Quantization = WIDE


def is_orbax(path: Path | str) -> bool:
    """Whether a folder is a finished checkpoint of this format."""
    return (Path(path) / MARKER_FILE).is_file()


def is_interrupted(path: Path | str) -> bool:
    """Whether a folder is what an interrupted save left."""
    path = Path(path)
    return not is_orbax(path) and (".incomplete-" in path.name or (path / ARRAYS_FOLDER).is_dir())


def read_info(path: Path | str) -> OrbaxInfo:
    """Reads the small files of a checkpoint.

    Raises CheckpointError when the folder is not a finished checkpoint or is of another format version, and
    ConfigError when its config is not a Llama's.
    """
    path = Path(path)
    if not is_orbax(path):
        raise CheckpointError(
            f"{path} is not a finished Orbax checkpoint: it has no {MARKER_FILE}. A save that was "
            "interrupted leaves a folder without it; save again"
        )
    marker = read_object(path / MARKER_FILE)
    version, tp = marker.get("format_version"), marker.get("tp")
    if version not in (FORMAT_VERSION, QUANTIZED_VERSION):
        raise CheckpointError(
            f"{path / MARKER_FILE}: format_version is {version!r}; this program reads versions {FORMAT_VERSION} and "
            f"{QUANTIZED_VERSION}"
        )
    if not isinstance(tp, int) or tp < 1:
        raise CheckpointError(f"{path / MARKER_FILE}: tp is {tp!r}; it must be a positive integer")
    try:
        quantization = Quantization.from_json(marker.get("quantization", []))
    except QuantizationError as error:
        raise CheckpointError(f"{path / MARKER_FILE}: quantization: {error}") from None
    config = LlamaConfig.from_hf(read_object(path / CONFIG_FILE))
    return OrbaxInfo(path, config, check_dtype(marker.get("dtype")), tp, quantization)


def check_destination(path: Path | str, overwrite: bool = False) -> Path:
    """The absolute destination of a save. Raises CheckpointError when something is there that must stay.

    `overwrite` allows replacing a checkpoint of this format, and nothing else. An empty folder may go.
    """
    path = Path(path).expanduser().absolute()
    above = next(one for one in path.parents if one.exists())
    if not above.is_dir():
        raise CheckpointError(f"cannot write {path}: {above} is a file; choose another path")
    if not os.access(above, os.W_OK | os.X_OK):
        raise CheckpointError(f"cannot write {path}: no permission to write in {above}; choose another path")
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return path
    if not is_orbax(path):
        raise CheckpointError(f"{path} exists and is not an Orbax checkpoint of this program: choose another path")
    if not overwrite:
        raise CheckpointError(
            f"{path} exists: choose another path, or ask to overwrite it (overwrite=True, --overwrite)"
        )
    return path


def check_files(files: Mapping[str, bytes]) -> None:
    """Raises CheckpointError for a name that cannot stand beside the arrays."""
    for name in files:
        if name in _OWN_FILES or not name or Path(name).name != name:
            raise CheckpointError(f"a file called {name!r} cannot be kept in a checkpoint")


@contextmanager
def new_checkpoint(path: Path) -> Iterator[Path]:
    """A folder to build a checkpoint in. It becomes `path` if the body ends well, and is removed if not.

    On several hosts every process enters, with the same path, and sees the same folder.
    """
    first = jax.process_index() == 0
    left_over = sorted(str(other) for other in path.parent.glob(f"{path.name}.incomplete-*"))
    if left_over and first:
        _log.warning("left by interrupted saves, and safe to delete: %s", ", ".join(left_over))
    partial = path.with_name(f"{path.name}.incomplete-{_shared_token():08x}")
    try:
        if first:
            partial.mkdir(parents=True)
        _barrier("shardstream:save:begin")
        yield partial
        if first:
            _move_into_place(partial, path)
        _barrier("shardstream:save:end")
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint {path}: {error.strerror or error}") from error
    finally:
        if first:
            shutil.rmtree(partial, ignore_errors=True)


def write_small_files(
    folder: Path,
    config: LlamaConfig,
    dtype: np.dtype,
    tp: int,
    quantization: Quantization,
    tokenizer: Tokenizer | None,
    files: Mapping[str, bytes],
) -> None:
    """Everything but the arrays, the marker last; `files` go over what the tokenizer writes.

    Only the first of several hosts writes.
    """
    if jax.process_index() != 0:
        return
    if tokenizer is not None:
        tokenizer.save(folder)
    marker: dict[str, Any] = {"format_version": FORMAT_VERSION, "dtype": dtype.name, "tp": tp}
    if quantization != WIDE:
        marker |= {"format_version": QUANTIZED_VERSION, "quantization": quantization.to_json()}
    for name, content in {
        CONFIG_FILE: _to_json(config.to_hf()),
        **files,
        MARKER_FILE: _to_json(marker),
    }.items():
        with (folder / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def _move_into_place(partial: Path, path: Path) -> None:
    if not is_orbax(path):
        partial.rename(path)  # over nothing, or over an empty folder
        return
    # One folder cannot replace another in one step. For a moment neither is at `path`, and both are whole.
    replaced = path.with_name(f"{path.name}.replaced-{secrets.token_hex(4)}")
    path.rename(replaced)
    partial.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)


def _shared_token() -> int:
    """A random number, the same on every host."""
    token = np.uint32(secrets.randbits(32))
    return int(token if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(token))


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
