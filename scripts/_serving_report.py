"""What a serving benchmark says of a run: counts, rates, and percentiles of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from roofline.goodput import Request, goodput
from scripts._client import Outcome

QUANTITIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}

LEGEND = """\
rate, conc.   requests offered a second (Poisson arrivals), or requests held open at once
done/ref/fail requests completed, refused (429, 503) and failed; together all that were offered
req/s, tok/s  completed requests and their output tokens a second, from the first arrival to the last end
good req/s    completed requests that met both targets, a second; good %, their share of all offered
good tok/s    output tokens of those, a second
TTFT          from when a request was due (open loop) or sent (closed loop) to its first text
TPOT          mean time of its later tokens: first text to last text over (tokens - 1)
ITL           the longest wait between two parts of its text
E2E           from when it was due or sent to its last text
mean, P50...  over completed requests, each counted once, in ms"""


def summarise(
    outcomes: Sequence[Outcome], *, ttft_slo_s: float | None, tpot_slo_s: float | None, load: dict[str, float]
) -> dict[str, Any]:
    """The JSON of one point. load: {"rate": requests/s} or {"concurrency": requests}."""
    done = [one for one in outcomes if one.status == "completed"]
    began = min(one.began for one in outcomes)
    seconds = max((one.arrivals[-1] for one in done), default=began) - began
    tokens = sum(one.tokens for one in done)
    pooled = [gap for one in done for gap in one.gaps_s]
    return {
        **load,
        "requests": {
            "offered": len(outcomes),
            **{kind: sum(one.status == kind for one in outcomes) for kind in ("completed", "refused", "failed")},
        },
        "errors": dict(Counter(one.error for one in outcomes if one.error).most_common(10)),
        "seconds": seconds,
        "requests_per_s": len(done) / seconds if done else 0.0,
        "output_tokens_per_s": tokens / seconds if done else 0.0,
        "output_tokens": tokens,
        "prompt_tokens": _total(one.prompt_tokens for one in done),
        "tokens_counted_by": sorted({one.counted_by for one in done}),
        "goodput": _goodput(done, len(outcomes), seconds, ttft_slo_s, tpot_slo_s),
        "ttft_ms": _stats(one.ttft_s for one in done),
        "tpot_ms": _stats(one.tpot_s for one in done if one.tpot_s is not None),
        "itl_ms": _stats(max(one.gaps_s) for one in done if one.gaps_s),
        "itl_of_all_gaps_ms": _stats(pooled),
        "e2e_ms": _stats(one.e2e_s for one in done),
        "client_late_ms": _stats(one.late_s for one in outcomes),
    }


def render(points: Sequence[dict[str, Any]]) -> str:
    """Two tables, rates and latencies, with every column defined under them."""
    name = "rate" if "rate" in points[0] else "conc."
    good = points[0]["goodput"] is not None
    heads = [name, "done/ref/fail", "req/s", "tok/s", *(["good req/s", "good %", "good tok/s"] if good else [])]
    rows = [heads]
    for point in points:
        counts = point["requests"]
        row = [
            f"{_load(point):g}",
            f"{counts['completed']}/{counts['refused']}/{counts['failed']}",
            f"{point['requests_per_s']:.2f}",
            f"{point['output_tokens_per_s']:.1f}",
        ]
        if good:
            met = point["goodput"]
            row += [f"{met['requests_per_s']:.2f}", f"{met['share']:.0%}", f"{met['output_tokens_per_s']:.1f}"]
        rows.append(row)
    times = [[name, "", "mean", "P50", "P90", "P99"]]
    for point in points:
        for key, title in QUANTITIES.items():
            stats = point[f"{key}_ms"]
            shown = [stats[part] for part in ("mean", "median", "p90", "p99")] if stats else [None] * 4
            times.append([f"{_load(point):g}", title, *("-" if value is None else f"{value:.1f}" for value in shown)])
    notes = [f"{count} x {text}" for point in points for text, count in point["errors"].items()]
    told = ["", "not completed:", *notes] if notes else []
    return "\n".join([*_aligned(rows), "", *_aligned(times), "", LEGEND, *told])


def _goodput(
    done: Sequence[Outcome], offered: int, seconds: float, ttft_slo_s: float | None, tpot_slo_s: float | None
) -> dict[str, Any] | None:
    """None without targets. A target that is not given is always met."""
    if ttft_slo_s is None and tpot_slo_s is None:
        return None
    targets = {
        "ttft_target_ms": None if ttft_slo_s is None else ttft_slo_s * 1e3,
        "tpot_target_ms": None if tpot_slo_s is None else tpot_slo_s * 1e3,
    }
    if not done or seconds <= 0:
        return {**targets, "requests": 0, "share": 0.0, "requests_per_s": 0.0, "output_tokens_per_s": 0.0}
    never = float("inf")
    found = goodput(
        [Request(one.began, one.ttft_s, one.tpot_s or 0.0, one.tokens) for one in done],
        ttft_target_s=ttft_slo_s or never,
        tpot_target_s=tpot_slo_s or never,
        seconds=seconds,
    )
    return {
        **targets,
        "requests": found.good_requests,
        "share": found.good_requests / offered,
        "requests_per_s": found.good_requests_per_s,
        "output_tokens_per_s": found.good_tokens_per_s,
    }


def _stats(seconds: Iterable[float]) -> dict[str, float] | None:
    """In milliseconds; percentiles are interpolated. None of nothing."""
    values = np.array(list(seconds)) * 1e3
    if not len(values):
        return None
    median, p90, p99 = np.percentile(values, [50, 90, 99])
    found = {"mean": values.mean(), "median": median, "p90": p90, "p99": p99, "max": values.max()}
    return {key: float(value) for key, value in found.items()}


def _total(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _load(point: dict[str, Any]) -> float:
    return float(point["rate"] if "rate" in point else point["concurrency"])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
