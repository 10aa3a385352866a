"""How far a long measurement is, on stderr and only where somebody can see it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")


def counted(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The items, with a bar on stderr of how many are done where stderr is a terminal; it goes when they end.

    Drawn between items alone: no thread of it runs while one is timed.

    total: how many there are, where ``items`` does not know.
    """
    if not sys.stderr.isatty():
        yield from items
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with bar:
        task = bar.add_task(what, total=len(items) if total is None and isinstance(items, Sized) else total)
        bar.refresh()
        for item in items:
            yield item
            bar.advance(task)
            bar.refresh()
