"""Choosing the next token from logits that stay split over the vocabulary.

No device sees the whole row. Each reduces its own slice, and a few numbers a row cross the mesh: one gather
of (best, its id, log-sum-exp) for greedy decoding. Filters become thresholds on the logits, found by
bisection over the ordered bit patterns of float32, so top-k and top-p are exact at any vocabulary size and
any number of devices.

Sampling is the Gumbel-max trick (Gumbel, 1954): argmax of logits plus noise. The noise of token v at position
p of a row is a pure function of (seed, p, v), so the same seed gives the same text at every tensor-parallel
degree and in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry_2x32
from jax.typing import ArrayLike

from sharding.collectives import DEFAULT_COLLECTIVES, Collectives, tensor_index
from sharding.mesh import TENSOR

SMALLEST, LARGEST = 1e-20, 1e20
"""Temperature and top_p are held between these, so that no score over- or underflows float32. Values closer
to 0 have the same result (the best token and its equals), as has a hotter temperature (every token alike)."""


class SamplingError(ValueError):
    """A sampling parameter outside its range."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. The defaults are greedy.

    They apply in this order, each to what the one before left: repetition penalty, temperature, top-k, top-p,
    min-p. ``temperature`` 0 means greedy, which penalises but does not filter; ``top_k`` 0, ``top_p`` 1 and
    ``min_p`` 0 mean off. Tokens whose score equals the last one that a filter keeps are kept too.

    Raises:
        SamplingError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_k", _is_integer(self.top_k) and self.top_k >= 0, "a whole number, 0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 (off) to 1"),
            ("repetition_penalty", 1e-9 <= self.repetition_penalty <= 1e9, "from 1e-9 to 1e9; 1 is off"),
            ("seed", _is_integer(self.seed) and 0 <= self.seed < 2**64, "a whole number from 0 to 2**64 - 1"),
        )
        for name, ok, allowed in checks:
            if not ok:
                raise SamplingError(f"{name} is {getattr(self, name)}; it must be {allowed}")

    @property
    def form(self) -> SamplingForm:
        """Which parts of the sampler this needs."""
        random = self.temperature > 0
        return SamplingForm(
            random=random,
            top_k=random and self.top_k > 0,
            top_p=random and self.top_p < 1,
            min_p=random and self.min_p > 0,
            penalty=self.repetition_penalty != 1,
        )


class SamplingForm(NamedTuple):
    """The parts of the sampler that are compiled in. Values stay arguments: new ones recompile nothing."""

    random: bool
    top_k: bool
    top_p: bool
    min_p: bool
    penalty: bool


class SamplingValues(NamedTuple):
    """A sampler's numbers as arrays, the same for every row."""

    temperature: ArrayLike  # float32 []
    top_k: ArrayLike  # int32 []
    top_p: ArrayLike  # float32 []
    min_p: ArrayLike  # float32 []
    penalty: ArrayLike  # float32 []
    seed: ArrayLike  # uint32 [2]

    @classmethod
    def of(cls, params: SamplingParams) -> SamplingValues:
        return cls(
            temperature=np.float32(min(max(params.temperature, SMALLEST), LARGEST)),
            top_k=np.int32(min(params.top_k, 2**31 - 1)),
            top_p=np.float32(max(params.top_p, SMALLEST)),
            min_p=np.float32(params.min_p),
            penalty=np.float32(params.repetition_penalty),
            seed=np.array([params.seed >> 32, params.seed & 0xFFFFFFFF], np.uint32),
        )


