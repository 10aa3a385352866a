"""What Prometheus reads: the engine's own counters at each scrape, and the times that clients saw.

Times are from the moment that a request's headers arrived to the moment that a token reached the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from decode.batching.options import EngineStats

PREFIX = "shardstream"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_TPOT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_REQUEST_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)

_GAUGES = {
    "waiting": ("queue_requests", "Requests that wait to be admitted"),
    "running": ("running_requests", "Requests in the batch"),
    "pages_used": ("pages_used", "KV cache pages held by requests"),
    "pages_cached": ("pages_cached", "KV cache pages kept for their content alone"),
    "pages_total": ("pages", "KV cache pages"),
    "step_s": ("step_seconds", "Recent mean time of a step while busy"),
}
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests"),
    "cached_tokens": ("prefix_hit_tokens", "Prompt tokens that came from the prefix cache"),
    "generated_tokens": ("generated_tokens", "Tokens generated"),
    "proposed_tokens": ("proposed_tokens", "Tokens that speculation proposed"),
    "accepted_tokens": ("accepted_tokens", "Proposed tokens that stood"),
    "preemptions": ("preemptions", "Requests preempted for lack of pages, to be computed again"),
    "steps": ("steps", "Device steps"),
    "decode_steps": ("decode_steps", "Device steps without prompt tokens"),
}


class Metrics:
    """One server's metrics, in a registry of their own.

    stats: the engine's.
    ttft_slo_s, tpot_slo_s: the targets that a request must meet to count as goodput; None: no target.
    """

    def __init__(
        self, stats: Callable[[], EngineStats], *, ttft_slo_s: float | None = None, tpot_slo_s: float | None = None
    ) -> None:
        self._ttft_slo_s, self._tpot_slo_s = ttft_slo_s, tpot_slo_s
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats))
        make: dict[str, Any] = {"namespace": PREFIX, "registry": self._registry}
        self._ttft = Histogram("time_to_first_token_seconds", "TTFT of a sequence", buckets=_TTFT_S, **make)
        self._tpot = Histogram(
            "time_per_output_token_seconds",
            "TPOT of a sequence: mean time of its later tokens",
            buckets=_TPOT_S,
            **make,
        )
        self._whole = Histogram("request_seconds", "A sequence from its request to its end", buckets=_REQUEST_S, **make)
        self._ends = Counter(
            "requests", "Sequences by how they ended; a request refused unread is one", ["outcome"], **make
        )
        self._good = Counter("goodput_requests", "Sequences that met both targets; all, where there are none", **make)
        self._good_tokens = Counter("goodput_tokens", "Tokens of those sequences", **make)
        for outcome in ("stop", "length", "cancelled", "refused", "failed"):
            self._ends.labels(outcome)

    def completed(self, outcome: str, began: float, first: float, last: float, tokens: int) -> None:
        """A sequence ended with "stop" or "length"; times as ``time.perf_counter`` tells them."""
        ttft_s, tpot_s = first - began, (last - first) / (tokens - 1) if tokens > 1 else None
        self._ttft.observe(ttft_s)
        if tpot_s is not None:
            self._tpot.observe(tpot_s)
        self._whole.observe(last - began)
        self._ends.labels(outcome).inc()
        in_time = self._ttft_slo_s is None or ttft_s <= self._ttft_slo_s
        if in_time and (self._tpot_slo_s is None or tpot_s is None or tpot_s <= self._tpot_slo_s):
            self._good.inc()
            self._good_tokens.inc(tokens)

    def ended(self, outcome: str, sequences: int = 1) -> None:
        """Sequences ended otherwise: "cancelled", "refused" or "failed"."""
        self._ends.labels(outcome).inc(sequences)

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads the engine once a scrape."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"{PREFIX}_{name}", text, value=getattr(stats, field))
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=getattr(stats, field))
        split = GaugeMetricFamily(
            f"{PREFIX}_step_part_seconds",
            "Of a recent step: device, time the host waited for the device; host, its own work beside that; host_cpu, "
            "the CPU time of that work",
            labels=["part"],
        )
        split.add_metric(["host"], stats.host_wall_s)
        split.add_metric(["host_cpu"], stats.host_s)
        split.add_metric(["device"], stats.device_s)
        yield split
        predicted = GaugeMetricFamily(
            f"{PREFIX}_step_predicted_seconds", "The fitted model's terms of the newest step", labels=["term"]
        )
        for term, seconds in stats.predicted_s.items():
            predicted.add_metric([term], seconds)
        yield predicted
        shapes = GaugeMetricFamily(
            f"{PREFIX}_step_shape_seconds",
            "Recent mean time of the steps of a shape, and what the fitted model says of the newest",
            labels=["rows", "prompt_tokens", "kind"],
        )
        for (rows, prompt), (measured, fitted) in stats.shapes_s.items():
            shapes.add_metric([str(rows), str(prompt), "measured"], measured)
            shapes.add_metric([str(rows), str(prompt), "predicted"], fitted)
        yield shapes

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering does not read the engine."""
        return iter(())
