"""Answers in OpenAI's shapes, whole and in chunks."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from model.tokenizer import Tokenizer
from serve.choice import Delta, ShownToken

LOWEST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON cannot write."""


class Reply(Protocol):
    """How one kind of request is answered."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """A chunk that comes ahead of a choice's first text, if any."""

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]: ...

    def whole(self, deltas: Sequence[Sequence[Delta]], usage: Mapping[str, Any]) -> dict[str, Any]: ...

    def usage_chunk(self, usage: Mapping[str, Any]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class _Base:
    """id, time and model, which every part repeats.

    logprobs: alternatives to show; None shows no log-probabilities.
    with_usage: chunks say ``usage: null`` where a chunk with the usage is to come.
    """

    tokenizer: Tokenizer
    model: str
    logprobs: int | None
    with_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def _body(self, kind: str, prefix: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{self.key}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _null_usage(self) -> dict[str, Any]:
        return {"usage": None} if self.with_usage else {}


class CompletionReply(_Base):
    def opening(self, index: int) -> None:
        return None

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        return self._body("text_completion", "cmpl", [self._choice(index, [delta])]) | self._null_usage()

    def whole(self, deltas: Sequence[Sequence[Delta]], usage: Mapping[str, Any]) -> dict[str, Any]:
        choices = [self._choice(index, own) for index, own in enumerate(deltas)]
        return self._body("text_completion", "cmpl", choices) | {"usage": usage}

    def usage_chunk(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        return self._body("text_completion", "cmpl", []) | {"usage": usage}

    def _choice(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(delta.text for delta in deltas),
            "logprobs": self._logprobs([token for delta in deltas for token in delta.tokens]),
            "finish_reason": deltas[-1].finish_reason,
        }

    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        tops = [
            dict(token.top) | {token.token: token.logprob} for token in tokens
        ]  # the chosen one, whether best or not
        return {
            "tokens": [self._label(token.token) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [{self._label(token): _finite(value) for token, value in top.items()} for top in tops]
            if self.logprobs
            else None,
            "text_offset": [token.offset for token in tokens],
        }

    def _label(self, token: int) -> str:
        """A token's text; of a token that is part of a character, its bytes, as OpenAI writes them."""
        raw = self.tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatReply(_Base):
    def opening(self, index: int) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._body("chat.completion.chunk", "chatcmpl", [choice]) | self._null_usage()

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(delta.tokens) if delta.tokens else None,
            "finish_reason": delta.finish_reason,
        }
        return self._body("chat.completion.chunk", "chatcmpl", [choice]) | self._null_usage()

    def whole(self, deltas: Sequence[Sequence[Delta]], usage: Mapping[str, Any]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(delta.text for delta in own), "refusal": None},
                "logprobs": self._logprobs([token for delta in own for token in delta.tokens]),
                "finish_reason": own[-1].finish_reason,
            }
            for index, own in enumerate(deltas)
        ]
        return self._body("chat.completion", "chatcmpl", choices) | {"usage": usage}

    def usage_chunk(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        return self._body("chat.completion.chunk", "chatcmpl", []) | {"usage": usage}

    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        content = [
            self._token(token.token, token.logprob) | {"top_logprobs": [self._token(*each) for each in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self.tokenizer.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def to_json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
