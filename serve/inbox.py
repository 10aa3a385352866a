"""The way from the engine's thread into the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any


class Inbox:
    """Hands things to functions in the event loop, which is woken once for all that come together.

    Waking the loop is a system call, in which Python lets another thread run: once a token, it takes the engine's
    thread more time than everything else that it does for a step.
    """

    def __init__(self) -> None:
        self._items: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._woken = False

    def put(self, loop: asyncio.AbstractEventLoop, take: Callable[[Any], None], item: Any) -> None:
        """From any thread: ``take(item)`` in ``loop``, after all that was put before. Nothing once that is closed."""
        self._items.append((take, item))
        if not self._woken:
            self._woken = True
            try:
                loop.call_soon_threadsafe(self._empty)
            except RuntimeError:  # closed: nobody listens any more
                self._woken = False
                self._items.clear()

    def _empty(self) -> None:
        self._woken = False  # first: what comes from here on may be too late for this round
        while self._items:
            take, item = self._items.popleft()
            take(item)
