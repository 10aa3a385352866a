"""Engines over tiny models for the tests, and what each request gives alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from decode.batching.engine import Engine
from decode.batching.options import EngineOptions
from decode.batching.request import Request, Ticket
from decode.decoder import Decoder
from tests.decode.running import Row, make_decoder, run, small_model
from tests.model.checkpoint_files import small_config

CONFIG = small_config(
    vocab_size=101, num_layers=1, num_heads=4, num_kv_heads=2, tie_word_embeddings=True, max_position_embeddings=512
)
OPTIONS = EngineOptions(max_batch=4, max_len=160, token_budget=32)


@functools.cache
def decoder(tp: int = 1) -> Decoder:
    return make_decoder(small_model(CONFIG), tp)


@contextmanager
def running(tp: int = 1, own: Decoder | None = None, **changes: object) -> Iterator[Engine]:
    """A started engine, closed at the end; options differ from ``OPTIONS`` by ``changes``."""
    engine = Engine(own or decoder(tp), replace(OPTIONS, **changes))  # type: ignore[arg-type]
    engine.start()
    try:
        yield engine
        if engine.healthy():
            check_returned(engine)
    finally:
        engine.close()


def check_returned(engine: Engine) -> None:
    """Nothing runs, and so no page is held."""
    assert engine.drain(60)
    stats = engine.stats()
    assert (stats.waiting, stats.running, stats.pages_used) == (0, 0, 0)
    assert stats.submitted == stats.completed + stats.cancelled + stats.failed + late(stats)


def late(stats: object) -> int:
    """Requests refused in the queue count as submitted; these tests have no targets, so none is."""
    return 0


def alone(request: Request, tp: int = 1) -> Row:
    """What plain decoding gives for one request."""
    stop = list(request.stop_token_ids)
    return run(decoder(tp), [request.prompt], request.max_new_tokens, request.sampling, stop_token_ids=stop)[0]


def finished(ticket: Ticket) -> Row:
    """A ticket's tokens and log-probabilities once it has ended."""
    row = Row([], [])
    for event in ticket:
        if event.error:
            raise event.error
        if event.token is not None:
            row.tokens.append(event.token)
            row.logprobs.append(event.logprob)
    return row
