"""Token id -> the bytes of text it stands for, for every kind of decoder that Llama tokenizers use.

A token may hold part of a character, so text is only made where bytes are joined (`StreamingDecoder`). This
is also how whole sequences are decoded here, so streamed and whole text cannot differ.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

from model.tokenizer.byte_alphabet import character_bytes
from model.tokenizer.errors import TokenizerError

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class DecodeRule:
    """How a token's spelling becomes text.

    byte_level: spelled in GPT-2's byte alphabet. replacements: (spelled, meant) pairs.
    byte_fallback: `<0x41>` is the byte 0x41. strip_left: blanks dropped where the whole text begins.
    """

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip_left: int = 0


class Pieces:
    """Bytes of each token, looked up once per id.

    backend: the loaded tokenizer. Raises TokenizerError when its decoder is of an unknown kind.
    role_ids: ids that are special by their role (BOS, EOS, ...), whatever the backend says.
    special_ids: those, and the ids that the backend calls special.
    """

    def __init__(self, backend: Backend, role_ids: Iterable[int]) -> None:
        added = backend.get_added_tokens_decoder()
        self.rule = read_decode_rule(backend)
        self.special_ids = frozenset(role_ids).union(token_id for token_id, token in added.items() if token.special)
        self._backend = backend
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._alphabet = character_bytes() if self.rule.byte_level else {}
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes, special tokens included.

        An id beyond the vocabulary stands for nothing: models pad theirs. TokenizerError below 0.
        """
        piece = self._known.get(token_id)
        if piece is None:
            if token_id < 0:
                raise TokenizerError(f"token id {token_id} is negative; ids start at 0")
            piece = self._known[token_id] = self._spell(token_id)
        return piece

    def _spell(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        token = added if added is not None else self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.rule.byte_level:
            if added is None and all(character in self._alphabet for character in token):
                return bytes(self._alphabet[character] for character in token)
            return token.encode("utf-8")
        byte = _BYTE_TOKEN.fullmatch(token) if self.rule.byte_fallback else None
        if byte:
            return bytes.fromhex(byte[1])
        for spelled, meant in self.rule.replacements:
            token = token.replace(spelled, meant)
        return token.encode("utf-8")


def read_decode_rule(backend: Backend) -> DecodeRule:
    """The rule that `backend.decoder` follows; TokenizerError naming a component that is not known."""
    if backend.decoder is None:
        raise TokenizerError("the tokenizer has no decoder, so its tokens cannot be turned into text")
    steps = _flatten(json.loads(backend.decoder.__getstate__()))  # the state is the decoder's own JSON
    byte_level = byte_fallback = False
    replacements: list[tuple[str, str]] = []
    strip_left = 0
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(spelled)}, "content": str(meant)}:
                replacements.append((spelled, meant))
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                strip_left = start
            case {"type": "Metaspace", "replacement": str(spelled), **others}:
                replacements.append((spelled, " "))
                strip_left = 0 if others.get("prepend_scheme") == "never" else 1
            case _:
                raise TokenizerError(
                    f"the tokenizer's decoder has a step {json.dumps(step)}, which is not supported; "
                    "supported: ByteLevel, ByteFallback, Fuse, Metaspace, Replace of a string, Strip of "
                    "blanks at the start"
                )
    if byte_level and (replacements or byte_fallback or strip_left):
        raise TokenizerError("the tokenizer's decoder mixes ByteLevel with other steps, which is not supported")
    return DecodeRule(byte_level, tuple(replacements), byte_fallback, strip_left)


def _flatten(step: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if step.get("type") == "Sequence":
        return [inner for child in step["decoders"] for inner in _flatten(child)]
    return [step]
