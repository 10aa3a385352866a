"""How many tokens to propose, from what was accepted and what passes cost here: none where it does not pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from roofline.speculation import expected_tokens

PRIOR = 0.7, 4.0
"""Acceptance assumed of a new request, and how many proposals that is worth: enough to try, soon outweighed."""

DRAFT_PRIOR = 0.4, 4.0
"""The same for a draft, whose proposals cost its passes: it begins with few, which lose little where they fall."""

MEMORY = 0.97
"""What each pass leaves of the weight of those before it, so that a change of subject is noticed."""

MARGIN = 1.02
"""Speculation must promise this gain to go on: below it, plain steps are the safer choice."""

PAUSE, LONGEST_PAUSE = 24, 192
"""Tokens to decode plainly after speculation lost, doubled each time it loses again."""


def candidates(k: int) -> list[int]:
    """The numbers of proposals to choose from: k, and halves of it down to 1."""
    found = [k]
    while found[-1] > 1:
        found.append(found[-1] // 2)
    return found


@dataclass
class RowEstimate:
    """One request's acceptance: proposals that stood, of those that were looked at."""

    stood: float = PRIOR[0] * PRIOR[1]
    tried: float = PRIOR[1]

    @classmethod
    def of(cls, prior: tuple[float, float]) -> RowEstimate:
        """An open mind: (acceptance, proposals that it is worth)."""
        return cls(prior[0] * prior[1], prior[1])

    def update(self, proposed: int, accepted: int) -> None:
        """A pass: what comes after the first refusal was not looked at."""
        tried = min(accepted + 1, proposed)
        self.stood = self.stood * MEMORY + accepted
        self.tried = self.tried * MEMORY + tried

    @property
    def acceptance(self) -> float:
        return self.stood / self.tried


@dataclass
class Controller:
    """Chooses k for a batch, and keeps the count of what happened.

    Every row has its own estimate. A pass costs the batch the same whatever a row proposes, so the k chosen is the one
    that yields the most tokens a second over all rows that are not done.

    Args:
        costs: seconds of a pass by number of proposals; 0 is a plain step.
        rows: how many requests there are.
        fixed: use always this many, and never stop; None adapts.
        prior: what to think of a request that has made no proposals yet.
    """

    costs: Mapping[int, float]
    rows: int
    fixed: int | None = None
    prior: tuple[float, float] = PRIOR
    estimates: list[RowEstimate] = field(default_factory=list)
    pause: int = PAUSE

    def __post_init__(self) -> None:
        self.estimates = [RowEstimate.of(self.prior) for _ in range(self.rows)]

    def choose(self, active: Sequence[bool]) -> int:
        """The number of proposals of the next passes; 0 says that a plain step is the better."""
        if self.fixed is not None:
            return self.fixed
        live = [one.acceptance for one, is_active in zip(self.estimates, active, strict=True) if is_active]
        if not live:
            return 0
        rates = {k: sum(expected_tokens(acceptance, k) for acceptance in live) / cost for k, cost in self.costs.items()}
        best = max((k for k in rates if k), key=lambda k: rates[k])
        return best if rates[best] > rates[0] * MARGIN else 0

    def update(self, proposed: np.ndarray, accepted: np.ndarray) -> None:
        """int [passes, B] each, -1 where a row took no part."""
        for row, estimate in enumerate(self.estimates):
            for p, a in zip(proposed[:, row], accepted[:, row], strict=True):
                if p > 0:
                    estimate.update(int(p), int(a))

    def paused(self) -> int:
        """Tokens to decode plainly before the next try. Rows begin that try with an open mind."""
        now, self.pause = self.pause, min(self.pause * 2, LONGEST_PAUSE)
        self.estimates = [RowEstimate.of(self.prior) for _ in range(self.rows)]
        return now


@dataclass
class Tally:
    """What speculation did over a generation, or several.

    looked, stood: by position in the proposal, how often it was looked at (all before it stood) and how often it stood
    passes: how many passes ran with so many proposals for some row; 0 counts plain steps
    row_passes: passes of every row that was not done
    stops: how often speculation was found not to pay, and plain steps took over
    """

    k: int
    looked: list[int] = field(default_factory=list)
    stood: list[int] = field(default_factory=list)
    passes: dict[int, int] = field(default_factory=dict)
    tokens: int = 0
    row_passes: int = 0
    seconds: float = 0.0
    stops: int = 0

    def __post_init__(self) -> None:
        self.looked, self.stood = [0] * self.k, [0] * self.k

    def add(self, k: int, proposed: np.ndarray, accepted: np.ndarray, tokens: int, seconds: float) -> None:
        """A dispatch's int [passes, B] arrays, -1 where a row took no part; the tokens that it gave; its time."""
        for pass_proposed, pass_accepted in zip(proposed.tolist(), accepted.tolist(), strict=True):
            if max(pass_proposed) < 0:
                continue
            kind = k if max(pass_proposed) > 0 else 0
            self.passes[kind] = self.passes.get(kind, 0) + 1
            for p, a in zip(pass_proposed, pass_accepted, strict=True):
                self.row_passes += p >= 0
                for position in range(min(a + 1, p)):
                    self.looked[position] += 1
                    self.stood[position] += position < a
        self.tokens += tokens
        self.seconds += seconds

    @property
    def acceptance_by_position(self) -> list[float | None]:
        """Of the proposals at each place that were looked at, the share that stood."""
        return [stood / looked if looked else None for stood, looked in zip(self.stood, self.looked, strict=True)]

    @property
    def acceptance(self) -> float | None:
        """Over all places: the acceptance rate of the closed form."""
        return sum(self.stood) / sum(self.looked) if sum(self.looked) else None

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens a row gets from a pass of the model, plain steps among them."""
        return self.tokens / self.row_passes if self.row_passes else None

    def predicted_speed_up(self, costs: Mapping[int, float]) -> float | None:
        """The closed form of ``roofline.speculation`` for these passes: their k, this acceptance, and ``costs``."""
        if not self.passes:
            return None
        tokens = sum(count * expected_tokens(self.acceptance or 0.0, k) for k, count in self.passes.items())
        return tokens * costs[0] / sum(count * costs[k] for k, count in self.passes.items())

    def measured_speed_up(self, costs: Mapping[int, float], rows: int) -> float | None:
        """Tokens a second of ``rows`` rows over those of plain steps."""
        return self.tokens / rows * costs[0] / self.seconds if self.seconds else None
