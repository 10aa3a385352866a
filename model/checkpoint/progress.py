"""A progress bar for loads that last, on stderr and only where somebody can see it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column

# Loads shorter than this show nothing.
_SHOW_AFTER_S = 1.0

ProgressOption = bool | Callable[[int, int], None]


class LoadProgress:
    """Counts bytes placed on devices; a context manager.

    `option` True shows a bar with bytes a second once the load has lasted a second, if stderr is a terminal;
    False shows nothing; a callable is called with (bytes done, bytes in all) after each step instead.
    """

    def __init__(self, what: str, total: int, option: ProgressOption) -> None:
        self._what = what
        self._total = total
        self._option = option
        self._done = 0
        self._started = time.perf_counter()
        self._bar: Progress | None = None

    def __enter__(self) -> LoadProgress:
        return self

    def advance(self, count: int) -> None:
        self._done += count
        if callable(self._option):
            self._option(self._done, self._total)
            return
        if self._bar is None:
            if not self._option or time.perf_counter() - self._started < _SHOW_AFTER_S or not sys.stderr.isatty():
                return
            self._bar = Progress(
                TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
                BarColumn(bar_width=20),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
                expand=True,  # to the terminal's width: a long name is what is cut
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bar.add_task(self._what, total=self._total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=self._done)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
