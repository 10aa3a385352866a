"""What ends a generation: stop strings across token boundaries, and stop tokens from every place."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.tokenizer import StopStrings, Tokenizer, TokenizerError
from tests.model.tokenizer_files import save_folder


def run(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None]:
    """The text shown in all, and the stop string that ended it."""
    watch = StopStrings(stops)
    shown = "".join(watch.push(piece) for piece in pieces)
    return shown + watch.flush(), watch.matched


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        ([], ["a", "b"], ("ab", None)),
        (["###"], ["a#", "#", "b##", "#c"], ("a##b", "###")),
        (["END"], ["xE", "N", "D", "y"], ("x", "END")),
        (["END"], ["xEN"], ("xEN", None)),
        (["END"], ["END"], ("", "END")),
        (["aab"], ["aa", "ab"], ("a", "aab")),
        (["abab"], ["aba", "babx"], ("", "abab")),
        (["\n\n", "User:"], ["hi\nUser", ": x"], ("hi\n", "User:")),
        # the one complete first wins, and of two that end together the longer
        (["abcd", "c"], ["abcd"], ("ab", "c")),
        (["abcd", "c"], ["ab", "cd"], ("ab", "c")),
        (["bc", "abc"], ["xabc"], ("x", "abc")),
        (["é", "🤷"], ["a🤷b"], ("a", "🤷")),
    ],
)
def test_stop_strings(stops: list[str], pieces: list[str], expected: tuple[str, str | None]) -> None:
    assert run(stops, pieces) == expected


def test_only_a_possible_beginning_is_held_back() -> None:
    watch = StopStrings(["END"])
    assert [watch.push(piece) for piece in ("a", "E", "x", "EN", "EN", "E")] == [
        "a",
        "",
        "Ex",
        "",
        "EN",
        "EN",
    ]
    assert watch.flush() == "E"
    assert watch.flush() == ""


def test_nothing_comes_after_a_stop() -> None:
    watch = StopStrings(["."])
    assert not watch.stopped
    assert watch.push("One. Two") == "One"
    assert watch.stopped
    assert watch.matched == "."
    assert watch.push("Three") == ""
    assert watch.flush() == ""


def ends_of(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By definition: the first position at which some stop string is complete, and there the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
@settings(max_examples=500, deadline=None)
def test_any_cutting_gives_the_defined_result(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == ends_of("".join(pieces), stops)


@pytest.mark.parametrize("stops", [[""], ["a", ""], [3], "END"])
def test_refused_stop_strings(stops: object) -> None:
    with pytest.raises(TokenizerError, match="stop string"):
        StopStrings(stops)  # type: ignore[arg-type]


SPECIAL = {"<bos>": True, "<eos>": True, "<|eot_id|>": True, "<|im_end|>": False, "</s>": True}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ()),
        ({"config": {"eos_token_id": 256}}, (256,)),
        ({"config": {"eos_token_id": [257, 256]}}, (257, 256)),
        ({"generation_config": {"eos_token_id": [3, 257]}, "config": {"eos_token_id": 257}}, (257, 3)),
        ({"tokenizer_config": {"eos_token": "<eos>"}}, (257,)),
        ({"tokenizer_config": {"eos_token": {"content": "<eos>"}}, "config": {"eos_token_id": None}}, (257,)),
        ({"special_tokens_map": {"eos_token": "<eos>"}}, (257,)),
    ],
)
def test_stop_tokens_from_every_file(tmp_path: Path, files: dict, expected: tuple[int, ...]) -> None:
    tokenizer = Tokenizer.from_folder(save_folder(tmp_path, special=SPECIAL, **files))
    # then the well-known marks that the vocabulary declares special: not <|im_end|>, which it does not
    assert tokenizer.stop_token_ids == (*expected, 258, 260)


def test_bad_stop_token_is_refused(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, generation_config={"eos_token_id": "<eos>"})
    with pytest.raises(TokenizerError, match=r"eos_token_id of .*generation_config.json is '<eos>'"):
        Tokenizer.from_folder(folder)
