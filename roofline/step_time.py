"""How long a step of a batching engine takes: the memory wall as four numbers, learned from the steps seen.

    seconds = base + row * rows + prompt * prompt_tokens + cache * positions

``base`` is what every step pays, above all one read of the weights; ``row`` what each decoded row adds; ``prompt`` what
each prompt token adds; ``cache`` what reading one position of the KV cache adds. A step's rows and prompt tokens are
those of the shape it runs in, padding included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TERMS = ("base", "rows", "prompt", "cache")

MEMORY = 0.99
"""What an old step still counts after each new one: about the last hundred decide."""

PRIOR_WEIGHT = 0.01
"""How much the starting guess counts, in steps, against those seen: it decides only what they leave open."""


@dataclass(frozen=True)
class StepTime:
    """Seconds a step pays: base, and for each row, prompt token and cache position. None is negative."""

    base: float
    row: float
    prompt: float
    cache: float

    def seconds(self, rows: int, prompt_tokens: int, positions: int) -> float:
        return self.base + self.row * rows + self.prompt * prompt_tokens + self.cache * positions

    def terms(self, rows: int, prompt_tokens: int, positions: int) -> dict[str, float]:
        """What ``seconds`` adds up, by ``TERMS``."""
        parts = (self.base, self.row * rows, self.prompt * prompt_tokens, self.cache * positions)
        return dict(zip(TERMS, parts, strict=True))


class StepTimeFit:
    """``StepTime`` by least squares of relative errors over the steps seen, later ones counting more.

    Args:
        start: the guess before any step; a roofline's, or a first measurement's.
    """

    def __init__(self, start: StepTime):
        self._start = [start.base, start.row, start.prompt, start.cache]
        self._moments = [[0.0] * 4 for _ in range(4)]
        self._sums = [0.0] * 4
        self._known: StepTime | None = start

    def saw(self, rows: int, prompt_tokens: int, positions: int, seconds: float) -> None:
        """Note a step. One of no time at all is left out: it was not measured."""
        if seconds <= 0:
            return
        x = [1 / seconds, rows / seconds, prompt_tokens / seconds, positions / seconds]  # relative: the target is 1
        for i in range(4):
            row = self._moments[i]
            for j in range(4):
                row[j] = row[j] * MEMORY + x[i] * x[j]
            self._sums[i] = self._sums[i] * MEMORY + x[i]
        self._known = None

    @property
    def model(self) -> StepTime:
        """The fit now."""
        if self._known is None:
            self._known = StepTime(*self._solve())
        return self._known

    def _solve(self) -> list[float]:
        """The normal equations, each pulled to its start; a negative one is 0, and the rest are solved again."""
        free = list(range(4))
        while True:
            # A coefficient's pull is in its own unit: a start of 0 is pulled as hard as a share of the base would be.
            matrix = [[self._moments[i][j] for j in free] for i in free]
            right = [self._sums[i] for i in free]
            for place, i in enumerate(free):
                pull = PRIOR_WEIGHT * self._moments[i][i] + 1e-30
                matrix[place][place] += pull
                right[place] += pull * self._start[i]
            found = _solved(matrix, right)
            negative = [i for i, value in zip(free, found, strict=True) if value < 0]
            if not negative:
                out = [0.0] * 4
                for i, value in zip(free, found, strict=True):
                    out[i] = value
                return out
            free = [i for i in free if i not in negative]
            if not free:
                return list(self._start)


def _solved(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Gauss-Jordan elimination with pivoting, after scaling each unknown to a unit diagonal. The matrix is positive."""
    size = len(right)
    scale = [matrix[i][i] ** -0.5 for i in range(size)]
    rows = [[matrix[i][j] * scale[i] * scale[j] for j in range(size)] + [right[i] * scale[i]] for i in range(size)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        head = rows[i][i]
        rows[i] = [value / head for value in rows[i]]
        for r in range(size):
            if r != i and rows[r][i]:
                factor = rows[r][i]
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    return [rows[i][size] * scale[i] for i in range(size)]
