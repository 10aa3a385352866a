"""What the engine's thread puts in arrives in the event loop, all of it and in order, with few wake-ups."""

from __future__ import annotations

import asyncio
import threading

from serve.inbox import Inbox


def test_the_loop_is_woken_once_for_what_comes_together() -> None:
    async def run() -> tuple[list[int], int]:
        loop, inbox, got, woken = asyncio.get_running_loop(), Inbox(), [], 0
        real = loop.call_soon_threadsafe

        def wake(*given: object) -> object:
            nonlocal woken
            woken += 1
            return real(*given)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = wake  # type: ignore[assignment, method-assign]
        for begin in (0, 50):
            for item in range(begin, begin + 50):
                inbox.put(loop, got.append, item)
            while len(got) < begin + 50:
                await asyncio.sleep(0)
        return got, woken

    got, woken = asyncio.run(run())
    assert got == list(range(100))
    assert woken == 2


def test_nothing_is_lost_while_both_sides_work() -> None:
    async def run() -> list[int]:
        loop, inbox, got = asyncio.get_running_loop(), Inbox(), []
        thread = threading.Thread(target=lambda: [inbox.put(loop, got.append, item) for item in range(20_000)])
        thread.start()
        while len(got) < 20_000:
            await asyncio.sleep(0)
        thread.join()
        return got

    assert asyncio.run(run()) == list(range(20_000))


def test_a_closed_loop_is_no_error_for_the_engine() -> None:
    loop, inbox, got = asyncio.new_event_loop(), Inbox(), []
    loop.close()
    inbox.put(loop, got.append, 1)
    inbox.put(loop, got.append, 2)
    assert got == []
