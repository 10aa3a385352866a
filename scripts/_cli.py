"""What every command does before and around its work: devices, caches, start-up checks, errors in one line."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from decode.cache import CacheOverflowError
from decode.compile_cache import CompileCache
from decode.decoder import NumericsError, PromptError
from decode.sampling import SamplingError
from kernels.select import KernelError
from model.cache_dir import cache_dir
from model.checkpoint.errors import CheckpointError
from model.config import ConfigError
from model.tokenizer import TokenizerError
from roofline.errors import RooflineError
from sharding.mesh import LayoutError
from sharding.self_check import MeshFaultError

DTYPES = {"f32": "float32", "bf16": "bfloat16"}


class UsageError(ValueError):
    """Options that do not go together."""


USER_ERRORS = (
    CacheOverflowError,
    CheckpointError,
    ConfigError,
    KernelError,
    LayoutError,
    MeshFaultError,
    NumericsError,
    PromptError,
    RooflineError,
    SamplingError,
    TokenizerError,
    UsageError,
)
"""Errors whose message is written for the person at the terminal; anything else is a fault of ours, with a traceback."""


def run_command(work: Callable[[], None]) -> int:
    """Run a command's work; exit status 0, 1 after one line on stderr for a user's error, 130 when interrupted."""
    try:
        work()
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def add_device_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument("--cpu-devices", type=positive, metavar="N", help="run on N fake CPU devices")


def set_up(cpu_devices: int | None) -> CompileCache:
    """Choose devices before JAX starts, turn on the compilation cache, and let progress notes through to stderr."""
    if cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    notes = logging.StreamHandler()
    notes.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("model.checkpoint")
    if not logger.handlers:
        logger.addHandler(notes)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return CompileCache(cache_dir() / "jax")


def default_dtype() -> str:
    """bf16 where the matrix units take it; f32 on CPU, where XLA runs it faster."""
    return "f32" if jax.devices()[0].platform == "cpu" else "bf16"


def versions() -> dict[str, str]:
    """The versions a measurement depends on."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    names = ("shardstream", "jax", "jaxlib", "flax", "numpy")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a checkout that was not installed
            found[name] = "unknown"
    return found


def device_facts() -> dict[str, Any]:
    """What the program ran on."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "count": jax.device_count(),
        "processes": jax.process_count(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def check_writable(path: str | None) -> None:
    """Refuse an output path before the work instead of after it."""
    if path is None or path == "-":
        return
    folder = Path(path).absolute().parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {path}: {folder} is not a folder one can write to, or {path} is a folder")


def write_json(path: str, data: Any) -> None:
    """Write ``data`` whole or not at all; ``-`` is standard output."""
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    target = Path(path).absolute()
    with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, target)


def positive(text: str) -> int:
    """argparse type: an integer of at least 1."""
    return _integer(text, 1)


def not_negative(text: str) -> int:
    """argparse type: an integer of at least 0."""
    return _integer(text, 0)


def integers(text: str) -> list[int]:
    """argparse type: integers of at least 1, separated by commas."""
    return [positive(part) for part in text.split(",")]


def words(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """argparse type: some of ``allowed``, separated by commas."""

    def parse(text: str) -> list[str]:
        parts = text.split(",")
        for part in parts:
            if part not in allowed:
                raise argparse.ArgumentTypeError(f"{part!r} is not one of {', '.join(allowed)}")
        return parts

    return parse


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is too small: it must be at least {least}")
    return value
