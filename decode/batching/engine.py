"""The engine: a thread that runs one compiled step after another for whichever requests there are."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from decode.batching.jobs import Job, Plan
from decode.batching.options import EngineOptions, EngineStats
from decode.batching.packing import Packing, StepVectors
from decode.batching.paged_cache import TILE
from decode.batching.pages import PagePool, root
from decode.batching.program import Chosen
from decode.batching.request import MOST_TOP_LOGPROBS, EngineError, Event, Request, RequestError, Ticket
from decode.batching.runner import Runner
from decode.batching.scheduler import Scheduler
from decode.batching.speculation import Speculation
from decode.batching.targets import MARGIN, Targets
from decode.decoder import Decoder
from decode.speculation.draft import DraftModel
from decode.speculation.ngram_index import NgramIndex
from model.wording import number_of
from roofline.step_time import StepTime, StepTimeFit

IN_FLIGHT = 2
"""Steps on their way at most: while the device runs one, the host has the next one ready."""

RECENT = 0.05
"""What the newest step counts in the averages of ``stats``."""

log = logging.getLogger(__name__)


class _Sent(NamedTuple):
    """A step on its way. listed: a row asks for its likeliest tokens. host_s, host_wall_s: what sending it took, in CPU
    seconds and by the clock."""

    plan: Plan
    chosen: Chosen
    listed: bool
    at: float
    host_s: float
    host_wall_s: float
    dispatch_s: float
    draft_s: float


class Engine:
    """Continuous batching over one loaded model; token ids in, token ids out.

    Every method may be called from any thread. The host prepares a step while the device runs the one before it: it
    reads each step's tokens one step late, and a request that turns out to have ended wastes one row of one step. With
    ``EngineOptions.proposals`` it also speculates, where that is faster; the text is the same.

    Args:
        decoder: a loaded model on its mesh, with ``layout.data`` 1.
        draft: what proposes tokens, on the same layout, beside what followed the same tokens before (unless its
            ``copies`` is False); None: the latter alone.

    Raises:
        RequestError: options that contradict each other or the model.
        SpeculationError: proposals out of range, or a draft that does not fit.
    """

    def __init__(self, decoder: Decoder, options: EngineOptions | None = None, draft: DraftModel | None = None):
        self.options = options or EngineOptions()
        self._runner = Runner(decoder, self.options, draft)
        self.max_len, self.vocab_size = self._runner.max_len, decoder.config.vocab_size
        self._fit = StepTimeFit(StepTime(1e-3, 0.0, 0.0, 0.0))
        for name in ("ttft_slo_s", "tpot_slo_s"):
            target = getattr(self.options, name)
            if target is not None and not 0 < target < math.inf:
                raise RequestError(f"{name} is {target}; it must be a positive number of seconds")
        self._speculation: Speculation | None = None
        if self.options.proposals:
            limit_s = None if self.options.tpot_slo_s is None else MARGIN * self.options.tpot_slo_s
            self._speculation = Speculation(
                self.options.proposals,
                self._runner.shapes,
                self._fit,
                limit_s=limit_s,
                index=NgramIndex if draft is None or draft.copies else None,
                draft_s=None if self._runner.draft is None else self._runner.draft.seconds,
            )
        self._scheduler = Scheduler(
            PagePool(self._runner.pages, keep=self.options.prefix_cache),
            self._runner.page_size,
            self._runner.shapes,
            Targets(
                self._fit,
                self._runner.shapes,
                ttft_s=self.options.ttft_slo_s,
                tpot_s=self.options.tpot_slo_s,
                max_batch=self.options.max_batch,
            ),
            root=root(repr((decoder.config, str(decoder.dtype), str(decoder.cache_dtype)))),
            max_batch=self.options.max_batch,
            max_queue=self.options.max_queue,
            deliver=self._deliver,
            speculation=self._speculation,
        )
        self._vectors = StepVectors(self.options.max_batch, self._runner.pages_each, self._runner.set_slot)
        self._jobs: dict[int, Job] = {}
        self._ids = itertools.count()
        self._changed = threading.Condition(threading.RLock())
        self._sent: deque[_Sent] = deque()
        self._thread: threading.Thread | None = None
        self._ready = self._draining = self._closing = False
        self._dead: str | None = None
        self._last_result = 0.0
        self._averages = dict.fromkeys(("step_s", "host_s", "host_wall_s", "device_s", "dispatch_s"), 0.0)
        self._newest: tuple[int, int, int] = (1, 0, 0)
        self._of_shape: dict[tuple[int, int], tuple[float, int]] = {}  # recent mean seconds, and positions read

    def start(self) -> None:
        """Compile every shape and start the engine's thread. Returns when ``ready``."""
        if self._thread is not None or self._closing:
            raise EngineError("this engine was started before; make a new one")
        if jax.process_index() != 0:
            raise EngineError(f"process 0 starts the engine; process {jax.process_index()} calls follow()")
        timed = self._runner.compile()
        for rows, prompt, seconds in timed:
            self._fit.saw(rows, prompt, 0, seconds)
        if self._speculation is not None:
            for shape in timed:
                self._speculation.timed(*shape)
        self._runner.lead()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._ready = True
        self._thread.start()

    def follow(self) -> None:
        """On every process but 0: compile, then run the steps that process 0 decides on, until it closes its engine.

        Every process must have made its engine with the same model and options.

        Raises:
            MultihostError: process 0 cannot be reached.
        """
        self._runner.compile()
        self._runner.follow()

    def ready(self) -> bool:
        """Whether ``start`` is done and the engine takes requests."""
        return self._ready and self._dead is None and not self._draining and not self._closing

    def healthy(self) -> bool:
        """False from the moment that the engine's thread has died; then every request has ended with an error."""
        return self._dead is None

    def check(self, request: Request) -> None:
        """Raises RequestError where ``submit`` would, without submitting."""
        prompt, new = request.prompt, request.max_new_tokens
        if not len(prompt):
            raise RequestError("the prompt is empty; give at least one token")
        if not isinstance(new, int) or new < 1:
            raise RequestError(f"max_new_tokens is {new}; it must be at least 1")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            place, token = next((i, t) for i, t in enumerate(prompt) if not 0 <= t < self.vocab_size)
            raise RequestError(
                f"the prompt has token id {token} at place {place}; ids run from 0 to {self.vocab_size - 1}"
            )
        if len(prompt) + new > self.max_len:
            raise RequestError(
                f"the prompt of {number_of(len(prompt), 'token')} and {new} new ones make {len(prompt) + new} "
                f"positions; a request has room for {self.max_len}: shorten the prompt or ask for fewer"
            )
        for token, value in request.logit_bias.items():
            if not 0 <= token < self.vocab_size:
                raise RequestError(f"logit_bias has token id {token}; ids run from 0 to {self.vocab_size - 1}")
            if not -100 <= value <= 100:
                raise RequestError(f"logit_bias of token {token} is {value}; it must be from -100 to 100")
        if not 0 <= request.top_logprobs <= MOST_TOP_LOGPROBS:
            raise RequestError(f"top_logprobs is {request.top_logprobs}; it must be from 0 to {MOST_TOP_LOGPROBS}")

    def submit(self, request: Request, on_event: Callable[[Event], None] | None = None) -> Ticket:
        """Queue a request. Does not block on the device.

        on_event: called with each event from the engine's thread, in order; it must return at once and not raise
            (``loop.call_soon_threadsafe`` is meant).

        Raises:
            RequestError: it can never run: empty, token ids outside the vocabulary, too long, with the numbers.
            RefusedError: too late now; carries ``retry_after_s``.
            EngineError: the engine died, is closed, drains, or was not started.
        """
        self.check(request)
        ticket = Ticket(next(self._ids), len(request.prompt), on_event)
        with self._changed:
            if not self.ready():
                raise EngineError(self._dead or ("the engine is shutting down" if self._ready else "not started yet"))
            self._jobs[ticket.id] = self._scheduler.submit(ticket, request, time.perf_counter())
            self._changed.notify_all()
        return ticket

    def cancel(self, id: int) -> None:
        """End a request; its pages are free within one step. Unknown and ended ids are ignored."""
        with self._changed:
            job = self._jobs.get(id)
            if job is not None:
                self._scheduler.cancel(job, time.perf_counter())
                self._changed.notify_all()

    def stats(self) -> EngineStats:
        """Counters and gauges, cheap enough for every scrape."""
        names: tuple[str, ...] = ("submitted", "completed", "cancelled", "refused", "failed", "preemptions")
        names += ("prompt_tokens", "cached_tokens", "generated_tokens", "goodput_requests", "steps", "decode_steps")
        names += ("proposed_tokens", "accepted_tokens")
        averages: dict[str, Any] = dict(self._averages)
        with self._changed:
            scheduler, pool = self._scheduler, self._scheduler.pool
            return EngineStats(
                waiting=len(scheduler.waiting),
                running=len(scheduler.running),
                pages_used=pool.used,
                pages_cached=pool.cached,
                pages_total=pool.total,
                predicted_s=self._fit.model.terms(*self._newest),
                shapes_s={
                    shape: (seconds, self._fit.model.seconds(*shape, context))
                    for shape, (seconds, context) in self._of_shape.items()
                },
                **{name: scheduler.counts[name] for name in names},
                **averages,
            )

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests and wait for those there are. False where some were left after the timeout."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self._jobs, timeout_s)

    def close(self) -> None:
        """End every request with EngineError, and the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._fail_all("the engine was closed")
        self._runner.close()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # whatever it is, nobody may wait for ever
            log.exception("the engine's thread died")
            with self._changed:
                self._dead = f"the engine died: {type(error).__name__}: {error}"
                self._fail_all(self._dead)

    def _fail_all(self, reason: str) -> None:
        with self._changed:
            for job in list(self._jobs.values()):
                error, now = EngineError(reason), time.perf_counter()
                try:
                    self._scheduler.fail(job, error, now)
                except Exception:  # where the scheduler itself broke: whoever waits is told all the same
                    job.ended = True
                    self._deliver(job, Event(None, 0.0, (), "error", error, now))
            self._changed.notify_all()

    def _turn(self) -> bool:
        """Send the next step and read the oldest one; waits where there is neither. False when closed."""
        with self._changed:
            while True:
                if self._closing:
                    return False
                began, busy = time.perf_counter(), time.thread_time()
                plan = self._scheduler.schedule(began, self._busy_until()) if len(self._sent) < IN_FLIGHT else None
                if plan is not None or self._sent:
                    break
                self._changed.wait()
            if plan is not None:
                vector, listed = self._vectors.of(plan)
                draft_calls, draft_s = self._draft_calls(plan)
        if plan is not None:
            packed = time.perf_counter()
            for call in draft_calls:
                call()
            chosen = self._runner.step(plan.R, plan.C, vector)
            now = time.perf_counter()
            busy_s = time.thread_time() - busy
            self._sent.append(_Sent(plan, chosen, listed, now, busy_s, now - began, now - packed, draft_s))
        if len(self._sent) == IN_FLIGHT or plan is None:
            self._read(self._sent.popleft())
        return True

    def _draft_calls(self, plan: Plan) -> tuple[list[Callable[[], None]], float]:
        """What the plan asks of a draft model, to be sent ahead of its step, and how long that takes. The tables are as
        its own vector has them."""
        draft, runner = self._runner.draft, self._runner
        if draft is None or not (plan.fills or plan.asked):
            return [], 0.0
        calls: list[Callable[[], None]] = []
        size = 0
        if plan.fills:
            _, size = runner.shapes.fit(1, sum(-(-piece.count // TILE) * TILE for piece in plan.fills))
            fills = Plan([], plan.fills, [], 0, size, 0)
            vector = Packing(0, size, runner.pages_each).pack(fills, self._vectors.sampler, self._vectors.tables, 0)
            calls.append(functools.partial(runner.fill, size, vector))
        if plan.asked:
            asking = draft.asking(len(plan.asked))
            vector = asking.pack(plan, self._vectors.tables, runner.max_batch)
            calls.append(functools.partial(runner.propose, asking.N, vector))
        return calls, draft.plan_seconds(plan, size)

    def _read(self, sent: _Sent) -> None:
        """Wait for a step's tokens, and hand them out."""
        asked = time.perf_counter()
        words = np.asarray(sent.chosen.words)[: len(sent.plan.sampled)]
        listed = np.asarray(sent.chosen.top)[: len(words)] if sent.listed else None
        came, busy = time.perf_counter(), time.thread_time()
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(words)
        if listed is not None:
            wants = [job.request.top_logprobs for job, _ in sent.plan.sampled]
            tops = [_pairs(row, count) for row, count in zip(listed, wants, strict=True)]
        with self._changed:
            if self._runner.draft is not None:
                self._learn_proposals(sent.plan, words[:, 2].tolist())
            logprobs = words[:, 1].copy().view(np.float32).tolist()
            plan, seconds = sent.plan, came - max(self._last_result, sent.at)
            accepted = self._scheduler.complete(plan, words[:, 0].tolist(), logprobs, tops, came)
            self._fit.saw(plan.R, plan.C, plan.context, seconds - sent.draft_s)
            if self._speculation is not None:
                self._speculation.ran(plan, accepted, seconds, sent.draft_s)
            self._last_result, self._newest = came, (plan.R, plan.C, plan.context)
            before, _ = self._of_shape.get((plan.R, plan.C), (seconds, 0))
            self._of_shape[plan.R, plan.C] = before + RECENT * (seconds - before), plan.context
            seen = {
                "step_s": seconds,
                "host_s": sent.host_s + time.thread_time() - busy,
                "host_wall_s": sent.host_wall_s + time.perf_counter() - came,
                "device_s": came - asked,
                "dispatch_s": sent.dispatch_s,
            }
            for name, value in seen.items():
                before = self._averages[name]
                self._averages[name] = value if not before else before + RECENT * (value - before)
            if self._speculation is not None:
                # The mean remembers for long what a first step took.
                self._speculation.host_s = min(self._averages["host_wall_s"], seen["host_wall_s"])

    def _learn_proposals(self, plan: Plan, fed: list[int]) -> None:
        """A plan's proposals as the draft made them. fed: the token that each of its sampled rows was given."""
        for piece, token in zip(plan.rows, fed, strict=False):  # pieces of prompts follow
            if piece.proposal is not None and piece.proposal < 0:
                plan.proposals[piece.job][-2 - piece.proposal] = token

    def _busy_until(self) -> float:
        """When the steps on their way are expected to end; asked only where there is a target to keep."""
        if not self._sent or self.options.tpot_slo_s is None:
            return 0.0
        model = self._fit.model
        seconds = sum(model.seconds(sent.plan.R, sent.plan.C, sent.plan.context) for sent in self._sent)
        return max(self._last_result, self._sent[0].at) + seconds

    def _deliver(self, job: Job, event: Event) -> None:
        if event.finish_reason:
            self._jobs.pop(job.ticket.id, None)
            if not self._jobs:
                self._changed.notify_all()  # who drains
        try:
            job.ticket.deliver(event)
        except Exception:  # a caller's fault is not to end the others' requests
            log.exception("an on_event callback raised; its request is cancelled")
            self._scheduler.cancel(job, time.perf_counter())


def _pairs(row: np.ndarray, count: int) -> tuple[tuple[int, float], ...]:
    """[2, n] ids and bits of log-probabilities -> the first ``count`` of them."""
    return tuple(zip(row[0, :count].tolist(), row[1, :count].copy().view(np.float32).tolist(), strict=True))
