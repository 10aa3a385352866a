"""What the host says about a step: one vector of int32.

A step is so one small transfer, and processes that follow another need nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from decode.batching.jobs import Job, Piece, Plan
from decode.batching.paged_cache import TILE
from decode.batching.sampling import BIASED, LISTED, MIN_P, PENALISED, RANDOM, TOP_K, TOP_P
from decode.sampling import SamplingValues

SLOT_WORDS = 8
"""Numbers a slot that stay: asks, temperature, top_k, top_p, min_p, penalty, and a seed of two."""

SAMPLER_WORDS = 3 + SLOT_WORDS
"""Numbers a sampled row: place, slot, position, and those of its slot."""


@dataclass(frozen=True)
class Packing:
    """How a step of R rows and C prompt tokens lies in its vector; P pages in a table."""

    R: int
    C: int
    P: int

    @property
    def tokens(self) -> int:
        return self.R + self.C

    @property
    def tables(self) -> int:
        return self.R + self.C // TILE

    @property
    def size(self) -> int:
        return 2 * self.tokens + SAMPLER_WORDS * self.R + self.tables * self.P

    def parts(self, vector: Any) -> tuple[Any, Any, Any, Any]:
        """Views: tokens (-1: the slot's newest; -2, -3...: its first proposal, its second...) and positions (-1:
        padding) [R + C], sampler [words, R], tables."""
        N, R = self.tokens, self.R
        middle = 2 * N + SAMPLER_WORDS * R
        sampler = vector[2 * N : middle].reshape(SAMPLER_WORDS, R)
        return vector[:N], vector[N : 2 * N], sampler, vector[middle:].reshape(self.tables, self.P)

    def pack(self, plan: Plan, sampler: np.ndarray, tables: np.ndarray, no_slot: int) -> np.ndarray:
        """The vector of a plan. sampler: int32 [M, SLOT_WORDS], see ``sampler_words``; tables: int32 [M, P]; both by
        slot."""
        vector = np.zeros(self.size, np.int32)
        tokens, positions, words, own_tables = self.parts(vector)
        positions[:] = -1
        words[1] = no_slot
        rows = len(plan.rows)
        if rows:  # whole columns at once: a row at a time takes NumPy as long as all of them
            tokens[:rows] = [_fed(piece) for piece in plan.rows]
            positions[:rows] = [piece.start for piece in plan.rows]
            own_tables[:rows] = tables[[piece.job.slot for piece in plan.rows]]
        places = list(range(rows))
        at, tile = self.R, self.R
        ending = {job for job, _ in plan.sampled} if plan.pieces else set()
        for piece in plan.pieces:
            end = piece.start + piece.count
            tokens[at : at + piece.count] = piece.job.tokens[piece.start : end]
            positions[at : at + piece.count] = range(piece.start, end)
            if piece.job in ending:
                places.append(at + piece.count - 1)
            tiles = -(-piece.count // TILE)
            own_tables[tile : tile + tiles] = tables[piece.job.slot]
            at, tile = at + tiles * TILE, tile + tiles
        if plan.sampled:
            slots, positions = [job.slot for job, _ in plan.sampled], [position for _, position in plan.sampled]
            words[:3, : len(slots)] = places, slots, positions
            words[3:, : len(slots)] = sampler[slots].T
        return vector


def _fed(piece: Piece) -> int:
    """The token of a row; -1 where only the device knows it, -2, -3... for a draft's proposals that only it knows."""
    if piece.proposal is not None:
        return piece.proposal
    tokens = piece.job.tokens
    return tokens[piece.start] if piece.start < len(tokens) else -1


def sampler_words(job: Job) -> np.ndarray:
    """A job's sampling parameters, int32 [SLOT_WORDS]: what it asks, and floats as their bits."""
    params, request = job.request.sampling, job.request
    form, values = params.form, SamplingValues.of(params)
    asks = (
        BIASED * bool(request.logit_bias)
        | PENALISED * form.penalty
        | RANDOM * form.random
        | TOP_K * form.top_k
        | TOP_P * form.top_p
        | MIN_P * form.min_p
        | LISTED * (request.top_logprobs > 0)
    )
    floats = np.array([values.temperature, values.top_p, values.min_p, values.penalty], np.float32).view(np.int32)
    seed = np.asarray(values.seed, np.uint32).view(np.int32)
    return np.array([asks, floats[0], values.top_k, *floats[1:], *seed], np.int32)


class StepVectors:
    """Makes the vector of one plan after another, and keeps what stays from step to step.

    Args:
        max_batch: slots, M. pages_each: pages of a table, P.
        set_slot: called with a slot, the tokens seen and the logit bias, where a request that begins has any use for
            them; see ``decode.batching.runner.Runner.set_slot``.

    tables: int32 [M, P], the pages of each slot's job. sampler: int32 [M, SLOT_WORDS], of slots that got a token.
    """

    def __init__(self, max_batch: int, pages_each: int, set_slot: Callable[..., None]):
        self.max_batch, self.pages_each, self._set_slot = max_batch, pages_each, set_slot
        self.tables = np.zeros((max_batch, pages_each), np.int32)
        self.sampler = np.zeros((max_batch, SLOT_WORDS), np.int32)
        self._jobs: list[Job] = []  # of the newest plan, where it had nothing but rows
        self._newest, self._listed = np.zeros(0, np.int32), False

    def of(self, plan: Plan) -> tuple[np.ndarray, bool]:
        """The plan's vector, and whether a row of it asks for its likeliest tokens. Plans must come in the order in
        which they are sent."""
        packing = Packing(plan.R, plan.C, self.pages_each)
        jobs = [piece.job for piece in plan.rows]
        changed = [row for row, job in enumerate(jobs) if job.fresh or job.tabled != len(job.pages)]
        for job in [jobs[row] for row in changed] + [piece.job for piece in plan.pieces]:
            self._put_pages(job)
        plain = not plan.pieces and not plan.proposals and len(plan.sampled) == len(jobs)
        same = plain and jobs == self._jobs
        if same and not any(jobs[row].fresh for row in changed):
            # Most steps: each job goes on from the token that the step before chose. The vector is that step's but for
            # the positions, and to change these costs the host far less than to gather all of it from the jobs.
            self._newest = vector = self._newest.copy()
            tokens, positions, words, tables = packing.parts(vector)
            tokens[: len(jobs)] = -1
            positions[: len(jobs)] += 1
            words[2, : len(jobs)] += 1
            for row in changed:
                tables[row] = self.tables[jobs[row].slot]
            return vector, self._listed
        for job, _ in plan.sampled:
            if job.fresh:
                # At the end of a prompt, or of what was computed again: from then on the step marks what it generates.
                request, job.fresh = job.request, False
                self.sampler[job.slot] = sampler_words(job)
                if request.logit_bias or request.sampling.repetition_penalty != 1:
                    self._set_slot(job.slot, job.tokens, request.logit_bias)
        vector = packing.pack(plan, self.sampler, self.tables, self.max_batch)
        self._jobs, self._newest = jobs if plain else [], vector
        self._listed = any(job.request.top_logprobs for job, _ in plan.sampled)
        return vector, self._listed

    def _put_pages(self, job: Job) -> None:
        """A job's pages in its slot's row of the table, those that are not there already."""
        self.tables[job.slot, job.tabled : len(job.pages)] = job.pages[job.tabled :]
        job.tabled = len(job.pages)
