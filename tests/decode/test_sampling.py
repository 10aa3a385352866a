"""The sampler against float64 NumPy, with logits split over meshes that the vocabulary does not divide by."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from decode import sampling
from decode.sampling import SamplingError, SamplingForm, SamplingParams, SamplingValues, sample
from sharding.collectives import DEFAULT_COLLECTIVES, tensor_index
from sharding.layout import Layout
from sharding.mesh import TENSOR, make_mesh

pytestmark = pytest.mark.xdist_group("sampling")  # one worker compiles each form of the sampler once

V = 11
TPS = (1, 2, 3, 4, 8)  # none but 1 divides 11; at 8 the last two devices hold padding alone
BATCHES = (64, 8192)  # every draw is padded to one of these, for few shapes to compile
SPLIT = PartitionSpec(None, TENSOR)


def split(x: np.ndarray, tp: int) -> np.ndarray:
    """x [B, V] padded as the layout pads the head: with zeros, which the sampler must not see."""
    padded = Layout(make_mesh(tp, 3)).padded_shape(x.shape, (None, "vocab"))
    return np.pad(x, ((0, 0), (0, padded[1] - x.shape[1])))


def over_mesh(tp: int, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    mesh = make_mesh(tp, 3)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


@functools.cache
def sampler(tp: int, form: SamplingForm, vocab: int) -> Callable[..., Any]:
    """``sample`` over a mesh, compiled once for each form."""

    def run(logits: Any, positions: Any, seen: Any, values: SamplingValues) -> tuple[jax.Array, jax.Array]:
        return sample(logits, positions, seen if form.penalty else None, values, form, vocab)

    return over_mesh(tp, run, (SPLIT, PartitionSpec(), SPLIT, PartitionSpec()), PartitionSpec())


def draw(
    logits: np.ndarray,
    params: SamplingParams,
    *,
    tp: int = 1,
    positions: np.ndarray | None = None,
    seen: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities of each row of logits [B, V]."""
    rows = len(logits)
    extra = next(size for size in BATCHES if size >= rows) - rows
    logits = np.pad(np.asarray(logits, np.float32), ((0, extra), (0, 0)))
    positions = np.pad(np.arange(rows) if positions is None else positions, (0, extra)).astype(np.int32)
    seen = np.zeros(logits.shape, bool) if seen is None else np.pad(seen, ((0, extra), (0, 0)))
    run = sampler(tp, params.form, logits.shape[1])
    tokens, logprobs = run(split(logits, tp), positions, split(seen, tp), SamplingValues.of(params))
    return np.asarray(tokens)[:rows], np.asarray(logprobs)[:rows]


@functools.cache
def filter_program(tp: int, form: SamplingForm) -> Callable[..., Any]:
    def run(scores: jax.Array, values: SamplingValues) -> jax.Array:
        ids = tensor_index() * scores.shape[-1] + jnp.arange(scores.shape[-1])
        return sampling.filtered(jnp.where(ids < V, scores, -jnp.inf), values, form, DEFAULT_COLLECTIVES)

    return over_mesh(tp, run, (SPLIT, PartitionSpec()), SPLIT)


def kept(scores: np.ndarray, params: SamplingParams, tp: int = 1) -> list[set[int]]:
    """Which tokens of each row [B, V] the filters leave."""
    left = filter_program(tp, params.form)(split(scores, tp), SamplingValues.of(params))
    assert not np.isnan(left).any()
    return [set(np.flatnonzero(row > -np.inf).tolist()) for row in np.asarray(left)]


# --- greedy ---


@pytest.mark.parametrize("tp", TPS)
def test_greedy_is_argmax_and_ties_go_to_the_lowest_id(tp: int) -> None:
    rng = np.random.default_rng(0)
    logits = rng.integers(-2, 3, (64, V)).astype(np.float32)  # plenty of ties, within and across devices
    logits[0], logits[1], logits[2] = 0, -5, np.where(np.arange(V) == V - 1, 1, -np.inf)
    logits[3] = [-0.0, 0.0] * 5 + [-0.0]  # all the same number
    tokens, _ = draw(logits, SamplingParams(), tp=tp)
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))


