"""Ctrl-C while a command is still importing what it needs, which takes seconds: one word, and no traceback."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 128 + 2


def end_quietly_while_importing() -> None:
    """From here on Ctrl-C ends the process at once, until ``raise_again``. Nothing is open yet that it would harm."""
    signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Ctrl-C is ``KeyboardInterrupt`` again, where the function above took it."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    # Not an exception: extension modules that are half imported turn one into errors of their own.
    print("\ninterrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)
