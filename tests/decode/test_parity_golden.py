"""Against Hugging Face transformers, by golden files: its logits and greedy tokens, made by `tests.golden.make`.

`tests/parity` compares live, where torch and transformers are installed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from model.checkpoint.demo import GGUF_SHA256
from tests.decode.running import demo_decoder, golden_demo, golden_model, golden_random, make_decoder, run
from tests.golden.cases import CASES, checksum, tensors, tokens

pytestmark = pytest.mark.optimized

RANDOM_TOLERANCE = 5e-5
"""Both sides are float32 and sum in different orders; twice the largest difference seen."""

DEMO_TOLERANCE = 2e-3
"""30 layers deep, on logits up to 35; the largest difference seen is 7e-5."""


def check_logits(logits: np.ndarray, golden: dict[str, Any], positions: list[int], tolerance: float) -> None:
    """The stored top logits at `positions`, and log(sum(exp(logits))) at every position, which sums up all others."""
    ids, values = np.array(golden["top_ids"]), np.array(golden["top_logits"])
    found = np.take_along_axis(logits[positions], ids, axis=-1)
    np.testing.assert_allclose(found, values, rtol=0, atol=tolerance)
    # No other logit is larger than the smallest stored one.
    others = logits[positions].copy()
    np.put_along_axis(others, ids, -np.inf, axis=-1)
    assert (others.max(axis=-1) <= values[:, -1] + tolerance).all()
    peak = logits.max(axis=-1, keepdims=True)
    total = peak[:, 0] + np.log(np.exp((logits - peak).astype(np.float64)).sum(axis=-1))
    np.testing.assert_allclose(total, golden["logsumexp"], rtol=0, atol=tolerance)


def test_every_random_model_has_a_golden_answer() -> None:
    assert golden_random().keys() == CASES.keys()


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_rule_makes_the_weights_that_transformers_had(name: str) -> None:
    """When this fails, the weights differ, not the model: see `tests.golden.cases`."""
    golden = golden_random()[name]
    assert checksum(tensors(CASES[name])) == golden["weights_sha256"]
    assert tokens(CASES[name]) == golden["tokens"]


@pytest.mark.parametrize("name", sorted(CASES))
def test_random_model(name: str) -> None:
    golden = golden_random()[name]
    decoder = make_decoder(golden_model(name))
    logits = decoder.logits([golden["tokens"]])[0]
    check_logits(logits, golden, golden["positions"], RANDOM_TOLERANCE)
    assert run(decoder, [golden["tokens"]], len(golden["greedy"]))[0].tokens == golden["greedy"]


def test_positions_pass_the_original_maximum() -> None:
    """What makes the two llama3 ropes a test of their scaling."""
    for name in ("llama-3.1", "llama-3.2"):
        config = golden_model(name).config
        assert config.rope_scaling.kind == "llama3"
        original = config.rope_scaling.original_max_position_embeddings
        assert original is not None
        assert len(golden_random()[name]["tokens"]) > original


@pytest.mark.xdist_group("demo")
def test_demo_model_logits() -> None:
    """All 200 positions of a text: the six largest logits, eight across the vocabulary, and the sum of all."""
    golden = golden_demo()
    assert golden["gguf_sha256"] == GGUF_SHA256
    assert len(golden["tokens"]) == 200
    logits = demo_decoder().logits([golden["tokens"]])[0]
    check_logits(logits, golden, list(range(200)), DEMO_TOLERANCE)
    probes = logits[:, golden["probe_ids"]]
    np.testing.assert_allclose(probes, golden["probe_logits"], rtol=0, atol=DEMO_TOLERANCE)


@pytest.mark.xdist_group("demo")
def test_demo_model_greedy_tokens() -> None:
    """64 tokens after each of five prompts, all in one batch; nothing stops a row early, on either side."""
    runs = golden_demo()["runs"]
    assert len(runs) == 5
    assert all(len(one["greedy"]) == 64 for one in runs)
    assert len({len(one["prompt"]) for one in runs}) == 5
    rows = run(demo_decoder(), [one["prompt"] for one in runs], 64)
    for row, one in zip(rows, runs, strict=True):
        assert row.tokens == one["greedy"]
