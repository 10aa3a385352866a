"""Fit the latency model to measurements of another decoder, or of this one, and predict the rest.

What is estimated, and from what:

- from the rows with tp = 1: for each weight dtype its share of the bandwidth and its overhead a layer;
- from the rows with tp > 1, when there are any: one factor on the interconnect's latencies, the single
  constant of the collective library.

Everything else is arithmetic: how many bytes each device reads, what is replicated, how many
collectives a step makes. Few unknowns and weak priors are the point: such tables have few rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from roofline.case import Case
from roofline.chips import Chip
from roofline.collectives import CollectiveModel
from roofline.efficiency import Efficiency
from roofline.errors import RooflineError
from roofline.latency import Terms, tpot

# How far the truth may lie from the defaults before a measurement has to argue for it, as a share of the
# default: bandwidth shares of real kernels lie within some 15 % of 0.85 or 0.9, overheads within twice.
BANDWIDTH_SPREAD = 0.15
OVERHEAD_SPREAD = 1.0
LEAST_OVERHEAD_SPREAD_S = 5e-6
COLLECTIVE_SPREAD = 2.0
# Run-to-run noise of a published mean, as a share of it; a row more than OUTLIER times that off is
# weighed by its distance, not by the square of it (Huber), so one odd row does not bend the rest.
NOISE = 0.01
OUTLIER = 3.0


@dataclass(frozen=True)
class Measurement:
    """One row of a table: a case (model, dtype, tp, batch, context, what is replicated) and its ms a step."""

    case: Case
    ms: float
    label: str = ""

    def __post_init__(self) -> None:
        if self.ms <= 0:
            raise RooflineError(f"measurement {self.label or self.case.tp}: {self.ms} ms is not positive")

    @classmethod
    def from_tokens_per_s(cls, case: Case, tokens_per_s: float, label: str = "") -> Measurement:
        """A row that states tokens a second of the whole batch."""
        if tokens_per_s <= 0:
            raise RooflineError(f"measurement {label or case.tp}: {tokens_per_s} tokens/s is not positive")
        return cls(case, 1e3 * case.batch / tokens_per_s, label)


@dataclass(frozen=True)
class Fit:
    """Estimated efficiencies. `predict` prices a case, `errors` compares with measurements.

    `by_dtype` holds one Efficiency for each weight dtype seen at tp = 1; a dtype never seen takes
    `default`, the one of bf16 where there is one. `notes` says what could not be estimated and was left
    at its prior.
    """

    chip: Chip
    by_dtype: dict[str, Efficiency]
    default: Efficiency
    collectives: CollectiveModel | None = None
    notes: tuple[str, ...] = field(default=())

    def efficiency(self, case: Case) -> Efficiency:
        """The efficiency for this case's weight dtype."""
        return self.by_dtype.get(case.weight_format.name, self.default)

    def predict(self, case: Case) -> Terms:
        """Terms of a decode step of `case`."""
        return tpot(case, self.chip, self.efficiency(case), self.collectives)

    def errors(self, measurements: Iterable[Measurement]) -> list[float]:
        """`predicted / measured - 1` for each measurement."""
        return [self.predict(row.case).total * 1e3 / row.ms - 1 for row in measurements]

    def mean_error(self, measurements: Iterable[Measurement]) -> float:
        """Mean of the absolute relative errors. Raises RooflineError for no measurements."""
        found = self.errors(measurements)
        if not found:
            raise RooflineError("no measurements to compare with")
        return sum(map(abs, found)) / len(found)


def fit(
    measurements: Iterable[Measurement],
    chip: Chip,
    prior: Efficiency | None = None,
    collectives: CollectiveModel | None = None,
) -> Fit:
    """Estimate efficiencies from `measurements` on `chip`.

    Relative errors are minimised by linear least squares in `1 / bandwidth`, the overhead a layer and
    the collective factor, with a weak pull towards `prior` (default: the chip's own) that decides only
    what the rows leave open. Compute and step overhead stay at the prior: a decode table does not show
    them. `collectives` fixes the collective model (`collectives.Constant`, `collectives.Measured`)
    instead of fitting a factor. Raises RooflineError when no row has tp = 1.
    """
    rows = list(measurements)
    single = [row for row in rows if row.case.tp == 1]
    several = [row for row in rows if row.case.tp > 1]
    if not single:
        raise RooflineError("fit needs at least one measurement with tp = 1: bandwidth and overhead come from those")
    prior = chip.efficiency if prior is None else prior
    notes = []
    by_dtype = {}
    for name in dict.fromkeys(row.case.weight_format.name for row in single):
        same = [row for row in single if row.case.weight_format.name == name]
        by_dtype[name] = _fit_single(same, chip, prior)
        if len({row.case.config for row in same}) == 1:
            notes.append(f"{name}: one model at tp = 1, so the prior splits its time between bandwidth and overhead")
    default = by_dtype.get("bf16", next(iter(by_dtype.values())))
    if collectives is None and several:
        scale = _fit_collectives(several, chip, Fit(chip, by_dtype, default))
        by_dtype = {name: replace(item, collective_scale=scale) for name, item in by_dtype.items()}
        default = replace(default, collective_scale=scale)
    elif collectives is None:
        notes.append("no row with tp > 1: collectives cost what the chip's interconnect says")
    return Fit(chip, by_dtype, default, collectives, tuple(notes))


