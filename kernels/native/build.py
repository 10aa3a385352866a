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
import signal
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import jax
import jaxlib

from kernels.cache_dir import cache_dir

TARGETS = (
    "shardstream_matmul",
    "shardstream_normed_matmul",
    "shardstream_normed_gate",
    "shardstream_cache_attention",
    "shardstream_rope_attention",
    "shardstream_paged_attention",
    "shardstream_paged_extend",
    "shardstream_paged_write",
)
"""The symbols of the library, which are also the names XLA calls them by."""

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-w")
# Of this CPU: the first that the compiler takes (gcc and clang name it differently on arm64), else any CPU of its kind.
CPU_FLAGS = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ("-mcpu=native",), ())
SOURCES = Path(__file__).parent / "src"
LONGEST = 300
"""Seconds a compiler may take: it needs 7 on a core of a server."""

log = logging.getLogger(__name__)
_one_at_a_time = threading.Lock()


class BuildError(RuntimeError):
    """The native library cannot be had here; the message says why."""


def problem() -> str | None:
    """Why the native operations cannot be used here, or None: the first call of a process builds and registers them.

    A problem is logged, in one line.
    """
    with _one_at_a_time:
        return _first_use()


@functools.cache
def _first_use() -> str | None:
    try:
        _register(build())
    except BuildError as error:
        log.warning("native CPU kernels are off, XLA's own operations run instead: %s", error)
        return str(error)
    return None


def build(folder: Path | None = None) -> Path:
    """The compiled library, built if it is not whole in ``folder`` yet (``native`` in the cache folder by default).

    Processes that build at once each write a file of their own and move it into place whole.

    Raises:
        BuildError: no compiler, an unwritable folder, or a compiler that fails or does not end.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler found (looked for {', '.join(COMPILERS)})")
    try:
        folder = folder or cache_dir() / "native"
        key = _key(compiler)
        # The name ends in a digest of the content: loading a library that a full disk or a crash cut short would end
        # the process, not raise.
        for path in sorted(folder.glob(f"{key}-*.so")):
            if path.name == _name(key, path):
                return path
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "library.so"
            _compile(compiler, made)
            target = folder / _name(key, made)
            os.replace(made, target)
    except (OSError, RuntimeError) as error:
        raise error if isinstance(error, BuildError) else BuildError(str(error)) from error
    return target


def _name(key: str, library: Path) -> str:
    return f"{key}-{hashlib.sha256(library.read_bytes()).hexdigest()[:24]}.so"


def _compile(compiler: str, target: Path) -> None:
    complaint = ""
    for cpu in CPU_FLAGS:
        command = [compiler, *FLAGS, *cpu, "-isystem", jax.ffi.include_dir(), str(SOURCES / "bindings.cc")]
        status, _, complaints = _run([*command, "-o", str(target)])
        if status == 0 and target.exists():
            return
        # Of the last, with the fewest flags: an earlier one may only not know a flag.
        lines = [line.strip() for line in complaints.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line]
        complaint = (errors[:1] or lines[-1:] or [f"exit status {status} and no message"])[0]
    raise BuildError(f"{compiler} failed: {complaint}")


def _run(command: list[str]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a compiler, whose own processes end with it."""
    plain = {**os.environ, "LC_ALL": "C"}  # messages in English
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=plain,
        start_new_session=True,
    ) as process:
        try:
            out, complaints = process.communicate(timeout=LONGEST)
        except BaseException as error:  # an interrupt at the terminal does not reach a session of its own
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise BuildError(f"{command[0]} did not end in {LONGEST} seconds") from error
            raise
    return process.returncode, out, complaints


def _key(compiler: str) -> str:
    """A name for what the library depends on, so that a changed one is built anew."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    _, version, _ = _run([compiler, "--version"])
    for part in (compiler, version, jaxlib.__version__, repr((FLAGS, CPU_FLAGS)), _cpu()):
        digest.update(part.encode())
    return digest.hexdigest()[:24]


def _cpu() -> str:
    """This CPU's kind and instruction sets, as far as the system tells, and the C library."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = {line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))}
    return "\n".join([platform.machine(), platform.processor(), *platform.libc_ver(), *sorted(told)])


@functools.cache
def has_bf16_tiles() -> bool:
    """Whether this CPU multiplies bfloat16 in tiles (AMX), which XLA's own dot makes use of."""
    return any(line.startswith("flags") and "amx_bf16" in line.split() for line in _cpu().splitlines())


def _register(path: Path) -> None:
    try:
        library = ctypes.CDLL(str(path))
        handlers = {name: jax.ffi.pycapsule(getattr(library, name)) for name in TARGETS}
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from error
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
