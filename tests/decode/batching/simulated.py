"""The scheduler against a device that only takes time: a discrete-event run with a clock of its own."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from decode.batching.engine import IN_FLIGHT
from decode.batching.jobs import Job, Plan
from decode.batching.packing import Packing, StepVectors, sampler_words
from decode.batching.paged_cache import TILE
from decode.batching.pages import PagePool, root
from decode.batching.request import Event, RefusedError, Request, Ticket
from decode.batching.scheduler import Scheduler
from decode.batching.shapes import Shapes
from decode.batching.speculation import Speculation
from decode.batching.targets import Targets
from decode.speculation.ngram_index import NgramIndex
from roofline import goodput
from roofline.step_time import StepTime, StepTimeFit

STOP = 1


def output_of(prompt: Sequence[int], length: int) -> list[int]:
    """What the fake model answers: a function of the prompt, ``length`` tokens of which the last is ``STOP``."""
    rng = random.Random(hash(tuple(prompt)))
    return [rng.randrange(2, 1000) for _ in range(length - 1)] + [STOP]


@dataclass
class Outcome:
    """What became of one request."""

    request: Request
    arrived: float
    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    first_at: float = 0.0
    last_at: float = 0.0
    reason: str | None = None
    error: Exception | None = None
    ticket: Ticket | None = None


class Guesser(NgramIndex):
    """Proposes what will come, but every so often something else, and at times nothing at all."""

    def __init__(self, simulation: Simulation):
        super().__init__()
        self.simulation = simulation

    def follow(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)

    def propose(self, k: int) -> list[int]:
        rng = self.simulation.rng
        if rng.random() < 0.2:
            return []
        whole = self.simulation.whole(self.tokens)[len(self.tokens) :][:k]
        return [token if rng.random() < 0.8 else rng.randrange(2, 1000) for token in (whole + [7] * k)[:k]]


class Simulation:
    """An engine without a device: ``device`` says how long a step takes, and tokens are those of ``output_of``.

    It remembers which token each slot of a page was computed for, and what a step reads must be the request's own. So
    must what a draft model reads, where one proposes.
    """

    def __init__(
        self,
        device: StepTime,
        *,
        max_batch: int = 16,
        pages: int = 1000,
        page_size: int = 16,
        token_budget: int = 256,
        ttft_s: float | None = None,
        tpot_s: float | None = None,
        max_queue: int = 10**6,
        keep: bool = True,
        jitter: float = 0.05,
        proposals: int = 0,
        draft: bool = False,
        copies: bool = True,
    ):
        self.device, self.jitter, self.rng = device, jitter, random.Random(0)
        self.fit = StepTimeFit(StepTime(1e-3, 0.0, 0.0, 0.0))
        self.shapes = Shapes.of(max_batch, token_budget, proposals)
        self.page_size, self.held = page_size, dict[tuple[int, int], int]()
        self.draft, self.drafted = draft, dict[tuple[int, int], int]()
        speculation = None
        if proposals:
            draft_s = (lambda jobs, ahead: 0.0) if draft else None
            index = (lambda: Guesser(self)) if copies or not draft else None
            speculation = Speculation(proposals, self.shapes, self.fit, index=index, draft_s=draft_s)
        for rows, prompt in self.shapes.all():  # what the engine measures when it starts
            self.fit.saw(rows, prompt, 0, device.seconds(rows, prompt, 0))
        self.pool = PagePool(pages, keep=keep)
        self.vectors = StepVectors(max_batch, pages, lambda slot, seen, bias: None)
        self.newest: dict[int, int] = {}  # by slot, on the device
        targets = Targets(self.fit, self.shapes, ttft_s=ttft_s, tpot_s=tpot_s, max_batch=max_batch)
        self.scheduler = Scheduler(
            self.pool,
            page_size,
            self.shapes,
            targets,
            root=root("fake"),
            max_batch=max_batch,
            max_queue=max_queue,
            deliver=self._deliver,
            speculation=speculation,
        )
        self.now, self.free_at = 0.0, 0.0
        self.sent: deque[tuple[Plan, float, float]] = deque()
        self.outcomes: list[Outcome] = []
        self._of: dict[int, Outcome] = {}
        self.plans: list[Plan] = []

    def submit(self, request: Request, length: int, at: float) -> tuple[Outcome, Job | None]:
        outcome = Outcome(request, at, output_of(request.prompt, length)[: request.max_new_tokens])
        self.outcomes.append(outcome)
        ticket = outcome.ticket = Ticket(len(self.outcomes), len(request.prompt), lambda event: None)
        self._of[ticket.id] = outcome
        try:
            return outcome, self.scheduler.submit(ticket, request, at)
        except RefusedError as error:
            outcome.reason, outcome.error = "refused", error
            return outcome, None

    def turn(self) -> bool:
        """Send a step, or read one, as the engine does; False where there is neither."""
        plan = self.scheduler.schedule(self.now, self.free_at) if len(self.sent) < IN_FLIGHT else None
        if plan is not None:
            self.plans.append(plan)
            if self.draft:
                self._propose(plan)
            self._compute(plan)
            seconds = self.device.seconds(plan.R, plan.C, plan.context) * self.rng.uniform(1, 1 + self.jitter)
            self.free_at = max(self.now, self.free_at) + seconds
            self.sent.append((plan, self.free_at, seconds))
        if len(self.sent) == IN_FLIGHT or (plan is None and self.sent):
            plan, self.now, seconds = self.sent.popleft()
            self.fit.saw(plan.R, plan.C, plan.context, seconds)
            tokens = [self._token(job, position) for job, position in plan.sampled]
            stood = self.scheduler.complete(plan, tokens, [0.0] * len(tokens), [()] * len(tokens), self.now)
            if self.scheduler.speculation is not None:
                self.scheduler.speculation.ran(plan, stood, seconds)
            return True
        return plan is not None

    def run(self, arrivals: Sequence[tuple[float, Request, int]]) -> None:
        """Requests (time, request, output length) in order of time, to their end."""
        waiting = deque(arrivals)
        while True:
            if not self.sent and waiting and not self.scheduler.running and not self.scheduler.waiting:
                self.now = max(self.now, waiting[0][0])
            while waiting and waiting[0][0] <= self.now:
                at, request, length = waiting.popleft()
                self.submit(request, length, at)
            if not self.turn() and not waiting:
                return

    def goodput(self, ttft_s: float, tpot_s: float, seconds: float) -> float:
        """Requests a second that met both targets."""
        served = [
            goodput.Request(
                one.arrived,
                one.first_at - one.arrived,
                (one.last_at - one.first_at) / max(1, len(one.tokens) - 1),
                len(one.tokens),
            )
            for one in self.outcomes
            if one.reason in ("stop", "length")
        ]
        found = goodput.goodput(served, ttft_target_s=ttft_s, tpot_target_s=tpot_s, seconds=seconds)
        return found.good_requests_per_s

    def whole(self, tokens: Sequence[int]) -> list[int]:
        """The prompt and output of the request that these tokens are the beginning of."""
        for outcome in reversed(self.outcomes):
            found = [*outcome.request.prompt, *outcome.expected]
            if found[: len(tokens)] == list(tokens):
                return found
        return list(tokens)

    def _compute(self, plan: Plan) -> None:
        """Write a step's tokens to their pages as its vector says, then read what each of its rows and pieces attends
        to as the plan says."""
        vector, listed = self.vectors.of(plan)
        assert listed == any(job.request.top_logprobs for job, _ in plan.sampled)
        packing = Packing(plan.R, plan.C, self.vectors.pages_each)
        tokens, positions, sampler, tables = packing.parts(vector)
        places, slots = sampler[:2]
        for at, (token, position) in enumerate(zip(tokens.tolist(), positions.tolist(), strict=True)):
            if position < 0:
                continue
            if token == -1:
                token = self.newest[slots[at]]
            elif token < -1:
                token = plan.proposals[plan.rows[at].job][-2 - token]
            page = tables[at if at < plan.R else plan.R + (at - plan.R) // TILE][position // self.page_size]
            self.held[int(page), position % self.page_size] = token
        for place, slot, (job, position) in zip(places, slots, plan.sampled, strict=False):
            assert (slot, positions[place] + 1) == (job.slot, position)
            self.newest[job.slot] = self._token(job, position)
        assert sampler[2, : len(plan.sampled)].tolist() == [position for _, position in plan.sampled]
        assert sampler[3:, : len(plan.sampled)].T.tolist() == [sampler_words(job).tolist() for job, _ in plan.sampled]
        assert (slots[len(plan.sampled) :] == self.vectors.max_batch).all()
        for piece in [*plan.rows, *plan.pieces]:
            end = piece.start + piece.count
            guesses = dict(enumerate(plan.proposals.get(piece.job, []), piece.job.computed))
            expected = [guesses.get(at, self._known(piece.job, at)) for at in range(end)]
            assert [self.held[self._slot(piece.job, at)] for at in range(end)] == expected

    def _propose(self, plan: Plan) -> None:
        """What the draft of ``decode.batching.draft`` does: fill, check what it then reads, and propose."""
        for piece in plan.fills:
            for at in range(piece.start, piece.start + piece.count):
                self.drafted[self._slot(piece.job, at)] = piece.job.tokens[at]
        for job in plan.asked:
            asked = plan.proposals[job]
            newest = len(job.tokens) - 1
            for at in (newest - 1, newest):
                self.drafted[self._slot(job, at)] = job.tokens[at]
            assert [self.drafted[self._slot(job, at)] for at in range(newest + 1)] == job.tokens
            guesser = Guesser(self)
            guesser.follow(job.tokens)
            asked[:] = guesser.propose(len(asked)) or [7] * len(asked)
            for ahead, token in enumerate(asked[:-1], newest + 1):
                self.drafted[self._slot(job, ahead)] = token

    def _slot(self, job: Job, position: int) -> tuple[int, int]:
        return job.pages[position // self.page_size], position % self.page_size

    def _known(self, job: Job, position: int) -> int:
        return job.request.prompt[position] if position < job.prompt_len else self._token(job, position)

    def _token(self, job: Job, position: int) -> int:
        expected = self._of[job.ticket.id].expected
        place = position - job.prompt_len
        return expected[place] if place < len(expected) else 999  # past the stop, before the host knows

    def _deliver(self, job: Job, event: Event) -> None:
        outcome = self._of[job.ticket.id]
        assert outcome.reason is None, "an event after the last"
        if event.token is not None:
            outcome.tokens.append(event.token)
            outcome.first_at, outcome.last_at = outcome.first_at or event.at, event.at
        if event.finish_reason:
            outcome.reason, outcome.error = event.finish_reason, event.error


def poisson(rate: float, seconds: float, seed: int = 0) -> list[tuple[float, Request, int]]:
    """Requests at ``rate`` a second: prompts of 50 to 400 tokens, outputs of 20 to 120 of at most 128."""
    rng, now, found = random.Random(seed), 0.0, []
    while (now := now + rng.expovariate(rate)) < seconds:
        prompt = [rng.randrange(2, 1000) for _ in range(rng.randrange(50, 400))]
        found.append((now, Request(prompt, 128, stop_token_ids=(STOP,)), rng.randrange(20, 120)))
    return found
