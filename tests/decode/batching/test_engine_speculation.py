"""Speculation inside the engine: what is proposed for whom, and texts that stay as they are without it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.batching.engine import Engine
from decode.batching.request import Request
from decode.sampling import SamplingParams
from decode.speculation.draft import DraftModel
from decode.speculation.ngram_index import NgramIndex
from decode.speculation.proposer import SpeculationError
from model.config import LlamaConfig
from roofline.step_time import StepTime
from tests.decode.batching.engines import (
    CONFIG,
    EVERYTHING,
    OPTIONS,
    decoder,
    draft_of,
    finished,
    running,
    speculation_pays,
)
from tests.decode.batching.simulated import STOP, Guesser, Simulation
from tests.decode.running import make_decoder, small_model, some_tokens
from tests.decode.test_speculation_parts import brute_look_up

TOLERANCE = 2e-5
K = 5

pytestmark = pytest.mark.xdist_group("engines")

CHEAP = StepTime(1e-3, 1e-6, 1e-5, 0.0)
"""A device on which a row more costs next to nothing."""


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 2), st.integers(2, 5), st.integers(1, 9))
def test_the_index_finds_what_a_search_of_the_text_finds(text: list[int], shortest: int, longest: int, k: int) -> None:
    """At every length of a text, as it grows. (``look_up`` is tested against the same search and the index.)"""
    index = NgramIndex(longest, shortest)
    for end in range(1, len(text) + 1):
        index.follow(text[:end])
        assert index.propose(k) == (brute_look_up(text[:end], k, longest, shortest) or [])


def simulated(device: StepTime, requests: int, length: int = 60, **options: Any) -> Simulation:
    """Requests that all come at once and run to their end."""
    simulation = Simulation(device, jitter=0.0, **options)
    for i in range(requests):
        simulation.submit(Request([3 + i] * 8, 200, stop_token_ids=(STOP,)), length, 0.0)
    while simulation.turn():
        pass
    assert all(outcome.tokens == outcome.expected for outcome in simulation.outcomes)
    return simulation


def test_cheap_rows_are_proposed_for_and_everyone_stays_in_one_batch() -> None:
    simulation = simulated(CHEAP, 3, max_batch=4, proposals=4)
    counts = simulation.scheduler.counts
    assert counts["generated_tokens"] == 3 * 60
    # 0.8 of proposals are right, and one time in five there are none: about 2.9 tokens a step and request.
    assert counts["decode_steps"] < 60 / 2
    assert 0.5 < counts["accepted_tokens"] / counts["proposed_tokens"] < 0.9
    whole = [plan for plan in simulation.plans if plan.proposals]
    assert all(len({job for job, _ in plan.sampled}) >= len(plan.proposals) for plan in whole)
    together = [plan for plan in simulation.plans[:10] if not plan.pieces]
    assert all(len({job for job, _ in plan.sampled}) == 3 for plan in together)
    assert simulation.now < 0.6 * simulated(CHEAP, 3, max_batch=4).now


def test_dear_rows_are_not_and_steps_overlap_as_without() -> None:
    dear = StepTime(1e-4, 1e-3, 1e-3, 0.0)
    simulation, plain = simulated(dear, 4, max_batch=4, proposals=4), simulated(dear, 4, max_batch=4)
    assert simulation.scheduler.counts["proposed_tokens"] == 0
    assert [plan.R for plan in simulation.plans] == [plan.R for plan in plain.plans]
    assert simulation.now == plain.now


def test_a_full_batch_leaves_fewer_rows_to_propose_in() -> None:
    """Past 8 rows a row costs as much as a step: one request has 4 proposals, and eight have none."""
    busy = StepTime(1e-3, 5e-4, 1e-3, 0.0)
    one, eight = (simulated(busy, requests, max_batch=8, proposals=4).scheduler.counts for requests in (1, 8))
    assert one["accepted_tokens"] > 0
    assert eight["proposed_tokens"] < 0.1 * eight["generated_tokens"]


def test_a_draft_is_asked_only_where_its_request_does_not_copy() -> None:
    """The simulated look-up finds nothing one time in five. Both kinds run in one step, and every text is whole."""
    simulation = simulated(CHEAP, 3, max_batch=4, proposals=4, draft=True)
    kinds = {(job in plan.asked) for plan in simulation.plans for job in plan.proposals}
    assert kinds == {False, True}
    assert any(0 < len(plan.asked) < len(plan.proposals) for plan in simulation.plans)
    for plan in simulation.plans:
        guesses = [piece for piece in plan.rows if piece.proposal is not None]
        assert all((piece.proposal < 0) == (piece.job in plan.asked) for piece in guesses)


def test_copies_that_lost_are_tried_again_once_they_would_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft is right in half of the places and goes on being asked; what is looked up is right in all of them."""

    def propose(self: Guesser, k: int) -> list[int]:
        at = len(self.tokens)
        right = self.simulation.whole(self.tokens)[at : at + k]
        looks_up = job is not None and job.guess is not None and job.guess.index is self
        return [token if looks_up or place % 2 else 1000 for place, token in enumerate(right, at)]

    monkeypatch.setattr(Guesser, "propose", propose)
    simulation = Simulation(CHEAP, jitter=0.0, max_batch=1, proposals=2, draft=True)
    _, job = simulation.submit(Request([3] * 8, 100, stop_token_ids=(STOP,)), 100, 0.0)
    assert job is not None
    simulation.turn()
    assert job.guess is not None
    job.guess.copying.stood = 0.0
    job.guess.drafting.stood = 0.5 * job.guess.drafting.tried
    while simulation.turn():
        pass
    assert simulation.outcomes[0].tokens == simulation.outcomes[0].expected
    copied = [job not in plan.asked for plan in simulation.plans if plan.proposals]
    assert (copied[0], copied[-1]) == (False, True)


