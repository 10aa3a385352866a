"""Streaming: text as early as its characters allow, and in sum the decoded whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.tokenizer import StreamingDecoder, Tokenizer
from tests.model.tokenizer_files import byte_level_metadata, sentencepiece_metadata


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    build = byte_level_metadata if request.param == "byte-level" else sentencepiece_metadata
    return Tokenizer.from_gguf(build())


def pushes(stream: StreamingDecoder, ids: list[int]) -> list[str]:
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


def test_a_character_comes_out_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é日🤷", add_special_tokens=False)
    texts = [text for text in pushes(tokenizer.stream(), ids) if text]
    assert texts == ["é", "日", "🤷"]


def test_text_is_not_held_back_once_complete(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    seen = ""
    for token_id in tokenizer.encode("hi\nthere", add_special_tokens=False):
        seen += stream.push(token_id)
    assert seen == "hi\nthere"
    assert stream.flush() == ""


def test_unfinished_character_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x🤷", add_special_tokens=False)[:-1]
    stream = tokenizer.stream()
    assert "".join(stream.push(token_id) for token_id in ids) == "x"
    assert stream.flush() == "\ufffd"


def test_broken_bytes_do_not_hold_up_what_follows(tokenizer: Tokenizer) -> None:
    broken, whole = tokenizer.encode("日", add_special_tokens=False)[-3:-1], tokenizer.encode("e\n")
    texts = pushes(tokenizer.stream(continuation=True), [*broken, *whole])
    assert "".join(texts).lstrip("\ufffd").lstrip() == "e\n"
    assert texts[0] == texts[1] == ""


def test_special_tokens_give_no_text(tokenizer: Tokenizer) -> None:
    end = tokenizer.stop_token_ids[0]
    ids = [*tokenizer.encode("e", add_special_tokens=False), end]
    assert pushes(tokenizer.stream(), ids)[-2:] == ["", ""]
    shown = "".join(pushes(tokenizer.stream(skip_special=False), ids))
    assert shown == "e" + tokenizer.token_text(end)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_pushes_add_up_to_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    # Mostly single-byte tokens, so that most sequences hold broken characters.
    token = st.integers(0, tokenizer.vocab_size - 1) | st.integers(130, 258)
    ids = data.draw(st.lists(token, max_size=30))
    continuation = data.draw(st.booleans())
    texts = pushes(tokenizer.stream(continuation=continuation), ids)
    assert "".join(texts) == tokenizer.decode(ids, continuation=continuation)
    assert all(text.isprintable() or text.encode() for text in texts)  # no lone surrogates


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd▁"), max_size=30))
@settings(max_examples=200, deadline=None)
def test_valid_text_never_shows_a_replacement(tokenizer: Tokenizer, text: str) -> None:
    texts = pushes(tokenizer.stream(), tokenizer.encode(text, add_special_tokens=False))
    assert "".join(texts) == text
    assert "\ufffd" not in "".join(texts)


def test_two_streams_are_independent(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🤷", add_special_tokens=False)
    first, second = tokenizer.stream(), tokenizer.stream()
    texts = [(first.push(token_id), second.push(token_id)) for token_id in ids]
    assert texts[-1] == ("🤷", "🤷")


def test_each_token_is_looked_up_once(tokenizer: Tokenizer) -> None:
    # The cost of a token does not grow with the text: it is one cached lookup and at most a few held bytes.
    class Counting:
        def __init__(self, backend: object) -> None:
            self.backend, self.calls = backend, 0

        def id_to_token(self, token_id: int) -> str | None:
            self.calls += 1
            return self.backend.id_to_token(token_id)  # type: ignore[attr-defined,no-any-return]

    counting = Counting(tokenizer._pieces._backend)
    tokenizer._pieces._known.clear()
    tokenizer._pieces._backend = counting  # type: ignore[assignment]
    try:
        ids = tokenizer.encode("e t", add_special_tokens=False) * 100
        tokenizer.decode(ids)
        assert counting.calls == len(set(ids))
    finally:
        tokenizer._pieces._backend = counting.backend  # type: ignore[assignment]
