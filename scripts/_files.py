"""The files that a command writes: refused before the work where they cannot be, and written whole or not at all.

Nothing here needs JAX.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO


class UsageError(ValueError):
    """Options that do not go together, or that this machine cannot satisfy."""


def check_writable(path: str | None) -> None:
    """Refuse an output path before the work instead of after it."""
    if path is None or path == "-":
        return
    target = Path(path).resolve()
    if target.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder; name a file in it")
    if not target.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {target.parent}")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise UsageError(f"cannot write {path}: no permission; name another file")


def write_json(path: str, data: Any) -> None:
    """Write ``data`` as ``write_file`` does; ``-`` is standard output."""
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    # A character that is half of a pair (an undecodable byte of the command line) becomes its JSON escape.
    write_file(path, text.encode("utf-8", "backslashreplace"))


def write_file(path: str, content: bytes) -> None:
    """Write ``content`` whole or not at all; links and devices are written through."""
    target = Path(path).resolve()
    if target.exists() and not target.is_file():  # /dev/stdout, a named pipe
        target.write_bytes(content)
        return
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, target)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)


def hand_out(
    text: str | None,
    data: Any,
    json_path: str | None,
    *,
    image: tuple[str | None, Callable[[], bytes]] = (None, bytes),
    out: TextIO | None = None,
) -> None:
    """What a run found: its files first, for who reads the text may be gone (``| head``), and the text in any case.

    text: to ``out``, or else to standard output, or to standard error where JSON goes to the former; None: nothing.
    image: a path, or None, and what draws what goes there.
    """
    try:
        if json_path:
            write_json(json_path, data)
        path, draw = image
        if path:
            write_file(path, draw())
    finally:
        if text is not None:
            print(text, file=out or (sys.stderr if json_path == "-" else sys.stdout))
