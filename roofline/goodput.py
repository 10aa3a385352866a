"""Throughput, and the part of it that met its targets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from roofline.errors import RooflineError


@dataclass(frozen=True)
class Request:
    """One served request: start, seconds to its first token, mean seconds for each later one, tokens made."""

    start_s: float
    ttft_s: float
    tpot_s: float
    tokens: int

    @property
    def end_s(self) -> float:
        """When its last token came."""
        return self.start_s + self.ttft_s + max(0, self.tokens - 1) * self.tpot_s


@dataclass(frozen=True)
class Goodput:
    """Output of a run over `seconds`: all of it, and that of requests that met both targets."""

    seconds: float
    requests: int
    good_requests: int
    tokens_per_s: float
    good_tokens_per_s: float

    @property
    def attainment(self) -> float:
        """Share of requests that met both targets."""
        return self.good_requests / self.requests

    @property
    def good_requests_per_s(self) -> float:
        """Requests a second that met both targets."""
        return self.good_requests / self.seconds


def goodput(
    requests: Iterable[Request], *, ttft_target_s: float, tpot_target_s: float, seconds: float | None = None
) -> Goodput:
    """Count tokens of all requests, and of those with TTFT and TPOT at or under their targets.

    Source of the measure: Zhong et al., "DistServe" (2024). `seconds` is the length of the run; None
    takes it from the first start to the last end. A request of one token has no TPOT to miss. Raises
    RooflineError for no requests, a target that is not positive, or a run of no length.
    """
    found = list(requests)
    if not found:
        raise RooflineError("goodput needs at least one request")
    for name, target in (("ttft_target_s", ttft_target_s), ("tpot_target_s", tpot_target_s)):
        if target <= 0:
            raise RooflineError(f"{name} is {target}: it must be positive")
    span = max(r.end_s for r in found) - min(r.start_s for r in found) if seconds is None else seconds
    if span <= 0:
        raise RooflineError(f"the run lasts {span} s: it must be positive")
    good = [r for r in found if r.ttft_s <= ttft_target_s and (r.tokens <= 1 or r.tpot_s <= tpot_target_s)]
    return Goodput(span, len(found), len(good), sum(r.tokens for r in found) / span, sum(r.tokens for r in good) / span)
