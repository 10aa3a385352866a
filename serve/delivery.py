"""Sending an answer while it is made, and stopping both when the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from decode.batching.request import EngineError, RefusedError, RequestError
from decode.decoder import NumericsError
from serve.choice import Delta
from serve.errors import RATE_LIMIT, SERVER, ApiError, internal, invalid
from serve.generation import Generation, now
from serve.limits import Limits
from serve.replies import DONE, Reply, event, to_json

log = logging.getLogger(__name__)

T = TypeVar("T")

SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx passes each event on at once
}


class Delivery(Response):
    """Runs a generation when it is sent, whole or as server-sent events.

    The status is decided by the first event, so a request that is refused in the queue is a 429 in a stream, too. An
    error after that is an event of its own, as OpenAI's clients expect.

    generation: makes the generation; called when sending begins.
    others: holds this one while it is being sent.
    include_usage: end a stream with a chunk that counts its tokens.
    """

    def __init__(
        self,
        generation: Callable[[], Generation],
        reply: Reply,
        limits: Limits,
        others: set[Delivery],
        *,
        stream: bool,
        include_usage: bool,
    ) -> None:
        super().__init__()
        self._generation, self._reply, self._limits, self._others = generation, reply, limits, others
        self._stream, self._include_usage = stream, include_usage
        self._running: Generation | None = None

    def cut_off(self) -> None:
        """End it with an error that the client is told, in a stream, too."""
        if self._running is not None:
            self._running.fail(EngineError("this server is shutting down; ask another"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        since: float | None = None  # when the part was sent that the client has not taken yet

        async def watched(message: Message) -> None:
            nonlocal since
            since = now()
            await send(message)
            since = None

        work = asyncio.create_task(self._run(scope, receive, watched))
        gone = asyncio.create_task(_disconnected(receive))
        patience = self._limits.send_s
        self._others.add(self)
        try:
            # Looking up now and then is cheaper than a timer for each token.
            while not (await asyncio.wait((work, gone), timeout=patience, return_when=asyncio.FIRST_COMPLETED))[0]:
                if since is not None and now() - since >= patience:
                    log.warning("a client took nothing for %g s; its request was ended", patience)
                    break
        finally:
            self._others.discard(self)
            gone.cancel()
            if not work.done():
                work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._generation() as generation:
                self._running = generation
                if self._stream:
                    await self._send_stream(generation, send)
                else:
                    await self._send_whole(generation, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except (RequestError, RefusedError, NumericsError, EngineError) as error:
            await as_api_error(error).response()(scope, receive, send)

    async def _send_whole(self, generation: Generation, send: Send) -> None:
        deltas: list[list[Delta]] = [[] for _ in generation.choices]
        async for together in generation.deltas():
            for index, delta in together:
                deltas[index].append(delta)
        body = to_json(self._reply.whole(deltas, generation.usage()))
        await Response(body, media_type="application/json")({"type": "http"}, _nothing, send)

    async def _send_stream(self, generation: Generation, send: Send) -> None:
        deltas = generation.deltas()
        first = await anext(deltas)
        headers = [(name.encode(), value.encode()) for name, value in SSE_HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        opened: set[int] = set()
        try:
            async for together in _again(first, deltas):
                parts = []
                for index, delta in together:
                    if index not in opened:
                        opened.add(index)
                        opening = self._reply.opening(index)
                        parts += [] if opening is None else [event(opening)]
                    if delta.text or delta.tokens or delta.finish_reason:
                        parts.append(event(self._reply.chunk(index, delta)))
                if parts:
                    await send({"type": "http.response.body", "body": b"".join(parts), "more_body": True})
            if self._include_usage:
                last = event(self._reply.usage_chunk(generation.usage()))
                await send({"type": "http.response.body", "body": last, "more_body": True})
        except (RefusedError, NumericsError, EngineError) as error:
            last = event(as_api_error(error).body())
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


def as_api_error(error: Exception) -> ApiError:
    """What the engine raised, for a client."""
    match error:
        case RequestError():
            return invalid(str(error))
        case RefusedError():
            return ApiError(
                429, str(error), kind=RATE_LIMIT, code="rate_limit_exceeded", retry_after_s=error.retry_after_s
            )
        case NumericsError():
            return ApiError(500, str(error), kind=SERVER, code="numerics_error")
        case EngineError():
            return ApiError(503, str(error), kind=SERVER, code="engine_error")
        case _:
            return internal(str(error))


async def _again(first: T, rest: AsyncIterator[T]) -> AsyncIterator[T]:
    yield first
    async for one in rest:
        yield one


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing() -> dict[str, object]:
    return {"type": "http.disconnect"}
