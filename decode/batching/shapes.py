"""The few shapes that steps are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from decode.batching.paged_cache import TILE

COARSE, FINE = 4, 2
"""In steps with prompt tokens, each number of rows and each size of the prompt part is so many times the last one."""

LEAST_MIXED = 4
"""Rows of the smallest step with prompt tokens, but for the one of a request that is alone."""


VERIFIED_ROWS = 64
"""Rows of the largest step with proposals, unless more requests run together. Past that a row costs real time even
where matrix units are large, and proposals seldom pay."""


@dataclass(frozen=True)
class Shapes:
    """Rows and prompt tokens of every compiled step.

    rows: of steps without prompt tokens; mixed_rows: of those with; prompt: prompt tokens of the latter. Ascending.
    With speculation a request may have several rows.
    """

    rows: tuple[int, ...]
    mixed_rows: tuple[int, ...]
    prompt: tuple[int, ...]

    @classmethod
    def of(cls, max_batch: int, token_budget: int, proposals: int = 0, *, fine: bool = False) -> Shapes:
        """Rows by twos, with prompts by ``COARSE``, up to ``max_batch``; prompt tokens up to ``token_budget``.

        proposals: with them the rows of steps without prompts go on, as far as ``VERIFIED_ROWS``, and one size is just
            what a request alone makes of them.
        fine: for devices that a few tokens keep busy already, where padding takes as long as what it pads: steps with
            prompts come by ``FINE``, and there are some of a single row.
        """
        step = FINE if fine else COARSE
        rows = [1]
        while rows[-1] < max_batch:
            rows.append(min(2 * rows[-1], max_batch))
        if proposals:
            most = min(max_batch * (1 + proposals), max(VERIFIED_ROWS, max_batch))
            while rows[-1] < most:
                rows.append(min(2 * rows[-1], most))
            rows = sorted({*rows, 1 + proposals})
        largest = -(-token_budget // TILE) * TILE
        prompt = [largest]
        while prompt[0] > TILE:
            prompt.insert(0, max(TILE, prompt[0] // step // TILE * TILE))
        mixed = [min(LEAST_MIXED, max_batch)]
        while mixed[-1] < max_batch:
            mixed.append(min(step * mixed[-1], max_batch))
        if fine and mixed[0] == LEAST_MIXED:
            mixed.insert(0, 1)
        return cls(tuple(rows), tuple(mixed), tuple(prompt))

    def all(self) -> list[tuple[int, int]]:
        """Every (rows, prompt tokens), the largest first."""
        mixed = [(rows, prompt) for prompt in reversed(self.prompt) for rows in reversed(self.mixed_rows)]
        return mixed + [(rows, 0) for rows in reversed(self.rows)]

    def fit(self, rows: int, prompt_tokens: int) -> tuple[int, int]:
        """The smallest shape that holds so many rows and prompt tokens (in whole tiles)."""
        if not prompt_tokens:
            return next(size for size in self.rows if size >= rows), 0
        return (
            next(size for size in self.mixed_rows if size >= rows),
            next(size for size in self.prompt if size >= prompt_tokens),
        )
