"""Logits against a plain float64 forward pass in numpy, for shapes and devices that divide evenly and that do not."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from decode.decoder import Decoder
from model.config import LlamaConfig, RopeScaling
from model.llama import LayersForm
from tests.decode.running import make_decoder, small_model, small_tensors, some_tokens
from tests.model.checkpoint_files import small_config
from tests.model.llama_reference import reference_logits

# V = 37, F = 45, D = 32, K = 3 and G = 2 of 8: beyond one device, most of it has to be padded.
CONFIGS = {
    "grouped": small_config(),
    "biases": small_config(attention_bias=True, mlp_bias=True, rms_norm_eps=0.02),
    "only-attention-bias": small_config(attention_bias=True, num_kv_heads=2, num_heads=2),
    "tied": small_config(tie_word_embeddings=True),
    "one-kv-head": small_config(num_kv_heads=1, num_heads=5, head_dim=6),
    "multi-head": small_config(num_kv_heads=4, num_heads=4, head_dim=10),
    "wide-heads": small_config(num_kv_heads=2, num_heads=4, head_dim=32),
    "llama3-rope": small_config(
        rope_theta=500000.0,
        num_kv_heads=2,
        num_heads=4,
        head_dim=16,
        rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 16),
    ),
    "linear-rope": small_config(rope_scaling=RopeScaling("linear", 4.0)),
    "one-layer-one-head": small_config(num_layers=1, num_heads=1, num_kv_heads=1, vocab_size=3),
}

RUNS = [
    *[("grouped", tp, "unrolled") for tp in (1, 2, 3, 4, 5, 6, 7, 8)],
    *[("grouped", tp, "scan") for tp in (1, 6)],
    *[("biases", tp, "unrolled") for tp in (1, 2, 5, 6)],
    ("biases", 8, "scan"),
    ("only-attention-bias", 4, "unrolled"),
    ("tied", 1, "unrolled"),
    ("tied", 4, "unrolled"),
    # tp = 2 x K
    ("one-kv-head", 2, "unrolled"),
    ("one-kv-head", 7, "unrolled"),
    ("multi-head", 8, "unrolled"),
    ("multi-head", 6, "unrolled"),
    ("wide-heads", 3, "unrolled"),
    ("llama3-rope", 1, "unrolled"),
    ("llama3-rope", 4, "unrolled"),
    ("linear-rope", 3, "unrolled"),
    ("one-layer-one-head", 1, "unrolled"),
    ("one-layer-one-head", 8, "unrolled"),
]


def expected(config: LlamaConfig, tokens: list[int]) -> np.ndarray:
    return reference_logits(config, small_tensors(config), tokens)


@pytest.mark.parametrize(("name", "tp", "layers"), RUNS)
def test_logits(name: str, tp: int, layers: LayersForm) -> None:
    """float32 against float64 over 40 positions: 2e-5 is four times the largest difference seen, on logits up to 4."""
    config = CONFIGS[name]
    rows = [some_tokens(config, 40, seed) for seed in (0, 1)]
    found = make_decoder(small_model(config), tp, layers=layers).logits(rows)
    assert found.shape == (2, 40, config.vocab_size)
    assert found.dtype == np.float32
    for row, tokens in enumerate(rows):
        np.testing.assert_allclose(found[row], expected(config, tokens), rtol=0, atol=2e-5)


@pytest.mark.xdist_group("lengths")
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 33])
def test_lengths_around_a_compiled_size(length: int) -> None:
    """A piece is padded to 16, 32, 64; what is computed for the padding is seen nowhere."""
    config = CONFIGS["grouped"]
    tokens = some_tokens(config, length)
    found = _grouped_on_two().logits([tokens])
    np.testing.assert_allclose(found[0], expected(config, tokens), rtol=0, atol=2e-5)


@functools.cache
def _grouped_on_two() -> Decoder:
    return make_decoder(small_model(CONFIGS["grouped"]), 2)


@pytest.mark.parametrize("tp", [1, 2, 3, 6])
def test_bfloat16_stays_near(tp: int) -> None:
    """bf16 weights and activations (8 bits): the mean error against the same weights in float64 is under 2 %."""
    config = CONFIGS["biases"]
    rounded = {
        name: (value.view(np.uint32) + 0x7FFF + (value.view(np.uint32) >> 16 & 1) & 0xFFFF0000).view(np.float32)
        for name, value in small_tensors(config).items()
    }
    tokens = some_tokens(config, 40)
    found = make_decoder(small_model(config), tp, dtype="bfloat16").logits([tokens])[0]
    assert found.dtype == np.float32
    wanted = reference_logits(config, rounded, tokens)
    assert np.abs(found - wanted).mean() < 0.02 * np.abs(wanted).mean()
    assert np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()