@pytest.mark.parametrize("tp", [1, 3, 8])
def test_padding_is_never_chosen(tp: int) -> None:
    """Padding logits are 0: above every real one here."""
    logits = np.full((4, V), -50, np.float32)
    for params in (SamplingParams(), SamplingParams(temperature=5.0), SamplingParams(1.0, top_k=V + 5)):
        tokens, logprobs = draw(logits, params, tp=tp)
        assert (tokens < V).all()
        np.testing.assert_allclose(logprobs, -math.log(V), rtol=1e-5)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    top = wide.max(axis=-1, keepdims=True)
    return wide - top - np.log(np.exp(wide - top).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("tp", [1, 3, 8])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=3, top_p=0.9, min_p=0.01),
        SamplingParams(repetition_penalty=2.0),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_logprobs_are_of_the_model_alone(tp: int, params: SamplingParams, scale: float) -> None:
    """Not of the filtered, heated or penalised scores."""
    logits = (scale * np.random.default_rng(1).standard_normal((16, V))).astype(np.float32)
    seen = np.random.default_rng(2).random((16, V)) < 0.5
    tokens, logprobs = draw(logits, params, tp=tp, seen=seen)
    expected = np.take_along_axis(log_softmax(logits), tokens[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(logprobs, expected, rtol=1e-5, atol=2e-6 * max(1.0, scale))


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0, top_p=0.9)])
@pytest.mark.parametrize("place", [0, V - 1])
def test_nan_logits_show_in_the_logprob(tp: int, params: SamplingParams, place: int) -> None:
    logits = np.zeros((2, V), np.float32)
    logits[1, place] = np.nan
    _, logprobs = draw(logits, params, tp=tp)
    np.testing.assert_array_equal(np.isnan(logprobs), [False, True])


# --- the sets that filters keep ---


def numpy_kept(scores: np.ndarray, params: SamplingParams) -> set[int] | None:
    """The documented set in float64; None where rounding could decide it."""
    left = scores.astype(np.float64)
    if params.top_k:
        smallest = np.sort(left)[::-1][: params.top_k].min()
        left = np.where(left >= smallest, left, -np.inf)
    if params.top_p < 1:
        mass = np.exp(left - left.max())
        for cut in np.unique(left[left > -np.inf])[::-1]:
            reached = mass[left >= cut].sum() / mass.sum()
            if abs(reached - params.top_p) < 1e-5:
                return None
            if reached >= params.top_p:
                left = np.where(left >= cut, left, -np.inf)
                break
    if params.min_p:
        floor = left.max() + math.log(params.min_p)
        if (np.abs(left - floor) < 1e-4 * max(1.0, abs(floor))).any():
            return None
        left = np.where(left >= floor, left, -np.inf)
    return set(np.flatnonzero(left > -np.inf).tolist())


FLOATS = st.one_of(
    st.integers(-3, 3).map(float),  # ties
    st.floats(-20, 20, width=32, allow_subnormal=False),  # the hardware may take those for 0
    st.sampled_from([-0.0, 0.0, 1e-30, -1e-30, 3e38, -3e38, 1e5, -1e5]),
)


