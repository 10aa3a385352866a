"""Targets under overload, on a device of simulated time: what is served in time stays, instead of nothing."""

from __future__ import annotations

import functools

import pytest

from decode.batching.request import RefusedError, Request
from roofline.step_time import StepTime
from tests.decode.batching.simulated import STOP, Simulation, poisson

DEVICE = StepTime(base=0.02, row=5e-4, prompt=1e-4, cache=2e-7)
TTFT_S, TPOT_S, SECONDS = 1.0, 0.04, 30.0
SUSTAINABLE = 6
"""Requests a second that this device serves with nearly all of them in time; see the first test."""


@functools.cache
def served(rate: float, with_targets: bool, device: StepTime = DEVICE) -> Simulation:
    targets = {"ttft_s": TTFT_S, "tpot_s": TPOT_S} if with_targets else {}
    simulation = Simulation(device, max_batch=32, pages=4000, **targets)  # type: ignore[arg-type]
    simulation.run(poisson(rate, SECONDS))
    return simulation


def goodput(rate: float, with_targets: bool) -> float:
    return served(rate, with_targets).goodput(TTFT_S, TPOT_S, SECONDS)


def test_overload_keeps_goodput_with_targets_and_loses_it_without() -> None:
    best = max(goodput(rate, True) for rate in (4, SUSTAINABLE, 2 * SUSTAINABLE))
    assert best > 0.9 * SUSTAINABLE
    assert goodput(2 * SUSTAINABLE, True) > 0.8 * best
    assert goodput(2 * SUSTAINABLE, False) < 0.1 * best


def test_targets_cost_nothing_below_the_load_that_they_are_for() -> None:
    counts = served(4, True).scheduler.counts
    assert counts["refused"] == 0
    assert goodput(4, True) >= 0.98 * goodput(4, False)


def test_every_request_is_answered_or_refused_with_a_time_to_come_back() -> None:
    simulation = served(2 * SUSTAINABLE, True)
    reasons = {outcome.reason for outcome in simulation.outcomes}
    assert reasons <= {"stop", "length", "refused", "error"}
    for outcome in simulation.outcomes:
        if outcome.reason in ("refused", "error"):
            assert isinstance(outcome.error, RefusedError)
            assert 1 <= outcome.error.retry_after_s < 60
        else:
            assert outcome.tokens == outcome.expected
    counts = simulation.scheduler.counts
    assert counts["completed"] + counts["refused"] == len(simulation.outcomes)
    in_time = round(goodput(2 * SUSTAINABLE, True) * SECONDS)
    assert abs(counts["goodput_requests"] - in_time) <= 1  # what the engine says of itself


def test_a_long_prompt_leaves_the_others_their_pace() -> None:
    """Eight decodes in time; a prompt of 3,000 tokens then takes no more of any step than the target leaves."""
    simulation = Simulation(DEVICE, max_batch=16, pages=4000, tpot_s=0.05)
    short = [(0.0, Request([7 + i] * 20, 400, stop_token_ids=(STOP,)), 400) for i in range(8)]
    simulation.run([*short, (1.0, Request([5] * 3000, 4, stop_token_ids=(STOP,)), 4)])
    for outcome in simulation.outcomes[:8]:
        assert (outcome.last_at - outcome.first_at) / (len(outcome.tokens) - 1) <= 0.05
    late = simulation.outcomes[8]
    assert late.reason == "stop"
    assert late.last_at < max(outcome.last_at for outcome in simulation.outcomes[:8])  # and it did not wait for them


def test_an_unreachable_target_still_serves_one_after_the_other() -> None:
    simulation = Simulation(DEVICE, max_batch=8, tpot_s=0.001)
    simulation.run([(0.0, Request([7 + i] * 40, 30, stop_token_ids=(STOP,)), 30) for i in range(4)])
    assert [outcome.reason for outcome in simulation.outcomes] == ["stop"] * 4


def test_a_request_that_would_be_late_is_refused_at_once_and_an_idle_engine_refuses_none() -> None:
    simulation = Simulation(DEVICE, max_batch=2, ttft_s=0.5)
    first, _ = simulation.submit(Request([3] * 6000, 8), 8, 0.0)  # takes longer than the target alone
    simulation.turn()
    assert first.reason is None
    assert len(simulation.scheduler.running) == 1
    for i in range(6):
        simulation.submit(Request([4 + i] * 1000, 100), 100, 0.0)
    refused = [outcome for outcome in simulation.outcomes if outcome.reason == "refused"]
    assert refused
    with pytest.raises(RefusedError, match=r"more than the target of 0\.5 s"):
        raise refused[0].error  # type: ignore[misc]


def test_a_prediction_far_too_high_does_not_refuse_for_ever() -> None:
    """As where the machine was busy with something else while the steps were timed, before any request."""
    simulation = Simulation(DEVICE, max_batch=4, ttft_s=TTFT_S)
    simulation.fit.__init__(simulation.fit.model)  # type: ignore[misc]
    for rows, prompt in simulation.shapes.all():
        simulation.fit.saw(rows, prompt, 0, 50 * DEVICE.seconds(rows, prompt, 0))
    assert simulation.scheduler.targets._own_s(200) > TTFT_S
    simulation.run([(float(i), Request([7 + i] * 200, 20, stop_token_ids=(STOP,)), 20) for i in range(9)])
    assert [outcome.reason for outcome in simulation.outcomes] == ["stop"] * 9
