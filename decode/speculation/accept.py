"""How many proposals stand, and the token after them: exact for greedy decoding, and in distribution for sampling.

A proposal x that was sampled with probability q(x) stands with probability min(1, p(x) / q(x)), p the target's own
distribution there, filters and all. The first that falls is replaced by a sample from max(p - q, 0), normalised; after
proposals that all stand comes a sample from p. Each token is then distributed as p (Leviathan et al., 2023; Chen et
al., 2023). A proposal that was not sampled has q = 1 at itself: it stands with probability p(x).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry_2x32
from jax.typing import ArrayLike

from decode.sampling import SamplingForm, SamplingValues, argmax, filtered, gumbel, sample
from decode.speculation.proposer import Proposal
from sharding.collectives import Collectives, tensor_index

COINS = np.array([0x5EC0, 0x1A7E], np.uint32)
"""Turns a seed into that of the coins which decide about proposals."""


class Verdict(NamedTuple):
    """tokens int32 [B, k + 1]: the ``accepted`` proposals and the token after them; what follows is meaningless.
    logprobs float32 [B, k + 1], under the unfiltered softmax at temperature 1. accepted int32 [B]."""

    tokens: jax.Array
    logprobs: jax.Array
    accepted: jax.Array


def judge(
    logits: jax.Array,
    proposal: Proposal,
    positions: jax.Array,
    seen: jax.Array | None,
    values: SamplingValues,
    form: SamplingForm,
    vocab_size: int,
    collectives: Collectives,
) -> Verdict:
    """Args:
    logits: float32 [B, k + 1, V / tp], the target's after the newest token and after each proposal.
    positions: int32 [B, k + 1], which the tokens chosen from them will take.
    seen: bool [B, k + 1, V / tp], tokens already in the row if the proposals before stand; for a repetition penalty.
    """
    B, T, _ = logits.shape
    flat = logits.reshape(B * T, -1)
    flat_seen = None if seen is None else seen.reshape(B * T, -1)
    if not form.random:
        token, logprob = sample(flat, positions.reshape(-1), flat_seen, values, form, vocab_size, collectives)
        token, logprob = token.reshape(B, T), logprob.reshape(B, T)
        return Verdict(token, logprob, _leading(token[:, :-1] == proposal.tokens, proposal.meant))

    ids = tensor_index() * logits.shape[-1] + jnp.arange(logits.shape[-1])
    flat = jnp.where(ids < vocab_size, flat, -jnp.inf)
    scores = flat
    if flat_seen is not None:
        penalised = jnp.where(scores > 0, scores / values.penalty, scores * values.penalty)
        scores = jnp.where(flat_seen, penalised, scores)
    scores = filtered(scores / values.temperature, values, form, collectives)
    log_p = log_softmax(scores, collectives).reshape(B, T, -1)
    drawn = proposal.tokens[..., None] == ids  # [B, k, V / tp]
    log_q = certain(proposal.tokens, logits.shape[-1]) if proposal.log_q is None else proposal.log_q
    chances = collectives.max(jnp.max(jnp.where(drawn, log_p[:, :-1], -jnp.inf), axis=-1))
    odds = collectives.max(jnp.max(jnp.where(drawn, log_q, -jnp.inf), axis=-1))
    coins = jnp.log(_uniform(jnp.asarray(values.seed) ^ COINS, positions[:, :-1]))
    accepted = _leading(coins < chances - odds, proposal.meant)

    there = accepted[:, None, None]
    p = jnp.exp(jnp.take_along_axis(log_p, there, axis=1)[:, 0])
    q = jnp.exp(jnp.take_along_axis(log_q, jnp.minimum(there, T - 2), axis=1)[:, 0]) if T > 1 else jnp.zeros_like(p)
    left = jnp.where((accepted < proposal.meant)[:, None], jnp.maximum(p - q, 0.0), p)
    # Nothing is left where p and q differ by rounding alone.
    left = jnp.where((collectives.sum(jnp.sum(left, axis=-1)) > 0)[:, None], left, p)
    place = jnp.take_along_axis(positions, accepted[:, None], axis=1)[:, 0]
    noisy = jnp.log(left) + gumbel(values.seed, place, ids)
    last, _ = argmax(noisy, jnp.take_along_axis(logits, there, axis=1)[:, 0], ids, collectives)
    slots = jnp.arange(T)[None]
    padded = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(slots < accepted[:, None], padded, last[:, None])
    raw = log_softmax(flat, collectives).reshape(B, T, -1)
    logprobs = collectives.max(jnp.max(jnp.where(tokens[..., None] == ids, raw, -jnp.inf), axis=-1))
    # A NaN is no maximum on every device; it must be told.
    broken = collectives.max(jnp.any(jnp.isnan(raw), axis=-1).astype(jnp.float32)) > 0
    return Verdict(tokens, jnp.where(broken, jnp.nan, logprobs), accepted)


def certain(tokens: jax.Array, slots: int) -> jax.Array:
    """tokens int32 [...] -> float32 [..., slots], this device's slice: the log-probabilities of choosing just them."""
    own = tensor_index() * slots + jnp.arange(slots)
    return jnp.where(tokens[..., None] == own, 0.0, -jnp.inf)


def log_softmax(scores: jax.Array, collectives: Collectives) -> jax.Array:
    """Over a last axis that is split between devices; -inf stays -inf. float32 [..., V / tp]."""
    top = collectives.max(jnp.max(scores, axis=-1))[..., None]
    return scores - top - jnp.log(collectives.sum(jnp.sum(jnp.exp(scores - top), axis=-1)))[..., None]


def _leading(stands: jax.Array, count: jax.Array) -> jax.Array:
    """stands bool [B, k] -> how many hold from the first on, of the first ``count`` [B]."""
    meant = jnp.arange(stands.shape[1])[None] < count[:, None]
    return jnp.sum(jnp.cumprod((stands & meant).astype(jnp.int32), axis=1), axis=1)


def _uniform(seed: ArrayLike, positions: jax.Array) -> jax.Array:
    """Coins in (0, 1), float32 of the shape of positions, each a pure function of (seed, position)."""

    def one(position: jax.Array) -> jax.Array:
        return threefry_2x32(seed, jnp.stack([position.astype(jnp.uint32), jnp.uint32(0)]))[0]

    bits = jax.vmap(one)(positions.reshape(-1)).reshape(positions.shape)
    return lax.convert_element_type(bits >> 8, jnp.float32) * jnp.float32(2**-24) + jnp.float32(2**-25)
