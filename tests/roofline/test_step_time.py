"""The fitted step time: exact on exact steps, robust where steps leave something open, and it follows a change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.step_time import StepTime, StepTimeFit

GUESS = StepTime(1e-3, 0.0, 0.0, 0.0)
seconds = st.floats(1e-7, 1e-2)


def steps(rng: np.random.Generator, count: int) -> list[tuple[int, int, int]]:
    return [
        (int(2 ** rng.integers(0, 5)), int(rng.choice([0, 0, 16, 64])), int(rng.integers(1, 9000)))
        for _ in range(count)
    ]


@given(base=st.floats(1e-3, 1e-1), row=seconds, prompt=seconds, cache=st.floats(1e-9, 1e-5), seed=st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_finds_the_terms_of_exact_steps(base: float, row: float, prompt: float, cache: float, seed: int) -> None:
    truth, fit = StepTime(base, row, prompt, cache), StepTimeFit(GUESS)
    seen = steps(np.random.default_rng(seed), 200)
    for step in seen:
        fit.saw(*step, truth.seconds(*step))
    for step in seen[-50:]:
        assert fit.model.seconds(*step) == pytest.approx(truth.seconds(*step), rel=0.1)


def test_follows_a_machine_that_slows_down() -> None:
    rng, fit = np.random.default_rng(0), StepTimeFit(GUESS)
    for factor in (1, 3):
        truth = StepTime(0.02 * factor, 1e-3 * factor, 2e-3 * factor, 1e-6 * factor)
        for step in steps(rng, 600):
            fit.saw(*step, truth.seconds(*step) * rng.uniform(0.95, 1.05))
        assert fit.model.seconds(8, 64, 3000) == pytest.approx(truth.seconds(8, 64, 3000), rel=0.1)


def test_steps_all_alike_are_predicted_and_no_term_is_negative() -> None:
    fit = StepTimeFit(GUESS)
    for _ in range(300):
        fit.saw(4, 0, 1000, 0.03)
    assert fit.model.seconds(4, 0, 1000) == pytest.approx(0.03, rel=0.05)
    assert min(fit.model.terms(1, 1, 1).values()) >= 0
    # Fewer seconds for more rows cannot be had from terms that are not negative.
    for _ in range(300):
        fit.saw(1, 0, 0, 0.02)
        fit.saw(8, 0, 0, 0.01)
    assert fit.model.row == 0


def test_before_any_step_it_is_the_guess_and_a_step_of_no_time_counts_nothing() -> None:
    fit = StepTimeFit(StepTime(0.5, 0.25, 0.125, 0.0625))
    fit.saw(1, 1, 1, 0.0)
    assert fit.model.terms(2, 4, 8) == {"base": 0.5, "rows": 0.5, "prompt": 0.5, "cache": 0.5}
    assert fit.model.seconds(2, 4, 8) == 2
