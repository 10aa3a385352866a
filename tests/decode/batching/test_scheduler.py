"""The scheduler alone, with a device that only takes time."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from decode.batching.request import RefusedError, Request
from decode.batching.shapes import Shapes
from decode.sampling import SamplingParams
from roofline.step_time import StepTime
from tests.decode.batching.simulated import STOP, Simulation

DEVICE = StepTime(1e-3, 1e-4, 1e-5, 0.0)


@given(
    seed=st.integers(0, 10**6),
    pages=st.integers(6, 30),
    keep=st.booleans(),
    batch=st.integers(1, 6),
    proposals=st.sampled_from([0, 1, 4, 15]),
    draft=st.booleans(),
    copies=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_random_company_changes_no_output_and_loses_no_page(
    seed: int, pages: int, keep: bool, batch: int, proposals: int, draft: bool, copies: bool
) -> None:
    rng = random.Random(seed)
    simulation = Simulation(
        DEVICE,
        max_batch=batch,
        pages=pages,
        page_size=4,
        token_budget=32,
        keep=keep,
        proposals=proposals,
        draft=draft,
        copies=copies,
    )
    prefixes = [[rng.randrange(2, 9) for _ in range(rng.randrange(1, 12))] for _ in range(2)]
    live = []
    for _ in range(rng.randrange(1, 25)):
        prompt = rng.choice(prefixes) + [rng.randrange(2, 9) for _ in range(rng.randrange(0, 6))]
        request = Request(
            prompt,
            min(rng.randrange(1, 12), 4 * pages - len(prompt)),
            SamplingParams(temperature=rng.choice([0.0, 0.5]), seed=rng.randrange(100)),
            stop_token_ids=(STOP,),
            top_logprobs=rng.choice([0, 0, 0, 2]),
        )
        live.append(simulation.submit(request, rng.randrange(1, 14), simulation.now))
        for _ in range(rng.randrange(3)):
            simulation.turn()
        if rng.random() < 0.2:
            _, job = rng.choice(live)
            if job is not None:
                simulation.scheduler.cancel(job, simulation.now)
        held = [page for job in simulation.scheduler.running for page in job.pages]
        assert len(set(held)) == simulation.pool.used
        assert [job.order for job in simulation.scheduler.running] == sorted(
            job.order for job in simulation.scheduler.running
        )
    turns = 0
    while simulation.turn():
        turns += 1
        assert turns < 5000, "it does not end"
    for outcome in simulation.outcomes:
        if outcome.reason == "cancelled":
            assert outcome.tokens == outcome.expected[: len(outcome.tokens)]
        else:
            assert outcome.reason == ("stop" if outcome.expected[-1] == STOP else "length")
            assert outcome.tokens == outcome.expected
    assert simulation.pool.used == 0
    assert not simulation.scheduler.running
    assert not simulation.scheduler.waiting


def test_few_pages_preempt_the_youngest_and_the_oldest_ends_first() -> None:
    simulation = Simulation(DEVICE, max_batch=4, pages=12, page_size=4, keep=False)
    for i in range(4):
        simulation.submit(Request([3 + i] * 8, 30), 40, 0.0)
    while simulation.turn():
        pass
    assert simulation.scheduler.counts["preemptions"] > 0
    ends = [outcome.last_at for outcome in simulation.outcomes]
    assert ends == sorted(ends)
    assert all(outcome.tokens == outcome.expected[:30] for outcome in simulation.outcomes)


def test_a_long_prompt_is_cut_and_decodes_go_on_beside_it() -> None:
    simulation = Simulation(DEVICE, max_batch=4, token_budget=64)
    simulation.submit(Request([3] * 5, 50), 60, 0.0)
    for _ in range(4):
        simulation.turn()
    simulation.plans.clear()
    simulation.submit(Request([4] * 300, 2), 2, simulation.now)
    while simulation.turn():
        pass
    pieces = [plan for plan in simulation.plans if plan.pieces]
    assert [plan.pieces[0].count for plan in pieces] == [64, 64, 64, 64, 44]
    assert all(len(plan.rows) == 1 for plan in pieces)
    assert all(plan.C <= 64 for plan in simulation.plans)


def test_several_short_prompts_share_a_step() -> None:
    simulation = Simulation(DEVICE, max_batch=8, token_budget=64)
    for i in range(4):
        simulation.submit(Request([3 + i] * 10, 2), 2, 0.0)
    simulation.turn()
    assert [piece.count for piece in simulation.plans[0].pieces] == [10, 10, 10, 10]
    assert len(simulation.plans[0].sampled) == 4


def test_a_second_turn_of_a_conversation_computes_only_what_is_new() -> None:
    simulation = Simulation(DEVICE, page_size=4, token_budget=64)
    first, _ = simulation.submit(Request(list(range(100, 130)), 20), 20, 0.0)
    while simulation.turn():
        pass
    history = [*first.request.prompt, *first.tokens]  # 50 tokens; the last was never computed
    simulation.plans.clear()
    second, job = simulation.submit(Request([*history, 77, 78], 5), 5, simulation.now)
    while simulation.turn():
        pass
    assert job is not None
    assert second.ticket is not None
    assert second.ticket.cached_tokens == 48
    assert simulation.plans[0].pieces[0].start == 48
    assert simulation.scheduler.counts["cached_tokens"] == 48
    # The same prompt once more: all but its last token can be there, in whole pages.
    third, _ = simulation.submit(Request([*history, 77, 78], 5), 5, simulation.now)
    while simulation.turn():
        pass
    assert third.ticket is not None
    assert third.ticket.cached_tokens == 48
    assert third.tokens == second.tokens


def test_equal_prompts_of_one_moment_share_pages() -> None:
    simulation = Simulation(DEVICE, page_size=4, token_budget=128)
    for _ in range(2):
        simulation.submit(Request([9] * 33, 1), 1, 0.0)
    simulation.turn()
    first, second = simulation.plans[0].pieces[0], simulation.plans[0].rows
    assert (first.start, first.count) == (0, 33)
    assert [(piece.start, piece.count) for piece in second] == [(32, 1)]
    while simulation.turn():
        pass
    assert simulation.pool.used == 0


def test_the_queue_has_an_end() -> None:
    simulation = Simulation(DEVICE, max_queue=2)
    outcomes = [simulation.submit(Request([3], 4), 4, 0.0)[0] for _ in range(3)]
    assert [outcome.reason for outcome in outcomes] == [None, None, "refused"]
    assert isinstance(outcomes[2].error, RefusedError)


def test_shapes_are_few_and_hold_what_fits() -> None:
    shapes = Shapes.of(64, 256)
    assert (shapes.rows, shapes.mixed_rows, shapes.prompt) == ((1, 2, 4, 8, 16, 32, 64), (4, 16, 64), (16, 64, 256))
    assert len(shapes.all()) == 16
    assert shapes.fit(5, 0) == (8, 0)
    assert shapes.fit(5, 48) == (16, 64)
    fine = Shapes.of(16, 64, fine=True)
    assert (fine.rows, fine.mixed_rows, fine.prompt) == ((1, 2, 4, 8, 16), (1, 4, 8, 16), (16, 32, 64))
    assert Shapes.of(3, 48, fine=True) == Shapes((1, 2, 3), (3,), (16, 48))
    assert Shapes.of(1, 5) == Shapes((1,), (1,), (16,))
    assert Shapes.of(3, 32) == Shapes((1, 2, 3), (3,), (16, 32))
    assert Shapes.of(16, 16, 4) == Shapes((1, 2, 4, 5, 8, 16, 32, 64), (4, 16), (16,))
    assert Shapes.of(1, 16, 3).rows == (1, 2, 4)
    assert Shapes.of(100, 16, 3).rows[-1] == 100
