"""A connection that has so long to bring the rest of a request: uvicorn gives it for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def connection_type(headers_s: float) -> type[asyncio.Protocol]:
    """A protocol for ``uvicorn.Config(http=)``, which closes what brings no whole request head in ``headers_s``.

    The time runs from the connection's start, and on a connection that is kept from the first byte of the next head;
    between two requests uvicorn's own keep-alive time holds. A body that was answered before its end has the same time
    from that answer on: nobody reads it, so nobody else would miss the rest.
    """

    class Connection(H11Protocol):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self._deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._deadline = self.loop.call_later(headers_s, self._late)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._look()  # the next head may have begun before this answer ended

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _look(self) -> None:
            if not self._has_begun() and not self._is_answered_unread():
                self._forget()
                idle = self.conn.their_state is h11.IDLE
                if idle and self.timeout_keep_alive_task is None and not self.transport.is_closing():
                    # The end of such a body: uvicorn set this time at the answer, and dropped it as more came.
                    self.timeout_keep_alive_task = self.loop.call_later(
                        self.timeout_keep_alive, self.timeout_keep_alive_handler
                    )
            elif self._deadline is None:
                self._deadline = self.loop.call_later(headers_s, self._late)

        def _has_begun(self) -> bool:
            return self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])

        def _is_answered_unread(self) -> bool:
            return self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY

        def _late(self) -> None:
            if not self.transport.is_closing():
                # What has sent nothing gets nothing: browsers and proxies open connections ahead of their requests.
                if self._has_begun():
                    self.transport.write(LATE)
                self.transport.close()

        def _forget(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Connection
