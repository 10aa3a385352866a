"""SentencePiece-style tokenizers rebuilt from GGUF metadata.

The vocabulary in `tokenizer_files` is a BPE model that the sentencepiece library (0.2.3) trained on a few
English sentences, with byte_fallback, split_digits, identity normalisation and blanks kept. The ids in
ENCODINGS are what that library gives.
"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.tokenizer import Tokenizer, TokenizerError
from model.tokenizer.gguf_vocabulary import read_vocabulary
from model.tokenizer.sentencepiece import rebuild_merges
from tests.model.tokenizer_files import NORMAL, USER_DEFINED
from tests.model.tokenizer_files import sentencepiece_metadata as metadata

ENCODINGS = [
    ("The capital of France is Paris.", [278, 280, 262, 313, 298, 281, 302, 274, 313, 341, 266, 263, 329]),
    (" leading blank", [271, 325, 314, 315, 326, 307, 331, 313, 101, 325, 281, 332]),
    ("  two  blanks  ", [271, 261, 122, 319, 271, 101, 325, 281, 332, 317, 271]),
    ("naïve cafés", [290, 348, 345, 314, 273, 306, 317]),
    (
        "def f(x):\n    return x",
        [313, 276, 324, 313, 324, 334, 333, 297, 13, 271, 271, 320, 305, 344, 312, 313, 333],
    ),
    (
        "日本 🤷🏽\u200d♀️",
        [
            *(313, 233, 154, 168, 233, 159, 175, 313, 243, 162, 167, 186, 243, 162, 146, 192),
            *(229, 131, 144, 229, 156, 131, 242, 187, 146),
        ],
    ),
    ("e\u0301", [313, 314, 207, 132]),
    ("12", [313, 52, 53]),
    ("ttttttt", [261, 316, 316, 316, 316, 316, 316]),
    ("is is", [274, 274]),
    ("eseses", [313, 268, 268, 268]),
    ("\t", [313, 12]),
    ("", []),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(metadata())


@pytest.mark.parametrize(("text", "ids"), ENCODINGS)
def test_as_sentencepiece(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text) == [1, *ids]
    assert tokenizer.decode(ids) == text


@given(text=st.text() | st.text("The capitl\n\tesé日🤷\u200d▁x0", max_size=40))
@settings(max_examples=300, deadline=None)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    # A typed U+2581 is read as a blank: SentencePiece cannot tell the two apart.
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special=False) == (
        text.replace("▁", " ")
    )


def test_the_best_scored_pair_is_merged_first() -> None:
    # "abc" can be ab|c or a|bc. The scores decide, not the order of the pieces.
    def tokens(score_ab: float, score_bc: float) -> list[str]:
        extra = [("ab", NORMAL), ("bc", NORMAL), ("b", NORMAL)]
        built = metadata(extra, add_space_prefix=False)
        built["tokenizer.ggml.scores"][-3:] = [score_ab, score_bc, -2000.0]
        chosen = Tokenizer.from_gguf(built)
        return [chosen.token_text(token_id) for token_id in chosen.encode("abc", add_special_tokens=False)]

    assert tokens(-1.5, -2.5) == ["ab", "c"]
    assert tokens(-2.5, -1.5) == ["a", "bc"]


def test_merges_leave_out_tokens_that_are_not_made_of_characters() -> None:
    built = metadata([("<", NORMAL), ("s>", NORMAL), ("is is", USER_DEFINED)])
    merges = rebuild_merges(read_vocabulary(built), built["tokenizer.ggml.scores"])
    made = {left + right for left, right in merges}
    assert not made & {"<s>", "is is"}
    assert merges[:3] == [("h", "e"), ("▁", "o"), ("▁", "t")]
    assert ("▁o", "f") in merges


def test_special_tokens_in_the_text(tokenizer: Tokenizer) -> None:
    the = 278
    # Each stretch of text gets the blank in front, as in llama.cpp and in Llama 2's own tokenizer.json.
    assert tokenizer.encode("<s>The</s>The") == [1, the, 2, the]
    assert tokenizer.decode([1, the, 2]) == "The"
    assert tokenizer.decode([1, the, 2], skip_special=False) == "<s> The</s>"


def test_user_defined_tokens_stay_whole_and_visible() -> None:
    built = Tokenizer.from_gguf(metadata([("<tool>", USER_DEFINED), ("  ", USER_DEFINED)]))
    assert built.encode("The<tool>", add_special_tokens=False) == [278, 349]
    assert built.decode([278, 349]) == "The<tool>"
    assert 350 in built.encode("is  is")


def test_without_the_blank_in_front(tmp_path: Path) -> None:
    built = Tokenizer.from_gguf(metadata(add_space_prefix=False))
    assert built.encode("is is", add_special_tokens=False) == [263, 274]
    assert built.decode([274, 274]) == " is is"
    built.save(tmp_path)
    assert Tokenizer.from_folder(tmp_path).decode([274, 274]) == " is is"


@pytest.mark.parametrize(("changes", "prefix"), [({}, [1]), ({"add_bos_token": False}, [])])
def test_bos(changes: dict[str, Any], prefix: list[int]) -> None:
    assert Tokenizer.from_gguf(metadata(**changes)).encode("is") == [*prefix, 274]


def test_continuation_keeps_the_first_blank(tokenizer: Tokenizer) -> None:
    # Generated after a prompt, the blank in front of the first word is part of the text.
    assert tokenizer.decode([274, 274]) == "is is"
    assert tokenizer.decode([274, 274], continuation=True) == " is is"


def test_saved_and_loaded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    loaded = Tokenizer.from_folder(tmp_path)
    assert loaded.stop_token_ids == tokenizer.stop_token_ids == (2,)
    for text, ids in ENCODINGS:
        assert loaded.encode(text) == [1, *ids]
        assert loaded.decode([1, *ids]) == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": ...}, "has no tokenizer.ggml.scores"),
        ({"scores": [0.0]}, "scores has 1 entries for 349 tokens"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces is true, which is not supported"),
        ({"bos_token_id": ...}, "asks for a BOS token"),
    ],
)
def test_refused_metadata(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_gguf(metadata(**changes))


def test_refused_without_byte_tokens() -> None:
    built = metadata()
    built["tokenizer.ggml.tokens"][68] = "<A>"
    with pytest.raises(TokenizerError, match=r"lacks 1 of the 256 byte tokens \(<0x41> first\)"):
        Tokenizer.from_gguf(built)
