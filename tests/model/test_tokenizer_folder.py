"""Loading Hugging Face folders: the files beside tokenizer.json, their old and new forms, and bad ones."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from model.tokenizer import Tokenizer, TokenizerError
from tests.model.tokenizer_files import edit_tokenizer_json, save_folder

X = 55  # the byte "X"


def add_template(folder: Path, *steps: str) -> Path:
    """Gives tokenizer.json a post-processor with the given steps."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [("<bos>", 256), ("<eos>", 257)]
    backend.post_processor = processors.TemplateProcessing(
        single=list(steps), pair=["$A", "$B"], special_tokens=special
    )
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("steps", "config", "prefix"),
    [
        ((), {}, []),
        (("<bos>", "$A"), {}, [256]),
        (("<bos>", "$A", "<eos>"), {}, [256]),
        (("$A", "<eos>"), {}, []),
        ((), {"add_bos_token": True, "bos_token": "<bos>"}, [256]),
        ((), {"add_bos_token": True, "bos_token": {"content": "<bos>", "lstrip": False}}, [256]),
        (("<bos>", "$A"), {"add_bos_token": False, "bos_token": "<bos>"}, []),
        (("<bos>", "$A"), {"add_bos_token": None, "bos_token": "<bos>"}, [256]),
    ],
)
def test_bos_as_the_files_declare_it(
    tmp_path: Path, steps: tuple[str, ...], config: dict[str, Any], prefix: list[int]
) -> None:
    folder = save_folder(tmp_path / "a", tokenizer_config=config)
    if steps:
        add_template(folder, *steps)
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer.save(tmp_path / "b")
    for loaded in (tokenizer, Tokenizer.from_folder(str(tmp_path / "b"))):
        assert loaded.encode("X") == [*prefix, X]
        assert loaded.encode("<bos>X") == [256, X]
        assert loaded.encode("X", add_special_tokens=False) == [X]


def test_a_prefix_of_several_tokens(tmp_path: Path) -> None:
    folder = add_template(save_folder(tmp_path / "a"), "<eos>", "<bos>", "$A")
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer.save(tmp_path / "b")
    for loaded in (tokenizer, Tokenizer.from_folder(tmp_path / "b")):
        assert loaded.encode("X") == [257, 256, X]
        assert loaded.encode("<eos><bos>X") == [257, 256, X]


def test_truncation_and_padding_from_training_are_dropped(tmp_path: Path) -> None:
    folder = save_folder(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8, pad_id=0, pad_token="!")
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.from_folder(folder).encode("XXXXXX") == [X] * 6
    assert Tokenizer.from_folder(folder).encode("X") == [X]


def test_roles_make_tokens_special(tmp_path: Path) -> None:
    # tokenizer.json does not call these special; tokenizer_config.json gives them a role
    folder = save_folder(
        tmp_path,
        special={"<bos>": False, "<eos>": True},
        tokenizer_config={"eos_token": "<eos>", "bos_token": "<bos>", "pad_token": "[none]"},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.bos_token_id == 256
    assert tokenizer.encode("<bos>X") == [256, X]
    assert tokenizer.decode([256, X, 257]) == "X"
    assert tokenizer.vocab_size == 258  # [none] is no token of the model


def test_tokens_that_only_the_config_declares(tmp_path: Path) -> None:
    entries = {
        "257": {"content": "<eos>", "special": True},
        "258": {"content": "<|im_end|>", "special": True, "normalized": False},
        "259": {"content": "<think>", "special": False, "normalized": False},
    }
    folder = save_folder(tmp_path, tokenizer_config={"added_tokens_decoder": entries})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<think>X<|im_end|>") == [259, X, 258]
    assert tokenizer.decode([259, X, 258]) == "<think>X"
    assert tokenizer.stop_token_ids == (258,)


def test_special_tokens_can_be_split(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "a", tokenizer_config={"split_special_tokens": True})
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer.save(tmp_path / "b")
    for loaded in (tokenizer, Tokenizer.from_folder(tmp_path / "b")):
        assert loaded.decode(loaded.encode("<bos>")) == "<bos>"
        assert 256 not in loaded.encode("<bos>")


def test_added_tokens_with_accents_decode_as_written(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save_folder(tmp_path, special={"<é>": False}))
    assert tokenizer.decode(tokenizer.encode("X<é>é")) == "X<é>é"


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}


@pytest.mark.parametrize(
    ("decoder", "text"),
    [
        (METASPACE, "b b"),
        (METASPACE | {"prepend_scheme": "never"}, " b b"),
        ({"type": "Sequence", "decoders": [METASPACE, {"type": "Fuse"}]}, "b b"),
        (
            {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ],
            },
            "b b",
        ),
    ],
)
def test_decoders(tmp_path: Path, decoder: dict[str, Any], text: str) -> None:
    folder = save_folder(tmp_path, special={"▁b": False})
    edit_tokenizer_json(folder, decoder=decoder)
    assert Tokenizer.from_folder(folder).decode([256, 256]) == text
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert backend.decode([256, 256]) == text


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (None, "no decoder"),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, 'has a step .*"WordPiece"'),
        ({"type": "Strip", "content": "_", "start": 1, "stop": 0}, 'has a step .*"Strip"'),
        (
            {"type": "Sequence", "decoders": [METASPACE, {"type": "ByteLevel"}]},
            "mixes ByteLevel with other steps",
        ),
    ],
)
def test_refused_decoders(tmp_path: Path, decoder: Any, message: str) -> None:
    if decoder and decoder.get("decoders"):
        decoder["decoders"][1] |= {"add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    folder = edit_tokenizer_json(save_folder(tmp_path), decoder=decoder)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"add_bos_token": True}, "sets add_bos_token but no bos_token"),
        ({"eos_token": "<end>"}, "eos_token is '<end>', which is not a token of tokenizer.json"),
        ({"bos_token": {"text": "<bos>"}}, "bos_token in .* expected a string or an object with a content"),
        ({"bos_token": 5}, "bos_token in .* is 5"),
        ({"added_tokens_decoder": {"300": {"content": "<new>"}}}, "'<new>' the id 300, .* would be 258"),
    ],
)
def test_refused_configs(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(save_folder(tmp_path, tokenizer_config=config))


def test_missing_folder_and_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"nowhere has no tokenizer.json; it is needed"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(TokenizerError, match=r"only a SentencePiece tokenizer.model; make it once"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("tokenizer.json", "", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{,", "tokenizer_config.json is not valid JSON"),
        ("generation_config.json", "[]", "generation_config.json must hold an object, not list"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    save_folder(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(tmp_path)


def test_token_text_shows_special_and_partial_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save_folder(tmp_path))
    assert tokenizer.token_text(256) == "<bos>"
    assert tokenizer.token_text(X) == "X"
    assert tokenizer.token_text(tokenizer.encode("é")[0]) == "\ufffd"
