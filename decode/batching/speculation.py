"""Speculation inside the engine: how many tokens to propose for whom, from what stood before and what steps cost.

A proposal is a row of the step like any other, of the same sequence and one position further on; a step writes keys and
values before it reads them, so such a row sees the proposals before it. Every row draws the token that follows it, with
the noise of its own position. The engine's tokens are a pure function of (seed, position, logits), so the token that a
row draws is the very one that plain decoding would draw there, as long as the tokens it was fed are the ones that plain
decoding would have fed. The host keeps that prefix: the first row's token, and each further one while the token before
it equals its proposal. Text is therefore the same token for token, greedy and seeded alike, which is more than the same
distribution; it costs nothing in acceptance where proposals are single tokens without a distribution of their own
(a proposal x stands with probability p(x), the most that any exact rule gives it).

With a draft model a request still copies where its text repeats itself, as long as more of that stands (see
``decode.speculation.draft``). What the draft then has not computed is filled in when it is asked again.

Only what every row takes with it makes this hold. A repetition penalty depends on the tokens between, which are marked
on the device step by step, so requests with one do not speculate. A logit bias is the same in all rows.

What fell leaves nothing behind: its keys and values lie past the request's length, no later query of a lower position
sees them, and whoever gets those positions writes them before reading. Going back is a smaller length.

Whether that pays is predicted, and predictions can be wrong for long: of texts that never repeat themselves each new
one looks promising. So what speculation really won and lost against plain steps is kept on account, and it may lose
``STAKE`` of the steps' time, no more.

A step with proposals is not overlapped with the next, because the host must know its tokens to propose more, and the
batch stays together rather than split into two that take turns (each would read the weights for itself). That time of
the host is a cost like the others.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

from decode.batching.jobs import Guess, Job, Piece, Plan
from decode.batching.shapes import Shapes
from decode.speculation.control import DRAFT_PRIOR, LONGEST_PAUSE, MARGIN, PRIOR, RowEstimate
from decode.speculation.ngram_index import NgramIndex
from roofline.step_time import StepTimeFit

STAKE = 0.015
"""The share of all steps' time that tries which fail may cost."""

FIRST_STAKE, MOST_STAKE = 8.0, 24.0
"""Plain steps' time that may be lost at the start, and however much was won before."""

LONGEST = 3.0
"""A step counts as no longer than so many times what was expected: something else held it up."""

TRUST = 0.1
"""How much the newest step says of its shape beside those before it."""


