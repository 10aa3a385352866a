"""Engines over a tiny model for the tests, and what each request gives alone.

Every engine has the same shapes, and the decoder keeps what it compiled: the first engine of a degree pays for all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from decode.batching.engine import Engine
from decode.batching.options import EngineOptions
from decode.batching.request import Request, Ticket
from decode.decoder import Decoder
from decode.sampling import SamplingParams
from decode.speculation.draft import DraftModel
from roofline.step_time import StepTime, StepTimeFit
from tests.decode.running import Row, make_decoder, run, small_model
from tests.model.checkpoint_files import small_config

CONFIG = small_config(
    vocab_size=101, num_layers=1, num_heads=4, num_kv_heads=2, tie_word_embeddings=True, max_position_embeddings=512
)
OPTIONS = EngineOptions(max_batch=3, max_len=160, token_budget=16, pages=11)

GREEDY = SamplingParams()
EVERYTHING = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.3, seed=2**40 + 3)
"""Every part of the sampler at once. Its values differ from request to request by ``replace``."""


class Fixed(StepTimeFit):
    """In place of what the machine takes: rows and prompt tokens cost next to nothing, so speculation always pays."""

    def __init__(self, start: StepTime):
        super().__init__(StepTime(10.0, 1e-6, 1e-6, 0.0))

    def saw(self, rows: int, prompt_tokens: int, positions: int, seconds: float) -> None:
        pass


@functools.cache
def decoder(tp: int = 1) -> Decoder:
    return make_decoder(small_model(CONFIG), tp)


def draft_of(tp: int, listed: bool, *, copies: bool = True) -> DraftModel:
    """The target itself: always right; or with half of the vocabulary: often right, and often not."""
    target = decoder(tp)
    params: Any = dict(zip(target.programs.paths, target.params, strict=True))
    draft = Decoder(CONFIG, params, target.layout, "float32")
    vocabulary = np.arange(1, CONFIG.vocab_size, 2).astype(np.int32) if listed else None
    return DraftModel(draft, vocabulary, copies=copies)


def speculation_pays(patch: pytest.MonkeyPatch) -> None:
    """Engines propose whatever it costs here and now. One more shape is compiled."""
    patch.setattr("decode.batching.engine.StepTimeFit", Fixed)
    patch.setattr("decode.batching.shapes.VERIFIED_ROWS", 6)
    patch.setattr("decode.batching.speculation.TRUST", 0.0)  # nor what steps took since
    patch.setattr("decode.batching.draft.PagedDraft.seconds", lambda self, jobs, ahead: 0.0)


@contextmanager
def running(
    tp: int = 1, own: Decoder | None = None, draft: DraftModel | None = None, **changes: object
) -> Iterator[Engine]:
    """A started engine, closed at the end; options differ from ``OPTIONS`` by ``changes``. At the end every request is
    accounted for and every page is back."""
    engine = Engine(own or decoder(tp), replace(OPTIONS, **changes), draft)  # type: ignore[arg-type]
    engine.start()
    try:
        yield engine
        assert engine.healthy()
        assert engine.drain(100)
        stats = engine.stats()
        assert (stats.waiting, stats.running, stats.pages_used) == (0, 0, 0)
        assert stats.submitted == stats.completed + stats.cancelled + stats.failed
    finally:
        engine.close()


def alone(request: Request, tp: int = 1) -> Row:
    """What plain decoding gives for one request."""
    stop = list(request.stop_token_ids)
    options = {"stop_token_ids": stop, "max_len": OPTIONS.max_len}
    return run(decoder(tp), [request.prompt], request.max_new_tokens, request.sampling, **options)[0]


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
