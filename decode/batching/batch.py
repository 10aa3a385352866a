"""Who waits, who runs, and how a request comes in and ends. Plain Python.

First come, first served. A request holds the pages of its prompt from admission on and takes further ones as it grows;
when there is none, the youngest gives up all of its own and is computed again later: its tokens are known, and the
noise of a position does not depend on when it is drawn, so its output goes on unchanged. The oldest is never preempted
and every admitted request fits the cache alone, so it always ends, and so do all.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from decode.batching.holdings import Holdings
from decode.batching.jobs import Job
from decode.batching.request import Event, RefusedError, Request, Ticket
from decode.batching.targets import Targets
from model.wording import number_of

Deliver = Callable[[Job, Event], None]


class Batch:
    """Jobs that wait and jobs that run, these by age, the oldest first.

    Args:
        holdings: the pages of jobs.
        targets: what the TTFT and TPOT targets allow.
        max_batch: requests that run together at most.
        max_queue: requests that wait at most.
        deliver: called with each event.
    """

    def __init__(self, holdings: Holdings, targets: Targets, *, max_batch: int, max_queue: int, deliver: Deliver):
        self.holdings, self.targets, self.max_queue, self.deliver = holdings, targets, max_queue, deliver
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.counts: Counter[str] = Counter()
        self._slots = list(range(max_batch - 1, -1, -1))
        self._order = 0

    def submit(self, ticket: Ticket, request: Request, now: float) -> Job:
        """Queue a request that fits (see ``decode.batching.engine.Engine.check``).

        Raises:
            RefusedError: the queue is full, or the TTFT target would be missed.
        """
        targets, output = self.targets, request.max_new_tokens
        if len(self.waiting) >= self.max_queue:
            self.counts["refused"] += 1
            ahead = targets.first_token_s(len(request.prompt), output, self.running, self.waiting)
            raise RefusedError(f"the queue of {number_of(self.max_queue, 'request')} is full; try later", ahead)
        job = Job(ticket, request, self._order, now, list(request.prompt))
        if targets.ttft_s is not None:
            predicted = targets.first_token_s(self.holdings.uncached(job), output, self.running, self.waiting)
            if predicted > targets.ttft_s and (self.running or self.waiting):
                self.counts["refused"] += 1
                raise RefusedError(
                    f"the first token would take {predicted:.2f} s, more than the target of {targets.ttft_s:g} s, "
                    f"behind {len(self.running)} running and {len(self.waiting)} waiting requests; try later",
                    targets.retry_after_s(predicted),
                )
        self._order += 1
        self.counts["submitted"] += 1
        self.waiting.append(job)
        return job

    def cancel(self, job: Job, now: float) -> None:
        """End a job now. A step in flight may still write to its pages: whoever gets them writes later."""
        if not job.ended:
            self.counts["cancelled"] += 1
            if count := len(job.tokens) - job.prompt_len:
                self.targets.finished(count)  # a stop string or an impatient reader makes room, too
            self._end(job, Event(None, 0.0, (), "cancelled", None, now))

    def fail(self, job: Job, error: Exception, now: float) -> None:
        """End a job with an error."""
        if not job.ended:
            self.counts["failed"] += 1
            self._end(job, Event(None, 0.0, (), "error", error, now))

    def refuse_late(self, now: float) -> None:
        """End the waiting jobs whose first token can no longer come in time.

        Where none runs, the first may try as long as there is time left: it keeps nobody waiting, and what steps take
        is only learned from steps. A prediction that is far too high would refuse all requests for ever.
        """
        late = [job for job in self.waiting if self.targets.late(job, now)]
        if late and not self.running and now < late[0].arrived + (self.targets.ttft_s or 0.0):
            del late[0]
        for job in late:
            self.counts["refused"] += 1
            waited = now - job.arrived
            error = RefusedError(
                f"waited {waited:.2f} s; its first token can no longer come within {self.targets.ttft_s:g} s; "
                "try later",
                waited,
            )
            self._end(job, Event(None, 0.0, (), "error", error, now))

    def join(self) -> Job | None:
        """The first of those that wait starts to run, where there is a slot, pages, and time for one more."""
        job = self.waiting[0]
        if not self._slots or job.in_flight:
            return None
        positions = sum(other.length for other in self.running) + job.length
        if not self.targets.holds(len(self.running) + 1, positions, job.request.max_new_tokens):
            return None
        # Each running job may soon want one more page: admitting into the last ones would only preempt again.
        if not self.holdings.admit(job, spare=len(self.running)):
            return None
        self.waiting.popleft()
        job.slot, job.fresh = self._slots.pop(), True
        self.running.append(job)
        if job.reused is None:
            job.reused = job.ticket.cached_tokens = job.computed
            self.targets.admitted(job.left)
            self.counts["prompt_tokens"] += job.prompt_len
            self.counts["cached_tokens"] += job.computed
        return job

    def grow(self, job: Job, length: int) -> bool:
        """Give a job the pages of ``length`` positions, preempting younger ones; False: it was the youngest itself."""
        while not self.holdings.grow(job, length):
            youngest = self.running[-1]
            self.counts["preemptions"] += 1
            self._leave(youngest)
            youngest.computed = 0
            self.waiting.appendleft(youngest)
            if youngest is job:
                return False
        return True

    def finish(self, job: Job, last: Event) -> None:
        """End a job by itself; ``last`` has its last token, which its tokens have already."""
        count = len(job.tokens) - job.prompt_len
        self.counts["completed"] += 1
        self.targets.finished(count)
        assert job.first_at is not None, "a token was just added"
        ttft_s, tpot_s = self.targets.ttft_s, self.targets.tpot_s
        in_time = ttft_s is None or job.first_at - job.arrived <= ttft_s
        steady = tpot_s is None or job.last_at - job.first_at <= tpot_s * (count - 1)
        self.counts["goodput_requests"] += in_time and steady
        self._end(job, last)

    def _leave(self, job: Job) -> None:
        """Out of those that run."""
        self.running.remove(job)
        self._slots.append(job.slot)
        job.slot = -1
        self.holdings.leave(job)

    def _end(self, job: Job, last: Event) -> None:
        if job.slot >= 0:
            self._leave(job)
        else:
            self.waiting.remove(job)
        job.ended = True
        self.deliver(job, last)