def test_proposals_preempt_nobody() -> None:
    """Pages for the text alone, to the last: whoever speculates finds none left for it, and all end without loss."""
    simulation = simulated(CHEAP, 2, length=24, max_batch=2, pages=16, page_size=4, proposals=15)
    assert simulation.scheduler.counts["preemptions"] == 0
    assert simulation.scheduler.counts["accepted_tokens"] > 0


def test_who_lost_is_tried_again_after_a_pause() -> None:
    simulation = Simulation(CHEAP, jitter=0.0, proposals=2)
    outcome, job = simulation.submit(Request([3] * 8, 200, stop_token_ids=(STOP,)), 150, 0.0)
    assert job is not None
    simulation.turn()
    assert job.guess is not None
    job.guess.copying.stood = 0.0
    before = job.guess.copying
    while len(outcome.tokens) < 100:
        if job.guess.copying is before:
            assert simulation.scheduler.counts["proposed_tokens"] == 0
        simulation.turn()
    assert job.guess.pause == 48
    assert simulation.scheduler.counts["accepted_tokens"] > 0


def test_guesses_that_never_stand_cost_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many short texts looks promising at first, and a step with proposals takes half as long again."""
    monkeypatch.setattr(Guesser, "propose", lambda self, k: [1000] * k)  # which no text has
    dear = StepTime(1e-3, 2e-4, 1e-5, 0.0)
    lost, plain = (simulated(dear, 40, length=30, max_batch=1, proposals=proposals) for proposals in (3, 0))
    counts = lost.scheduler.counts
    assert counts["accepted_tokens"] == 0 < counts["proposed_tokens"]
    assert lost.now < 1.03 * plain.now


def pairs() -> list[Request]:
    """Texts that repeat themselves and texts that do not; greedy, seeded, and some that never speculate."""
    sampled = SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, seed=2**40 + 3)
    again = [5, 6, 7, 5, 6, 7, 5, 6]
    return [
        Request([9] * 50, 50),
        Request([*again, *some_tokens(CONFIG, 40, 1), *again], 50, sampled),
        Request(some_tokens(CONFIG, 40, 2), 50),
        Request(again, 24, EVERYTHING),  # a repetition penalty
        Request([3, 1, 4], 30, replace(sampled, temperature=0.3, seed=1)),
        Request([9] * 70, 30),
    ]


@pytest.fixture(autouse=True)
def always_pays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tests of engines: whether it pays here and now is not to decide what they test."""
    if "engine" in request.function.__name__:
        speculation_pays(monkeypatch)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_an_engine_that_speculates_says_what_it_says_without(tp: int) -> None:
    """There are few pages for three at once, so preemption takes part, and so does the prefix cache."""
    wanted = pairs()
    with running(tp) as engine:  # which is tested against plain decoding
        plain = [finished(ticket) for ticket in [engine.submit(request) for request in wanted]]
    with running(tp, proposals=K) as engine:
        for _ in range(2):
            tickets = [engine.submit(request) for request in wanted]
            for expected, ticket in zip(plain, tickets, strict=True):
                got = finished(ticket)
                assert got.tokens == expected.tokens
                np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=TOLERANCE, rtol=0)
        stats = engine.stats()
    assert 20 < stats.accepted_tokens < stats.proposed_tokens
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert stats.generated_tokens == 2 * sum(request.max_new_tokens for request in wanted)


