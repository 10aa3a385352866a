"""Random load on an engine: arrivals, lengths, cancels, shared prefixes and few pages, each text against its solo run.

python -m tests.decode.batching.stress --seconds 300 --tp 2 --speculate
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import pytest

from decode.batching.engine import Engine
from decode.batching.request import Request
from tests.decode.batching.engines import (
    CONFIG,
    EVERYTHING,
    GREEDY,
    alone,
    draft_of,
    finished,
    running,
    speculation_pays,
)
from tests.decode.running import some_tokens

CLIENTS = 6
"""Threads that ask, more than the engine runs at once."""

PROPOSALS = 5


def random_request(rng: random.Random) -> Request:
    """A prompt that often begins as another does, greedy or with the whole sampler."""
    prefix = some_tokens(CONFIG, rng.choice([16, 40, 70]), rng.randrange(3)) if rng.random() < 0.6 else []
    prompt = [*prefix, *(rng.randrange(101) for _ in range(rng.randrange(1, 30)))]
    sampling = GREEDY
    if rng.random() < 0.5:
        sampling = replace(EVERYTHING, seed=rng.randrange(4), temperature=rng.choice([0.7, 1.0, 1.5]))
    stop = tuple(rng.randrange(101) for _ in range(rng.choice([0, 0, 2])))
    return Request(prompt, rng.randrange(1, 60), sampling, stop)


def client(engine: Engine, seed: int, more: Callable[[], bool], found: list[tuple[Request, list[int], bool]]) -> None:
    """One request after another; some are cancelled after a few tokens."""
    rng = random.Random(seed)
    while more():
        request = random_request(rng)
        ticket = engine.submit(request)
        if rng.random() < 0.2:
            tokens, leave_at = [], rng.randrange(20)
            if not leave_at:
                engine.cancel(ticket.id)
            for event in ticket:
                if event.token is not None:
                    tokens.append(event.token)
                if len(tokens) == leave_at:
                    engine.cancel(ticket.id)
            found.append((request, tokens, event.finish_reason == "cancelled"))
        else:
            found.append((request, finished(ticket).tokens, False))


def stress(tp: int, more: Callable[[], bool], seed: int = 0, *, speculate: bool = False) -> dict[str, int]:
    """Run clients while ``more()``; raises AssertionError for a wrong text, a page or a thread that does not return.

    speculate: with a draft, which is asked and copies whether it pays or not.
    """
    threads = threading.active_count()
    found: list[tuple[Request, list[int], bool]] = []
    errors: list[BaseException] = []

    def guarded(engine: Engine, number: int) -> None:
        try:
            client(engine, seed * 1000 + number, more, found)
        except BaseException as error:
            errors.append(error)

    options: dict[str, Any] = {"draft": draft_of(tp, True), "proposals": PROPOSALS} if speculate else {}
    with pytest.MonkeyPatch.context() as patch:
        if speculate:
            speculation_pays(patch)
        with running(tp, **options) as engine:
            workers = [threading.Thread(target=guarded, args=(engine, number)) for number in range(CLIENTS)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            stats = engine.stats()
    if errors:
        raise errors[0]
    assert threading.active_count() <= threads + 1  # JAX may have started one of its own
    solo: dict[str, list[int]] = {}
    for request, tokens, cut in found:
        key = repr(request)
        if key not in solo:
            solo[key] = alone(request, tp).tokens
        assert tokens == (solo[key][: len(tokens)] if cut else solo[key])
    return {
        "requests": len(found),
        "cancelled": stats.cancelled,
        "preemptions": stats.preemptions,
        "cached_tokens": stats.cached_tokens,
        "steps": stats.steps,
        "proposed_tokens": stats.proposed_tokens,
        "accepted_tokens": stats.accepted_tokens,
    }


def _before(end: float) -> bool:
    return time.monotonic() < end


def _resident_mb() -> int:
    """Memory of this process now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--speculate", action="store_true", help="with a draft model")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(1, args.tp))
    stress(args.tp, lambda: False, speculate=args.speculate)  # compiles, which is not to count
    until, round_number = time.monotonic() + args.seconds, 0
    held = []
    while time.monotonic() < until:
        end = min(until, time.monotonic() + 20)
        more = functools.partial(_before, end)
        counts = stress(args.tp, more, round_number, speculate=args.speculate)
        print({**counts, "resident_mb": _resident_mb()}, flush=True)
        round_number += 1
        gc.collect()
        held.append(len(jax.live_arrays()))
        assert held[-1] <= held[0], f"live arrays grow: {held}"
    return 0


if __name__ == "__main__":
    sys.exit(main())
