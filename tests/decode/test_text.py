"""Text out of tokens that arrive by a script: who gets what, when, and why each row ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from decode.decoder import Arrival
from decode.sampling import SamplingParams
from decode.text import TextGeneration
from model.tokenizer import Tokenizer, TokenizerError
from model.tokenizer.byte_alphabet import byte_characters
from tests.model.tokenizer_files import save_folder, sentencepiece_metadata

BYTES = list(byte_characters())
EOS = 257


class Script:
    """A decoder that says what it is told: for each dispatch, the tokens of each row."""

    def __init__(self, *dispatches: Sequence[Sequence[int]]):
        self.dispatches, self.taken, self.options = dispatches, 0, {}

    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> Iterator[Arrival]:
        self.options = options

        def arrivals() -> Iterator[Arrival]:
            for at, rows in enumerate(self.dispatches):
                self.taken += 1
                logprobs = [[-float(token) for token in row] for row in rows]
                yield Arrival([list(row) for row in rows], logprobs, max(map(len, rows)) if at else 0, 10.0 + at)

        return arrivals()


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_folder(save_folder(tmp_path, tokenizer_config={"eos_token": "<eos>"}))


def ids(text: str | bytes) -> list[int]:
    return [BYTES.index(byte) for byte in (text.encode() if isinstance(text, str) else text)]


def generation(script: Script, tokenizer: Tokenizer, rows: int = 1, **options: Any) -> TextGeneration:
    return TextGeneration(script, tokenizer, [[1, 2]] * rows, max_new_tokens=9, **options)  # type: ignore[arg-type]


def test_text_streams_by_whole_characters(tokenizer: Tokenizer) -> None:
    heart = ids("♥")
    script = Script([ids("a")], [heart[:1]], [heart[1:] + ids("b")], [[EOS]])
    run = generation(script, tokenizer)
    assert list(run) == [(0, "a"), (0, "♥b")]
    (done,) = run.completions
    assert (done.text, done.finish_reason, done.prompt_tokens) == ("a♥b", "stop", 2)
    assert done.token_ids == [*ids("a♥b"), EOS]
    assert done.logprobs == [-float(token) for token in done.token_ids]


def test_a_cut_character_is_shown_as_such_at_the_end(tokenizer: Tokenizer) -> None:
    run = generation(Script([ids("a")], [ids("♥")[:2]]), tokenizer)
    assert list(run) == [(0, "a"), (0, "\ufffd")]
    assert (run.completions[0].text, run.completions[0].finish_reason) == ("a\ufffd", "length")
    run = generation(Script([ids("♥")[:2]], [[EOS]]), tokenizer)
    assert run.run()[0].text == "\ufffd"
    assert run.completions[0].finish_reason == "stop"


def test_a_stop_string_ends_the_text_before_it_wherever_tokens_cut_it(tokenizer: Tokenizer) -> None:
    script = Script([ids("one E")], [ids("N")], [ids("D two")], [ids("three")])
    run = generation(script, tokenizer, stop=["END", "zzz"])
    assert list(run) == [(0, "one ")]
    (done,) = run.completions
    assert (done.text, done.finish_reason) == ("one ", "stop")
    assert done.token_ids == ids("one END")  # what was decoded past it is dropped
    assert len(done.logprobs) == len(done.token_ids)
    assert script.taken == 3  # and nothing more is asked for


@pytest.mark.parametrize(("last", "reason"), [([EOS], "stop"), ([], "length")])
def test_the_beginning_of_a_stop_string_is_given_back_at_the_end(
    tokenizer: Tokenizer, last: list[int], reason: str
) -> None:
    run = generation(Script([ids("one E")], [[*ids("N"), *last]]), tokenizer, stop=["END"])
    assert list(run) == [(0, "one "), (0, "EN")]
    assert (run.completions[0].text, run.completions[0].finish_reason) == ("one EN", reason)


def test_a_stop_string_completed_by_the_last_flush(tokenizer: Tokenizer) -> None:
    run = generation(Script([ids("a")], [ids("♥")[:2]]), tokenizer, stop=["\ufffd"])
    assert run.run()[0].text == "a"
    assert run.completions[0].finish_reason == "stop"


def test_rows_end_each_in_its_own_time(tokenizer: Tokenizer) -> None:
    script = Script(
        [ids("a"), ids("b"), [EOS]], [ids("xy"), ids("."), []], [ids("z"), ids("c"), []], [ids("!"), [], []]
    )
    run = generation(script, tokenizer, rows=3, stop=["."])
    assert list(run) == [(0, "a"), (1, "b"), (0, "xy"), (0, "z"), (0, "!")]
    found = [(one.text, one.finish_reason, one.token_ids) for one in run.completions]
    assert found == [("axyz!", "length", ids("axyz!")), ("b", "stop", ids("b.")), ("", "stop", [EOS])]
    # The first arrival is prefill's; the first dispatch of steps warms up; then 1 + 1 and 1 tokens in 2 s.
    assert run.timing.dispatches == [(2, 1.0, 3), (1, 1.0, 2), (1, 1.0, 1)]
    assert run.timing.tokens_per_s == 1.5


def test_options_reach_the_decoder(tokenizer: Tokenizer) -> None:
    script, sampling = Script(), SamplingParams(temperature=0.5)
    generation(script, tokenizer, max_len=7, sampling=sampling, steps_per_dispatch=3)
    assert script.options == {
        "max_new_tokens": 9,
        "max_len": 7,
        "sampling": sampling,
        "stop_token_ids": tokenizer.stop_token_ids,
        "steps_per_dispatch": 3,
    }
    assert EOS in tokenizer.stop_token_ids


def test_unusable_options(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="stop string '' is not usable"):
        generation(Script(), tokenizer, stop=[""])
    with pytest.raises(ValueError, match="continuation has 1 values for 2 prompts"):
        generation(Script(), tokenizer, rows=2, continuation=[True])


def test_a_continuation_keeps_its_first_blank() -> None:
    """SentencePiece writes a blank before every word: part of a continued text, and none of an answer."""
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    tokens = tokenizer.encode("The capital", add_special_tokens=False)
    script = Script([tokens[:1], tokens[:1]], [tokens[1:], tokens[1:]])
    run = generation(script, tokenizer, rows=2, continuation=[True, False])
    assert [one.text for one in run.run()] == [" The capital", "The capital"]
    both = generation(Script([tokens, tokens]), tokenizer, rows=2, continuation=True).run()
    assert [one.text for one in both] == [" The capital"] * 2
