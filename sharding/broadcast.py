"""Messages from process 0 to every other, in order, over connections of their own.

What process 0 decides while it runs (which step comes next, of whom) the others must dispatch alike. A collective could
carry it, but would wait on the device behind the step that runs; a socket is there before that step has ended.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

from jax._src import distributed  # the only way to the key-value store of the processes that JAX has joined

from sharding.multihost import MultihostError, process_count

_LENGTH = struct.Struct("!Q")
_KEY = "shardstream/broadcast/"


class Announcer:
    """Process 0's end. The constructor returns once every other process has connected.

    Args:
        name: what the messages are about; the same on both ends, used once in a run.
        timeout_s: how long the others may take to connect, or to take a message.

    Raises:
        MultihostError: not all of them came.
    """

    def __init__(self, name: str, timeout_s: float):
        self._links: list[socket.socket] = []
        client, missing = distributed.global_state.client, process_count() - 1
        if not missing:
            return
        assert client is not None, "several processes are joined by JAX's client"
        try:
            server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        except (OSError, ValueError):  # no IPv6 here
            server = socket.create_server(("", 0))
        word = secrets.token_hex(16)
        client.key_value_set(_KEY + name, f"{server.getsockname()[1]} {word}")
        with server:
            server.settimeout(timeout_s)
            while len(self._links) < missing:
                try:
                    link, _ = server.accept()
                    link.settimeout(timeout_s)
                    if not secrets.compare_digest(_exactly(link, len(word)), word.encode()):
                        link.close()  # whoever that is
                        continue
                except (OSError, EOFError) as error:
                    self.close()
                    raise MultihostError(
                        f"{missing - len(self._links)} processes did not connect to process 0 for {name} ({error})"
                    ) from None
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._links.append(link)

    def send(self, message: bytes) -> None:
        """To every other process. Raises OSError for one that is gone or takes nothing."""
        for link in self._links:
            link.sendall(_LENGTH.pack(len(message)) + message)

    def close(self) -> None:
        """The others' ``messages`` end after the last one sent."""
        for link in self._links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_WR)
            link.close()
        self._links = []


def messages(name: str, timeout_s: float) -> Iterator[bytes]:
    """On every other process: the messages of ``Announcer(name)``, until it closes.

    Raises:
        MultihostError: process 0 cannot be reached.
    """
    state = distributed.global_state
    assert state.client is not None
    assert state.coordinator_address is not None
    port, word = state.client.blocking_key_value_get(_KEY + name, int(timeout_s * 1000)).split()
    host = state.coordinator_address.rpartition(":")[0].strip("[]")
    try:
        link = socket.create_connection((host, int(port)), timeout=timeout_s)
    except OSError as error:
        raise MultihostError(f"process 0 cannot be reached at {host}:{port} for {name} ({error})") from None
    with link:
        link.settimeout(None)  # it may have nothing to say for hours; its death is the lifeline's to notice
        link.sendall(word.encode())
        while True:
            try:
                (length,) = _LENGTH.unpack(_exactly(link, _LENGTH.size))
            except EOFError:
                return
            yield _exactly(link, length)


def _exactly(link: socket.socket, count: int) -> bytes:
    """So many bytes. Raises EOFError where the connection ends first."""
    parts, left = [], count
    while left:
        part = link.recv(min(left, 1 << 20))
        if not part:
            raise EOFError("the connection ended")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
