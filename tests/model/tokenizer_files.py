"""Small vocabularies for the tokenizer tests, as GGUF metadata and as Hugging Face folders."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from model.tokenizer.byte_alphabet import byte_characters

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

BLANK = "\u0120"  # how byte-level vocabularies spell a blank


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary: the 256 bytes, five merges, then special tokens from id 261 on.

    Keys of `changes` are those after "tokenizer.ggml."; a change to ... removes the key.
    """
    merges = ["h i", f"{BLANK} hi", "1 2", "e s", f"{BLANK} {BLANK}"]
    merged = [merge.replace(" ", "") for merge in merges]
    special = ["<bos>", "<eos>", "<|eot_id|>", "<think>"]
    tokens = [*byte_characters().values(), *merged, *special]
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [NORMAL] * 261 + [CONTROL, CONTROL, CONTROL, USER_DEFINED],
        "merges": merges,
        "bos_token_id": 261,
        "eos_token_id": 262,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not ...}


# In order of score, best first.
PIECES = """
he ▁o ▁t ▁of is pi ta ar ca es me ▁T ▁▁ tal ▁ca ▁is ▁the de na ▁The pital ▁capital an ec en ex ok ▁s
are ens ext ▁na ▁pi eces ▁are okens ▁text ▁pieces ): Fr Ro Wh at ce co ed et fé in ir ll ma rg rn ▁
e a t s i o r h n c f l d m p . T g k x ( ) , : ? F I P R W u v y é ï
""".split()  # noqa: SIM905  (a list of 90 literals reads worse)


def sentencepiece_metadata(extra: list[tuple[str, int]] | None = None, **changes: Any) -> dict[str, Any]:
    """The vocabulary above, then `extra` (token, type) pairs from id 349 on; ... removes a key."""
    extra = extra or []
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    values: dict[str, Any] = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *byte_tokens, *PIECES, *(token for token, _ in extra)],
        "scores": [0.0] * 259 + [-float(index) for index in range(len(PIECES))] + [-1000.0] * len(extra),
        "token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(PIECES) + [kind for _, kind in extra],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not ...}


def save_folder(folder: Path, *, special: dict[str, bool] | None = None, **files: Any) -> Path:
    """A byte-level tokenizer.json with the 256 bytes and added tokens (text -> special), ids from 256 on.

    files: further files by stem, JSON unless text ("chat_template" as text is a .jinja file).
    """
    vocabulary = {character: index for index, character in enumerate(byte_characters().values())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for text, is_special in ({"<bos>": True, "<eos>": True} if special is None else special).items():
        backend.add_tokens([tokenizers.AddedToken(text, special=is_special, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for stem, content in files.items():
        if isinstance(content, str):
            (folder / f"{stem}.jinja").write_text(content, encoding="utf-8")
        else:
            (folder / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def edit_tokenizer_json(folder: Path, **changes: Any) -> Path:
    """Replaces top-level keys of the folder's tokenizer.json."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    return folder
