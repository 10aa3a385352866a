"""The vocabulary part of GGUF metadata, checked: token texts, their types, scores, and ids by role."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from model.tokenizer.errors import TokenizerError

_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "eot_token": "eot_token_id",
    "eom_token": "eom_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, as the GGUF specification numbers it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class GgufVocabulary:
    """tokens[i] and types[i] belong to id i; `ids` is text -> id; `roles` is "bos_token" and so on -> id."""

    tokens: Sequence[str]
    types: Sequence[int]
    ids: Mapping[str, int]
    roles: Mapping[str, int]

    def texts(self, *types: TokenType) -> list[str]:
        """The tokens of the given types, in id order."""
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]


def read_vocabulary(metadata: Mapping[str, Any]) -> GgufVocabulary:
    """The vocabulary in `metadata`; TokenizerError when a part is missing or does not fit the others."""
    tokens = require(metadata, "tokenizer.ggml.tokens")
    types = require(metadata, "tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise TokenizerError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens; they must agree"
        )
    ids: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if token in ids:
            raise TokenizerError(f"tokenizer.ggml.tokens {ids[token]} and {token_id} are both {token!r}")
        ids[token] = token_id
    roles = {}
    for role, name in _ROLES.items():
        stated = metadata.get(f"tokenizer.ggml.{name}")
        if stated is None:
            continue
        if not 0 <= stated < len(tokens):
            raise TokenizerError(f"tokenizer.ggml.{name} is {stated}, outside the vocabulary of {len(tokens)} tokens")
        roles[role] = stated
    return GgufVocabulary(tokens, types, ids, roles)


def require(metadata: Mapping[str, Any], key: str) -> Any:
    """The value under `key`, else TokenizerError."""
    value = metadata.get(key)
    if value is None:
        raise TokenizerError(
            f"the GGUF metadata has no {key}, without which its tokenizer cannot be rebuilt; convert the "
            "model again with a current converter"
        )
    return value
