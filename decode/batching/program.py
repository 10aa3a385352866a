"""The compiled step: decodes and pieces of prompts together, through the model and to the next tokens.

Everything the host says about a step is one vector of int32, so that a step is one small transfer, and processes that
follow another need nothing else. What only the device knows, each slot's newest token, stays there: the next step may
be sent before anyone has read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from decode.batching.jobs import Job, Piece, Plan
from decode.batching.paged_cache import TILE, PagedCache, page_specs
from decode.batching.request import MOST_TOP_LOGPROBS
from decode.batching.sampling import BIASED, LISTED, MIN_P, PENALISED, RANDOM, TOP_K, TOP_P, RowValues, sample_rows
from decode.cache import KVCache
from decode.sampling import SamplingValues
from decode.speculation.proposer import MOST_PROPOSALS
from decode.step import SEEN, Programs, mark

SLOT_WORDS = 8
"""Numbers a slot that stay: asks, temperature, top_k, top_p, min_p, penalty, and a seed of two."""

SAMPLER_WORDS = 3 + SLOT_WORDS
"""Numbers a sampled row: place, slot, position, and those of its slot."""


class Slots(NamedTuple):
    """What the device keeps for each slot of the batch.

    token: int32 [M], the newest token
    seen: bool [M, V] split over the vocabulary, tokens already in the row, where it has a repetition penalty
    bias: float32 [M, V] split likewise, the logit bias, where it has one
    """

    token: jax.Array
    seen: jax.Array
    bias: jax.Array


class Chosen(NamedTuple):
    """What a step returns: words int32 [R, 3], each row's token, the bits of its logprob and the token that it was fed;
    and the likeliest tokens int32 [R, 2, n], ids above the bits of their logprobs, meaningful where a row asked."""

    words: jax.Array
    top: jax.Array


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


def step(programs: Programs, shape: Packing) -> Any:
    """A jitted (params, cache, token, seen, bias, proposals, vector) -> (cache, token, seen, chosen); the three that it
    takes and returns are donated. proposals: int32 [M, MOST_PROPOSALS], by slot, of a draft model where there is one.
    """
    graph = programs.graph if shape.C else programs.decode_graph
    collectives = programs.collectives
    platform = programs.layout.platform

    def run(
        params: list[jax.Array],
        cache: KVCache,
        token: jax.Array,
        seen: jax.Array,
        bias: jax.Array,
        proposals: jax.Array,
        vector: jax.Array,
    ) -> tuple[KVCache, jax.Array, jax.Array, Chosen]:
        model = programs.model(graph, params)
        tokens, positions, sampler, tables = shape.parts(vector)
        places, slots = sampler[0], sampler[1]
        floats = lax.bitcast_convert_type(sampler, jnp.float32)
        newest = jnp.take(token, slots, mode="clip")
        asked = tokens[: shape.R]
        guess = proposals[jnp.minimum(slots, proposals.shape[0] - 1), jnp.clip(-2 - asked, 0, MOST_PROPOSALS - 1)]
        own = jnp.where(asked >= 0, asked, jnp.where(asked == -1, newest, guess))
        tokens = jnp.concatenate([own, tokens[shape.R :]])
        paged = PagedCache(cache, tables, positions, shape.R, platform, programs.kernels)
        hidden, paged = model(tokens[None], jnp.maximum(positions, 0)[None], paged)
        values = RowValues(
            asks=sampler[3],
            position=sampler[2],
            temperature=floats[4],
            top_k=sampler[5],
            top_p=floats[6],
            min_p=floats[7],
            penalty=floats[8],
            seed=lax.bitcast_convert_type(sampler[9:11].T, jnp.uint32),
        )
        # Where a row is penalised, the token it was just given counts as seen: a prompt's are marked by the host.
        fed = jnp.take(tokens, places)[:, None]

        def marked(seen: jax.Array) -> jax.Array:
            return seen.at[slots].set(mark(seen[jnp.minimum(slots, seen.shape[0] - 1)], fed, fed >= 0), mode="drop")

        seen = lax.cond(jnp.any(values.asks & PENALISED), marked, lambda seen: seen, seen)
        logits = model.logits(jnp.take(hidden[0], places, axis=0))
        got = sample_rows(logits, values, bias, seen, slots, programs.config.vocab_size, collectives, MOST_TOP_LOGPROBS)
        words = jnp.stack([got.token, lax.bitcast_convert_type(got.logprob, jnp.int32), fed[:, 0]], axis=1)
        top = jnp.stack([got.top_ids, lax.bitcast_convert_type(got.top_logprobs, jnp.int32)], axis=1)
        token = token.at[slots].set(got.token, mode="drop")
        return paged.cache, token, seen, Chosen(words, top)

    everywhere: Any = PartitionSpec()
    split = programs.layout.spec(SEEN)
    return programs.jit(
        run,
        (
            programs.param_specs(),
            page_specs(programs),
            everywhere,
            split,
            split,
            everywhere,
            everywhere,
        ),
        (page_specs(programs), everywhere, split, Chosen(everywhere, everywhere)),
        donate=(1, 2, 3),
    )


def set_slot(programs: Programs) -> Callable[..., Any]:
    """(seen, bias, slot [], seen_row [V], bias_row [V]) -> (seen, bias), both donated: a slot's own rows replaced."""

    def run(
        seen: jax.Array, bias: jax.Array, slot: jax.Array, seen_row: jax.Array, bias_row: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return seen.at[slot].set(seen_row), bias.at[slot].set(bias_row)

    split, row = programs.layout.spec(SEEN), programs.layout.spec(("vocab",))
    return programs.jit(run, (split, split, PartitionSpec(), row, row), (split, split), donate=(0, 1))
