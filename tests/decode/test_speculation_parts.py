"""The parts of speculation: lookup, acceptance, the choice of k. Against brute force and exact distributions."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from scipy.stats import chisquare

from decode.sampling import SamplingParams, SamplingValues, argmax, filtered, gumbel
from decode.speculation.accept import Verdict, judge, log_softmax
from decode.speculation.control import DRAFT_PRIOR, LONGEST_PAUSE, PAUSE, Controller, Tally, candidates
from decode.speculation.draft import NOISE
from decode.speculation.ngram import look_up
from decode.speculation.ngram_index import NgramIndex
from decode.speculation.proposer import Proposal
from sharding.collectives import DEFAULT_COLLECTIVES, tensor_index
from sharding.mesh import TENSOR, make_mesh

S, K = 24, 3


def brute_look_up(text: list[int], k: int, longest: int, shortest: int) -> list[int] | None:
    """The same by loops over the text: the longest match, the latest of equals, repeating past the end."""
    best: tuple[int, int] | None = None
    last = len(text) - 1
    for end in range(last):
        size = 0
        while size < min(longest, end + 1) and text[end - size] == text[last - size]:
            size += 1
        if size >= shortest and (best is None or size >= best[0]):
            best = size, end
    if best is None:
        return None
    between = text[best[1] + 1 :]
    return [between[at % len(between)] for at in range(k)]


_look_up = jax.jit(look_up, static_argnums=(2, 3, 4))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=S), min_size=2, max_size=2), st.integers(1, 2))
def test_look_up_is_brute_force(texts: list[list[int]], shortest: int) -> None:
    history = np.full((2, S), 1, np.int32)  # what lies after a text looks like text
    for row, text in enumerate(texts):
        history[row, : len(text)] = text
    tokens, matched = _look_up(history, np.array([len(text) - 1 for text in texts], np.int32), K, 4, shortest)
    for row, text in enumerate(texts):
        expected = brute_look_up(text, K, 4, shortest)
        assert bool(matched[row]) == (expected is not None)
        if expected is not None:
            assert tokens[row].tolist() == expected
        index = NgramIndex(4, shortest)  # the same rule on the host, for the batching engine
        index.follow(text)
        assert index.propose(K) == (expected or [])


V, ROWS = 8, 3000
LIKELY = np.argsort(-np.random.default_rng(5).standard_normal((3, V)), axis=1)[:, 1].tolist()
"""At each place the token that is second in the target's distribution."""


