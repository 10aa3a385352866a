"""Speculation inside the engine: how many tokens to propose for whom, from what stood before and what steps cost.

A proposal is a row of the step like any other, of the same sequence and one position further on; a step writes keys and
values before it reads them, so such a row sees the proposals before it. Every row draws the token that follows it, with
the noise of its own position. The engine's tokens are a pure function of (seed, position, logits), so the token that a
row draws is the very one that plain decoding would draw there, as long as the tokens it was fed are the ones that plain
decoding would have fed. The host keeps that prefix: the first row's token, and each further one while the token before
it equals its proposal. Text is therefore the same token for token, greedy and seeded alike, which is more than the same
distribution; it costs nothing in acceptance where proposals are single tokens without a distribution of their own
(a proposal x stands with probability p(x), the most that any exact rule gives it).

Only what every row takes with it makes this hold. A repetition penalty depends on the tokens between, which are marked
on the device step by step, so requests with one do not speculate. A logit bias is the same in all rows.

What fell leaves nothing behind: its keys and values lie past the request's length, no later query of a lower position
sees them, and whoever gets those positions writes them before reading. Going back is a smaller length.

A step with proposals is not overlapped with the next, because the host must know its tokens to propose more, and the
batch stays together rather than split into two that take turns (each would read the weights for itself). That time of
the host is a cost like the others.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

from decode.batching.jobs import Guess, Job, Piece
from decode.batching.shapes import Shapes
from decode.speculation.control import DRAFT_PRIOR, LONGEST_PAUSE, MARGIN, PRIOR, RowEstimate
from decode.speculation.ngram_index import NgramIndex
from roofline.step_time import StepTimeFit


class Speculation:
    """Chooses the proposals of each step.

    Every request has its own estimate of acceptance, a. Its i-th proposal is worth a^i tokens, so the next row of a
    step is best given to whoever's next proposal is worth most; and of the compiled sizes that one is taken which
    yields the most tokens a second, none where a plain step does.

    Args:
        k: most proposals for a request and step.
        shapes: the compiled steps. fit: what they cost.
        limit_s: no step with proposals may be expected to take longer than so many seconds; None: no limit.
        index: makes what proposes for one text.
        draft_s: seconds in which a draft model proposes so many tokens for so many jobs, (jobs, tokens); with it that
            model proposes, on the device, and not the index.

    host_s: seconds that the host needs between two steps that do not overlap; the engine keeps it up to date.
    """

    def __init__(
        self,
        k: int,
        shapes: Shapes,
        fit: StepTimeFit,
        *,
        limit_s: float | None = None,
        index: Callable[[], NgramIndex] = NgramIndex,
        draft_s: Callable[[int, int], float] | None = None,
    ):
        self.k, self.shapes, self.fit, self.limit_s, self._index = k, shapes, fit, limit_s, index
        self._draft_s = draft_s
        self._prior = PRIOR if draft_s is None else DRAFT_PRIOR
        self.host_s = 0.0

    def admitted(self, job: Job, drafted: int) -> None:
        """A job joins the batch, for the first time or again; so many of its positions a draft has computed already."""
        if job.guess is None and job.request.sampling.repetition_penalty == 1 and job.request.max_new_tokens > 1:
            job.guess = Guess(None if self._draft_s else self._index(), RowEstimate.of(self._prior))
        if job.guess is not None:
            job.guess.drafted = drafted

    def choose(self, jobs: Sequence[Job], base: int, prompt_tokens: int, context: int) -> dict[Job, list[int]]:
        """Proposals for some of ``jobs``, whose next positions are in a step as single rows.

        base: rows of that step without proposals, each of which yields a token.
        prompt_tokens, context: prompt tokens in it (padded), and positions that it reads.
        """
        offers = {job: tokens for job in jobs if (tokens := self._offer(job))}
        ranked: list[tuple[float, int, Job]] = []
        for job, tokens in offers.items():
            assert job.guess is not None, "it made an offer"
            stands, worth = job.guess.estimate.acceptance, 1.0
            for place in range(len(tokens)):
                worth *= stands
                ranked.append((worth, job.length + place, job))
        if not ranked:
            return {}
        ranked.sort(key=lambda one: one[0], reverse=True)  # stable: a job's own proposals stay in order
        gains = list(itertools.accumulate((one[0] for one in ranked), initial=float(base)))
        reads = list(itertools.accumulate((one[1] for one in ranked), initial=context))
        R, C = self.shapes.fit(base, prompt_tokens)
        best, taken = MARGIN * base / self.fit.model.seconds(R, C, context), 0
        for size in self.shapes.mixed_rows if prompt_tokens else self.shapes.rows:
            count = min(size - base, len(ranked))
            if count <= 0:
                continue
            seconds = self.fit.model.seconds(size, C, reads[count])
            if self._draft_s is not None:
                each = Counter(job for _, _, job in ranked[:count])
                seconds += self._draft_s(len(each), max(each.values()))
            if self.limit_s is not None and seconds > self.limit_s:
                break
            rate = gains[count] / (seconds + self.host_s)
            if rate > best:
                best, taken = rate, count
            if count == len(ranked):
                break
        counts = Counter(job for _, _, job in ranked[:taken])
        return {job: offers[job][:count] for job, count in counts.items()}

    def plain(self, job: Job) -> None:
        """A job got a token without proposals."""
        guess = job.guess
        if guess is None:
            return
        guess.passed_over += 1
        if guess.passed_over >= guess.pause and guess.estimate.acceptance < self._prior[0]:
            guess.estimate, guess.passed_over = RowEstimate.of(self._prior), 0
            guess.pause = min(2 * guess.pause, LONGEST_PAUSE)

    def judged(self, job: Job, proposed: int, accepted: int) -> None:
        """Of a job's proposals, so many stood."""
        assert job.guess is not None, "it had proposals"
        job.guess.passed_over = 0
        job.guess.estimate.update(proposed, accepted)
        # The draft ran over the newest token and all its proposals but the last.
        job.guess.drafted = job.length - 1 - accepted + min(accepted, proposed - 1)

    def fill(self, job: Job, room: int) -> Piece | None:
        """What the draft has to compute before it can propose for a job: all but the two newest positions, as far as
        ``room`` tokens go. Counts as done."""
        assert job.guess is not None
        start = job.guess.drafted
        count = min(job.length - 2 - start, room)
        if self._draft_s is None or count <= 0:
            return None
        job.guess.drafted += count
        return Piece(job, start, count)

    def behind(self, job: Job) -> bool:
        """Whether a draft model still lacks positions of a job."""
        return self._draft_s is not None and job.guess is not None and job.guess.drafted < job.length - 2

    def _offer(self, job: Job) -> list[int]:
        """What a job could be given, from the tokens that the host knows: no more than it may still generate."""
        most = min(self.k, job.request.max_new_tokens - job.sampled - 1)
        if job.guess is None or most < 1:
            return []
        if job.guess.index is None:
            return list(range(-2, -2 - most, -1))
        job.guess.index.follow(job.tokens)
        return job.guess.index.propose(most)
