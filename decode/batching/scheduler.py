"""Who runs in the next step. Plain Python over numbers: no device, no thread, and the time is told.

The rules: first come, first served. Every running request that can decodes in every step; prompts ride along in what
the token budget leaves. A request holds the pages of its prompt from admission on and takes further ones as it grows;
when there is none, the youngest gives up all of its own and is computed again later: its tokens are known, and the
noise of a position does not depend on when it is drawn, so its output goes on unchanged. The oldest is never preempted
and every admitted request fits the cache alone, so it always ends, and so do all. With speculation a request may get
several tokens from a step: see ``decode.batching.speculation``. Proposals take what room is left, and preempt nobody.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence

from decode.batching.drafted import DraftedPages
from decode.batching.jobs import Job, Piece, Plan
from decode.batching.paged_cache import TILE
from decode.batching.pages import PagePool, chain
from decode.batching.request import Event, FinishReason, RefusedError, Request, Ticket
from decode.batching.shapes import Shapes
from decode.batching.speculation import Speculation
from decode.batching.targets import Targets
from decode.decoder import NumericsError
from model.wording import number_of

Deliver = Callable[[Job, Event], None]


class Scheduler:
    """Jobs, their pages, and the next step.

    Args:
        pool: the pages of the cache.
        page_size: positions of one.
        shapes: the compiled steps.
        targets: what the TTFT and TPOT targets allow.
        root: the name that the first page of every sequence follows; see ``decode.batching.pages.root``.
        max_batch: requests that run together at most.
        max_queue: requests that wait at most.
        deliver: called with each event.
        speculation: what proposes tokens; None: nothing does.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        shapes: Shapes,
        targets: Targets,
        *,
        root: bytes,
        max_batch: int,
        max_queue: int,
        deliver: Deliver,
        speculation: Speculation | None = None,
    ):
        self.pool, self.page_size, self.shapes, self.targets = pool, page_size, shapes, targets
        self.max_queue, self.deliver, self._root = max_queue, deliver, root
        self.speculation = speculation
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []  # by age, the oldest first
        self.counts: Counter[str] = Counter()
        self._slots = list(range(max_batch - 1, -1, -1))
        self._order = 0
        self._on_their_way = 0  # steps sent and not read
        self._drafted = DraftedPages(page_size)
        self._in_doubt = False  # whether one of them has proposals: only its tokens tell how long its jobs are

    def submit(self, ticket: Ticket, request: Request, now: float) -> Job:
        """Queue a request that fits (see ``decode.batching.engine.Engine.check``).

        Raises:
            RefusedError: the queue is full, or the TTFT target would be missed.
        """
        if len(self.waiting) >= self.max_queue:
            self.counts["refused"] += 1
            ahead = self.targets.first_token_s(len(request.prompt), request.max_new_tokens, self.running, self.waiting)
            raise RefusedError(f"the queue of {number_of(self.max_queue, 'request')} is full; try later", ahead)
        job = Job(ticket, request, self._order, now, list(request.prompt))
        if self.targets.ttft_s is not None:
            predicted = self.targets.first_token_s(
                self._uncached(job), request.max_new_tokens, self.running, self.waiting
            )
            if predicted > self.targets.ttft_s and (self.running or self.waiting):
                self.counts["refused"] += 1
                raise RefusedError(
                    f"the first token would take {predicted:.2f} s, more than the target of {self.targets.ttft_s:g} s, "
                    f"behind {len(self.running)} running and {len(self.waiting)} waiting requests; try later",
                    self.targets.retry_after_s(predicted),
                )
        self._order += 1
        self.counts["submitted"] += 1
        self.waiting.append(job)
        return job

    def cancel(self, job: Job, now: float) -> None:
        """End a job now. A step in flight may still write to its pages: whoever gets them writes later."""
        if not job.ended:
            self.counts["cancelled"] += 1
            self._end(job, "cancelled", now)

    def fail(self, job: Job, error: Exception, now: float) -> None:
        """End a job with an error."""
        if not job.ended:
            self.counts["failed"] += 1
            self._end(job, "error", now, error)

    def schedule(self, now: float, busy_until: float = 0.0) -> Plan | None:
        """The next step, or None where there is nothing to run before another is read. Counts as sent: it must be run.

        busy_until: when the step in flight is expected to end, for the targets.
        """
        if self._in_doubt or (self._on_their_way and self._would_speculate()):
            return None
        rows = self._rows()
        positions = sum(piece.start + 1 for piece in rows)
        room = self.targets.room_for_prompt([piece.job for piece in rows], positions, now, busy_until)
        pieces = self._pieces(room, len(rows))
        pieces += self._admitted(room - sum(_padded(piece.count) for piece in pieces), len(rows) + len(pieces), now)
        if not rows and not pieces:
            return None
        # A prompt's last single position runs as a row: no tile is spent on it.
        decoding = [piece.job for piece in rows]
        rows += [piece for piece in pieces if piece.count == 1]
        pieces = [piece for piece in pieces if piece.count > 1]
        padded = sum(_padded(piece.count) for piece in pieces)
        context = sum(piece.start + 1 for piece in rows)
        context += sum((piece.start + piece.count) * -(-piece.count // TILE) for piece in pieces)
        base = len(rows) + sum(piece.count == piece.job.left for piece in pieces)
        proposals, fills = self._proposals(decoding, base, padded, context)
        single, rows, sampled = rows, [], []
        for piece in (*single, *pieces):
            job, guesses = piece.job, proposals.get(piece.job, [])
            if piece.count == 1:
                rows.append(piece)
                rows += [Piece(job, piece.start + 1 + place, 1, token) for place, token in enumerate(guesses)]
            job.computed += piece.count
            if job.left == 0:
                sampled += [(job, job.length + place) for place in range(len(guesses) + 1)]
                job.in_flight += 1
            self._name_pages(job, job.computed)
        context += sum(piece.start + 1 for piece in rows if piece.proposal is not None)
        R, C = self.shapes.fit(max(1, len(sampled)), padded)
        self.counts["steps"] += 1
        self.counts["decode_steps"] += not pieces
        self._on_their_way += 1
        self._in_doubt = bool(proposals)
        return Plan(rows, pieces, sampled, R, C, context, proposals, fills)

    def complete(
        self,
        plan: Plan,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[tuple[tuple[int, float], ...]],
        now: float,
    ) -> None:
        """Take a step's tokens, one for each of ``plan.sampled``, and end what they end."""
        self._on_their_way -= 1
        if plan.proposals:
            self._in_doubt = False
        at = 0
        for job, rows in itertools.groupby(job for job, _ in plan.sampled):
            count = sum(1 for _ in rows)
            job.in_flight -= 1
            if not job.ended:  # else it stopped, or was cancelled, with this step on its way
                drawn = zip(tokens[at : at + count], logprobs[at : at + count], tops[at : at + count], strict=True)
                self._took(job, plan.proposals.get(job, []), list(drawn), now)
            at += count

    def _took(
        self,
        job: Job,
        proposals: list[int],
        drawn: list[tuple[int, float, tuple[tuple[int, float], ...]]],
        now: float,
    ) -> None:
        """A job's tokens, logprobs and likeliest from one step: one, and one for each proposal that stands."""
        token = -1
        accepted = 0
        for place, (following, logprob, top) in enumerate(drawn):
            if place:
                if token != proposals[place - 1]:
                    break
                job.computed += 1
                accepted += 1
            token = following
            self._add(job, token, logprob, top, now)
            if job.ended:
                break
        if self.speculation is None:
            return
        if proposals:
            self.counts["proposed_tokens"] += len(proposals)
            self.counts["accepted_tokens"] += accepted
            if job.guess is not None:
                before = job.guess.drafted
                self.speculation.judged(job, len(proposals), accepted)
                self._drafted.grew(job, before)
            self._give_back(job)
        else:
            self.speculation.plain(job)

    def _add(self, job: Job, token: int, logprob: float, top: tuple[tuple[int, float], ...], now: float) -> None:
        """A job's next token, which may end it."""
        if math.isnan(logprob):
            self.pool.distrust(job.pages)
            job.named = len(job.pages)  # and do not name them again
            error = NumericsError("the model produced NaN or infinite logits for this request; check its prompt")
            self.fail(job, error, now)
            return
        job.tokens.append(token)
        job.last_at = now
        if job.first_at is None:
            job.first_at = now
        self.counts["generated_tokens"] += 1
        reason: FinishReason | None = None
        if token in job.request.stop_token_ids:
            reason = "stop"
        elif len(job.tokens) - job.prompt_len >= job.request.max_new_tokens:
            reason = "length"
        if reason is None:
            self._name_pages(job, job.computed)
            self.deliver(job, Event(token, logprob, top, None, None, now))
        else:
            self._count_finished(job)
            self._end(job, reason, now, token=token, logprob=logprob, top=top)

    def _decoding(self) -> list[Job]:
        """The running jobs whose next position can be computed now, oldest first."""
        return [job for job in self.running if job.left == 1 and not job.whole]

    def _would_speculate(self) -> bool:
        """Whether it would pay to, going by the tokens that are known: then those on their way are waited for."""
        jobs = self._decoding() if self.speculation is not None else []
        if self.speculation is None or not jobs:
            return False
        return bool(self.speculation.choose(jobs, len(jobs), 0, sum(job.length for job in jobs)))

    def _proposals(
        self, jobs: list[Job], base: int, prompt_tokens: int, context: int
    ) -> tuple[dict[Job, list[int]], list[Piece]]:
        """What to propose in a step, with the pages for it: none is preempted for that. And what a draft model has to
        compute for it; one that cannot do so in one step goes on in the next, and proposes then."""
        if self.speculation is None or self._on_their_way:
            return {}, []
        found, fills, room = {}, [], self.shapes.prompt[-1]
        for job, tokens in self.speculation.choose(jobs, base, prompt_tokens, context).items():
            fill = self.speculation.fill(job, room)
            if fill is not None:
                self._drafted.grew(job, fill.start)
                fills.append(fill)
                room -= -(-fill.count // TILE) * TILE
            if self.speculation.behind(job):
                continue
            need = -(-(job.length + len(tokens)) // self.page_size) - len(job.pages)
            pages = self._allocate(need) if need > 0 else []
            if pages is None:
                tokens = tokens[: len(job.pages) * self.page_size - job.length]
            job.pages += pages or []
            if tokens:
                found[job] = tokens
        return found, fills

    def _allocate(self, count: int) -> list[int] | None:
        """New pages, of which a draft model has computed nothing."""
        pages = self.pool.allocate(count)
        self._drafted.emptied(pages or ())
        return pages

    def _give_back(self, job: Job) -> None:
        """The pages that proposals took and did not fill."""
        keep = -(-job.length // self.page_size)
        self.pool.release(job.pages[keep:])
        del job.pages[keep:]

    def _rows(self) -> list[Piece]:
        """The next position of every running job that has one, oldest first; takes pages, and preempts for them."""
        rows = []
        for job in self._decoding():
            if job.slot < 0:  # preempted just now
                continue
            if self._grow(job, job.length):
                rows.append(Piece(job, job.computed, 1))
        return rows

    def _grow(self, job: Job, length: int) -> bool:
        """Give a job the pages of ``length`` positions, preempting younger ones; False: it was the youngest itself."""
        while (need := -(-length // self.page_size) - len(job.pages)) > 0:
            pages = self._allocate(need)
            if pages is not None:
                job.pages += pages
                break
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is job:
                return False
        return True

    def _preempt(self, job: Job) -> None:
        self.counts["preemptions"] += 1
        self._leave(job)
        job.computed = 0
        self.waiting.appendleft(job)

    def _pieces(self, room: int, rows: int) -> list[Piece]:
        """More of the prompts that are under way, oldest first."""
        pieces: list[Piece] = []
        for job in self.running:
            if job.left <= 1 or rows + len(pieces) >= self.shapes.mixed_rows[-1]:
                continue
            piece = self._piece(job, room)
            if piece is None:
                break
            pieces.append(piece)
            room -= _padded(piece.count)
        return pieces

    def _piece(self, job: Job, room: int) -> Piece | None:
        """The next positions of a job's prompt. The pages that they fill can be shared from now on, in this very step:
        in every layer a step writes before it reads."""
        count = min(job.left, room)
        if count <= 0:
            return None
        self._name_pages(job, job.computed + count)
        return Piece(job, job.computed, count)

    def _admitted(self, room: int, rows: int, now: float) -> list[Piece]:
        """The first pieces of waiting jobs that may join, in order; the first that may not holds up the rest."""
        if self.targets.ttft_s is not None:
            for job in [job for job in self.waiting if self.targets.late(job, now)]:
                self._refuse_late(job, now)
        pieces: list[Piece] = []
        while self.waiting:
            job = self.waiting[0]
            if room <= 0 or not self._slots or job.in_flight or rows + len(pieces) >= self.shapes.mixed_rows[-1]:
                break
            positions = sum(other.length for other in self.running) + job.length
            if not self.targets.holds(len(self.running) + 1, positions, job.request.max_new_tokens):
                break
            if not self._give_pages(job):
                break
            self.waiting.popleft()
            job.slot, job.fresh = self._slots.pop(), True
            self.running.append(job)
            if self.speculation is not None:
                self.speculation.admitted(job, self._drafted.beginning(job))
            if job.reused is None:
                job.reused = job.ticket.cached_tokens = job.computed
                self.targets.admitted(job.left)
                self.counts["prompt_tokens"] += job.prompt_len
                self.counts["cached_tokens"] += job.computed
            piece = self._piece(job, room)
            assert piece is not None, "room is above 0, and something is left to compute"
            pieces.append(piece)
            room -= _padded(piece.count)
        return pieces

    def _give_pages(self, job: Job) -> bool:
        """The pages of all its tokens: those that the prefix cache has, and new ones; False where there are too few."""
        hits = self._hits(job)
        self.pool.hold(hits)
        need = -(-job.length // self.page_size) - len(hits)
        # Each running job may soon want one more: admitting into the last pages would only preempt again.
        spare = len(self.running)
        pages = self._allocate(need) if need + spare <= self.pool.available else None
        if pages is None:
            self.pool.release(hits)
            return False
        job.pages = hits + pages
        job.computed = len(hits) * self.page_size
        job.named = len(hits)
        return True

    def _hits(self, job: Job) -> list[int]:
        """Cached pages of the beginning of a job's tokens, all but the last of which may come from there."""
        if not self.pool.keep:
            return []
        self._extend_names(job, (len(job.tokens) - 1) // self.page_size)
        return self.pool.find(job.names[: (len(job.tokens) - 1) // self.page_size])

    def _uncached(self, job: Job) -> int:
        """Positions of a new job that would have to be computed now."""
        return job.left - len(self._hits(job)) * self.page_size

    def _extend_names(self, job: Job, count: int) -> None:
        while len(job.names) < count:
            at = len(job.names) * self.page_size
            before = job.names[-1] if job.names else self._root
            job.names.append(chain(before, job.tokens[at : at + self.page_size]))

    def _name_pages(self, job: Job, computed: int) -> None:
        """Tell the pool of pages that positions 0..computed fill, as far as their tokens are known."""
        full = min(computed, len(job.tokens)) // self.page_size
        if not self.pool.keep or full <= job.named:
            return
        self._extend_names(job, full)
        for place in range(job.named, full):
            self.pool.name(job.pages[place], job.names[place])
        job.named = full

    def _leave(self, job: Job) -> None:
        """Out of the batch, if it is in it."""
        if job.slot < 0:
            return
        self.running.remove(job)
        self._slots.append(job.slot)
        self.pool.release(job.pages)
        job.slot, job.pages, job.named = -1, [], 0

    def _count_finished(self, job: Job) -> None:
        count = len(job.tokens) - job.prompt_len
        self.counts["completed"] += 1
        self.targets.finished(count)
        assert job.first_at is not None, "a token was just added"
        ttft_s, tpot_s = self.targets.ttft_s, self.targets.tpot_s
        in_time = ttft_s is None or job.first_at - job.arrived <= ttft_s
        steady = tpot_s is None or job.last_at - job.first_at <= tpot_s * (count - 1)
        self.counts["goodput_requests"] += in_time and steady

    def _refuse_late(self, job: Job, now: float) -> None:
        self.counts["refused"] += 1
        waited = now - job.arrived
        error = RefusedError(
            f"waited {waited:.2f} s; its first token can no longer come within {self.targets.ttft_s:g} s; try later",
            waited,
        )
        self._end(job, "error", now, error)

    def _end(
        self,
        job: Job,
        reason: FinishReason,
        now: float,
        error: Exception | None = None,
        *,
        token: int | None = None,
        logprob: float = 0.0,
        top: tuple[tuple[int, float], ...] = (),
    ) -> None:
        if job.slot >= 0:
            self._leave(job)
        else:
            self.waiting.remove(job)
        job.ended = True
        self.deliver(job, Event(token, logprob, top, reason, error, now))


def _padded(tokens: int) -> int:
    """Room that a piece takes in the prompt part: whole tiles, or none for a single position, which runs as a row."""
    return -(-tokens // TILE) * TILE if tokens > 1 else 0
