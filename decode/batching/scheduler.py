"""What runs in the next step, and what its tokens do. Plain Python over numbers: no device, and the time is told.

Every running request that can decodes in every step; prompts ride along in what the token budget leaves. Who runs is
for ``decode.batching.batch`` to say. With speculation a request may get several tokens from a step: see
``decode.batching.speculation``. Proposals take what room is left, and preempt nobody.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from decode.batching.batch import Batch, Deliver
from decode.batching.holdings import Holdings
from decode.batching.jobs import Job, Piece, Plan
from decode.batching.paged_cache import TILE
from decode.batching.pages import PagePool
from decode.batching.request import Event, FinishReason
from decode.batching.shapes import Shapes
from decode.batching.speculation import Speculation, asks_draft
from decode.batching.targets import Targets
from decode.decoder import NumericsError

Top = tuple[tuple[int, float], ...]
"""The likeliest tokens and their log-probabilities, best first."""


class Scheduler(Batch):
    """The batch, and its steps.

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
        holdings = Holdings(pool, page_size, root)
        super().__init__(holdings, targets, max_batch=max_batch, max_queue=max_queue, deliver=deliver)
        self.pool, self.page_size, self.shapes, self.speculation = pool, page_size, shapes, speculation
        self._on_their_way = 0  # steps sent and not read
        self._in_doubt = False  # whether one of them has proposals: only its tokens tell how long its jobs are

    def schedule(self, now: float, busy_until: float = 0.0) -> Plan | None:
        """The next step, or None where there is nothing to run before another is read. Counts as sent: it must be run.

        busy_until: when the step in flight is expected to end, for the targets.
        """
        if self._in_doubt or (self._on_their_way and self._would_speculate()):
            return None
        rows = self._rows()
        context = sum(piece.start + 1 for piece in rows)
        pieces: list[Piece] = []
        if self.waiting or len(rows) < len(self.running):
            room = self.targets.room_for_prompt([piece.job for piece in rows], context, now, busy_until)
            pieces = self._pieces(room, len(rows))
            pieces += self._admitted(room - sum(_padded(piece.count) for piece in pieces), len(rows) + len(pieces), now)
        if not rows and not pieces:
            return None
        decoding = len(rows)
        # A prompt's last single position runs as a row: no tile is spent on it.
        rows += [piece for piece in pieces if piece.count == 1]
        pieces = [piece for piece in pieces if piece.count > 1]
        padded = sum(_padded(piece.count) for piece in pieces)
        context += sum(piece.start + 1 for piece in rows[decoding:])
        context += sum((piece.start + piece.count) * -(-piece.count // TILE) for piece in pieces)
        proposals: dict[Job, list[int]] = {}
        fills: list[Piece] = []
        if self.speculation is not None and not self._on_their_way:
            base = len(rows) + sum(piece.count == piece.job.left for piece in pieces)
            proposals, fills = self._proposals([piece.job for piece in rows[:decoding]], base, padded, context)
        if proposals:
            rows = [row for piece in rows for row in (piece, *_guessed(piece, proposals.get(piece.job, [])))]
            context += sum(piece.start + 1 for piece in rows if piece.proposal is not None)
        sampled = self._sent(rows, pieces)
        R, C = self.shapes.fit(max(1, len(sampled)), padded)
        self.counts["steps"] += 1
        self.counts["decode_steps"] += not pieces
        self._on_their_way += 1
        self._in_doubt = bool(proposals)
        asked = tuple(job for job, tokens in proposals.items() if asks_draft(tokens))
        return Plan(rows, pieces, sampled, R, C, context, proposals, asked, fills)

    def complete(
        self, plan: Plan, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[Top], now: float
    ) -> int:
        """Take a step's tokens, one for each of ``plan.sampled``, and end what they end.

        Returns:
            How many of its proposals stood.
        """
        self._on_their_way -= 1
        drawn = zip(plan.sampled, tokens, logprobs, tops, strict=True)
        if plan.proposals:
            self._in_doubt = False
            return sum(
                self._took(job, plan.proposals.get(job, []), [one[1:] for one in own], now, asked=job in plan.asked)
                for job, own in itertools.groupby(drawn, key=lambda one: one[0][0])
            )
        added = 0
        for (job, _), token, logprob, top in drawn:
            job.in_flight -= 1
            if not job.ended:  # else it stopped, or was cancelled, with this step on its way
                added += self._add(job, token, logprob, top, now)
                if self.speculation is not None:
                    self.speculation.plain(job)
        self.counts["generated_tokens"] += added
        return 0

    def _sent(self, rows: list[Piece], pieces: list[Piece]) -> list[tuple[Job, int]]:
        """Note that these are computed: the jobs that get a token, and its position."""
        sampled = []
        for piece in itertools.chain(rows, pieces):
            job = piece.job
            if piece.proposal is not None:
                sampled.append((job, piece.start + 1))
                continue
            computed = job.computed = job.computed + piece.count
            length = len(job.tokens) + job.in_flight
            if computed == length:
                sampled.append((job, length))
                job.in_flight += 1
            if computed >= (job.named + 1) * self.page_size:
                self.holdings.name(job)
        return sampled

    def _took(
        self, job: Job, proposals: list[int], drawn: list[tuple[int, float, Top]], now: float, *, asked: bool
    ) -> int:
        """A job's tokens, logprobs and likeliest from a step with proposals: one, and one for each that stands, as many
        of which are returned. asked: whether a draft model proposed."""
        job.in_flight -= 1
        if job.ended:
            return 0
        token, accepted, added = -1, 0, 0
        for place, (following, logprob, top) in enumerate(drawn):
            if place:
                if token != proposals[place - 1]:
                    break
                job.computed += 1
                accepted += 1
            token = following
            added += self._add(job, token, logprob, top, now)
            if job.ended:
                break
        self.counts["generated_tokens"] += added
        assert self.speculation is not None, "it proposed"
        if not proposals:
            self.speculation.plain(job)
            return 0
        self.counts["proposed_tokens"] += len(proposals)
        self.counts["accepted_tokens"] += accepted
        if job.guess is not None:
            before = job.guess.drafted
            self.speculation.judged(job, len(proposals), accepted, asked=asked)
            self.holdings.drafted.grew(job, before)
        self.holdings.shrink(job)
        return accepted

    def _add(self, job: Job, token: int, logprob: float, top: Top, now: float) -> bool:
        """A job's next token, which may end it. False where there is none: the numbers were no numbers."""
        if math.isnan(logprob):
            self.holdings.distrust(job)
            error = NumericsError("the model produced NaN or infinite logits for this request; check its prompt")
            self.fail(job, error, now)
            return False
        job.tokens.append(token)
        job.last_at = now
        if job.first_at is None:
            job.first_at = now
        reason: FinishReason | None = None
        if token in job.request.stop_token_ids:
            reason = "stop"
        elif len(job.tokens) >= job.end:
            reason = "length"
        event = Event(token, logprob, top, reason, None, now)
        if reason is None:
            self.deliver(job, event)
        else:
            self.finish(job, event)
        return True

    def _decoding(self) -> list[Job]:
        """The running jobs whose next position can be computed now, oldest first."""
        return [  # Job.length, but once a job and step its call is worth saving
            job for job in self.running if job.computed + 1 == len(job.tokens) + job.in_flight < job.end
        ]

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
        assert self.speculation is not None, "it is asked"
        found, fills, room = {}, [], self.shapes.prompt[-1]
        for job, tokens in self.speculation.choose(jobs, base, prompt_tokens, context).items():
            if asks_draft(tokens):
                fill = self.speculation.fill(job, room)
                if fill is not None:
                    self.holdings.drafted.grew(job, fill.start)
                    fills.append(fill)
                    room -= -(-fill.count // TILE) * TILE
                if self.speculation.behind(job):
                    continue
            if not self.holdings.grow(job, job.length + len(tokens)):
                tokens = tokens[: len(job.pages) * self.page_size - job.length]
            if tokens:
                found[job] = tokens
        return found, fills

    def _rows(self) -> list[Piece]:
        """The next position of every running job that has one, oldest first; takes pages, and preempts for them."""
        rows = []
        for job in self._decoding():
            if job.slot < 0:  # preempted just now
                continue
            if job.computed < len(job.pages) * self.page_size or self.grow(job, job.computed + 1):
                rows.append(Piece(job, job.computed, 1))
        return rows

    def _pieces(self, room: int, rows: int) -> list[Piece]:
        """More of the prompts that are under way, oldest first."""
        pieces: list[Piece] = []
        for job in self.running:
            if job.left <= 1 or rows + len(pieces) >= self.shapes.mixed_rows[-1]:
                continue
            if room <= 0:
                break
            pieces.append(self._piece(job, room))
            room -= _padded(pieces[-1].count)
        return pieces

    def _piece(self, job: Job, room: int) -> Piece:
        """The next positions of a job's prompt. The pages that they fill can be shared from now on, in this very step:
        in every layer a step writes before it reads."""
        count = min(job.left, room)
        self.holdings.name(job, count)
        return Piece(job, job.computed, count)

    def _admitted(self, room: int, rows: int, now: float) -> list[Piece]:
        """The first pieces of waiting jobs that may join, in order; the first that may not holds up the rest."""
        if self.targets.ttft_s is not None:
            self.refuse_late(now)
        pieces: list[Piece] = []
        while self.waiting and room > 0 and rows + len(pieces) < self.shapes.mixed_rows[-1]:
            job = self.join()
            if job is None:
                break
            if self.speculation is not None:
                self.speculation.admitted(job, self.holdings.drafted.beginning(job))
            pieces.append(self._piece(job, room))
            room -= _padded(pieces[-1].count)
        return pieces


def _guessed(piece: Piece, tokens: Sequence[int]) -> list[Piece]:
    """The rows of a job's proposals, which follow its own."""
    return [Piece(piece.job, piece.start + 1 + place, 1, token) for place, token in enumerate(tokens)]


def _padded(tokens: int) -> int:
    """Room that a piece takes in the prompt part: whole tiles, or none for a single position, which runs as a row."""
    return -(-tokens // TILE) * TILE if tokens > 1 else 0
