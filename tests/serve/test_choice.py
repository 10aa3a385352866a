"""Deltas add up to the text before the stop, and to its tokens, wherever events and characters are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decode.batching.request import Event
from model.tokenizer import Tokenizer
from serve.choice import Choice, Delta
from tests.scripts.tiny import EOS, tokens_of

TEXTS = st.text("ab\u00e9\U0001f600 .", max_size=12)


def run(tokenizer: Tokenizer, tokens: list[int], stop: list[str], reason: str) -> list[Delta]:
    choice = Choice(tokenizer, stop, continuation=True)
    deltas = []
    for index, token in enumerate(tokens):
        last = index == len(tokens) - 1
        event = Event(token, -float(index), ((token, 0.0),), reason if last else None, None, 0.0)  # type: ignore[arg-type]
        deltas.append(choice.take(event))
        if deltas[-1].finish_reason:
            assert choice.take(event) == Delta("", [], None)  # later tokens show nothing
            break
    return deltas


@given(text=TEXTS, stops=st.lists(st.text("ab\u00e9 .", min_size=1, max_size=3), max_size=3), eos=st.booleans())
def test_deltas_add_up(tokenizer: Tokenizer, text: str, stops: list[str], eos: bool) -> None:
    raw = text.encode()
    tokens = tokens_of(text, bos=False) + [EOS] * eos
    if not tokens:
        return
    deltas = run(tokenizer, tokens, stops, "stop" if eos else "length")
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(found)[1]] if found else text
    assert "".join(delta.text for delta in deltas) == expected
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == ("stop" if found or eos else "length")
    shown = [token for delta in deltas for token in delta.tokens]
    offsets = [len(raw[:index].decode("utf-8", "ignore")) for index in range(len(raw))]
    kept = [index for index, offset in enumerate(offsets) if offset < len(expected)]
    assert [(token.token, token.logprob, token.offset) for token in shown] == [
        (tokens[index], -float(index), offsets[index]) for index in kept
    ]
    # A token is never shown ahead of the text that it begins, nor long after it.
    released = 0
    for delta in deltas[:-1]:
        released += len(delta.text)
        assert all(token.offset < released for token in delta.tokens)


def test_a_character_cut_off_by_the_length_is_shown_as_such(tokenizer: Tokenizer) -> None:
    deltas = run(tokenizer, tokens_of("\u00e9", bos=False)[:1], [], "length")
    assert [(delta.text, len(delta.tokens)) for delta in deltas] == [("\ufffd", 1)]


def test_text_held_for_a_stop_string_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    deltas = run(tokenizer, tokens_of("ab", bos=False), ["bc"], "length")
    assert [delta.text for delta in deltas] == ["a", "b"]
    deltas = run(tokenizer, [*tokens_of("ab", bos=False), EOS], ["bc"], "stop")
    assert [delta.text for delta in deltas] == ["a", "", "b"]
    assert [len(delta.tokens) for delta in deltas] == [1, 0, 1]  # the stop token is not shown
