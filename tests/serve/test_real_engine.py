"""A live server over the real engine and a tiny model: each text is what plain decoding gives, whatever else runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from decode.batching.engine import Engine
from decode.batching.options import EngineOptions
from model.checkpoint.resolve import open_model
from scripts import bench_serving
from tests.decode.batching.engines import Fixed
from tests.decode.running import make_decoder
from tests.scripts.tiny import BYTES, EOS, answer, poison, text_of, tokens_of, write_tiny
from tests.serve.live import NAME, PATIENCE_S, Live, eventually, live_server

POISON = "~"
NEW = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with one token whose embedding is not a number."""
    found = write_tiny(tmp_path_factory.mktemp("tiny") / "model")
    poison(found, POISON)
    return found


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    model = open_model(str(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decode.batching.engine.StepTimeFit", Fixed)
        engine = Engine(make_decoder(model), EngineOptions(max_batch=4, token_budget=16, pages=12, proposals=1))
    engine.start()
    with live_server(engine, model.load_tokenizer()) as server:
        yield server
    engine.close()


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as found:
        yield found


def solo(folder: Path, prompt: str, **sampling: Any) -> str:
    """The text that plain decoding gives alone, up to the stop token."""
    tokens = answer(folder, tokens_of(prompt), NEW, **sampling)
    return text_of(tokens[: tokens.index(EOS)] if EOS in tokens else tokens)


def test_many_at_once_get_what_each_gets_alone(live: Live, client: openai.OpenAI, folder: Path) -> None:
    """More requests than slots, and few pages: they wait, join, leave, share prefixes and are preempted. All of them
    speculate where there is something to propose."""
    cases: list[tuple[str, dict[str, Any]]] = [
        (
            f"{'shared beginning, ' * (i % 2)}number {i}",
            {"temperature": 1.2, "seed": i} if i % 3 else {"temperature": 0},
        )
        for i in range(10)
    ]

    def ask(case: tuple[str, dict[str, Any]]) -> str:
        prompt, sampling = case
        stream = client.completions.create(model=NAME, prompt=prompt, max_tokens=NEW, stream=True, **sampling)
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(len(cases)) as threads:
        texts = list(threads.map(ask, cases))
    assert texts == [solo(folder, prompt, **sampling) for prompt, sampling in cases]
    eventually(lambda: live.engine.stats().pages_used == 0)


def test_a_second_turn_computes_only_what_is_new(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "a long enough first turn"}]
    first = client.chat.completions.create(model=NAME, messages=messages, max_tokens=1)
    again = client.chat.completions.create(model=NAME, messages=messages, max_tokens=1)
    assert first.usage is not None
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens == first.usage.prompt_tokens == len("user:a long enough first turn;") + 1
    assert again.usage.prompt_tokens_details.cached_tokens == 16


def test_log_probabilities_are_the_models(live: Live, client: openai.OpenAI) -> None:
    choice = client.completions.create(model=NAME, prompt="abc", max_tokens=5, temperature=0, logprobs=3).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.top_logprobs
    assert choice.logprobs.token_logprobs
    for top, own in zip(choice.logprobs.top_logprobs, choice.logprobs.token_logprobs, strict=True):
        assert len(top) == 3
        assert own == max(top.values())  # greedy takes the likeliest
    biased = client.completions.create(
        model=NAME, prompt="abc", max_tokens=9, temperature=0, logit_bias={str(BYTES.index(ord("q"))): 100}
    )
    assert biased.choices[0].text == 9 * "q"
    told, stats = live.get("/metrics").text, live.engine.stats()
    assert stats.proposed_tokens >= stats.accepted_tokens  # how many depends on what steps were seen to cost
    assert f"shardstream_proposed_tokens_total {float(stats.proposed_tokens)}" in told
    assert f"shardstream_accepted_tokens_total {float(stats.accepted_tokens)}" in told


def test_a_poisoned_prompt_fails_alone(live: Live, client: openai.OpenAI, folder: Path) -> None:
    def ask(prompt: str) -> str:
        return client.completions.create(model=NAME, prompt=prompt, max_tokens=NEW, temperature=0).choices[0].text

    with ThreadPoolExecutor(3) as threads:
        bad, *good = [threads.submit(ask, prompt) for prompt in (f"ab{POISON}", "first", "second")]
        with pytest.raises(openai.InternalServerError, match="NaN") as raised:
            bad.result()
        assert raised.value.code == "numerics_error"
        assert [one.result() for one in good] == [solo(folder, "first"), solo(folder, "second")]
    assert ask("third") == solo(folder, "third")  # and nothing of it stays behind in the cache
    assert live.get("/health").status_code == 200


def test_leaving_frees_the_pages(live: Live, client: openai.OpenAI) -> None:
    for _ in range(5):
        stream = client.completions.create(
            model=NAME, prompt="abc", max_tokens=50, n=4, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    eventually(lambda: live.engine.stats().running == 0)
    stats = live.engine.stats()
    assert (stats.pages_used, stats.waiting) == (0, 0)
    eventually(lambda: live.service.open_requests == 0)


def test_a_small_load_is_accounted_for(live: Live, tmp_path: Path) -> None:
    """``bench_serving`` and the engine count the same requests and tokens."""
    before = live.engine.stats()
    given = ["--url", live.url, "--rate", "200", "--requests", "24", "--warmup", "0", "--quiet"]
    given += [
        "--prompt-tokens",
        "uniform:1:4",
        "--output-tokens",
        "uniform:2:20",
        "--extra-body",
        '{"ignore_eos": true}',
    ]
    assert bench_serving.main([*given, "--json", str(tmp_path / "found.json")]) == 0
    (found,) = json.loads((tmp_path / "found.json").read_text())["points"]
    eventually(lambda: live.engine.stats().completed - before.completed == 24)
    eventually(lambda: live.engine.stats().pages_used == 0)
    after = live.engine.stats()
    assert found["requests"] == {"offered": 24, "completed": 24, "refused": 0, "failed": 0}
    assert found["output_tokens"] == after.generated_tokens - before.generated_tokens
    assert (after.running, after.waiting) == (0, 0)