def _fit_single(rows: Sequence[Measurement], chip: Chip, prior: Efficiency) -> Efficiency:
    """Bandwidth share and overhead a layer from rows of one dtype on one device.

    Each row says `stream / e + layers x overhead + rest = measured`, linear in `1 / e` and the overhead.
    The rest (compute that does not hide) depends on `e` when a row is compute-bound, so it is repeated.
    """
    found = prior
    for _ in range(8):
        equations = []
        for row in rows:
            now, seconds = tpot(row.case, chip, found), row.ms / 1e3
            stream = (now.weights + now.kv) * found.bandwidth
            weight = 1 / (NOISE * seconds)
            known = [stream * weight, row.case.config.num_layers * weight]
            equations.append((known, (seconds - now.compute - now.step) * weight))
        start = [1 / prior.bandwidth, prior.layer_overhead_s]
        spread = [
            BANDWIDTH_SPREAD / prior.bandwidth,
            max(OVERHEAD_SPREAD * prior.layer_overhead_s, LEAST_OVERHEAD_SPREAD_S),
        ]
        inverse, overhead = _robust(equations, start, spread, [1.0, 0.0])
        found = replace(prior, bandwidth=1 / inverse, layer_overhead_s=overhead)
    return found


def _fit_collectives(rows: Sequence[Measurement], chip: Chip, single: Fit) -> float:
    """One factor on the interconnect's latencies, from the rows with several devices."""
    equations = []
    for row in rows:
        efficiency = single.efficiency(row.case)
        none = tpot(row.case, chip, replace(efficiency, collective_scale=0.0)).total
        one = tpot(row.case, chip, replace(efficiency, collective_scale=1.0)).total
        seconds = row.ms / 1e3
        weight = 1 / (NOISE * seconds)
        equations.append(([(one - none) * weight], (seconds - none) * weight))
    return _robust(equations, [1.0], [COLLECTIVE_SPREAD], [0.0])[0]


def _robust(
    equations: Sequence[tuple[Sequence[float], float]],
    start: Sequence[float],
    spread: Sequence[float],
    low: Sequence[float],
) -> list[float]:
    """`_least_squares` with Huber weights: residuals, in units of the noise, count linearly past OUTLIER."""
    weights = [1.0] * len(equations)
    found: list[float] = []
    for _ in range(20):
        weighed = [([k * w for k in a], b * w) for (a, b), w in zip(equations, weights, strict=True)]
        found = _least_squares(weighed, start, spread, low)
        residuals = [abs(sum(k * x for k, x in zip(a, found, strict=True)) - b) for a, b in equations]
        weights = [1.0 if r <= OUTLIER else (OUTLIER / r) ** 0.5 for r in residuals]
    return found


def _least_squares(
    equations: Sequence[tuple[Sequence[float], float]],
    start: Sequence[float],
    spread: Sequence[float],
    low: Sequence[float],
) -> list[float]:
    """Minimise `sum (a . x - b)^2 + sum ((x - start) / spread)^2` with `x >= low`.

    A bound that is crossed is held and the rest solved again: exact enough for a handful of unknowns.
    """
    size = len(start)
    held: dict[int, float] = {}
    while True:
        free = [i for i in range(size) if i not in held]
        if not free:
            return [held[i] for i in range(size)]
        matrix = [[sum(a[i] * a[j] for a, _ in equations) for j in free] for i in free]
        right = []
        for index, i in enumerate(free):
            matrix[index][index] += 1 / spread[i] ** 2
            fixed = [b - sum(a[j] * held[j] for j in held) for a, b in equations]
            right.append(sum(a[i] * b for (a, _), b in zip(equations, fixed, strict=True)) + start[i] / spread[i] ** 2)
        solved = dict(zip(free, _solve(matrix, right), strict=True))
        crossed = [i for i in free if solved[i] < low[i]]
        if not crossed:
            return [held[i] if i in held else solved[i] for i in range(size)]
        worst = max(crossed, key=lambda i: (low[i] - solved[i]) / spread[i])
        held[worst] = low[worst]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small symmetric positive definite system by Gaussian elimination, scaled to a unit diagonal."""
    size = len(right)
    scale = [matrix[i][i] ** -0.5 for i in range(size)]
    rows = [[matrix[i][j] * scale[i] * scale[j] for j in range(size)] + [right[i] * scale[i]] for i in range(size)]
    for pivot in range(size):
        for lower in range(pivot + 1, size):
            factor = rows[lower][pivot] / rows[pivot][pivot]
            rows[lower] = [a - factor * b for a, b in zip(rows[lower], rows[pivot], strict=True)]
    solved = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solved[j] for j in range(i + 1, size))
        solved[i] = (rows[i][size] - known) / rows[i][i]
    return [value * scale[i] for i, value in enumerate(solved)]
