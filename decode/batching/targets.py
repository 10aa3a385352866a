"""Admission by targets: what a step will take decides who may join, how much prompt rides along, and whom to refuse.

Goodput counts only requests whose first token and whose later tokens come in time (Zhong et al., "DistServe", 2024).
Past what a machine sustains, a queue without targets makes everyone late; refusing early keeps the others in time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from decode.batching.jobs import Job
from decode.batching.shapes import Shapes
from roofline.step_time import StepTimeFit

MARGIN = 0.9
"""The share of a target that is planned with; the rest is for what the prediction does not know."""

BORROWED = 0.5
"""The part of a request's future lead over its TPOT target that prompts may use up now."""

LEARNING = 0.1
"""How much the newest request moves the average output length and prompt length."""


class Targets:
    """What the TTFT and TPOT targets allow, predicted with a fitted step time.

    Args:
        fit: the step-time model, refitted by the engine from the steps it sees.
        shapes: the compiled steps, which padding makes as dear as their size.
        ttft_s, tpot_s: targets in seconds, None for none.
        max_batch: requests that run together at most, whatever the targets.
    """

    def __init__(self, fit: StepTimeFit, shapes: Shapes, *, ttft_s: float | None, tpot_s: float | None, max_batch: int):
        self.fit, self.shapes, self.max_batch = fit, shapes, max_batch
        self.ttft_s, self.tpot_s = ttft_s, tpot_s
        self._output: float | None = None  # average tokens of a request when it leaves
        self._prompt: float | None = None  # average prompt tokens computed for an admitted one

    def finished(self, tokens: int) -> None:
        """Learn from a request that ran and makes room now: how long such stay."""
        self._output = tokens if self._output is None else self._output + LEARNING * (tokens - self._output)

    def admitted(self, prompt_tokens: int) -> None:
        """Learn from a request whose prompt, less what the prefix cache had, is about to be computed."""
        self._prompt = (
            prompt_tokens if self._prompt is None else self._prompt + LEARNING * (prompt_tokens - self._prompt)
        )

    def step_s(self, rows: int, prompt_tokens: int, positions: int) -> float:
        """Predicted seconds of a step in the shape that it would run in."""
        R, C = self.shapes.fit(max(rows, 1), prompt_tokens)
        return self.fit.model.seconds(R, C, positions)

    def holds(self, rows: int, positions: int, output: float) -> bool:
        """Whether ``rows`` requests reading ``positions`` of cache in all keep the TPOT target, prompts included."""
        if self.tpot_s is None or rows <= 1:
            return rows <= self.max_batch
        return rows <= self.max_batch and self._token_s(rows, positions, output) <= MARGIN * self.tpot_s

    def _token_s(self, rows: int, positions: int, output: float) -> float:
        """Seconds between a request's tokens while ``rows`` run: the decode step, and each one's share of prefill.

        A request that ends after ``output`` tokens makes room for another, whose prompt is then computed.
        """
        share = rows * (self._prompt or 0.0) * self._prompt_token_s() / max(1.0, self._output or output)
        return self.step_s(rows, 0, positions) + share

    def _prompt_token_s(self) -> float:
        """Seconds that a prompt token adds when steps carry as many as they can."""
        most = self.shapes.prompt[-1]
        return (self.step_s(1, most, 0) - self.step_s(1, 0, 0)) / most

    def room_for_prompt(self, rows: Sequence[Job], positions: int, now: float, busy_until: float) -> int:
        """Prompt tokens that may ride on a step beside the decodes of ``rows`` without making one of them late.

        A request's tokens are due one every ``tpot_s`` after its first; what it is ahead of that may be spent, and
        ``BORROWED`` of what it will gain by its expected end. One that cannot be in time any more holds nobody up.
        """
        most = self.shapes.prompt[-1]
        if self.tpot_s is None or not rows:
            return most
        start = max(now, busy_until)
        alone = self.step_s(len(rows), 0, positions)
        spare = None
        for job in rows:
            if job.first_at is None:
                continue
            last = job.first_at + (job.request.max_new_tokens - 1) * self.tpot_s
            if start + (job.request.max_new_tokens - job.sampled) * alone > last:
                continue
            expected = min(job.request.max_new_tokens, self._output or job.request.max_new_tokens)
            gain = max(0.0, expected - job.sampled) * max(0.0, self.tpot_s - alone)
            own = job.first_at + job.sampled * self.tpot_s - start + BORROWED * gain
            spare = own if spare is None else min(spare, own)
        if spare is None:
            return most
        return max((size for size in self.shapes.prompt if self.step_s(len(rows), size, positions) <= spare), default=0)

    def late(self, job: Job, now: float) -> bool:
        """Whether a waiting request will miss its TTFT target whatever happens from now on."""
        if self.ttft_s is None or job.first_at is not None or job.sampled:
            return False
        return now + self._own_s(job.left) > job.arrived + self.ttft_s

    def _own_s(self, tokens: int) -> float:
        """Seconds to compute a prompt with the device to itself."""
        most = self.shapes.prompt[-1]
        whole, rest = divmod(tokens, most)
        seconds = whole * self.step_s(1, most, 0)
        return seconds + (self.step_s(1, rest, 0) if rest else 0.0)

    def first_token_s(self, tokens: int, output: int, running: Sequence[Job], waiting: Iterable[Job]) -> float:
        """Predicted seconds to the first token of a new request of ``tokens`` prompt tokens, behind those there are."""
        ahead = list(waiting)
        output_mean = self._output or float(output)
        positions = sum(job.computed for job in running)
        decoding = max(1, len(running))
        each = max(self._token_s(decoding, positions, output_mean), 1e-9)
        # Room in the batch: how many must leave first, and how fast they leave.
        limit = 1
        mean_positions = positions / decoding if running else tokens
        while limit < self.max_batch and self.holds(limit + 1, round(mean_positions * (limit + 1)), output_mean):
            limit += 1
        leave = max(0, len(running) + len(ahead) + 1 - limit)
        wait = leave * output_mean * each / min(decoding, limit)
        # The prompts ahead, at the rate that the decodes leave room for.
        backlog = sum(job.left for job in ahead) + sum(job.left for job in running if job.left > 1)
        pace = self._prompt_token_s()
        if self.tpot_s is not None and running:
            spare = 1 - self.step_s(decoding, 0, positions) / self.tpot_s
            pace /= min(1.0, max(spare, 0.05))
        return max(wait, backlog * pace) + tokens * pace + self.step_s(decoding, 0, positions)

    def retry_after_s(self, predicted_s: float) -> float:
        """When a refused request may try again: once what makes it late has passed."""
        return predicted_s - (self.ttft_s or 0.0)
