"""What OpenAI's own Python client gets from a live server."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.scripts.tiny import tokens_of
from tests.serve.fake_engine import logprob
from tests.serve.live import NAME, Live, eventually

HELLO: Any = [{"role": "user", "content": "hello"}]
CHAT_CYCLE = "user:hello;"  # what the template makes of it, and so what the fake engine repeats


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == (NAME, "model")
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other/model")


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt="abc", temperature=0)
    assert answer.object == "text_completion"
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("abcabcabcabcabca", "length", None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 16, 20)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (["ab", "xyz"], ["abab", "xyzx"]),
        (tokens_of("xyz"), ["xyzx"]),
        ([tokens_of("ab"), tokens_of("xyz", bos=False)], ["abab", "xyzx"]),
    ],
)
def test_prompts_in_every_form(client: openai.OpenAI, prompt: Any, texts: list[str]) -> None:
    answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=4, temperature=0)
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=NAME, messages=HELLO, max_completion_tokens=13, temperature=0)
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", (CHAT_CYCLE * 2)[:13])
    assert choice.finish_reason == "length"
    # An answer goes into the next turn as it is, and a message may be in parts.
    again: Any = [*HELLO, choice.message, {"role": "user", "content": [{"type": "text", "text": "x"}]}]
    longer = client.chat.completions.create(model=NAME, messages=again, max_tokens=1)
    assert longer.usage is not None
    assert longer.usage.prompt_tokens == len(tokens_of(f"user:hello;assistant:{(CHAT_CYCLE * 2)[:13]};user:x;")) + 2


def test_a_chat_without_a_bound_fills_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=NAME, messages=HELLO, temperature=0)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512


def test_streams_equal_whole_answers(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": NAME, "n": 2, "seed": 3, "max_tokens": 20, "temperature": 1, "stop": ["o;u"]}
    whole = client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=2, **options)
    stream = client.chat.completions.create(
        messages=HELLO, logprobs=True, top_logprobs=2, stream=True, stream_options={"include_usage": True}, **options
    )
    texts, roles, ends, tokens = ["", ""], ["", ""], ["", ""], [[], []]  # type: ignore[var-annotated]
    usage = None
    for chunk in stream:
        assert usage is None  # the usage comes last
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role or ""
            ends[choice.index] += choice.finish_reason or ""
            if choice.logprobs:
                tokens[choice.index] += choice.logprobs.content or []
    assert roles == ["assistant"] * 2
    assert usage == whole.usage
    for index, choice in enumerate(whole.choices):
        assert (texts[index], ends[index]) == (choice.message.content, choice.finish_reason)
        assert choice.logprobs is not None
        assert tokens[index] == choice.logprobs.content


def test_a_completion_streams(client: openai.OpenAI) -> None:
    stream = client.completions.create(model=NAME, prompt="abc", max_tokens=4, temperature=0, stream=True)
    parts = [(chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in stream]
    assert parts == [("a", None), ("b", None), ("c", None), ("a", "length")]


def test_stops(client: openai.OpenAI, live: Live) -> None:
    def text(**options: Any) -> tuple[str, str]:
        choice = client.completions.create(model=NAME, prompt="one, two.", max_tokens=30, temperature=0, **options)
        return choice.choices[0].text, choice.choices[0].finish_reason

    assert text() == ("one, two.", "stop")  # the model's own end
    assert text(stop=",") == ("one", "stop")
    assert text(stop=["tw", "e,"]) == ("on", "stop")
    assert text(extra_body={"ignore_eos": True})[1] == "length"
    eventually(lambda: live.engine.stats().running == 0)  # a stop string ends the sequence in the engine, too


def test_seeds(client: openai.OpenAI) -> None:
    def texts(seed: int, n: int = 1) -> list[str]:
        answer = client.completions.create(model=NAME, prompt="abcdefg", max_tokens=5, temperature=1, seed=seed, n=n)
        return [choice.text for choice in answer.choices]

    assert texts(3) == texts(3) == ["defga"]
    assert texts(3, n=3) == ["defga", "efgab", "fgabc"]  # choices differ, and a run of them is one of seeds
    assert texts(-1) == texts(2**64 - 1)
    unseeded = {
        client.completions.create(model=NAME, prompt="abcdefg", max_tokens=5).choices[0].text for _ in range(40)
    }
    assert len(unseeded) > 1


def test_log_probabilities(client: openai.OpenAI) -> None:
    expected = [logprob(token) for token in tokens_of("h\u00e9.", bos=False)]
    old = client.completions.create(model=NAME, prompt="h\u00e9.", max_tokens=9, temperature=0, logprobs=2).choices[0]
    assert old.logprobs is not None
    assert old.logprobs.tokens == ["h", "bytes:\\xc3", "bytes:\\xa9", "."]
    assert old.logprobs.token_logprobs == expected
    assert old.logprobs.text_offset == [0, 1, 1, 2]
    assert old.logprobs.top_logprobs is not None
    assert old.logprobs.top_logprobs[0] == {"h": expected[0], "i": expected[0] - 1}
    plain = client.completions.create(model=NAME, prompt="abc", max_tokens=1, temperature=0, logprobs=0).choices[0]
    assert plain.logprobs is not None
    assert (plain.logprobs.tokens, plain.logprobs.top_logprobs) == (["a"], None)

    chat = client.chat.completions.create(
        model=NAME, messages=HELLO, max_tokens=2, temperature=0, logprobs=True, top_logprobs=1
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content or []
    assert [(token.token, token.bytes) for token in content] == [("u", [117]), ("s", [115])]
    assert [token.top_logprobs[0].token for token in content] == ["u", "s"]


def test_logit_bias(client: openai.OpenAI) -> None:
    bias: Any = {str(tokens_of("q", bos=False)[0]): 100, "7": -100}
    answer = client.completions.create(model=NAME, prompt="abc", max_tokens=3, logit_bias=bias)
    assert answer.choices[0].text == "qqq"


def test_the_cached_part_of_a_prompt_is_told(client: openai.OpenAI) -> None:
    usage = client.completions.create(model=NAME, prompt="x" * 70, max_tokens=1, n=2).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (71, 32)


@pytest.mark.parametrize(
    ("options", "error", "message", "param"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "does not exist here; this server has 'tiny'", "model"),
        ({"max_tokens": 600}, openai.BadRequestError, "maximum context length is 512 tokens, and 604", "prompt"),
        ({"temperature": -1}, openai.BadRequestError, "temperature is -1", "temperature"),
        ({"top_p": 0}, openai.BadRequestError, "top_p is 0", "top_p"),
        ({"n": 65}, openai.BadRequestError, "65 sequences in one request", "n"),
        ({"presence_penalty": 0.5}, openai.BadRequestError, "presence_penalty is not supported", "presence_penalty"),
        (
            {"extra_body": {"top_q": 1}},
            openai.BadRequestError,
            "unrecognized request argument supplied: top_q",
            "top_q",
        ),
        ({"logit_bias": {"300": 1}}, openai.BadRequestError, "this model's ids end at 257", "logit_bias"),
        ({"prompt": [300]}, openai.BadRequestError, "token id 300 is outside the vocabulary", None),
        ({"prompt": []}, openai.BadRequestError, "prompt is an empty list", "prompt"),
        ({"prompt": "abc~"}, openai.InternalServerError, "NaN or infinite logits", None),
        ({"prompt": "abc~", "stream": True}, openai.InternalServerError, "NaN or infinite logits", None),
    ],
)
def test_errors(
    client: openai.OpenAI, options: Any, error: type[openai.APIStatusError], message: str, param: Any
) -> None:
    with pytest.raises(error, match=message) as raised:
        client.completions.create(**{"model": NAME, "prompt": "abc", **options})
    assert raised.value.param == param
    assert raised.value.type == ("server_error" if error is openai.InternalServerError else "invalid_request_error")


def test_json_mode_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="response_format is not supported by this server") as raised:
        client.chat.completions.create(model=NAME, messages=HELLO, response_format={"type": "json_object"})
    assert (raised.value.param, raised.value.code) == ("response_format", "unsupported_parameter")
    client.chat.completions.create(model=NAME, messages=HELLO, response_format={"type": "text"}, max_tokens=1)


def test_a_refusal_is_a_429_that_says_when(client: openai.OpenAI, live: Live) -> None:
    live.engine.refuse_after_s = 3.2
    try:
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError, match="the queue is full") as raised:
                client.completions.create(model=NAME, prompt="abc", stream=stream)
            assert raised.value.response.headers["retry-after"] == "4"
    finally:
        live.engine.refuse_after_s = None


def test_leaving_a_stream_cancels_it(client: openai.OpenAI, live: Live) -> None:
    live.engine.hold_at = 2
    before = len(live.engine.cancelled)
    try:
        stream = client.chat.completions.create(model=NAME, messages=HELLO, n=3, stream=True)
        next(iter(stream))
        assert live.engine.stats().running == 3
        stream.close()
        eventually(lambda: live.engine.stats().running == 0)
    finally:
        live.engine.hold_at = None
    assert len(live.engine.cancelled) == before + 3
    assert live.engine.stats().pages_used == 0


def test_ids_are_fresh(client: openai.OpenAI) -> None:
    ids = {client.completions.create(model=NAME, prompt="a", max_tokens=1).id for _ in range(3)}
    assert len(ids) == 3
    assert all(one.startswith("cmpl-") for one in ids)
