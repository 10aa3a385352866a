"""The closed form of speculation against simulation and hand-made cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.presets import preset
from roofline.case import Case
from roofline.chips import get_chip
from roofline.errors import RooflineError
from roofline.latency import tpot
from roofline.speculation import acceptance_of, best_k, expected_tokens, predict, speed_up


@given(st.floats(0.01, 0.99), st.integers(0, 15))
def test_expected_tokens_is_the_closed_form(acceptance: float, k: int) -> None:
    assert expected_tokens(acceptance, k) == pytest.approx((1 - acceptance ** (k + 1)) / (1 - acceptance))
    assert 1 <= expected_tokens(acceptance, k) <= k + 1


def test_expected_tokens_is_what_a_simulation_gives() -> None:
    stands = np.random.default_rng(0).random((200_000, 5)) < 0.6
    tokens = 1 + np.cumprod(stands, axis=1).sum(axis=1)
    assert expected_tokens(0.6, 5) == pytest.approx(tokens.mean(), abs=4 * tokens.std() / 200_000**0.5)


def test_ends() -> None:
    assert expected_tokens(0.0, 7) == 1
    assert expected_tokens(1.0, 7) == 8
    assert speed_up(1.0, 3, 0.0) == 4
    assert speed_up(0.0, 3, 0.1) == pytest.approx(1 / 1.3)


@given(st.floats(0, 1), st.integers(1, 15))
def test_acceptance_of_inverts_expected_tokens(acceptance: float, k: int) -> None:
    assert expected_tokens(acceptance_of(expected_tokens(acceptance, k), k), k) == pytest.approx(
        expected_tokens(acceptance, k), rel=1e-9
    )


@pytest.mark.parametrize(("acceptance", "k"), [(-0.1, 2), (1.1, 2), (0.5, -1)])
def test_out_of_range(acceptance: float, k: int) -> None:
    with pytest.raises(RooflineError, match="must be"):
        expected_tokens(acceptance, k)


def test_best_k_is_none_where_nothing_gains() -> None:
    passes = {1: 1.1, 2: 1.2, 4: 1.4}
    assert best_k(0.05, 0.1, passes) == (0, 1.0)
    k, gain = best_k(0.9, 0.0, passes)
    assert k == 4
    assert gain == pytest.approx(expected_tokens(0.9, 4) / 1.4)


def test_prediction_on_a_chip_that_reading_bounds() -> None:
    """A verifying pass costs hardly more than a step there, so that proposals for nothing gain their tokens."""
    target, draft = Case(preset("llama-3.1-70b"), context=512, tp=8), Case(preset("llama-3.2-1b"), context=512, tp=8)
    chip = get_chip("h100")
    free = predict(target, chip, 0.7, 4)
    assert free.verify_s == pytest.approx(free.plain_s, rel=0.05)
    assert free.verify_s >= tpot(target, chip).weights
    assert free.speed_up == pytest.approx(expected_tokens(0.7, 4), rel=0.05)
    paid = predict(target, chip, 0.7, 4, draft)
    assert paid.draft_s == tpot(draft, chip).total
    expected = paid.tokens_per_pass * paid.plain_s / (4 * paid.draft_s + paid.verify_s)
    assert paid.speed_up == pytest.approx(expected)
    assert 1 < paid.speed_up < free.speed_up
