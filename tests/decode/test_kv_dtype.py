"""Caches of fewer bits end to end: what they lose, what they hold, and that degree, batch and form do not matter."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from decode.decoder import Decoder
from roofline.footprint import kv_bytes_per_device, kv_scale_bytes_per_device
from tests.decode.running import log_softmax, make_decoder, run, small_model, some_tokens
from tests.model.checkpoint_files import small_config

CONFIG = small_config(num_heads=6, num_kv_heads=2, num_layers=2, head_dim=16, max_position_embeddings=64)
NAMES = {"bfloat16": "bf16", "int8": "int8", "float8_e4m3fn": "fp8"}
# Log-probabilities against a float32 cache. A number loses up to 2^-9 of itself in bf16, 2^-8 of the largest of its
# head in int8 and 2^-4 of itself in fp8; two layers of attention with scores of a few units carry that to the logits.
LOSS = {"bfloat16": 0.02, "int8": 0.06, "float8_e4m3fn": 0.5}
ROWS = [some_tokens(CONFIG, 11, seed=1), some_tokens(CONFIG, 11, seed=2)]


@functools.cache
def decoder(cache_dtype: str, tp: int = 1, layers: Any = "unrolled") -> Decoder:
    return make_decoder(small_model(CONFIG), tp, layers=layers, cache_dtype=cache_dtype)


@functools.cache
def exact() -> np.ndarray:
    return log_softmax(decoder("float32").logits(ROWS))


@pytest.mark.parametrize("cache_dtype", LOSS)
def test_logits_stay_near_those_of_a_float32_cache(cache_dtype: str) -> None:
    found = log_softmax(decoder(cache_dtype).logits(ROWS))
    lost = np.abs(found - exact()).max()
    assert 0 < lost < LOSS[cache_dtype]


@pytest.mark.parametrize(
    ("cache_dtype", "tp", "layers"), [("int8", 2, "scan"), ("int8", 4, "unrolled"), ("float8_e4m3fn", 8, "scan")]
)
def test_every_degree_and_form_generates_the_same(cache_dtype: str, tp: int, layers: str) -> None:
    """Prefill, then decode, in a batch of unequal rows, at kv_seq 1, 2 and 4. One quantum of a stored number that
    rounds the other way moves a log-probability by well under the loss of the format."""
    prompts = [ROWS[0], ROWS[1][:5]]
    for own, alone in zip(
        run(decoder(cache_dtype, tp, layers), prompts, 8), run(decoder(cache_dtype), prompts, 8), strict=True
    ):
        assert own.tokens == alone.tokens
        np.testing.assert_allclose(own.logprobs, alone.logprobs, atol=LOSS[cache_dtype] / 4)


@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn"])
def test_decoding_is_what_prefill_says(cache_dtype: str) -> None:
    """A position reads the same stored numbers whether it came in a prompt or one by one."""
    one = decoder(cache_dtype)
    (made,) = run(one, [ROWS[0]], 6)
    logits = log_softmax(one.logits([ROWS[0] + made.tokens[:-1]]))[0, len(ROWS[0]) - 1 :]
    np.testing.assert_allclose(made.logprobs, [row[t] for row, t in zip(logits, made.tokens, strict=True)], atol=2e-3)


@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn"])
def test_the_native_kernels_say_what_xla_says(cache_dtype: str) -> None:
    own, plain = (run(one, ROWS, 6) for one in (decoder(cache_dtype), xla_decoder(cache_dtype)))
    for ours, theirs in zip(own, plain, strict=True):
        assert ours.tokens == theirs.tokens
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=LOSS[cache_dtype] / 4)


def xla_decoder(cache_dtype: str) -> Decoder:
    return make_decoder(small_model(CONFIG), 1, cache_dtype=cache_dtype, kernels="xla")


@pytest.mark.parametrize("cache_dtype", NAMES)
@pytest.mark.parametrize("tp", [1, 8])
def test_bytes_held_are_the_bytes_reported(cache_dtype: str, tp: int) -> None:
    cache = decoder(cache_dtype, tp, "scan" if tp == 8 else "unrolled").make_cache(2, 32)
    held: dict[jax.Device, int] = {}
    for array in jax.tree.leaves(cache):
        for shard in array.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    name = NAMES[cache_dtype]
    each = kv_bytes_per_device(CONFIG, 32, name, tp, 2) + kv_scale_bytes_per_device(CONFIG, 32, name, tp, 2)
    assert set(held.values()) == {each}
    assert len(held) == tp
    assert (kv_scale_bytes_per_device(CONFIG, 32, name, tp, 2) > 0) == (name != "bf16")