@pytest.mark.parametrize("tp", [1, 3, 8])
@settings(max_examples=60, deadline=None)
@given(
    scores=st.lists(FLOATS, min_size=V, max_size=V),
    top_k=st.sampled_from([0, 1, 2, 3, 10, 11, 12, 2**31 - 1, 2**40]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6, 1e-45, 5e-324]),
    min_p=st.sampled_from([0.0, 1e-30, 0.01, 0.3, 0.999]),
)
def test_filters_keep_the_exact_sets(tp: int, scores: list[float], top_k: int, top_p: float, min_p: float) -> None:
    params = SamplingParams(1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    row = np.array(scores, np.float32)
    with np.errstate(over="ignore"):
        expected = numpy_kept(row, params)
    assume(expected is not None)
    assert kept(row[None], params, tp) == [expected]


def test_filters_by_hand() -> None:
    """Probabilities 0.4, 0.3, 0.2, 0.1 at places 1, 3, 5, 7; the others have next to none."""
    scores = np.full((1, V), -80, np.float32)
    scores[0, [1, 3, 5, 7]] = np.log([0.4, 0.3, 0.2, 0.1])
    one = functools.partial(SamplingParams, 1.0)
    assert kept(scores, one(top_k=1)) == [{1}]
    assert kept(scores, one(top_k=3)) == [{1, 3, 5}]
    assert kept(scores, one(top_p=0.39)) == [{1}]
    assert kept(scores, one(top_p=0.41)) == [{1, 3}]
    assert kept(scores, one(top_p=0.99)) == [{1, 3, 5, 7}]
    assert kept(scores, one(min_p=0.6)) == [{1, 3}]
    assert kept(scores, one(min_p=1.0)) == [{1}]


def test_each_filter_works_on_what_the_one_before_left() -> None:
    scores = np.full((1, V), -80, np.float32)
    scores[0, [1, 3, 5, 7]] = np.log([0.4, 0.3, 0.2, 0.1])
    # Of the two that top-k leaves, the first has 4/7 of the mass: enough for a top-p of 0.55, which needs two
    # of all four.
    assert kept(scores, SamplingParams(1.0, top_p=0.55)) == [{1, 3}]
    assert kept(scores, SamplingParams(1.0, top_k=2, top_p=0.55)) == [{1}]
    # Heat before the filters: at temperature 10 all eleven share the mass more evenly (but four still lead).
    hot = scores / 10
    assert kept(hot.astype(np.float32), SamplingParams(1.0, top_p=0.55)) == [{1, 3, 5}]


def test_ties_at_the_edge_stay_in() -> None:
    scores = np.zeros((2, V), np.float32)
    scores[0, :3] = 1
    scores[1] = [1.0, -0.0, 0.0] + [-1.0] * 8  # the two zeros are one number
    assert kept(scores, SamplingParams(1.0, top_k=2)) == [{0, 1, 2}, {0, 1, 2}]
    assert kept(np.zeros((1, V), np.float32), SamplingParams(1.0, top_k=1, top_p=0.3)) == [set(range(V))]


@pytest.mark.parametrize("tp", [1, 3])
def test_the_whole_sampler_draws_every_kept_token_and_no_other(tp: int) -> None:
    """Penalty, then temperature, then filters, as seen from outside: 512 draws of one row."""
    logits = np.log(np.array([40, 30, 20, 10, 6, 5, 4, 3, 2, 1, 1], np.float32))[None]
    seen = np.zeros((1, V), bool)
    seen[0, 0] = True  # logit 3.69 / 4 falls behind the fifth
    params = SamplingParams(2.0, top_k=4, top_p=0.9, min_p=0.5, repetition_penalty=4.0, seed=3)
    scores = np.where(seen, logits / 4, logits) / 2
    expected = numpy_kept(scores[0], params)
    assert expected == {1, 2, 3}
    tokens, _ = draw(np.repeat(logits, 512, 0), params, tp=tp, seen=np.repeat(seen, 512, 0))
    assert set(tokens.tolist()) == expected


# --- repetition penalty ---


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("penalty", [1e-9, 0.5, 1.3, 5.0, 1e9])
def test_repetition_penalty_as_hugging_face_defines_it(tp: int, penalty: float) -> None:
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((64, V)).astype(np.float32)
    logits[:, 0] = 0
    seen = rng.random((64, V)) < 0.5
    # RepetitionPenaltyLogitsProcessor: torch.where(score < 0, score * penalty, score / penalty)
    score = logits.astype(np.float64)
    penalised = np.where(seen, np.where(score < 0, score * penalty, score / penalty), score)
    for temperature in (0.0, 1e-30):  # greedy, and sampling as good as greedy
        tokens, _ = draw(logits, SamplingParams(temperature, repetition_penalty=penalty), tp=tp, seen=seen)
        np.testing.assert_array_equal(tokens, penalised.argmax(axis=1))


# --- the distribution ---


def chi_square(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * len(tokens)
    observed = np.bincount(tokens, minlength=len(probabilities))
    assert (observed[probabilities == 0] == 0).all()
    live = probabilities > 0
    return float(((observed - expected)[live] ** 2 / expected[live]).sum())


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
@pytest.mark.parametrize(
    ("params", "power", "live"),
    [
        (SamplingParams(1.0), 1.0, V),
        (SamplingParams(0.5), 2.0, V),
        (SamplingParams(2.0, top_k=4), 0.5, 4),
        (SamplingParams(1.0, top_p=0.8), 1.0, 4),
    ],
)
def test_tokens_follow_the_softmax(tp: int, seed: int, params: SamplingParams, power: float, live: int) -> None:
    weights = np.array([35, 25, 16, 8, 5, 4, 3, 1.5, 1, 0.9, 0.6])
    logits = np.log(weights).astype(np.float32)
    order = np.random.default_rng(5).permutation(V)
    params = SamplingParams(params.temperature, params.top_k, params.top_p, seed=seed)
    n = 8192
    tokens, _ = draw(np.broadcast_to(logits[order], (n, V)), params, tp=tp, positions=np.arange(n))
    probabilities = weights**power * (np.arange(V) < live)
    # 10 degrees of freedom exceed 40 once in 50,000 fair samples (3 degrees less often still).
    assert chi_square(tokens, (probabilities / probabilities.sum())[order]) < 40


def test_successive_tokens_are_independent() -> None:
    """Pairs of neighbouring positions, and of neighbouring seeds, over a uniform row of 8 tokens."""
    n = 8192
    flat = np.zeros((n, 8), np.float32)
    first, _ = draw(flat, SamplingParams(1.0, seed=0), positions=np.arange(n))
    second, _ = draw(flat, SamplingParams(1.0, seed=1), positions=np.arange(n))
    even = np.full(64, 1 / 64)
    # 63 degrees of freedom exceed 125 about once in 200,000 fair samples.
    assert chi_square(first[:-1] * 8 + first[1:], even) < 125
    assert chi_square(first * 8 + second, even) < 125


def test_noise_is_gumbel_and_finite_for_every_word() -> None:
    words = np.array([0, 1, 2, 1000, 2**16, 2**31, 2**32 - 2**9, 2**32 - 1], np.uint32)
    found = np.asarray(jax.jit(sampling._gumbel_of)(words))
    uniform = np.minimum((words + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # Near the lower end, where nothing wins, the uniform is 1 less a few rounding steps of 2**-24.
    np.testing.assert_allclose(found, -np.log(-np.log1p(-uniform)), rtol=1e-4, atol=1e-6)
    assert found.max() > 22  # rare tokens can win
    assert found.min() > -3


def test_noise_has_the_moments_of_gumbel() -> None:
    seed = SamplingValues.of(SamplingParams(seed=9)).seed
    noise = np.asarray(jax.jit(sampling.gumbel)(seed, jnp.arange(64), jnp.arange(1024)))
    # 65,536 samples: the mean is known to 1.28 / 256 (one sigma), the variance to about 1 %.
    assert abs(noise.mean() - np.euler_gamma) < 0.025
    assert abs(noise.var() / (math.pi**2 / 6) - 1) < 0.05


# --- reproducibility ---


def test_noise_depends_on_seed_position_and_token_only() -> None:
    gumbel = jax.jit(sampling.gumbel)

    def noise(seed: int, positions: list[int], ids: list[int]) -> np.ndarray:
        key = SamplingValues.of(SamplingParams(1.0, seed=seed)).seed
        return np.asarray(gumbel(key, jnp.array(positions), jnp.array(ids)))

    whole = noise(5, [0, 1, 2, 3], list(range(12)))
    some = [11, 7, 2, 0, 0, 5, 6, 10, 9, 4, 3, 8]
    np.testing.assert_array_equal(noise(5, [3, 1, 1, 0], some), whole[[3, 1, 1, 0]][:, some])
    np.testing.assert_array_equal(noise(5, [2], [11]), whole[2:3, 11:12])
    assert len(np.unique(whole)) == whole.size  # no two positions or tokens share theirs
    # Every bit of the seed counts, those above 32 too.
    seeds = [0, 1, 2**31, 2**32, 2**63, 2**64 - 1]
    rows = np.concatenate([noise(seed, [0, 1, 2, 3], list(range(12))) for seed in seeds])
    assert len(np.unique(rows)) == rows.size


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    params=st.sampled_from(
        [
            SamplingParams(1.0),
            SamplingParams(0.8, top_k=5, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
        ]
    ),
)
def test_the_same_seed_gives_the_same_tokens_on_every_mesh(seed: int, params: SamplingParams) -> None:
    rng = np.random.default_rng(seed % 2**32)
    logits = (3 * rng.standard_normal((32, V))).astype(np.float32)
    seen = rng.random((32, V)) < 0.3
    params = SamplingParams(**{**vars(params), "seed": seed})
    positions = rng.integers(0, 2**31, 32)
    tokens, logprobs = draw(logits, params, tp=1, positions=positions, seen=seen)
    for tp in TPS[1:]:
        others, other_logprobs = draw(logits, params, tp=tp, positions=positions, seen=seen)
        np.testing.assert_array_equal(others, tokens)
        np.testing.assert_allclose(other_logprobs, logprobs, rtol=1e-5, atol=1e-6)


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = np.random.default_rng(6).standard_normal((8, V)).astype(np.float32)
    params = SamplingParams(1.0, top_k=6, seed=11)
    tokens, _ = draw(logits, params, positions=np.arange(8) * 7)
    for row in range(8):
        alone, _ = draw(logits[row : row + 1], params, positions=np.array([row * 7]))  # beside zeros
        assert alone[0] == tokens[row]


# --- parameters ---


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", -0.1, "0 (greedy) or more"),
        ("temperature", math.inf, "0 (greedy) or more"),
        ("temperature", math.nan, "0 (greedy) or more"),
        ("top_k", -1, "0 (off) or more"),
        ("top_k", 0.5, "a whole number"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("top_p", math.nan, "above 0 and at most 1"),
        ("min_p", -0.01, "from 0 (off) to 1"),
        ("min_p", 1.01, "from 0 (off) to 1"),
        ("repetition_penalty", 0.0, "from 1e-9 to 1e9"),
        ("repetition_penalty", -1.0, "from 1e-9 to 1e9"),
        ("repetition_penalty", math.inf, "from 1e-9 to 1e9"),
        ("repetition_penalty", math.nan, "from 1e-9 to 1e9"),
        ("seed", -1, "from 0 to 2**64 - 1"),
        ("seed", 2**64, "from 0 to 2**64 - 1"),
        ("seed", 1.5, "a whole number"),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: float, allowed: str) -> None:
    with pytest.raises(SamplingError) as caught:
        SamplingParams(**{name: value})
    assert f"{name} is {value}; it must be" in str(caught.value)
    assert allowed in str(caught.value)


def test_off_means_off_and_unused_parts_are_not_compiled() -> None:
    off = SamplingForm(random=False, top_k=False, top_p=False, min_p=False, penalty=False)
    assert SamplingParams().form == off
    assert SamplingParams(0.0, top_k=5, top_p=0.5, min_p=0.5).form == off  # greedy does not filter
    assert SamplingParams(1.0).form == off._replace(random=True)
    assert SamplingParams(1.0, 1, 0.9, 0.1, 1.1).form == SamplingForm(*[True] * 5)


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1e-300),
        SamplingParams(1e-40, top_k=3, top_p=0.9, min_p=0.1),
        SamplingParams(1.0, top_p=5e-324),
        SamplingParams(1.0, top_k=1),
        SamplingParams(1.0, min_p=1.0),
        SamplingParams(1e300, top_k=1),
    ],
)
def test_extreme_values_that_leave_one_token_are_greedy(tp: int, params: SamplingParams) -> None:
    logits = np.random.default_rng(8).permuted(np.tile(np.arange(V, dtype=np.float32), (64, 1)), axis=1)
    tokens, _ = draw(logits, params, tp=tp)
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))


def test_extreme_heat_is_uniform_over_real_tokens() -> None:
    n = 8192
    logits = np.broadcast_to(np.arange(V, dtype=np.float32), (n, V))
    tokens, _ = draw(logits, SamplingParams(1e300), tp=3, positions=np.arange(n))
    assert chi_square(tokens, np.full(V, 1 / V)) < 40


def test_a_large_vocabulary_is_filtered_exactly() -> None:
    """As many tokens as Llama 3 has, k beyond what bf16 could count."""
    vocab, k = 128_256, 1001
    logits = np.random.default_rng(10).permutation(np.linspace(-10, 10, vocab, dtype=np.float32))[None]
    values = SamplingValues.of(SamplingParams(1.0, top_k=k))
    form = SamplingParams(1.0, top_k=k).form
    run = over_mesh(2, lambda scores: sampling.filtered(scores, values, form, DEFAULT_COLLECTIVES), (SPLIT,), SPLIT)
    left = np.asarray(run(logits))[0]
    np.testing.assert_array_equal(left > -np.inf, logits[0] >= np.sort(logits[0])[-k])
    assert (left > -np.inf).sum() == k
