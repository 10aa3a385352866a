"""Requests that share steps, each as if it were alone, and what goes wrong kept to whom it concerns."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from decode.batching.engine import Engine
from decode.batching.options import EngineOptions
from decode.batching.request import EngineError, Event, RefusedError, Request, RequestError
from decode.decoder import Decoder, NumericsError
from model.quantize import WIDE, Quantization, WeightFormat
from tests.decode.batching.engines import CONFIG, EVERYTHING, GREEDY, OPTIONS, alone, decoder, finished, running
from tests.decode.running import log_softmax, make_decoder, run, small_model, some_tokens

pytestmark = pytest.mark.xdist_group("engines")  # one process compiles for all

TOLERANCE = 2e-5
"""On float32 log-probabilities: products of one row and of several rows add up in different orders."""


def some_requests() -> list[Request]:
    """Greedy and sampled ones in turn, of a few prompt lengths, more than run together; the last two share a prefix."""
    samplings = [GREEDY, EVERYTHING, GREEDY, replace(EVERYTHING, temperature=1.4, top_k=7, top_p=0.8, seed=1)]
    lengths = [1, 12, 100, 16, 5]
    found = [
        Request(some_tokens(CONFIG, length, seed), 8 + 4 * seed, samplings[seed % 4])
        for seed, length in enumerate(lengths)
    ]
    return [*found, Request(found[2].prompt[:70], 20, samplings[3])]


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_each_request_as_if_alone(tp: int) -> None:
    """There are few pages for three at once, so preemption takes part."""
    wanted = some_requests()
    with running(tp) as engine:
        tickets = [engine.submit(request) for request in wanted]
        for request, ticket in zip(wanted, tickets, strict=True):
            got, expected = finished(ticket), alone(request, tp)
            assert got.tokens == expected.tokens
            np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=TOLERANCE, rtol=0)
        stats = engine.stats()
        assert stats.completed == len(wanted)
        assert stats.generated_tokens == sum(request.max_new_tokens for request in wanted)


def test_preemption_and_the_prefix_cache_leave_the_text_alone() -> None:
    long = [Request(some_tokens(CONFIG, 60, seed), 80, EVERYTHING) for seed in range(3)]
    with running() as engine:
        texts = [finished(ticket).tokens for ticket in [engine.submit(request) for request in long]]
        assert engine.stats().preemptions > 0
        assert texts == [alone(request).tokens for request in long]
        again = Request([*long[0].prompt, *texts[0]][:130], 12, EVERYTHING)
        cold = alone(again).tokens
        for _ in range(2):
            ticket = engine.submit(again)
            assert finished(ticket).tokens == cold
        assert ticket.cached_tokens == 128
        assert engine.stats().cached_tokens >= 128


def test_stop_tokens_end_a_request_and_are_its_last() -> None:
    request = Request(some_tokens(CONFIG, 12, 3), 40)
    free = alone(request).tokens
    stop = free[7]
    with running() as engine:
        ticket = engine.submit(replace(request, stop_token_ids=(stop, 100)))
        events = list(ticket)
        assert [event.token for event in events] == free[: free.index(stop) + 1]
        assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].finish_reason == "stop"
        assert list(engine.submit(replace(request, max_new_tokens=2)))[-1].finish_reason == "length"


def test_logit_bias_and_top_logprobs() -> None:
    request = Request(some_tokens(CONFIG, 12, 4), 3, top_logprobs=5)
    with running() as engine:
        plain = list(engine.submit(request))
        others = [engine.submit(Request(some_tokens(CONFIG, 5, 8), 12)) for _ in range(2)]
        best = plain[0].token
        assert best is not None
        forced = list(engine.submit(replace(request, logit_bias={best: -100.0, 17: 100.0})))
        assert all(finished(other).tokens == alone(other_request).tokens for other, other_request in _with(others))
    sequence = [*request.prompt, *(event.token for event in plain[:-1])]
    logprobs = log_softmax(decoder().logits([sequence])[0])[len(request.prompt) - 1 :]
    for event, row in zip(plain, logprobs, strict=True):
        order = np.argsort(-row)[:5]
        assert [token for token, _ in event.top] == order.tolist()
        np.testing.assert_allclose([value for _, value in event.top], row[order], atol=TOLERANCE, rtol=0)
    assert [event.token for event in forced] == [17, 17, 17]
    assert forced[0].logprob == pytest.approx(logprobs[0][17], abs=TOLERANCE)  # of the model's own distribution
    assert forced[0].top == plain[0].top


def _with(tickets):  # type: ignore[no-untyped-def]
    return [(ticket, Request(some_tokens(CONFIG, 5, 8), 12)) for ticket in tickets]


def test_top_logprobs_and_bias_when_the_vocabulary_is_split() -> None:
    request = Request(some_tokens(CONFIG, 12, 4), 2, top_logprobs=20, logit_bias={99: 50.0})
    with running() as one, running(3) as three:
        for a, b in zip(one.submit(request), three.submit(request), strict=True):
            assert (a.token, [token for token, _ in a.top]) == (b.token, [token for token, _ in b.top])
            assert a.token == 99
            np.testing.assert_allclose([v for _, v in a.top], [v for _, v in b.top], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("tp", "weights"), [(1, WIDE), (2, Quantization.layers(WeightFormat("int8")))])
def test_a_cache_of_int8_gives_what_it_gives_alone(tp: int, weights: Quantization) -> None:
    """Scales lie in pages beside what they scale; with int8 weights too, and over two devices.

    Products of more rows add up in another order, and where that turns a value of the cache to its neighbour of 255,
    the log-probabilities move by some 1e-5.
    """
    layout = decoder(tp).layout
    params = small_model(CONFIG).load_params(layout, "float32", "unrolled", progress=False, quantization=weights)
    narrow = Decoder(CONFIG, params, layout, "float32", cache_dtype="int8", quantization=weights)
    request = Request(some_tokens(CONFIG, 20, 5), 20)
    expected = run(narrow, [request.prompt], 20, max_len=64)[0]
    with running(own=narrow, max_batch=2, pages=10) as engine:
        other = engine.submit(Request(some_tokens(CONFIG, 11, 6), 15))
        got = finished(engine.submit(request))
        assert len(other.result()) == 15
    assert got.tokens == expected.tokens
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=10 * TOLERANCE, rtol=0)


def test_cancelling_frees_the_pages_and_leaves_the_others_alone() -> None:
    keep, drop = Request(some_tokens(CONFIG, 12, 0), 60), Request(some_tokens(CONFIG, 16, 1), 140)
    with running() as engine:
        events: list[Event] = []
        ended, begun = threading.Event(), threading.Event()

        def on_event(event: Event) -> None:
            events.append(event)
            begun.set()
            if event.finish_reason:
                ended.set()

        kept, dropped = engine.submit(keep), engine.submit(drop, on_event)
        assert begun.wait(60)
        engine.cancel(dropped.id)
        assert ended.wait(60)
        engine.cancel(dropped.id)  # once more, and one that never was
        engine.cancel(10**9)
        assert finished(kept).tokens == alone(keep).tokens
    assert (events[-1].finish_reason, events[-1].token, events[-1].error) == ("cancelled", None, None)
    tokens = [event.token for event in events[:-1]]
    assert tokens == alone(drop).tokens[: len(tokens)]


def test_what_can_never_run_is_refused_with_the_numbers() -> None:
    engine = Engine(decoder(), OPTIONS)
    cases = [
        (Request([], 1), "empty"),
        (Request([1], 0), "max_new_tokens is 0"),
        (Request([5, 101], 1), "token id 101 at place 1; ids run from 0 to 100"),
        (Request([-1], 1), "token id -1"),
        (Request([1] * 100, 61), "100 tokens and 61 new ones make 161 positions; a request has room for 160"),
        (Request([1], 1, logit_bias={101: 1.0}), "logit_bias has token id 101"),
        (Request([1], 1, logit_bias={1: 101.0}), "must be from -100 to 100"),
        (Request([1], 1, logit_bias={1: float("nan")}), "must be from -100 to 100"),
        (Request([1], 1, top_logprobs=21), "from 0 to 20"),
    ]
    for request, message in cases:
        with pytest.raises(RequestError, match=message):
            engine.submit(request)
    few = Engine(decoder(), replace(OPTIONS, pages=4))
    assert few.max_len == 4 * 16  # what a chat without a bound may fill
    few.check(Request([1] * 60, 4))
    with pytest.raises(RequestError, match="a request has room for 64"):
        few.check(Request([1] * 60, 5))
    with pytest.raises(EngineError, match="not started"):
        engine.submit(Request([1], 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_batch": 0}, "max_batch is 0"),
        ({"max_len": 513}, "max_len is 513; this model allows 2 to 512"),
        ({"tpot_slo_s": 0.0}, "tpot_slo_s is 0.0"),
        ({"token_budget": 0}, "token_budget is 0"),
    ],
)
def test_options_that_do_not_fit(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Engine(decoder(), replace(EngineOptions(), **changes))  # type: ignore[arg-type]


def test_a_poisoned_prompt_fails_alone() -> None:
    """Token 50 has NaN for an embedding: a prompt with it gives NaN logits, and its neighbours what they always do."""
    poisoned = make_decoder(small_model(replace(CONFIG, tie_word_embeddings=False)))
    place = poisoned.programs.paths.index(("embed", "weight"))
    healthy = Request([3, 4, 5], 20)
    with running(own=poisoned, max_batch=2) as engine:
        before = finished(engine.submit(healthy)).tokens
    poisoned.params[place] = poisoned.params[place].at[50].set(np.nan)
    with running(own=poisoned, max_batch=2) as engine:
        for _ in range(2):  # nor does anything of it stay behind
            first, second = engine.submit(Request([7, 50, 8], 20)), engine.submit(healthy)
            with pytest.raises(NumericsError, match="NaN"):
                first.result()
            assert finished(second).tokens == before
        assert engine.stats().failed == 2


def test_a_dying_thread_ends_every_request_with_an_error_and_says_so() -> None:
    engine = Engine(decoder(), OPTIONS)
    engine.start()
    assert engine.ready()
    assert engine.healthy()

    def broken(*_: object) -> None:
        raise MemoryError("no more")

    engine._runner.step = broken  # type: ignore[assignment, method-assign]
    ticket = engine.submit(Request([1, 2], 5))
    with pytest.raises(EngineError, match="the engine died: MemoryError: no more"):
        ticket.result()
    assert not engine.healthy()
    assert not engine.ready()
    with pytest.raises(EngineError, match="died"):
        engine.submit(Request([1, 2], 5))
    engine.close()
    assert engine.stats().pages_used == 0


def test_a_scheduler_that_broke_leaves_nobody_waiting() -> None:
    engine = Engine(decoder(), OPTIONS)
    engine.start()

    def broken(*_: object) -> None:
        raise KeyError("the accounts are wrong")

    engine._scheduler.holdings.leave = broken  # type: ignore[method-assign]
    tickets = [engine.submit(Request([1, 2], length)) for length in (3, 100, 100, 100, 100)]  # some run, some wait
    for ticket in tickets:
        with pytest.raises(EngineError, match="the engine died: KeyError"):
            ticket.result()
    assert not engine.healthy()
    engine.close()


def test_closing_ends_what_runs_and_draining_finishes_it() -> None:
    engine = Engine(decoder(), OPTIONS)
    engine.start()
    ticket = engine.submit(Request([1, 2], 140))
    assert not engine.drain(0.0)
    with pytest.raises(EngineError, match="shutting down"):
        engine.submit(Request([1, 2], 5))
    assert engine.drain(60)
    assert len(ticket.result()) == 140
    engine.close()
    engine.close()

    engine = Engine(decoder(), OPTIONS)
    engine.start()
    tickets = [engine.submit(Request([1, 2], 150)) for _ in range(9)]
    engine.close()
    ends = [list(ticket)[-1] for ticket in tickets]
    assert all(isinstance(end.error, EngineError) or end.finish_reason == "length" for end in ends)
    assert engine.stats().pages_used == 0
    assert threading.active_count() < 50


def test_a_callback_that_raises_ends_its_own_request() -> None:
    def bad(event: Event) -> None:
        raise KeyError("a caller's fault")

    request = Request(some_tokens(CONFIG, 12, 0), 30)
    with running() as engine:
        engine.submit(request, bad)
        assert finished(engine.submit(request)).tokens == alone(request).tokens
        assert engine.stats().cancelled == 1


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    def fill(engine: Engine) -> None:
        for _ in range(20):
            engine.submit(Request([1], 100))

    with running(max_queue=1) as engine:
        with pytest.raises(RefusedError, match=r"the queue of \d+ requests? is full") as refused:
            fill(engine)
        assert refused.value.retry_after_s >= 1


def test_stats_say_where_the_time_goes() -> None:
    with running() as engine:
        engine.submit(Request(some_tokens(CONFIG, 40), 20)).result()
        stats = engine.stats()
    assert stats.steps == stats.decode_steps + 3  # 40 prompt tokens at 16 a step
    assert 0 < stats.host_s < 1
    assert stats.host_wall_s > stats.dispatch_s > 0
    assert stats.step_s > 0
    assert set(stats.predicted_s) == {"base", "rows", "prompt", "cache"}
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (40, 0, 20)
    assert stats.pages_cached == 3  # 59 positions computed: three full pages, kept
