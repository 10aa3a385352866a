"""What one client may ask of the server, and reading no more of a body than that."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request

from serve.errors import ApiError


@dataclass(frozen=True)
class Limits:
    """Bounds that hold whatever the engine could do. The engine's own are the prompt's length and the queue.

    body_bytes: of a request's body.
    choices: sequences that one request makes, prompts times ``n``.
    requests: generation requests open at once; above it, 429.
    headers_s, body_s, prompt_s, send_s: seconds for a request's head to arrive (and what is left of a body that was
        answered unread), for its body, for a template and the tokenizer to run, and for a reader to take a part of an
        answer.
    """

    body_bytes: int = 4 << 20
    choices: int = 64
    requests: int = 2048
    headers_s: float = 30.0
    body_s: float = 30.0
    prompt_s: float = 10.0
    send_s: float = 60.0


async def read_json_body(request: Request, limits: Limits) -> bytes:
    """The body of a request that says it is JSON. Raises ApiError (408, 413, 415); ClientDisconnect."""
    # A web page can make a browser send any other type here without asking first.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, f"the content type is {kind or 'missing'}; send application/json", code="unsupported_type")
    if (coding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise ApiError(415, f"the content encoding is {coding}; send plain JSON", code="unsupported_encoding")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limits.body_bytes:
        raise _too_large(limits)
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                size += len(part)
                if size > limits.body_bytes:
                    raise _too_large(limits)
                parts.append(part)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {limits.body_s:g} s", code="timeout", headers={"Connection": "close"}
        ) from None
    return b"".join(parts)


def _too_large(limits: Limits) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than the {limits.body_bytes:,} bytes that this server reads",
        code="body_too_large",
        headers={"Connection": "close"},
    )
