"""Times of a generation, from made-up moments."""

from __future__ import annotations

import pytest

from decode.timing import Timing


def timed(*arrivals: tuple[float, int, int], began: float = 0.0) -> Timing:
    timing = Timing(began)
    for arrival in arrivals:
        timing.arrived(*arrival)
    return timing


def test_nothing_arrived() -> None:
    timing = timed()
    assert (timing.ttft_s, timing.tpot_s, timing.tokens_per_s, timing.step_samples_s) == (None, None, None, [])


def test_one_token() -> None:
    timing = timed((103.5, 0, 1), began=100.0)
    assert timing.ttft_s == 3.5
    assert (timing.tpot_s, timing.tokens_per_s, timing.step_samples_s) == (None, None, [])


def test_one_dispatch_is_all_there_is() -> None:
    timing = timed((1.0, 0, 2), (3.0, 4, 8))
    assert timing.step_samples_s == [0.5]
    assert timing.tpot_s == 0.5
    assert timing.tokens_per_s == 4.0


def test_the_first_dispatch_is_thrown_away() -> None:
    timing = timed((1.0, 0, 1), (10.0, 1, 1), (11.0, 2, 2))
    assert timing.step_samples_s == [0.5]
    assert timing.tpot_s == 0.5
    assert timing.tokens_per_s == 2.0


def test_dispatches_that_arrive_bunched_are_taken_together() -> None:
    """Two are under way: the host reads the first late, and the second seems to take no time."""
    arrivals = [(1.0, 0, 1), (2.0, 1, 1), (3.0, 1, 1), (3.0, 1, 1), (7.0, 2, 2), (7.0, 2, 2), (9.0, 1, 1)]
    timing = timed(*arrivals)
    assert timing.step_samples_s == [0.5, 6.0 / 5]
    # 2 steps of 0.5 and 5 of 1.2
    assert timing.tpot_s == 1.2
    assert timing.tokens_per_s == pytest.approx(7 / 7.0)


def test_steps_weigh_in_the_median() -> None:
    timing = timed((0.0, 0, 1), (1.0, 1, 1), (11.0, 1, 1), (12.0, 1, 1), (13.0, 20, 20), (14.0, 20, 20))
    assert timing.step_samples_s == [5.5, 0.05]
    assert timing.tpot_s == 0.05


def test_tokens_count_for_all_rows_and_not_for_those_that_are_done() -> None:
    timing = timed((0.0, 0, 3), (1.0, 2, 6), (2.0, 2, 4), (3.0, 2, 2))
    assert timing.tokens_per_s == 3.0
    assert timing.tpot_s == 0.5
