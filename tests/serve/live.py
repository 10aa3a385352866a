"""A server on a free port of loopback, in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from model.tokenizer import Tokenizer
from serve.app import Service
from serve.generation import EngineLike
from serve.server import bind, serve

PATIENCE_S = 120
"""Longer than anything here takes, on a machine that is busy with other work, too."""
NAME = "tiny"


@dataclass(frozen=True)
class Live:
    service: Service
    engine: Any
    port: int
    stop: Callable[[], None]
    thread: threading.Thread
    http: httpx.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.http.post(f"{self.url}/v1/{path}", **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(f"{self.url}{path}", **options)


@contextmanager
def live_server(
    engine: EngineLike, tokenizer: Tokenizer, *, drain_s: float = PATIENCE_S, **options: Any
) -> Iterator[Live]:
    """options: those of ``Service``."""
    service = Service(engine, tokenizer, NAME, **options)
    held = bind("127.0.0.1", 0)
    port = held.getsockname()[1]
    listening = threading.Event()
    stop: Callable[[], None] = lambda: None  # noqa: E731
    outcome: list[bool] = []

    async def run() -> None:
        nonlocal stop
        event, loop = asyncio.Event(), asyncio.get_running_loop()
        stop = lambda: loop.call_soon_threadsafe(event.set)  # noqa: E731
        outcome.append(await serve(service, held, drain_s=drain_s, on_listening=listening.set, stop=event))

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    try:
        assert listening.wait(PATIENCE_S)
        with httpx.Client(timeout=PATIENCE_S, trust_env=False) as http:
            yield Live(service, engine, port, lambda: stop(), thread, http)
    finally:
        if thread.is_alive():
            stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        service.close()


def eventually(holds: Callable[[], bool]) -> None:
    """Wait for what another thread will make true; fails after far more time than that takes."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)
