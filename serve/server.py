"""Running the app on a socket until a signal, and ending without cutting anybody off."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from serve.app import Service
from serve.connection import connection_type

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LAST_WORDS_S = 5
"""How long connections that are still open after the drain may take to close."""
KEEP_ALIVE_S = 75
"""How long a connection may be idle between two requests: longer than clients and proxies keep theirs (nginx 60 s,
httpx 5), for one that both ends give up together loses the request that was just sent on it."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address, and does not listen yet. Raises OSError with both. Port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it a token can wait 40 ms for the one
    # before to be acknowledged.
    held = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        try:
            held.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # Connections of a server that was here before may linger. This option is for them, and only for them: two
            # that have it can both hold an address until one of them listens.
            _reuse(held)
            held.bind((host, port))
    except OSError as error:
        held.close()
        raise OSError(f"cannot listen at {host} port {port}: {error.strerror or error}") from None
    return held


def _reuse(held: socket.socket) -> None:
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn would close the listening socket at once, and end the process by the signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    service: Service,
    held: socket.socket,
    *,
    drain_s: float,
    on_listening: Callable[[], None] = lambda: None,
    on_draining: Callable[[], None] = lambda: None,
    stop: asyncio.Event | None = None,
) -> bool:
    """Serve until SIGTERM or SIGINT (or ``stop``), then drain: new requests get 503, running ones go on to their end.

    drain_s: how long they may take; after it, or after a second signal, they are cut off.

    Returns:
        Whether every request was answered.
    """
    config = uvicorn.Config(
        service.app(),
        http=connection_type(service.limits.headers_s),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_WORDS_S,
        h11_max_incomplete_event_size=64 << 10,
    )
    server = _Server(config)
    stop, hurry = stop or asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    with _handling(loop, signalled):
        running = asyncio.create_task(server.serve(sockets=[held]))
        while not server.started and not running.done():
            await asyncio.sleep(0.01)
        if server.started:
            _reuse(held)  # its connections take this on, and do not keep the next server from the address
            on_listening()
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        service.draining = True
        on_draining()
        answered = await _drained(service, drain_s, hurry)
        service.cut_off()
        server.should_exit = True
        await running
    return answered


async def _drained(service: Service, drain_s: float, hurry: asyncio.Event) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(drain_s):
            while service.open_requests and not hurry.is_set():
                await asyncio.sleep(0.02)
    return service.open_requests == 0


@contextlib.contextmanager
def _handling(loop: asyncio.AbstractEventLoop, handler: Callable[[], None]) -> Iterator[None]:
    """Where this is the main thread, the one that may handle signals."""
    try:
        for one in SIGNALS:
            loop.add_signal_handler(one, handler)
    except (RuntimeError, ValueError):  # another thread
        yield
        return
    try:
        yield
    finally:
        for one in SIGNALS:
            loop.remove_signal_handler(one)
