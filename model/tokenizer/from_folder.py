"""Loads a tokenizer from a Hugging Face folder: tokenizer.json and the small files beside it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from model.config_fields import ConfigError, merge_token_ids
from model.tokenizer.errors import TokenizerError
from model.tokenizer.parts import TokenizerParts

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
GENERATION_CONFIG = "generation_config.json"
MODEL_CONFIG = "config.json"
CHAT_TEMPLATE = "chat_template.jinja"
CHAT_TEMPLATE_JSON = "chat_template.json"

ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_folder(folder: Path) -> TokenizerParts:
    """The tokenizer in `folder`; TokenizerError naming the file that is missing or cannot be used."""
    backend = _read_backend(folder)
    config = _read_json(folder / CONFIG)
    special_tokens = _read_special_tokens(folder, config)
    _complete_added_tokens(backend, config, special_tokens)
    if config.get("split_special_tokens"):
        backend.encode_special_tokens = True
    ids = {role: backend.token_to_id(text) for role, text in special_tokens.items()}
    for role in ("bos_token", "eos_token"):
        if role in ids and ids[role] is None:
            raise TokenizerError(f"{folder}: {role} is {special_tokens[role]!r}, which is not a token of {TOKENIZER}")
    return TokenizerParts(
        backend=backend,
        special_tokens=special_tokens,
        prefix_ids=_read_prefix(folder, backend, config, ids),
        declared_stop_ids=_read_stop_ids(folder, ids.get("eos_token")),
        chat_template=_read_chat_template(folder, config),
    )


def _read_backend(folder: Path) -> Backend:
    path = folder / TOKENIZER
    if not path.is_file():
        advice = "; it is needed to turn text into tokens"
        if (folder / "tokenizer.model").is_file():
            advice = (
                ", only a SentencePiece tokenizer.model; make it once with transformers: "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        raise TokenizerError(f"{folder} has no {TOKENIZER}{advice}")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library has no narrower type
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    # Files keep these from training, where they cut or filled examples; here they would change a prompt.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} must hold an object, not {type(content).__name__}")
    return content


def _read_special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Text by role; tokenizer_config.json goes before special_tokens_map.json."""
    fallback = _read_json(folder / SPECIAL_TOKENS_MAP)
    found = {}
    for role in ROLES:
        value = config.get(role)
        if value is None:
            value = fallback.get(role)
        if value is not None:
            found[role] = _token_text(value, f"{role} in {folder}")
    return found


def _token_text(value: Any, where: str) -> str:
    """A token's text, which files write as a string or as an object with a "content"."""
    text = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(text, str) or not text:
        raise TokenizerError(f"{where} is {value!r}; expected a string or an object with a content")
    return text


def _complete_added_tokens(backend: Backend, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Adds tokens that only the small files declare, as transformers does when it loads the folder."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    entries = config.get("added_tokens_decoder") or {}
    for key, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        text = _token_text(entry, f"added_tokens_decoder {key}")
        if text in added:
            continue
        flags = {
            name: bool(entry[name])
            for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
            if isinstance(entry, Mapping) and name in entry
        }
        backend.add_tokens([AddedToken(text, **flags)])
        added.add(text)
        if backend.token_to_id(text) != int(key):
            raise TokenizerError(
                f"{CONFIG} gives token {text!r} the id {key}, but after {TOKENIZER} it would be "
                f"{backend.token_to_id(text)}; the two files do not belong together"
            )
    further = config.get("additional_special_tokens") or ()
    texts = [_token_text(value, "additional_special_tokens") for value in further]
    for text in (*special_tokens.values(), *texts):
        # A token that the vocabulary lacks is not added: the model has no row for it.
        if text not in added and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _read_prefix(
    folder: Path, backend: Backend, config: Mapping[str, Any], ids: Mapping[str, int | None]
) -> tuple[int, ...]:
    """What goes before a text: `add_bos_token` where it is stated, else what tokenizer.json's template adds.

    An EOS after the text, which some files ask for, is left out: a prompt is there to be continued.
    """
    stated = config.get("add_bos_token")
    if stated is None:
        plain = backend.encode("a", add_special_tokens=False).ids
        whole = backend.encode("a", add_special_tokens=True).ids
        starts = (start for start in range(len(whole)) if whole[start : start + len(plain)] == plain)
        return tuple(whole[: next(starts, 0)])
    if not stated:
        return ()
    bos = ids.get("bos_token")
    if bos is None:
        raise TokenizerError(f"{folder / CONFIG} sets add_bos_token but no bos_token; add bos_token")
    return (bos,)


def _read_stop_ids(folder: Path, eos_token_id: int | None) -> tuple[int, ...]:
    sources = [
        (f"eos_token_id of {folder / name}", _read_json(folder / name).get("eos_token_id"))
        for name in (MODEL_CONFIG, GENERATION_CONFIG)
    ]
    try:
        return merge_token_ids(*sources, ("eos_token", eos_token_id))
    except ConfigError as error:
        raise TokenizerError(str(error)) from error


def _read_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template, from the newest place that Hugging Face has kept it in to the oldest."""
    path = folder / CHAT_TEMPLATE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _read_json(folder / CHAT_TEMPLATE_JSON).get("chat_template")
    if template is None:
        template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        if "default" not in named:
            raise TokenizerError(
                f"{folder} names the chat templates {', '.join(sorted(named))} but none is called 'default'"
            )
        template = named["default"]
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"{folder}: chat_template is a {type(template).__name__}; expected text")
    return template