class Speculation:
    """Chooses the proposals of each step.

    Every request has its own estimate of acceptance, a. Its i-th proposal is worth a^i tokens, so the next row of a
    step is best given to whoever's next proposal is worth most; and of the compiled sizes that one is taken which
    yields the most tokens a second, none where a plain step does.

    Args:
        k: most proposals for a request and step.
        shapes: the compiled steps. fit: what they cost.
        limit_s: no step with proposals may be expected to take longer than so many seconds; None: no limit.
        index: makes what looks up the next tokens of one text; None: nothing does.
        draft_s: seconds in which a draft model proposes so many tokens for so many jobs, (jobs, tokens); with it that
            model proposes, on the device, where nothing is found that promises more.

    host_s: seconds that the host needs between two steps that do not overlap; the engine keeps it up to date.
    stake: what may be lost now, in plain steps; nothing is proposed while that is below 0.
    """

    def __init__(
        self,
        k: int,
        shapes: Shapes,
        fit: StepTimeFit,
        *,
        limit_s: float | None = None,
        index: Callable[[], NgramIndex] | None = NgramIndex,
        draft_s: Callable[[int, int], float] | None = None,
    ):
        self.k, self.shapes, self.fit, self.limit_s, self._index = k, shapes, fit, limit_s, index
        self._draft_s = draft_s
        self.host_s = 0.0
        self.stake = FIRST_STAKE
        self._beside: dict[tuple[int, int], float] = {}  # what steps of a shape take, as a part of what the fit says

    def admitted(self, job: Job, drafted: int) -> None:
        """A job joins the batch, for the first time or again; so many of its positions a draft has computed already."""
        if job.guess is None and job.request.sampling.repetition_penalty == 1 and job.request.max_new_tokens > 1:
            job.guess = Guess(None if self._index is None else self._index())
        if job.guess is not None:
            job.guess.drafted = drafted

    def choose(self, jobs: Sequence[Job], base: int, prompt_tokens: int, context: int) -> dict[Job, list[int]]:
        """Proposals for some of ``jobs``, whose next positions are in a step as single rows.

        base: rows of that step without proposals, each of which yields a token.
        prompt_tokens, context: prompt tokens in it (padded), and positions that it reads.
        """
        if self.stake < 0:
            return {}
        offers = {job: tokens for job in jobs if (tokens := self._offer(job))}
        ranked: list[tuple[float, int, Job]] = []
        for job, tokens in offers.items():
            assert job.guess is not None, "it made an offer"
            stands, worth = (job.guess.drafting if asks_draft(tokens) else job.guess.copying).acceptance, 1.0
            for place in range(len(tokens)):
                worth *= stands
                ranked.append((worth, job.length + place, job))
        if not ranked:
            return {}
        ranked.sort(key=lambda one: one[0], reverse=True)  # stable: a job's own proposals stay in order
        gains = list(itertools.accumulate((one[0] for one in ranked), initial=float(base)))
        reads = list(itertools.accumulate((one[1] for one in ranked), initial=context))
        R, C = self.shapes.fit(base, prompt_tokens)
        best, taken = MARGIN * base / self._seconds(R, C, context), 0
        for size in self.shapes.mixed_rows if prompt_tokens else self.shapes.rows:
            count = min(size - base, len(ranked))
            if count <= 0:
                continue
            seconds = self._seconds(size, C, reads[count])
            if self._draft_s is not None:
                each = Counter(job for _, _, job in ranked[:count] if asks_draft(offers[job]))
                seconds += self._draft_s(len(each), max(each.values())) if each else 0.0
            if self.limit_s is not None and seconds > self.limit_s:
                break
            rate = gains[count] / (seconds + self.host_s)
            if rate > best:
                best, taken = rate, count
            if count == len(ranked):
                break
        counts = Counter(job for _, _, job in ranked[:taken])
        return {job: offers[job][:count] for job, count in counts.items()}

    def timed(self, R: int, C: int, seconds: float) -> None:
        """A step of this shape took so long before any request; the fit has seen all of these."""
        self._beside[R, C] = min(2.0, max(0.5, seconds / max(self.fit.model.seconds(R, C, 0), 1e-9)))

    def ran(self, plan: Plan, accepted: int, seconds: float, draft_s: float = 0.0) -> None:
        """A step took so many seconds, a draft's ``draft_s`` among them, and so many of its proposals stood."""
        shape = plan.R, plan.C
        said = max(self.fit.model.seconds(*shape, plan.context), 1e-9)
        seconds = min(seconds, LONGEST * (said + draft_s))
        before = self._beside.get(shape, 1.0)
        self._beside[shape] = before + TRUST * ((seconds - draft_s) / said - before)
        guesses = [piece for piece in plan.rows if piece.proposal is not None]
        base = len(plan.sampled) - len(guesses)
        if base < 1:
            return
        context = plan.context - sum(piece.start + 1 for piece in guesses)
        plain_s = self._seconds(*self.shapes.fit(base, plan.C), context)
        won = (base + accepted) / base - (seconds + self.host_s) / plain_s if guesses else 0.0
        self.stake = min(self.stake + won + STAKE * seconds / plain_s, MOST_STAKE)

    def _seconds(self, R: int, C: int, context: int) -> float:
        """What a step takes: the fit, which is a line, and how far off it was for this shape lately."""
        return self._beside.get((R, C), 1.0) * self.fit.model.seconds(R, C, context)

    def plain(self, job: Job) -> None:
        """A job got a token without proposals."""
        guess = job.guess
        if guess is None:
            return
        guess.passed_over += 1
        lost = guess.copying.acceptance < PRIOR[0] or guess.drafting.acceptance < DRAFT_PRIOR[0]
        if guess.passed_over >= guess.pause and lost:
            guess.copying, guess.drafting = RowEstimate.of(PRIOR), RowEstimate.of(DRAFT_PRIOR)
            guess.passed_over, guess.pause = 0, min(2 * guess.pause, LONGEST_PAUSE)

    def judged(self, job: Job, proposed: int, accepted: int, *, asked: bool) -> None:
        """Of a job's proposals, so many stood. asked: whether a draft model made them."""
        assert job.guess is not None, "it had proposals"
        job.guess.passed_over = 0
        (job.guess.drafting if asked else job.guess.copying).update(proposed, accepted)
        if not asked:
            return
        # Copies would have been judged by the same tokens: else a request that lost by them once would copy no more.
        told = job.tokens[len(job.tokens) - 1 - accepted :]
        if looked := min(len(job.guess.found), len(told)):
            same = [a == b for a, b in zip(job.guess.found, told, strict=False)]
            job.guess.copying.update(looked, [*same, False].index(False))
        # The draft ran over the newest token and all its proposals but the last.
        job.guess.drafted = job.length - 1 - accepted + min(accepted, proposed - 1)

    def fill(self, job: Job, room: int) -> Piece | None:
        """What the draft has to compute before it can propose for a job: all but the two newest positions, as far as
        ``room`` tokens go. Counts as done."""
        assert job.guess is not None, "the draft is to propose for it"
        start = job.guess.drafted
        count = min(job.length - 2 - start, room)
        if count <= 0:
            return None
        job.guess.drafted += count
        return Piece(job, start, count)

    def behind(self, job: Job) -> bool:
        """Whether the draft still lacks positions of a job that it is to propose for."""
        assert job.guess is not None, "the draft is to propose for it"
        return job.guess.drafted < job.length - 2

    def _offer(self, job: Job) -> list[int]:
        """What a job could be given, from the tokens that the host knows: no more than it may still generate."""
        most = min(self.k, job.request.max_new_tokens - job.sampled - 1)
        guess = job.guess
        if guess is None or most < 1:
            return []
        found: list[int] = []
        if guess.index is not None:
            guess.index.follow(job.tokens)
            found = guess.index.propose(most)
        guess.found = found
        if self._draft_s is None or (found and guess.copying.acceptance >= guess.drafting.acceptance):
            return found
        return list(range(-2, -2 - most, -1))


def asks_draft(proposals: Sequence[int]) -> bool:
    """Whether these stand for tokens that a draft model has yet to make."""
    return proposals[0] < 0
