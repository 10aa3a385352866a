"""Speculation under load: so many requests at once through the batching engine, with it and without it."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from decode.batching.engine import Engine
from decode.batching.options import EngineOptions
from decode.batching.request import Request
from decode.decoder import Decoder
from decode.speculation.draft import DraftModel
from scripts._progress import counted
from scripts._table import framed, ranged

PLAIN = "plain"

HEAD = ["prompt", "at once", "mode", "tokens/s", "gain", "proposed", "accepted", "text"]
COLUMNS = """\
at once      requests that come together, each with an opening of its own; the next come when all of them have ended
tokens/s     generated tokens a second, the time of the prompts included: median over the rounds, and their range
gain         that over plain decoding's of the same round, median
proposed     tokens proposed for each one generated; accepted: how many of these stood
text         same: token for token that of plain decoding; else how many requests have another, as happens in 16 bits,
             where a step of another size rounds otherwise and near ties fall otherwise"""


@dataclass(frozen=True)
class Sample:
    """One load: its speed, what was proposed, what stood, and the tokens of each request."""

    tokens_per_s: float
    proposed: int
    accepted: int
    tokens: list[list[int]]


def measure(
    decoder: Decoder,
    modes: Mapping[str, DraftModel | None],
    prompts: Mapping[str, Sequence[list[int]]],
    levels: Sequence[int],
    *,
    k: int,
    new_tokens: int,
    max_len: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """Rows of the report, those of plain decoding first in each group.

    modes: what proposes, by name; None looks up what followed the same tokens before.
    prompts: by kind, one for each request of the largest level.
    """
    found: dict[tuple[str, int, str], list[Sample]] = defaultdict(list)
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name, draft in [(PLAIN, None), *modes.items()]:
            # Without the prefix cache: a prompt's second round would not compute it.
            options = EngineOptions(
                max_batch=max(levels),
                max_len=max_len,
                prefix_cache=False,
                max_queue=max(levels),
                proposals=0 if name == PLAIN else k,
            )
            engines[name] = Engine(decoder, options, draft)
            stack.callback(engines[name].close)
            engines[name].start()
        loads = [(turn, kind, level) for turn in range(rounds + 1) for kind in prompts for level in levels]
        for turn, kind, level in counted(loads, "loads"):
            names = list(engines)
            for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
                sample = _load(engines[name], prompts[kind][:level], new_tokens)
                if turn:  # the first warms up
                    found[kind, level, name].append(sample)
    return [_row(kind, level, name, found) for kind in prompts for level in levels for name in (PLAIN, *modes)]


def _load(engine: Engine, prompts: Sequence[list[int]], new_tokens: int) -> Sample:
    before, began = engine.stats(), time.perf_counter()
    tickets = [engine.submit(Request(prompt, new_tokens)) for prompt in prompts]
    tokens = [ticket.result() for ticket in tickets]
    seconds, after = time.perf_counter() - began, engine.stats()
    return Sample(
        sum(map(len, tokens)) / seconds,
        after.proposed_tokens - before.proposed_tokens,
        after.accepted_tokens - before.accepted_tokens,
        tokens,
    )


def _row(kind: str, level: int, name: str, found: Mapping[tuple[str, int, str], list[Sample]]) -> dict[str, Any]:
    own, plain = found[kind, level, name], found[kind, level, PLAIN]
    pairs = list(zip(own, plain, strict=True))
    return {
        "prompt": kind,
        "concurrency": level,
        "mode": name,
        "tokens_per_s": statistics.median(one.tokens_per_s for one in own),
        "samples_tokens_per_s": [one.tokens_per_s for one in own],
        "gain": statistics.median(one.tokens_per_s / base.tokens_per_s for one, base in pairs),
        "tokens": sum(len(tokens) for one in own for tokens in one.tokens),
        "proposed": sum(one.proposed for one in own),
        "accepted": sum(one.accepted for one in own),
        "other_texts": sum(a != b for one, base in pairs for a, b in zip(one.tokens, base.tokens, strict=True)),
    }


def render(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows for people, and what their columns mean."""
    return [*framed([HEAD, *map(_cells, rows)]), "", COLUMNS]


def _cells(row: Mapping[str, Any]) -> list[str]:
    cells = [
        row["prompt"],
        str(row["concurrency"]),
        row["mode"],
        ranged(row["tokens_per_s"], row["samples_tokens_per_s"], 1),
        f"{row['gain']:.2f}",
    ]
    if row["mode"] == PLAIN:
        return [*cells, "-", "-", "-"]
    accepted = f"{row['accepted'] / row['proposed']:.0%}" if row["proposed"] else "-"
    text = f"other: {row['other_texts']}" if row["other_texts"] else "same"
    return [*cells, f"{row['proposed'] / row['tokens']:.2f}", accepted, text]