@functools.cache
def drawn(tp: int, proposes: str, params: SamplingParams) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(tokens [ROWS, 2], accepted [ROWS], p [3, V], logprobs) of verdicts on proposals for the same logits.

    Rows differ in their positions alone, and so in their noise. The target's logits do not depend on the proposals.
    """
    rng = np.random.default_rng(5)
    target, draft = 2 * rng.standard_normal((3, V)), 2 * rng.standard_normal((2, V))
    values, form = SamplingValues.of(params), params.form
    positions = np.arange(ROWS)[:, None] * 3 + np.arange(3)

    def run(target: jax.Array, draft: jax.Array, positions: jax.Array) -> Any:
        ids = tensor_index() * target.shape[-1] + jnp.arange(target.shape[-1])
        tokens, log_qs = [], []
        for at in range(2):
            scores = filtered(
                jnp.broadcast_to(draft[at], (ROWS, draft.shape[-1])) / values.temperature,
                values,
                form,
                DEFAULT_COLLECTIVES,
            )
            noise = gumbel(jnp.asarray(values.seed) ^ NOISE, positions[:, at], ids)
            tokens.append(argmax(scores + noise, scores, ids, DEFAULT_COLLECTIVES)[0])
            log_qs.append(log_softmax(scores, DEFAULT_COLLECTIVES))
        log_q = jnp.stack(log_qs, axis=1)
        if proposes == "one":  # a proposal that was not sampled
            tokens, log_q = [jnp.full(ROWS, LIKELY[0]), jnp.full(ROWS, LIKELY[1])], None  # type: ignore[assignment]
        proposal = Proposal(jnp.stack(tokens, axis=1), jnp.full(ROWS, 2), log_q)
        logits = jnp.broadcast_to(target, (ROWS, *target.shape))
        verdict = judge(logits, proposal, positions, None, values, form, V, DEFAULT_COLLECTIVES)
        kept = filtered(target / values.temperature, values, form, DEFAULT_COLLECTIVES)
        exact = jnp.exp(log_softmax(kept, DEFAULT_COLLECTIVES))
        return verdict, exact

    vocab = P(None, TENSOR)
    mapped = jax.shard_map(
        run,
        mesh=make_mesh(tp, 2),
        in_specs=(vocab, vocab, P()),
        out_specs=(Verdict(P(), P(), P()), vocab),
        check_vma=False,
    )
    verdict, exact = jax.jit(mapped)(target.astype(np.float32), draft.astype(np.float32), positions.astype(np.int32))
    assert np.allclose(
        verdict[1][:, 0], (target[0] - np.log(np.exp(target[0]).sum()))[np.asarray(verdict[0][:, 0])], atol=1e-5
    )
    return np.asarray(verdict[0]), np.asarray(verdict[2]), np.asarray(exact, np.float64), np.asarray(verdict[1])


FORMS = {
    "plain": SamplingParams(temperature=1.0, seed=1),
    "filtered": SamplingParams(temperature=0.8, top_k=6, top_p=0.93, seed=2),
}


def check_counts(tokens: np.ndarray, p: np.ndarray) -> None:
    p = p / p.sum()
    counts = np.bincount(tokens, minlength=V)
    assert not counts[p == 0].any()
    assert chisquare(counts[p > 0], p[p > 0] * len(tokens)).pvalue > 1e-3


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("proposes", ["draft", "one"])
@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_distributed_as_the_target_says(tp: int, proposes: str, form: str) -> None:
    tokens, accepted, exact, _ = drawn(tp, proposes, FORMS[form])
    check_counts(tokens[:, 0], exact[0])
    check_counts(tokens[accepted >= 1, 1], exact[1])
    check_counts(tokens[accepted == 2, 2], exact[2])
    assert 0 < (accepted == 0).mean() < 1


def test_acceptance_is_the_overlap_of_the_distributions() -> None:
    """A sampled proposal stands with probability sum of min(p, q) (Leviathan et al., 2023, lemma 3.3 and 3.4)."""
    params = FORMS["plain"]
    _, accepted, exact, _ = drawn(1, "draft", params)
    rng = np.random.default_rng(5)
    rng.standard_normal((3, V))
    scores = 2 * rng.standard_normal((2, V))
    q = np.exp(scores[0]) / np.exp(scores[0]).sum()
    overlap = np.minimum(exact[0], q).sum()
    assert (accepted >= 1).mean() == pytest.approx(overlap, abs=4 * (overlap * (1 - overlap) / ROWS) ** 0.5)


def test_devices_agree_on_every_token() -> None:
    for proposes in ("draft", "one"):
        one, two = drawn(1, proposes, FORMS["plain"]), drawn(2, proposes, FORMS["plain"])
        # Rounding may turn a coin that lies on the edge; nothing else may differ.
        assert (one[0][:, 0] == two[0][:, 0]).mean() > 0.999


def test_candidates() -> None:
    assert candidates(1) == [1]
    assert candidates(6) == [6, 3, 1]
    assert candidates(8) == [8, 4, 2, 1]


COSTS = {0: 1.0, 1: 1.1, 2: 1.2, 4: 1.4}


def passes(proposed: int, accepted: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full((count, 1), proposed), np.full((count, 1), accepted)


def test_a_row_that_accepts_gets_many_proposals_and_one_that_does_not_none() -> None:
    control = Controller(COSTS, 1)
    control.update(*passes(4, 4, 20))
    assert control.choose([True]) == 4
    control.update(*passes(4, 0, 100))
    assert control.choose([True]) == 0
    assert Controller(COSTS, 1, fixed=2).choose([True]) == 2


def test_a_middling_row_gets_few() -> None:
    costs = {0: 1.0, 1: 1.1, 2: 1.45, 4: 2.0}
    control = Controller(costs, 1)
    control.update(*passes(1, 1, 20))
    control.update(*passes(1, 0, 20))
    assert control.choose([True]) == 1


def test_each_request_is_estimated_by_itself() -> None:
    control = Controller(COSTS, 2)
    control.update(np.array([[4, 4]] * 50), np.array([[4, 0]] * 50))
    good, bad = (one.acceptance for one in control.estimates)
    assert good > 0.9 > 0.1 > bad
    assert control.choose([True, False]) == 4
    assert control.choose([False, True]) == 0
    assert control.choose([False, False]) == 0


def test_a_draft_begins_with_few_proposals() -> None:
    """Where proposals cost passes of a draft, the first tries are cheap ones; acceptance soon decides."""
    costs = {0: 1.0, 1: 1.1, 2: 1.35, 4: 1.6}
    assert Controller(costs, 1).choose([True]) == 4
    control = Controller(costs, 1, prior=DRAFT_PRIOR)
    assert control.choose([True]) == 1
    control.update(*passes(1, 0, 20))
    assert control.choose([True]) == 0
    control = Controller(costs, 1, prior=DRAFT_PRIOR)
    control.update(*passes(1, 1, 30))
    assert control.choose([True]) == 4


def test_pauses_grow_and_end_with_an_open_mind() -> None:
    control = Controller(COSTS, 1)
    control.update(*passes(4, 0, 100))
    assert control.paused() == PAUSE
    assert control.choose([True]) > 0
    assert control.paused() == 2 * PAUSE
    for _ in range(9):
        control.paused()
    assert control.paused() == LONGEST_PAUSE


def test_tally() -> None:
    tally = Tally(3)
    proposed = np.array([[3, 3], [0, 3], [0, 0], [-1, -1]])
    accepted = np.array([[3, 1], [0, 0], [0, 0], [-1, -1]])
    tally.add(3, proposed, accepted, tokens=4 + 2 + 1 + 1 + 1 + 1, seconds=2.0)
    assert tally.looked == [3, 2, 1]
    assert tally.stood == [2, 1, 1]
    assert tally.acceptance == pytest.approx(4 / 6)
    assert tally.acceptance_by_position == [pytest.approx(2 / 3), 0.5, 1.0]
    assert tally.passes == {3: 2, 0: 1}
    assert tally.tokens_per_pass == pytest.approx(10 / 6)
    a = 4 / 6
    expected = (2 * (1 + a + a**2 + a**3) + 1) * 0.1 / (2 * 0.15 + 0.1)
    assert tally.predicted_speed_up({0: 0.1, 3: 0.15}) == pytest.approx(expected)
    assert tally.measured_speed_up({0: 0.1, 3: 0.15}, rows=2) == pytest.approx(10 / 2 * 0.1 / 2.0)
    assert Tally(2).acceptance is None
