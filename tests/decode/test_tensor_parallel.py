"""Any number of devices gives what one device gives: logits, greedy text, sampled text. float32."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from decode.decoder import Decoder
from decode.sampling import SamplingParams
from model.config import LlamaConfig
from model.llama import LayersForm
from sharding.collectives import CollectiveForm, Collectives
from sharding.mesh import factorise
from tests.decode.running import (
    Row,
    demo_decoder,
    demo_model,
    golden_demo,
    make_decoder,
    run,
    small_model,
    some_tokens,
)
from tests.model.checkpoint_files import small_config

TOLERANCE = 1e-4

# K = 2, so tp = 4 is 2 x K; at tp = 5 neither F = 45, V = 101, a head group's (G + 2) H = 40 rows split over 5 with
# G H = 24 columns, nor K divides.
SMALL = small_config(vocab_size=101, num_heads=6, num_kv_heads=2, tie_word_embeddings=True, max_position_embeddings=128)
DEGREES = (2, 3, 4, 5, 6, 7, 8)
DEMO_DEGREES = (2, 3, 4, 6, 8)


@functools.cache
def small_decoder(tp: int, config: LlamaConfig = SMALL) -> Decoder:
    return make_decoder(small_model(config), tp)


def prompts() -> list[list[int]]:
    return [some_tokens(SMALL, length, seed) for seed, length in enumerate((21, 5, 16))]


def check_rows(found: list[Row], expected: list[Row]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=TOLERANCE)


@pytest.mark.xdist_group("small-tp")
def test_the_degrees_cover_every_branch() -> None:
    """Split heads alone, split positions alone, and both; twice the KV heads; and sizes that must be padded."""
    demo = [factorise(tp, 3) for tp in DEMO_DEGREES]
    assert demo == [(1, 2), (3, 1), (1, 4), (3, 2), (1, 8)]
    assert factorise(2 * SMALL.num_kv_heads, SMALL.num_kv_heads) == (2, 2)
    layout = small_decoder(5).layout
    assert layout.padding((SMALL.vocab_size, 1), ("vocab", None)) == 4
    assert layout.padding((SMALL.intermediate_size + 1, 1), ("ff", None)) == 4


@pytest.mark.xdist_group("small-tp")
@pytest.mark.parametrize("tp", DEGREES)
def test_small_model(tp: int) -> None:
    text = [some_tokens(SMALL, 60)]
    found, expected = (small_decoder(degree).logits(text) for degree in (tp, 1))
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    check_rows(*(run(small_decoder(degree), prompts(), 40) for degree in (tp, 1)))


BIASED = replace(SMALL, hidden_size=34, attention_bias=True, mlp_bias=True)  # 34 numbers do not divide over 3 or 4


@pytest.mark.xdist_group("small-tp")
@pytest.mark.parametrize("form", ["scatter", "one_shot"])
@pytest.mark.parametrize(("tp", "layers"), [(2, "unrolled"), (4, "scan"), (3, "unrolled")])
def test_every_form_of_all_reduce_gives_the_same_text(form: CollectiveForm, tp: int, layers: LayersForm) -> None:
    """To float32 rounding, with biases, and where the hidden size is padded."""
    decoder = make_decoder(small_model(BIASED), tp, layers=layers, collectives=Collectives(form))
    check_rows(run(decoder, prompts(), 25), run(small_decoder(1, BIASED), prompts(), 25))


@pytest.mark.xdist_group("small-tp")
@pytest.mark.parametrize("form", ["scatter", "one_shot"])
def test_every_form_of_all_reduce_runs_in_bf16(form: CollectiveForm) -> None:
    """The bits of a share and of its sum of squares survive the trip: the same log-probabilities to bf16 rounding."""
    texts = [
        run(make_decoder(small_model(BIASED), 4, dtype="bfloat16", collectives=Collectives(each)), prompts(), 1 + 1)
        for each in (form, "psum")
    ]
    for one, other in zip(*texts, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=0.05)


@pytest.mark.xdist_group("demo")
@pytest.mark.parametrize("tp", DEMO_DEGREES)
def test_demo_model(tp: int) -> None:
    """All logits of a 200-token text. Beyond three devices in the scanned form, which compiles one layer and not 30."""
    text = [golden_demo()["tokens"]]
    form: LayersForm = "unrolled" if tp <= 3 else "scan"
    found, expected = make_decoder(demo_model(), tp, layers=form).logits(text), demo_decoder().logits(text)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


HOT = SamplingParams(temperature=0.8, seed=1234567890123)
SAMPLERS = {
    "temperature": HOT,
    "top-k": replace(HOT, top_k=7),
    "top-p": replace(HOT, top_p=0.9),
    "min-p": replace(HOT, min_p=0.1),
    "repetition-penalty": replace(HOT, repetition_penalty=1.3),
    "penalised-greedy": SamplingParams(repetition_penalty=1.3),
    "together": replace(HOT, top_k=20, top_p=0.95, min_p=0.02, repetition_penalty=1.2),
}


# Each part of the sampler on two meshes and all of them on five: a program is compiled for every pair.
SAMPLED = [
    *[("temperature", tp) for tp in (2, 8)],
    *[("top-k", tp) for tp in (3, 5)],
    *[("top-p", tp) for tp in (4, 8)],
    *[("min-p", tp) for tp in (2, 5)],
    *[("repetition-penalty", tp) for tp in (3, 4)],
    *[("penalised-greedy", tp) for tp in (5, 8)],
    *[("together", tp) for tp in (2, 3, 4, 5, 8)],
]
ONE_LAYER = replace(SMALL, num_layers=1)


@functools.cache
def sampled_on_one(name: str) -> list[Row]:
    return run(small_decoder(1, ONE_LAYER), prompts(), 25, SAMPLERS[name])


@pytest.mark.xdist_group("small-tp-sampled")
@pytest.mark.parametrize(("name", "tp"), SAMPLED)
def test_same_seed_same_text(name: str, tp: int) -> None:
    found = run(small_decoder(tp, ONE_LAYER), prompts(), 25, SAMPLERS[name])
    check_rows(found, sampled_on_one(name))


@pytest.mark.xdist_group("small-tp-sampled")
def test_samplers_differ_from_each_other_and_by_seed() -> None:
    """Else the test above would show nothing."""
    texts = [tuple(row.tokens) for name in SAMPLERS for row in sampled_on_one(name)]
    again = run(small_decoder(1, ONE_LAYER), prompts(), 25, replace(HOT, seed=1))
    texts += [tuple(row.tokens) for row in again]
    assert len(set(texts)) == len(texts)


@pytest.mark.xdist_group("small-tp-sampled")
def test_noise_is_new_at_every_position() -> None:
    """Far above any logit only the noise speaks, and it names another token each time."""
    for row in run(small_decoder(2, ONE_LAYER), prompts(), 25, replace(HOT, temperature=1e6)):
        assert len(set(row.tokens)) > 15


@functools.cache
def demo_sampled_on_one() -> list[Row]:
    return run(make_decoder(demo_model(), layers="scan"), demo_prompts(), 16, SAMPLERS["together"])


def demo_prompts() -> list[list[int]]:
    return [one["prompt"] for one in golden_demo()["runs"][:2]]


@pytest.mark.xdist_group("demo")
@pytest.mark.parametrize("tp", DEMO_DEGREES)
def test_demo_model_same_seed_same_text(tp: int) -> None:
    found = run(make_decoder(demo_model(), tp, layers="scan"), demo_prompts(), 16, SAMPLERS["together"])
    check_rows(found, demo_sampled_on_one())
    assert found[0].tokens != found[1].tokens
