"""Tables for a terminal that are Markdown, too."""

from __future__ import annotations

from collections.abc import Sequence


def framed(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose first row is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head, *lines = [
        "| " + " | ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return [head, "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines]


def ranged(median: float, samples: Sequence[float], digits: int) -> str:
    """ "20.1 (19.8 to 20.6)": a median and the range of its samples."""
    return f"{median:.{digits}f} ({min(samples):.{digits}f} to {max(samples):.{digits}f})"
