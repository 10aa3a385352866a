"""Where the time of a generation went, from the moments at which its tokens arrived."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field

IN_FLIGHT = 2
"""Dispatches that the decoder keeps under way. A late read of one makes the next seem instant, so samples take so many
together."""


@dataclass
class Timing:
    """Moments of one generation, in ``time.perf_counter`` seconds.

    began: when prefill was called, with everything compiled.
    first: when the first token was on the host.
    dispatches: (steps, seconds, new tokens of all rows) of each dispatch of decode steps.
    """

    began: float
    first: float | None = None
    dispatches: list[tuple[int, float, int]] = field(default_factory=list)
    _then: float = 0.0

    def arrived(self, at: float, steps: int, tokens: int) -> None:
        """Note tokens that reached the host at ``at``; ``steps`` 0 marks the first, which prefill made."""
        if steps == 0:
            self.first = at
        else:
            self.dispatches.append((steps, at - self._then, tokens))
        self._then = at

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, s: prefill and sampling, without compilation."""
        return None if self.first is None else self.first - self.began

    @property
    def warm(self) -> list[tuple[int, float, int]]:
        """The dispatches after the first, which pays for one-time set-up; all of them where there is one."""
        return self.dispatches[1:] or self.dispatches

    @property
    def _windows(self) -> list[tuple[int, float]]:
        """(steps, seconds) of runs of ``IN_FLIGHT`` warm dispatches; what is left at the end joins the last run."""
        warm = self.warm
        count = max(1, len(warm) // IN_FLIGHT)
        cuts = [index * IN_FLIGHT for index in range(count)] + [len(warm)]
        runs = [warm[start:end] for start, end in itertools.pairwise(cuts) if end > start]
        return [(sum(steps for steps, *_ in run), sum(seconds for _, seconds, _ in run)) for run in runs]

    @property
    def step_samples_s(self) -> list[float]:
        """Seconds a step, one sample for each run of warm dispatches."""
        return [seconds / steps for steps, seconds in self._windows]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token, s: the median over warm steps, each counted with the mean of its sample."""
        samples = [seconds / steps for steps, seconds in self._windows for _ in range(steps)]
        return statistics.median(samples) if samples else None

    @property
    def tokens_per_s(self) -> float | None:
        """Decoded tokens of all rows a second, over the warm dispatches."""
        seconds = sum(seconds for _, seconds, _ in self.warm)
        return sum(tokens for _, _, tokens in self.warm) / seconds if seconds else None
