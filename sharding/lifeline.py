"""Says within a stated time that another process of a run is gone.

A collective whose peer died may wait for ever, and JAX's own watch ends a process with a stack dump. So each process
keeps one connection to process 0, sends a line over it every few seconds, and reads what the other sends: a closed
connection, silence, or word of a failure ends the run, and process 0 passes it on to the rest. (JAX's coordination
service lives in process 0: when that is killed, its stack dump may come with our sentence or just before it.)
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TextIO

HUB = 0
GREETING_S, FAREWELL_S = 5.0, 2.0
"""Seconds for a new connection to say who it is, and for the others to hear of a failure."""

ALIVE, DONE, FAILED, HELLO = "alive", "done", "failed", "hello"

OnLoss = Callable[[str], None]


class Lifeline:
    """One process's end. ``on_loss(message)`` runs at most once, on a thread of this class; it should end the process.

    Args:
        me: this process's id; process 0 is the hub that the others connect to.
        count: processes of the run.
        timeout_s: how long another may be silent, or at work after this one is done.
        agreed: what must be the same on every process (a seed, the number of tokens): name and value.
    """

    def __init__(self, me: int, count: int, timeout_s: float, on_loss: OnLoss, agreed: Mapping[str, str] | None = None):
        self.me, self.count, self.timeout_s, self._on_loss = me, count, timeout_s, on_loss
        self._agreed = dict(agreed or {})
        self._links: dict[int, socket.socket] = {}
        self._listeners: list[threading.Thread] = []
        self._done: set[int] = set()
        self._everyone_done = threading.Event()
        self._ended = False
        self._lock = threading.RLock()

    def listen(self) -> tuple[int, str]:
        """On process 0: open the port that the others connect to. Returns it, and the word they must say."""
        try:
            self._server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        except (OSError, ValueError):  # no IPv6 here
            self._server = socket.create_server(("", 0))
        self._word = secrets.token_hex(16)
        return self._server.getsockname()[1], self._word

    def accept(self) -> None:
        """On process 0, after ``listen``: wait for every other process.

        Raises TimeoutError naming those missing, and RuntimeError for one that was started otherwise than this one.
        """
        deadline = time.monotonic() + self.timeout_s
        with self._server:
            while len(self._links) < self.count - 1:
                self._server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    self._greet(self._server.accept()[0])
                except TimeoutError:
                    missing = [str(peer) for peer in range(1, self.count) if peer not in self._links]
                    raise TimeoutError(
                        f"no word from process {', '.join(missing)} of {self.count} in {self.timeout_s:g} s"
                    ) from None
        self._start(self._send_alive)

    def connect(self, host: str, port: int, word: str) -> None:
        """On every other process: reach process 0. Raises OSError when that cannot be done in time."""
        link = socket.create_connection((host, port), timeout=self.timeout_s)
        link.sendall(f"{HELLO} {word} {self.me} {json.dumps(self._agreed)}\n".encode())
        self._links[HUB] = link
        self._hear(HUB, _lines(link))
        self._start(self._send_alive)

    def leave(self) -> None:
        """A normal end: returns once every process has come here. Losses before that still count."""
        if self.me != HUB:
            self._tell(DONE)
        if self.count > 1 and not self._everyone_done.wait(self.timeout_s):
            self._lose(
                f"process {self.me} of {self.count} is done, and others are not {self.timeout_s:g} s later: were all "
                f"started with the same options?"
            )
        with self._lock:
            self._ended = True
        if self.me == HUB:
            self._tell(DONE)

    def fail(self, message: str) -> None:
        """Tell the others that this process ends early, and why."""
        with self._lock:
            self._ended = True
        self._bid_farewell(f"process {self.me} of {self.count} stopped: {' '.join(message.split())}")

    def _greet(self, link: socket.socket) -> None:
        link.settimeout(min(GREETING_S, self.timeout_s))
        lines = _lines(link)
        try:
            said = lines.readline().split(maxsplit=3)
        except OSError:  # silent or gone: a stranger
            said = []
        if said[:2] != [HELLO, self._word]:
            link.close()
            return
        link.settimeout(self.timeout_s)
        peer, agreed = int(said[2]), json.loads(said[3])
        fault = None
        if peer in self._links or not 0 < peer < self.count:
            fault = f"a second process, or one too many, says that it is process {peer} of {self.count}"
        for name in sorted(agreed.keys() | self._agreed.keys()):
            here, there = (options.get(name, "nothing") for options in (self._agreed, agreed))
            if here != there:
                fault = f"process {peer} was started with {name} {there}, process 0 with {here}; start all alike"
        if fault is not None:
            with suppress(OSError):
                link.sendall(f"{FAILED} {fault}\n".encode())
            self._lose(fault)
            raise RuntimeError(fault)
        self._links[peer] = link
        self._hear(peer, lines)

    def _hear(self, peer: int, lines: TextIO) -> None:
        self._listeners.append(self._start(self._listen, peer, lines))

    def _listen(self, peer: int, lines: TextIO) -> None:
        reason = "closed its connection, as a process that is killed does"
        try:
            for line in lines:
                word, _, text = line.rstrip("\n").partition(" ")
                if word == DONE:
                    self._note_done(peer)
                elif word == FAILED:
                    self._lose(text)
                    return
        except TimeoutError:
            reason = f"has been silent for {self.timeout_s:g} s"
        except OSError as error:
            reason = f"cannot be reached ({error.strerror or error})"
        if peer not in self._done:
            self._lose(f"process {peer} of {self.count} was lost: it {reason}")

    def _note_done(self, peer: int) -> None:
        with self._lock:
            self._done.add(peer)
            if peer == HUB or len(self._done) == self.count - 1:
                self._everyone_done.set()

    def _lose(self, message: str) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._bid_farewell(message)
        self._on_loss(message)

    def _bid_farewell(self, message: str) -> None:
        """Tell of a failure. The others end when they have read it; ending first could take it from them unread."""
        self._tell(f"{FAILED} {message}")
        deadline = time.monotonic() + FAREWELL_S
        for listener in self._listeners:
            if listener is not threading.current_thread():
                listener.join(max(0.0, deadline - time.monotonic()))

    def _send_alive(self) -> None:
        while True:
            self._tell(ALIVE)
            time.sleep(min(5.0, self.timeout_s / 4))

    def _tell(self, line: str) -> None:
        with self._lock:
            for link in self._links.values():
                try:
                    link.sendall(f"{line}\n".encode())
                except OSError:  # its listener notices
                    continue

    @staticmethod
    def _start(work: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        return thread


def _lines(link: socket.socket) -> TextIO:
    return link.makefile("r", encoding="utf-8", errors="replace", newline="\n")
