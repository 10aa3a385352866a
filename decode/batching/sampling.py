"""Each row's own sampling parameters inside one compiled step.

The arithmetic is that of ``decode.sampling``, and so is the noise: a function of (seed, position, token), never of
the company a row is in. What no row of a step asks for is skipped while the step runs, by ``lax.cond``: nothing is
compiled anew, and greedy steps pay for no filter.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from decode.sampling import argmax, gumbel, largest_threshold, ordered_bits
from sharding.collectives import Collectives, tensor_index
from sharding.mesh import TENSOR

BIASED, PENALISED, RANDOM, TOP_K, TOP_P, MIN_P, LISTED = (1 << bit for bit in range(7))
"""Bits of a row's ``asks``: a logit bias, a repetition penalty, a temperature, each filter, top log-probabilities."""


class RowValues(NamedTuple):
    """Sampling parameters of S rows.

    asks: int32 [S], the bits above; everything else of a row counts only where its bit is set
    position: int32 [S], that the new token will take
    temperature, top_p, min_p, penalty: float32 [S]
    top_k: int32 [S]
    seed: uint32 [S, 2]
    """

    asks: jax.Array
    position: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    penalty: jax.Array
    seed: jax.Array


class Sampled(NamedTuple):
    """What a step chose: token int32 [S] and logprob float32 [S]; top_ids and top_logprobs [S, n], best first."""

    token: jax.Array
    logprob: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def sample_rows(
    logits: jax.Array,
    values: RowValues,
    bias: jax.Array,
    seen: jax.Array,
    slots: jax.Array,
    vocab_size: int,
    collectives: Collectives,
    top: int,
) -> Sampled:
    """The next token of each row: see ``decode.sampling.sample``.

    Args:
        logits: float32 [S, V / tp], this device's slice.
        bias: float32 [M, V / tp], by slot; added ahead of everything else.
        seen: bool [M, V / tp], by slot; for the repetition penalty.
        slots: int32 [S], each row's slot.
        top: how many of the likeliest tokens to list.
    """
    ids = tensor_index() * logits.shape[-1] + jnp.arange(logits.shape[-1])
    logits = jnp.where(ids < vocab_size, logits, -jnp.inf)

    def asked(bit: int) -> jax.Array:
        return (values.asks & bit) != 0

    def biased(scores: jax.Array) -> jax.Array:
        return jnp.where(asked(BIASED)[:, None], scores + bias[slots], scores)

    def penalised(scores: jax.Array) -> jax.Array:
        penalty = values.penalty[:, None]
        other = jnp.where(scores > 0, scores / penalty, scores * penalty)
        return jnp.where(asked(PENALISED)[:, None] & seen[slots], other, scores)

    def top_k(scores: jax.Array) -> jax.Array:
        order = ordered_bits(scores)
        cut = largest_threshold(order, jnp.ones_like(scores), values.top_k.astype(jnp.float32), collectives)
        return jnp.where((order >= cut[:, None]) | ~asked(TOP_K)[:, None], scores, -jnp.inf)

    def top_p(scores: jax.Array, best: jax.Array) -> jax.Array:
        order = ordered_bits(scores)
        mass = jnp.exp(scores - best[:, None])
        total = collectives.sum(jnp.sum(mass, axis=-1))
        cut = largest_threshold(order, mass, values.top_p * total, collectives)
        return jnp.where((order >= cut[:, None]) | ~asked(TOP_P)[:, None], scores, -jnp.inf)

    def min_p(scores: jax.Array, best: jax.Array) -> jax.Array:
        reached = scores >= best[:, None] + jnp.log(values.min_p)[:, None]
        return jnp.where(reached | ~asked(MIN_P)[:, None], scores, -jnp.inf)

    def where_any(bit: int, change, *operands: jax.Array) -> jax.Array:  # type: ignore[no-untyped-def]
        return lax.cond(jnp.any(asked(bit)), change, lambda scores, *_: scores, *operands)

    def random(scores: jax.Array) -> jax.Array:
        greedy, scores = scores, scores / values.temperature[:, None]
        best = collectives.max(jnp.max(scores, axis=-1))
        scores = where_any(TOP_K, top_k, scores)
        scores = where_any(TOP_P, top_p, scores, best)
        scores = where_any(MIN_P, min_p, scores, best)
        return jnp.where(asked(RANDOM)[:, None], scores + gumbel(values.seed, values.position, ids), greedy)

    scores = where_any(BIASED, biased, logits)
    scores = where_any(PENALISED, penalised, scores)
    scores = where_any(RANDOM, random, scores)
    token, logprob = argmax(scores, logits, ids, collectives)

    S, count = logits.shape[0], min(top, vocab_size)

    def listed(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _largest(logits, ids, count, collectives)

    def unlisted(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((S, count), jnp.int32), jnp.zeros((S, count), jnp.float32)

    top_ids, top_logprobs = lax.cond(jnp.any(asked(LISTED)), listed, unlisted, logits)
    return Sampled(token, logprob, top_ids, top_logprobs)


def _largest(logits: jax.Array, ids: jax.Array, count: int, collectives: Collectives) -> tuple[jax.Array, jax.Array]:
    """Ids and log-probabilities [S, count] of the largest logits over all devices, best first, lowest id of equals."""
    crest = collectives.max(jnp.max(logits, axis=-1))
    total = collectives.sum(jnp.sum(jnp.exp(logits - crest[:, None]), axis=-1))
    here = min(count, logits.shape[-1])
    values, places = lax.top_k(logits, here)
    own = jnp.stack([lax.bitcast_convert_type(values, jnp.int32), ids[places].astype(jnp.int32)])
    words = collectives.gather(own, TENSOR, axis=2)  # [2, S, tp * here]
    values = lax.bitcast_convert_type(words[0], jnp.float32)
    best, at = lax.top_k(values, count)
    return jnp.take_along_axis(words[1], at, axis=1), best - crest[:, None] - jnp.log(total)[:, None]