def sample(
    logits: jax.Array,
    positions: jax.Array,
    seen: jax.Array | None,
    values: SamplingValues,
    form: SamplingForm,
    vocab_size: int,
    collectives: Collectives = DEFAULT_COLLECTIVES,
) -> tuple[jax.Array, jax.Array]:
    """The next token of every row.

    Args:
        logits: float32 [B, V / tp], this device's slice, padding at the end of the last.
        positions: int32 [B], the position the new token will take: part of its noise.
        seen: bool [B, V / tp], tokens already in the row; needed where ``form.penalty``.
        vocab_size: V without padding.

    Returns:
        int32 [B] token ids and float32 [B] log-probabilities under the unfiltered, unpenalised softmax at
        temperature 1; the same on every device. A row with a NaN logit gives a NaN log-probability.
    """
    ids = tensor_index() * logits.shape[-1] + jnp.arange(logits.shape[-1])
    logits = jnp.where(ids < vocab_size, logits, -jnp.inf)
    scores = logits
    if form.penalty:
        assert seen is not None, "a repetition penalty needs the seen mask"
        penalised = jnp.where(scores > 0, scores / values.penalty, scores * values.penalty)
        scores = jnp.where(seen, penalised, scores)
    if form.random:
        scores = scores / values.temperature
        scores = filtered(scores, values, form, collectives)
        scores = scores + gumbel(values.seed, positions, ids)
    return argmax(scores, logits, ids, collectives)


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def argmax(
    scores: jax.Array, logits: jax.Array, ids: jax.Array, collectives: Collectives
) -> tuple[jax.Array, jax.Array]:
    """Token with the largest score over all devices, the lowest id among equals, and its log-probability."""
    best = jnp.argmax(scores, axis=-1)  # the first of equals, so the lowest id here
    chosen = jnp.take_along_axis(logits, best[:, None], axis=-1)[:, 0]
    top = jnp.max(scores, axis=-1)
    peak = jnp.max(logits, axis=-1)
    shift = jnp.where(peak > -jnp.inf, peak, 0.0)  # a slice that is all padding has nothing above -inf
    total = jnp.sum(jnp.exp(logits - shift[:, None]), axis=-1)
    # One gather carries everything, as integers: the bits of a small id would be a subnormal float, which
    # some hardware flushes to zero.
    floats = lax.bitcast_convert_type(jnp.stack([top, chosen, peak, total]), jnp.int32)
    mine = jnp.concatenate([floats, ids[best].astype(jnp.int32)[None]])[None]  # [1, 5, B]
    words = jnp.moveaxis(collectives.gather(mine, TENSOR, axis=0), 1, 0)  # [5, tp, B]
    top, chosen, peak, total = lax.bitcast_convert_type(words[:4], jnp.float32)
    winner = jnp.argmax(top, axis=0)[None]  # the first of equals, so the lowest id
    crest = jnp.max(peak, axis=0)
    log_total = crest + jnp.log(jnp.sum(total * jnp.exp(peak - crest), axis=0))
    token, logit = (jnp.take_along_axis(x, winner, axis=0)[0] for x in (words[4], chosen))
    return token, logit - log_total


def filtered(scores: jax.Array, values: SamplingValues, form: SamplingForm, collectives: Collectives) -> jax.Array:
    """Scores outside the top-k, then the top-p, then the min-p set become -inf. float32 [B, V / tp]."""
    if not (form.top_k or form.top_p or form.min_p):
        return scores
    top = collectives.max(jnp.max(scores, axis=-1))
    order = ordered_bits(scores)
    if form.top_k:
        # The largest threshold that at least k scores reach; scores equal to the k-th stay in.
        k = jnp.asarray(values.top_k, jnp.float32)
        cut = largest_threshold(order, jnp.ones_like(scores), k, collectives)
        scores = jnp.where(order >= cut[:, None], scores, -jnp.inf)
    if form.top_p:
        mass = jnp.exp(scores - top[:, None])
        total = collectives.sum(jnp.sum(mass, axis=-1))
        cut = largest_threshold(order, mass, values.top_p * total, collectives)
        scores = jnp.where(order >= cut[:, None], scores, -jnp.inf)
    if form.min_p:
        scores = jnp.where(scores >= top[:, None] + jnp.log(values.min_p), scores, -jnp.inf)
    return scores


def ordered_bits(x: jax.Array) -> jax.Array:
    """float32 -> uint32 that sorts the same way."""
    # -0.0 and 0.0 are one number. (XLA would take x + 0.0 for x.)
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def largest_threshold(order: jax.Array, weight: jax.Array, target: ArrayLike, collectives: Collectives) -> jax.Array:
    """The largest uint32 t a row with sum(weight[order >= t]) >= target over all devices; one bit a step."""

    def step(index: jax.Array, cut: jax.Array) -> jax.Array:
        trial = cut | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        reached = collectives.sum(jnp.sum(jnp.where(order >= trial[:, None], weight, 0.0), axis=-1))
        return jnp.where(reached >= target, trial, cut)

    return lax.fori_loop(0, 32, step, jnp.zeros(order.shape[:1], jnp.uint32))


def gumbel(seed: ArrayLike, positions: jax.Array, ids: jax.Array) -> jax.Array:
    """Noise float32 [B, V / tp], a pure function of (seed, position, token id); seed uint32 [2] or [B, 2]."""

    def row(seed: jax.Array, position: jax.Array) -> jax.Array:
        # Threefry is a block cipher over two words: key by (seed, position), then encrypt each token id.
        count = jnp.stack([position.astype(jnp.uint32), jnp.uint32(0)])
        key = threefry_2x32(seed, count)
        words = ids.astype(jnp.uint32)
        return threefry_2x32(key, jnp.concatenate([words, jnp.zeros_like(words)]))[: ids.shape[0]]

    return _gumbel_of(jax.vmap(row)(jnp.broadcast_to(seed, (*positions.shape, 2)), positions))


def _gumbel_of(bits: jax.Array) -> jax.Array:
    """Random uint32 -> float32 noise with the standard Gumbel distribution, always finite.

    The largest values decide who wins, so they are the finely resolved ones: they come from uniforms near 0,
    where float32 keeps all 32 bits, up to 22.9 (23 bits would end at 16.6 and never draw a rare token).
    """
    uniform = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2**-32)  # above 0
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, jnp.float32(1 - 2**-24))))
