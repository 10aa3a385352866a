"""The connection that tells of lost processes: ends inside one test process, over loopback."""

from __future__ import annotations

import queue
import socket
import threading

import pytest

from sharding.lifeline import Lifeline

SOON = 60
"""Seconds after which a test that waits for a message fails."""


class End:
    """A lifeline and the messages of its losses."""

    def __init__(self, me: int, count: int, timeout_s: float = 30, agreed: dict[str, str] | None = None):
        self.told: queue.Queue[str] = queue.Queue()
        self.line = Lifeline(me, count, timeout_s, self.told.put, agreed)

    def loss(self) -> str:
        return self.told.get(timeout=SOON)


def run_of(count: int, timeout_s: float = 30) -> list[End]:
    ends = [End(me, count, timeout_s) for me in range(count)]
    port, word = ends[0].line.listen()
    for end in ends[1:]:
        end.line.connect("127.0.0.1", port, word)
    ends[0].line.accept()
    return ends


def test_a_normal_end_waits_for_everyone_and_is_no_loss() -> None:
    ends = run_of(3)
    left: queue.Queue[int] = queue.Queue()

    def leave(end: End) -> None:
        end.line.leave()
        left.put(end.line.me)

    threads = [threading.Thread(target=leave, args=(end,), daemon=True) for end in ends]
    for thread in threads[:2]:
        thread.start()
    with pytest.raises(queue.Empty):
        left.get(timeout=0.2)  # process 2 is still at work
    threads[2].start()
    assert sorted(left.get(timeout=SOON) for _ in ends) == [0, 1, 2]
    for end in ends[1:]:
        end.line._links[0].shutdown(socket.SHUT_RDWR)
    assert all(end.told.empty() for end in ends)


def test_a_closed_connection_is_told_to_everyone_once() -> None:
    ends = run_of(3)
    ends[1].line._links[0].shutdown(socket.SHUT_RDWR)
    assert ends[0].loss() == "process 1 of 3 was lost: it closed its connection, as a process that is killed does"
    assert ends[2].loss() == "process 1 of 3 was lost: it closed its connection, as a process that is killed does"
    assert ends[0].told.empty()
    assert ends[2].told.empty()


def test_the_hub_itself_is_missed() -> None:
    ends = run_of(2)
    ends[0].line._links[1].shutdown(socket.SHUT_RDWR)
    assert ends[1].loss().startswith("process 0 of 2 was lost: it closed its connection")


def test_a_failure_is_told_with_its_reason() -> None:
    ends = run_of(3)
    ends[2].line.fail("no such\n  file")
    assert ends[0].loss() == "process 2 of 3 stopped: no such file"
    assert ends[1].loss() == "process 2 of 3 stopped: no such file"
    assert ends[2].told.empty()


def test_silence_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """No heartbeat at all, from a process whose connection stays open."""
    monkeypatch.setattr(Lifeline, "_send_alive", lambda self: None)
    ends = run_of(2, timeout_s=0.3)
    assert ends[0].loss().endswith(" of 2 was lost: it has been silent for 0.3 s")


def test_a_process_that_never_connects_and_strangers() -> None:
    hub = End(0, 3, timeout_s=0.5)
    port, _ = hub.line.listen()
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"hello wrong 1\n")
        with pytest.raises(TimeoutError, match=r"no word from process 1, 2 of 3 in 0.5 s"):
            hub.line.accept()
    assert hub.line._links == {}
    assert hub.told.empty()


def test_processes_that_were_started_differently_are_refused_by_name() -> None:
    ends = [End(0, 2, agreed={"--seed": "1", "--tp": "2"}), End(1, 2, agreed={"--seed": "2", "--tp": "2"})]
    port, word = ends[0].line.listen()
    ends[1].line.connect("127.0.0.1", port, word)
    with pytest.raises(RuntimeError, match="process 1 was started with --seed 2, process 0 with 1; start all alike"):
        ends[0].line.accept()
    assert all("process 1 was started with --seed 2, process 0 with 1" in end.loss() for end in ends)


@pytest.mark.parametrize("ids", [(1, 1), (1, 3)])
def test_a_number_that_is_taken_or_too_large_is_refused(ids: tuple[int, int]) -> None:
    hub = End(0, 3)
    port, word = hub.line.listen()
    for me in ids:
        End(me, 3).line.connect("127.0.0.1", port, word)
    with pytest.raises(RuntimeError, match=f"says that it is process {ids[1]} of 3"):
        hub.line.accept()


def test_a_process_that_never_ends_ends_the_wait_of_the_others() -> None:
    ends = run_of(2)
    ends[0].line.timeout_s = 0.1  # of this wait alone: a machine that stops for a moment is no silence here
    threading.Thread(target=ends[0].line.leave, daemon=True).start()
    assert "process 0 of 2 is done, and others are not 0.1 s later" in ends[0].loss()
    assert (
        ends[1].loss()
        == "process 0 of 2 is done, and others are not 0.1 s later: were all started with the same options?"
    )
