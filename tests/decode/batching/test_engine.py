"""Requests that share steps, each as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest

from decode.batching.request import Request
from decode.sampling import SamplingParams
from tests.decode.batching.engines import CONFIG, alone, finished, running
from tests.decode.running import some_tokens

KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(temperature=1.3, top_k=7, seed=2**40 + 3),
    SamplingParams(temperature=0.8, top_p=0.8, repetition_penalty=1.4, seed=1),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(temperature=1.0, min_p=0.05, top_k=20, top_p=0.9, seed=9),
]


def requests() -> list[Request]:
    lengths = [1, 40, 16, 17, 70, 5, 33, 3, 100]
    return [
        Request(some_tokens(CONFIG, length, seed), 12 + seed, KINDS[seed % len(KINDS)])
        for seed, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_each_request_as_if_alone(tp: int) -> None:
    wanted = requests()
    with running(tp) as engine:
        tickets = [engine.submit(request) for request in wanted]
        for request, ticket in zip(wanted, tickets, strict=True):
            got, expected = finished(ticket), alone(request, tp)
            assert got.tokens == expected.tokens
            np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=2e-5, rtol=0)
