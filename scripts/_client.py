"""One streamed request to an OpenAI-compatible server, and when each part of its answer came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

REFUSED = (429, 503)
"""Statuses by which a server says: not now."""


@dataclass
class Outcome:
    """What became of a request. Times are ``time.perf_counter``'s.

    began: when it was due (open loop) or sent (closed loop).
    late_s: how much later than due the client really sent it.
    arrivals: when each part with text came; the end of the answer where none had any.
    tokens: generated, as ``counted_by`` says: the server's own count; what was asked for, where it ended by its length;
        or one for each part of the stream.
    error: why it was refused or failed.
    """

    began: float
    late_s: float = 0.0
    status: Literal["completed", "refused", "failed"] = "failed"
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int | None = None
    counted_by: Literal["server", "length", "parts"] = "parts"
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.began

    @property
    def e2e_s(self) -> float:
        return self.arrivals[-1] - self.began

    @property
    def tpot_s(self) -> float | None:
        """Mean time of the tokens after the first; None for a single one."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latencies: between parts as they came."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]


class Client:
    """Talks to one endpoint of one server. An async context manager."""

    def __init__(
        self, url: str, *, chat: bool, api_key: str | None, timeout_s: float, extra: Mapping[str, Any]
    ) -> None:
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._chat, self._extra = chat, dict(extra)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session = aiohttp.ClientSession(
            headers=headers,
            # Servers close idle connections, many after 5 s: a request on one that is closing would count as failed.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            read_bufsize=1 << 20,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def first_model(self) -> str:
        """The first that the server lists. Raises OSError, also for an answer that is no list of models."""
        try:
            async with self._session.get(f"{self._base}/models") as response:
                response.raise_for_status()
                return str((await response.json())["data"][0]["id"])
        except aiohttp.ClientConnectionError as error:
            raise OSError(f"cannot reach {self._base}: {getattr(error, 'os_error', error)}") from None
        except (aiohttp.ClientError, TimeoutError, LookupError, TypeError, ValueError) as error:
            raise OSError(f"{self._base}/models does not list models: {_words_of(error)}") from None

    async def ask(self, model: str, text: str, new_tokens: int, due: float | None = None) -> Outcome:
        """Send one request and read its answer to the end. What goes wrong is in the outcome."""
        sent = time.perf_counter()
        outcome = Outcome(sent if due is None else due, 0.0 if due is None else sent - due)
        body = {
            "model": model,
            "max_tokens": new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"messages": [{"role": "user", "content": text}]} if self._chat else {"prompt": text}),
            **self._extra,
        }
        path = "chat/completions" if self._chat else "completions"
        try:
            async with self._session.post(f"{self._base}/{path}", json=body) as response:
                if response.status != 200:
                    outcome.status = "refused" if response.status in REFUSED else "failed"
                    outcome.error = f"{response.status}: {_message(await response.text())}"
                    return outcome
                await self._read(response, outcome, new_tokens)
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError, AttributeError) as error:
            outcome.status, outcome.error = "failed", _words_of(error)
        return outcome

    async def _read(self, response: aiohttp.ClientResponse, outcome: Outcome, new_tokens: int) -> None:
        ended: float | None = None
        reason, parts = "", 0
        async for data in _events(response):
            at = time.perf_counter()
            if data == "[DONE]":
                outcome.status = "completed"
                break
            found = json.loads(data)
            if found.get("error") is not None:
                outcome.error = f"in the stream: {_message(data)}"
                return
            usage = found.get("usage")
            if usage:
                outcome.tokens, outcome.counted_by = int(usage["completion_tokens"]), "server"
                prompt_tokens = usage.get("prompt_tokens")
                outcome.prompt_tokens = None if prompt_tokens is None else int(prompt_tokens)
            for choice in found.get("choices", ()):
                if choice.get("text") or (choice.get("delta") or {}).get("content"):
                    outcome.arrivals.append(at)
                    parts += 1
                if choice.get("finish_reason"):
                    ended, reason = at, choice["finish_reason"]
        if outcome.status != "completed" or ended is None:
            outcome.status, outcome.error = "failed", "the stream ended before its answer did"
            return
        outcome.arrivals = outcome.arrivals or [ended]
        if outcome.counted_by != "server":
            outcome.counted_by = "length" if reason == "length" else "parts"
            outcome.tokens = new_tokens if reason == "length" else parts


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of each server-sent event."""
    async for line in response.content:
        if line.startswith(b"data:"):
            yield line[5:].strip().decode()


def _message(body: str) -> str:
    """OpenAI's error message, or the beginning of whatever came."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200]


def _words_of(error: Exception) -> str:
    if isinstance(error, asyncio.TimeoutError | TimeoutError):
        return "timed out"
    return f"{type(error).__name__}: {error}"
