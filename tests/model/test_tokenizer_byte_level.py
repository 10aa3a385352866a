"""Byte-level tokenizers rebuilt from GGUF metadata: the demo model's, and a small one."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from model.tokenizer import Tokenizer, TokenizerError
from model.tokenizer.byte_alphabet import byte_characters, character_bytes
from tests.model.tokenizer_files import BLANK, byte_level_metadata


@pytest.fixture(scope="session")
def demo_metadata(demo_gguf: Path) -> dict[str, Any]:
    return {key: field.contents() for key, field in gguf.GGUFReader(demo_gguf).fields.items()}


@pytest.fixture(scope="session")
def demo(demo_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(demo_metadata)


@pytest.fixture(scope="session")
def demo_backend(demo: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> tokenizers.Tokenizer:
    """The same tokenizer as the `tokenizers` library itself reads it."""
    folder = tmp_path_factory.mktemp("saved")
    demo.save(folder)
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


# Ids from transformers 5.24's own reading of the file, except the line with blanks before digits:
# transformers does not know the file's splitting rule, which sets digits apart and keeps "  " one token.
DEMO_ENCODINGS = [
    ("Hello world", [19556, 905]),
    ("The capital of France is Paris.", [504, 3575, 282, 4649, 314, 7042, 30]),
    ("naïve café", [3546, 46494, 37366]),
    (
        "日本語のテキスト",
        [23274, 115, 40993, 179, 120, 248, 26453, 11100, 224, 10391, 251, 10391, 134, 11100, 226],
    ),
    ("🤷🏽\u200d♀️", [10813, 114, 132, 10813, 233, 138, 321, 231, 34625, 218, 31752]),
    ("e\u0301", [85, 151, 219]),
    ("  two  spaces  ", [216, 827, 216, 5600, 256]),
    ("def f(x):\n    return x**2\n", [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 198]),
    ("don't DON'T we'll", [12420, 982, 422, 2154, 23, 68, 392, 3060]),
    ("pi = 3.14159", [9020, 446, 216, 35, 30, 33, 36, 33, 37, 41]),
    ("a  12", [81, 256, 33, 34]),
    ("<|im_start|>user\nhi<|im_end|>\n", [1, 4093, 198, 6004, 2, 198]),
    ("", []),
]


@pytest.mark.parametrize(("text", "ids"), DEMO_ENCODINGS)
def test_demo_encoding(demo: Tokenizer, text: str, ids: list[int]) -> None:
    assert demo.encode(text) == ids
    assert demo.decode(ids, skip_special=False) == text


def test_demo_facts(demo: Tokenizer) -> None:
    assert demo.vocab_size == 49152
    assert demo.bos_token_id == 1
    # <|im_end|> is the declared one, <|endoftext|> (id 0) the other end mark in its vocabulary
    assert demo.stop_token_ids == (2, 0)


def test_demo_chat(demo: Tokenizer) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert demo.render_chat(messages) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712]
    ids += [8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    assert demo.encode_chat(messages) == ids
    assert demo.decode(ids).startswith("system\nYou are")


# The demo vocabulary lacks six control characters and the first bytes of planes that Unicode has not filled.
MISSING = "\x04\x06\x13\x14\x16\x1d"
spellable = st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters=MISSING))


@given(text=spellable | st.text("aé日🤷\u200d\u0301 \n\t0123٣½<|im_start|>", max_size=40))
@settings(max_examples=300, deadline=None)
def test_demo_round_trip(demo: Tokenizer, text: str) -> None:
    assert demo.decode(demo.encode(text), skip_special=False) == text


@given(ids=st.lists(st.integers(0, 49151), max_size=20))
@settings(max_examples=300, deadline=None)
def test_demo_decodes_any_ids_as_the_library_does(
    demo: Tokenizer, demo_backend: tokenizers.Tokenizer, ids: list[int]
) -> None:
    assert demo.decode(ids) == demo_backend.decode(ids)
    assert demo.decode(ids, skip_special=False) == demo_backend.decode(ids, skip_special_tokens=False)


@given(text=st.text("ab 1½\n'stéß日\u3000", max_size=30))
@settings(max_examples=200, deadline=None)
def test_demo_never_joins_a_digit_to_its_neighbours(demo: Tokenizer, text: str) -> None:
    for token_id in demo.encode(text):
        token = demo.token_text(token_id)
        assert len(token) == 1 or "1" not in token


def test_demo_drops_what_its_vocabulary_cannot_spell(demo: Tokenizer, demo_backend: tokenizers.Tokenizer) -> None:
    assert demo.encode(f"hi{MISSING}") == demo.encode("hi") == demo_backend.encode("hi").ids


def test_byte_alphabet_is_gpt2s() -> None:
    characters = byte_characters()
    assert len(set(characters.values())) == 256
    assert set(characters.values()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert (characters[0x20], characters[0x0A], characters[0x41], characters[0xFF]) == ("Ġ", "Ċ", "A", "ÿ")
    assert character_bytes()["Ġ"] == 0x20


def test_small_vocabulary() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata())
    hi, blank_hi = 256, 257
    assert tokenizer.encode("hi hi") == [hi, blank_hi]
    assert tokenizer.encode("<bos>hi<think>hi<eos>") == [261, hi, 264, hi, 262]
    assert tokenizer.decode([261, hi, 264, blank_hi, 262]) == "hi<think> hi"
    assert tokenizer.stop_token_ids == (262, 263)


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("gpt-2", "12  12", ["12", " ", " ", "12"]),
        ("smollm", "12  12", ["1", "2", "  ", "1", "2"]),
        ("llama-bpe", "12  12", ["12", " ", " ", "12"]),
        ("default", "12  12", ["12", " ", " ", "12"]),
        ("gpt-2", "1212", ["12", "12"]),
        # the splits differ in where a word may begin, seen by whether "es" and " hi" can form
        ("gpt-2", "'es hi", ["'", "es", " hi"]),
        ("llama3", "\nhi hi", ["\n", "hi", " hi"]),
        ("llama-v3", "1212", ["12", "1", "2"]),
        ("default", "1212", ["12", "1", "2"]),
        ("default", "hi.hi", ["hi", ".", "hi"]),
    ],
)
def test_splitting_rules(pre: str, text: str, tokens: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre=pre, add_bos_token=False))
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text)] == tokens


def test_llama3_takes_whole_tokens_without_merging() -> None:
    metadata = byte_level_metadata(pre="llama-bpe", add_bos_token=False)
    tokens = metadata["tokenizer.ggml.tokens"]
    whole = metadata | {
        "tokenizer.ggml.tokens": [*tokens, f"{BLANK}ab"],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], 1],
    }
    assert Tokenizer.from_gguf(whole).encode("x ab") == [*Tokenizer.from_gguf(metadata).encode("x"), 265]
    by_merging = whole | {"tokenizer.ggml.pre": "gpt-2"}
    assert 265 not in Tokenizer.from_gguf(by_merging).encode("x ab")


@pytest.mark.parametrize(
    ("changes", "prefix"),
    [
        ({"pre": "gpt-2"}, []),
        ({"pre": "gpt-2", "add_bos_token": True}, [261]),
        ({"pre": "llama-bpe"}, [261]),
        ({"pre": "llama-bpe", "add_bos_token": False}, []),
    ],
)
def test_bos_goes_first_when_declared_and_never_twice(
    changes: dict[str, Any], prefix: list[int], tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(**changes))
    tokenizer.save(tmp_path)
    for loaded in (tokenizer, Tokenizer.from_folder(tmp_path)):
        assert loaded.encode("hi") == [*prefix, 256]
        assert loaded.encode("") == prefix
        assert loaded.encode("hi", add_special_tokens=False) == [256]
        assert loaded.encode("<bos>hi") == [261, 256]
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert backend.encode("hi").ids == [*prefix, 256]


def test_ends_from_eos_eot_and_eom() -> None:
    metadata = byte_level_metadata(eot_token_id=65, eom_token_id=262)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.stop_token_ids == (262, 65, 263)
    # an end token is special whatever its type says
    assert tokenizer.decode([65, 256]) == "hi"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'; supported: 'gpt2'"),
        ({"model": ...}, "has no tokenizer.ggml.model"),
        ({"pre": "qwen2"}, r"tokenizer.ggml.pre is 'qwen2'.*known: gpt-2, smollm, llama-bpe"),
        ({"pre": ...}, "has no tokenizer.ggml.pre"),
        ({"tokens": ...}, "has no tokenizer.ggml.tokens"),
        ({"token_type": ...}, "has no tokenizer.ggml.token_type"),
        ({"token_type": [1, 2]}, "has 2 entries for 265 tokens"),
        ({"merges": ...}, "has no tokenizer.ggml.merges"),
        ({"merges": ["hi"]}, r"tokenizer.ggml.merges\[0\] is 'hi'; expected two tokens"),
        ({"merges": ["q u"]}, "tokenizer.ggml.merges does not fit"),
        ({"bos_token_id": 999}, "bos_token_id is 999, outside the vocabulary of 265"),
        (
            {"bos_token_id": ..., "add_bos_token": True},
            "asks for a BOS token .* no tokenizer.ggml.bos_token_id",
        ),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "tokens 0 and 1 are both 'a'"),
    ],
)
def test_refused_metadata(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_gguf(byte_level_metadata(**changes))


def test_refused_text(demo: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="cannot encode a bytes; give a string"):
        demo.encode(b"hi")  # type: ignore[arg-type]
    with pytest.raises(TokenizerError, match="not valid Unicode: surrogates not allowed at character 2"):
        demo.encode("ab\udc80")


def test_ids_outside_the_vocabulary(demo: Tokenizer) -> None:
    # Models pad their vocabularies, so an id beyond the tokenizer's can be sampled; it stands for no text.
    assert demo.decode([19556, 60000, 905]) == "Hello world"
    with pytest.raises(TokenizerError, match="token id -1 is negative"):
        demo.decode([-1])


def test_saved_demo_reads_back_the_same(demo: Tokenizer, tmp_path: Path) -> None:
    demo.save(tmp_path / "made" / "here")
    loaded = Tokenizer.from_folder(tmp_path / "made" / "here")
    assert loaded.stop_token_ids == demo.stop_token_ids
    assert loaded.bos_token_id == 1
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 12"}]
    assert loaded.encode_chat(messages) == demo.encode_chat(messages)
    for text, ids in DEMO_ENCODINGS:
        assert loaded.encode(text) == ids
