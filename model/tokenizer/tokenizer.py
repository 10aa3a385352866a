"""Tokenizer: one model's text conversions."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from model.tokenizer import from_folder
from model.tokenizer.chat_template import ChatTemplate
from model.tokenizer.errors import TokenizerError
from model.tokenizer.from_gguf import read_gguf
from model.tokenizer.parts import TokenizerParts
from model.tokenizer.pieces import Pieces
from model.tokenizer.stop_tokens import stop_token_ids
from model.tokenizer.streaming import StreamingDecoder


class Tokenizer:
    """Encodes, decodes and renders chats for one model. Made by `from_folder` or `from_gguf`.

    vocab_size: ids it can produce, added tokens included; a model's own vocabulary may be padded beyond.
    stop_token_ids: every id that ends a generation (see `stop_tokens`), those that the files declare first.
    bos_token_id: None when the model has no such token.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._backend = parts.backend
        roles = {role: parts.backend.token_to_id(text) for role, text in parts.special_tokens.items()}
        self._pieces = Pieces(parts.backend, (token_id for token_id in roles.values() if token_id is not None))
        self._template: ChatTemplate | None = None
        self.vocab_size: int = parts.backend.get_vocab_size(with_added_tokens=True)
        self.stop_token_ids = stop_token_ids(parts.backend, parts.declared_stop_ids)
        self.bos_token_id: int | None = roles.get("bos_token")

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Load tokenizer.json and the files beside it; TokenizerError naming what is wrong."""
        return cls(from_folder.read_folder(Path(folder)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Rebuild from GGUF metadata (key -> decoded Python value); TokenizerError naming what is wrong."""
        return cls(read_gguf(metadata))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it become their ids.

        Bytes that the vocabulary has no token for (in some, rare control characters) are dropped, as they are
        by transformers.

        add_special_tokens: put BOS first where the model declares so, unless the text begins with it already.

        Raises TokenizerError for anything but valid Unicode text.
        """
        if not isinstance(text, str):
            raise TokenizerError(f"cannot encode a {type(text).__name__}; give a string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text is not valid Unicode: {error.reason} at character {error.start}; "
                "it was probably read with the wrong encoding"
            ) from error
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        prefix = list(self._parts.prefix_ids)
        return prefix + ids if add_special_tokens and ids[: len(prefix)] != prefix else ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continuation: bool = False) -> str:
        """Text of `ids`; the options are those of `StreamingDecoder`."""
        stream = self.stream(skip_special=skip_special, continuation=continuation)
        return "".join([stream.push(int(token_id)) for token_id in ids]) + stream.flush()

    def stream(self, *, skip_special: bool = True, continuation: bool = False) -> StreamingDecoder:
        """A decoder for one sequence whose tokens come one by one."""
        return StreamingDecoder(self._pieces, skip_special=skip_special, continuation=continuation)

    def token_text(self, token_id: int) -> str:
        """One token on its own, special or not, for showing; part of a character appears as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """One token's UTF-8 bytes, which may be part of a character."""
        return self._pieces[token_id]

    @property
    def has_chat_template(self) -> bool:
        return self._parts.chat_template is not None

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat as the text that the model was trained on, special tokens written out.

        messages: {"role": ..., "content": ...} objects.
        add_generation_prompt: end where the assistant's turn begins.
        variables: further ones that the template reads, such as `tools` or `date_string`.

        Raises TokenizerError when there is no template, or with the template's message when it fails.
        """
        if self._template is None:
            if self._parts.chat_template is None:
                raise TokenizerError(
                    "this model has no chat template, so it cannot chat; give it text with --prompt instead"
                )
            self._template = ChatTemplate(self._parts.chat_template)
        return self._template.render(
            messages,
            special_tokens=self._parts.special_tokens,
            add_generation_prompt=add_generation_prompt,
            variables=variables or {},
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the rendered chat. The template writes all special tokens, so none is added to it."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, variables=variables)
        return self.encode(text, add_special_tokens=False)

    def save(self, folder: str | Path) -> None:
        """Write what `from_folder` reads back as an equal tokenizer, into `folder`, which is made if needed.

        Files: tokenizer.json, tokenizer_config.json, generation_config.json (the declared stop ids) and,
        where there is a template, chat_template.jinja. Programs that read Hugging Face folders can use them.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        roles = {role: text for role, text in self._parts.special_tokens.items() if role in from_folder.ROLES}
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
        bos_alone = () if self.bos_token_id is None else (self.bos_token_id,)
        if self._parts.prefix_ids in ((), bos_alone):
            config["add_bos_token"] = bool(self._parts.prefix_ids)
        if self._backend.encode_special_tokens:
            config["split_special_tokens"] = True
        self._backend.save(str(folder / from_folder.TOKENIZER))
        _write_json(folder / from_folder.CONFIG, config)
        stop_ids = list(self._parts.declared_stop_ids)
        _write_json(folder / from_folder.GENERATION_CONFIG, {"eos_token_id": stop_ids})
        if self._parts.chat_template is not None:
            path = folder / from_folder.CHAT_TEMPLATE
            path.write_text(self._parts.chat_template, encoding="utf-8", newline="")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
