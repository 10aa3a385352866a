"""When a connection's time for a request's head runs, on a loop whose clock never moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from serve.connection import LATE, connection_type

HEADERS_S, KEEP_ALIVE_S = 30.0, 75
WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = b"GET / HTTP/1.1\r\nHos"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"


class Wire(asyncio.Transport):
    """The server's end of a connection to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.closed = b"", False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Timer:
    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self.seconds, self.call, self.cancelled = seconds, call, False

    def cancel(self) -> None:
        self.cancelled = True


class Case:
    """A connection, what it sent, and the timers that run."""

    def __init__(self, answer: asyncio.Event) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await answer.wait()
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        self.timers: list[Timer] = []

        def call_later(seconds: float, call: Callable[[], None]) -> Timer:
            self.timers.append(Timer(seconds, call))
            return self.timers[-1]

        loop: Any = SimpleNamespace(call_later=call_later, create_task=asyncio.get_running_loop().create_task)
        config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, timeout_keep_alive=KEEP_ALIVE_S)
        kind: Any = connection_type(HEADERS_S)
        self.wire, self.end = Wire(), kind(config=config, server_state=ServerState(), app_state={}, _loop=loop)
        self.end.connection_made(self.wire)

    def waits(self) -> list[float]:
        return sorted(timer.seconds for timer in self.timers if not timer.cancelled)

    def expire(self) -> None:
        next(timer for timer in self.timers if not timer.cancelled and timer.seconds == HEADERS_S).call()


Steps = Callable[[Case, asyncio.Event], Coroutine[Any, Any, None]]


def on_a_loop(steps: Steps) -> Callable[[], None]:
    """A test of these steps, with a connection and what lets its answers be made."""

    async def main() -> None:
        answer = asyncio.Event()
        await steps(Case(answer), answer)

    def test() -> None:
        asyncio.run(main())

    test.__doc__ = steps.__doc__
    return test


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@on_a_loop
async def test_from_its_start_until_the_head_is_whole(case: Case, answer: asyncio.Event) -> None:
    assert case.waits() == [HEADERS_S]
    case.end.data_received(WHOLE[:-2])
    assert case.waits() == [HEADERS_S]  # the same: bytes one by one do not prolong it
    assert len(case.timers) == 1
    case.end.data_received(WHOLE[-2:])
    assert case.waits() == []  # an answer may take as long as it takes
    answer.set()
    await settle()
    assert case.wire.sent.startswith(b"HTTP/1.1 204")
    assert case.waits() == [KEEP_ALIVE_S]


@on_a_loop
async def test_again_from_the_first_byte_of_the_next_head(case: Case, answer: asyncio.Event) -> None:
    answer.set()
    case.end.data_received(WHOLE)
    await settle()
    case.end.data_received(HALF)
    assert case.waits() == [HEADERS_S]
    case.expire()
    assert (case.wire.closed, case.wire.sent.endswith(LATE)) == (True, True)


@on_a_loop
async def test_what_sent_nothing_gets_nothing(case: Case, answer: asyncio.Event) -> None:
    case.expire()
    assert (case.wire.closed, case.wire.sent) == (True, b"")


@on_a_loop
async def test_a_head_that_begins_before_the_answer_has_ended(case: Case, answer: asyncio.Event) -> None:
    case.end.data_received(WHOLE + HALF)
    assert case.waits() == []
    answer.set()
    await settle()
    assert HEADERS_S in case.waits()


@on_a_loop
async def test_the_rest_of_a_body_that_was_answered_unread(case: Case, answer: asyncio.Event) -> None:
    answer.set()
    case.end.data_received(POST)
    await settle()
    for _ in range(2):
        case.end.data_received(b"a")
        assert HEADERS_S in case.waits()
    assert len([timer for timer in case.timers if timer.seconds == HEADERS_S]) == 2  # its head's, and this one
    case.expire()
    assert case.wire.closed
    assert case.wire.sent.count(b"HTTP/1.1 ") == 1  # it has its answer


@on_a_loop
async def test_idle_after_a_body_that_was_answered_unread(case: Case, answer: asyncio.Event) -> None:
    answer.set()
    case.end.data_received(POST)
    await settle()
    case.end.data_received(b"abcd")
    assert case.waits() == [KEEP_ALIVE_S]
    case.end.data_received(HALF)
    assert case.waits() == [HEADERS_S]
    case.end.data_received(WHOLE[len(HALF) :])
    await settle()
    assert case.wire.sent.count(b"HTTP/1.1 204") == 2


@on_a_loop
async def test_what_was_closed_is_left_alone(case: Case, answer: asyncio.Event) -> None:
    case.wire.close()
    case.expire()
    assert case.wire.sent == b""
    case.end.connection_lost(None)
    assert case.waits() == []
