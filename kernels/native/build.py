"""Compiles ``src`` with the system's C++ compiler into the cache folder, and gives it to XLA.

The library is built once for each source, compiler, jaxlib and CPU. A machine without a compiler runs XLA's own
operations instead: slower, never wrong, and one logged line says so.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import jaxlib

from kernels.cache_dir import cache_dir

TARGETS = ("shardstream_matmul", "shardstream_normed_matmul", "shardstream_normed_gate", "shardstream_cache_attention")
"""The symbols of the library, which are also the names XLA calls them by."""

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-w")
# Of this CPU: the first that the compiler takes (gcc and clang name it differently on arm64), else any CPU of its kind.
CPU_FLAGS = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ("-mcpu=native",), ())
SOURCES = Path(__file__).parent / "src"

log = logging.getLogger(__name__)


class BuildError(RuntimeError):
    """The native library cannot be had here; the message says why."""


@functools.cache
def problem() -> str | None:
    """Why the native operations cannot be used here, or None: the first call of a process builds and registers them.

    A problem is logged, in one line.
    """
    try:
        _register(build())
    except BuildError as error:
        log.warning("native CPU kernels are off, XLA's own operations run instead: %s", error)
        return str(error)
    return None


def build(folder: Path | None = None) -> Path:
    """The compiled library, built if it is not in ``folder`` yet (``native`` in the cache folder by default).

    Processes that build at once each write a file of their own and move it into place whole.

    Raises:
        BuildError: no compiler, an unwritable folder, or a compiler that fails.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler found (looked for {', '.join(COMPILERS)})")
    try:
        folder = folder or cache_dir() / "native"
        target = folder / f"{_key(compiler)}.so"
        if target.exists():
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "library.so"
            _compile(compiler, made)
            os.replace(made, target)
    except (OSError, RuntimeError) as error:
        raise error if isinstance(error, BuildError) else BuildError(str(error)) from error
    return target


def _compile(compiler: str, target: Path) -> None:
    complaint = ""
    for cpu in CPU_FLAGS:
        command = [compiler, *FLAGS, *cpu, "-isystem", jax.ffi.include_dir(), str(SOURCES / "bindings.cc")]
        done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        complaint = complaint or next((line for line in done.stderr.splitlines() if "error" in line), "no message")
    raise BuildError(f"{compiler} failed: {complaint}")


def _key(compiler: str) -> str:
    """A name for what the library depends on, so that a changed one is built anew."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    for part in (compiler, version, jaxlib.__version__, repr((FLAGS, CPU_FLAGS)), _cpu()):
        digest.update(part.encode())
    return digest.hexdigest()[:24]


def _cpu() -> str:
    """This CPU's kind and instruction sets, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = {line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(told)])


def _register(path: Path) -> None:
    try:
        library = ctypes.CDLL(str(path))
    except OSError:  # damaged on the disk: built again
        path.unlink(missing_ok=True)
        try:
            library = ctypes.CDLL(str(build(path.parent)))
        except OSError as error:
            raise BuildError(f"{path} cannot be loaded: {error}") from error
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