@functools.cache
def test_an_engine_whose_draft_is_the_target_accepts_all_of_a_greedy_text() -> None:
    """So the draft's cache is whole, also where its request was preempted, came in late, or began with shared pages."""
    wanted = [Request([9] * 50, 50), Request(some_tokens(CONFIG, 40, 2), 60), Request(some_tokens(CONFIG, 70, 3), 50)]
    with running() as engine:
        plain = [engine.submit(request).result() for request in wanted]
    with running(draft=draft_of(1, False, copies=False), proposals=K) as engine:
        for _ in range(2):
            tickets = [engine.submit(request) for request in wanted]
            assert [ticket.result() for ticket in tickets] == plain
        again = Request([*wanted[1].prompt, *plain[1][:30]], 30)
        assert engine.submit(again).result() == plain[1][30:]
        stats = engine.stats()
    assert stats.accepted_tokens == stats.proposed_tokens > 150
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0


def test_an_engine_with_a_draft_says_what_it_says_without() -> None:
    wanted = pairs()
    with running(2) as engine:
        plain = [finished(ticket) for ticket in [engine.submit(request) for request in wanted]]
    with running(2, draft=draft_of(2, True), proposals=K) as engine:
        tickets = [engine.submit(request) for request in wanted]
        for expected, ticket in zip(plain, tickets, strict=True):
            got = finished(ticket)
            assert got.tokens == expected.tokens
            np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=TOLERANCE, rtol=0)
        stats = engine.stats()
    assert 10 < stats.accepted_tokens < stats.proposed_tokens


def test_an_engine_ends_a_request_within_what_stood() -> None:
    """By a stop token and by ``max_new_tokens``, at every place; nothing comes after, and every event is as it was."""
    request = Request([9] * 12, 30, top_logprobs=3)
    with running() as engine:
        plain = list(engine.submit(request))
        biased = list(engine.submit(replace(request, logit_bias={17: 100.0})))
    tokens = [event.token for event in plain]
    with running(proposals=K) as engine:
        for new in range(1, 12):
            events = list(engine.submit(replace(request, max_new_tokens=new)))
            assert [event.token for event in events] == tokens[:new]
            assert [event.finish_reason for event in events] == [None] * (new - 1) + ["length"]
        for stop in set(tokens):
            events = list(engine.submit(replace(request, stop_token_ids=(stop,))))
            assert [event.token for event in events] == tokens[: tokens.index(stop) + 1]
            assert events[-1].finish_reason == "stop"
        for expected, own in ((plain, request), (biased, replace(request, logit_bias={17: 100.0}))):
            events = list(engine.submit(own))
            assert [event.token for event in events] == [event.token for event in expected]
            for mine, theirs in zip(events, expected, strict=True):
                assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
                np.testing.assert_allclose([v for _, v in mine.top], [v for _, v in theirs.top], atol=TOLERANCE)
        assert engine.stats().accepted_tokens > 20


def test_an_engine_whose_request_leaves_with_proposals_on_their_way() -> None:
    keep, drop = Request([9] * 12, 60), Request([5, 6, 7] * 4, 100)
    with running() as engine:
        kept_text, dropped_text = (engine.submit(request).result() for request in (keep, drop))
    with running(proposals=K) as engine:
        for after in (1, 6, 20):
            seen: list[int | None] = []
            kept = engine.submit(keep)
            for event in (dropped := engine.submit(drop)):
                seen.append(event.token)
                if len(seen) == after:
                    engine.cancel(dropped.id)
            assert seen[:-1] == dropped_text[: len(seen) - 1]
            assert kept.result() == kept_text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"proposals": 16}, "up to 15 a request"),
        ({"proposals": -1}, "up to 15 a request"),
        ({"proposals": 9, "max_len": 8}, "room for 8 positions"),
    ],
)
def test_an_engine_refuses_proposals_that_do_not_fit(changes: dict[str, int], message: str) -> None:
    with pytest.raises(SpeculationError, match=message):
        Engine(decoder(), replace(OPTIONS, **changes))


@pytest.mark.parametrize(
    ("config", "proposals", "message"),
    [
        (CONFIG, 0, "proposes 0 tokens"),
        (replace(CONFIG, vocab_size=102), K, "a vocabulary of 102 tokens and the model one of 101"),
        (replace(CONFIG, num_layers=2), K, "use a smaller one"),
        (replace(CONFIG, max_position_embeddings=64), K, "made for 64 positions .* may have 160"),
    ],
)
def test_an_engine_refuses_a_draft_that_does_not_fit(config: LlamaConfig, proposals: int, message: str) -> None:
    draft = DraftModel(make_decoder(small_model(config)))
    with pytest.raises(SpeculationError, match=message):
        Engine(decoder(), replace(OPTIONS, proposals=proposals), draft)
