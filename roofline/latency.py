"""How long a token takes, as a sum of named terms, and where adding devices stops paying.

    t(n) = W / (n B e) + s x kv / (n B e) + compute not hidden behind them + collectives(n) + overhead

`e` is the share of the datasheet's bandwidth that the kernels reach. The first two terms fall as 1 / n,
except for what is replicated; the collectives grow with n; the overheads do not fall. That is why twice
the devices is not half the latency, and why at some n it stops paying.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise

from roofline.case import Case
from roofline.chips import Chip
from roofline.collectives import CollectiveModel, Constant
from roofline.efficiency import Efficiency
from roofline.errors import RooflineError
from roofline.footprint import Work, decode_work, prefill_work
from roofline.step_collectives import collectives_s, step_collectives

# All of the bandwidth and the compute, and no overhead; `ideal_tpot_s` leaves the collectives out too.
IDEAL = Efficiency(bandwidth=1.0, compute=1.0, layer_overhead_s=0.0, step_overhead_s=0.0)


class TermSum:
    """Seconds of a step by cause: the fields of a dataclass."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.as_dict().values())

    def as_dict(self) -> dict[str, float]:
        """Seconds by name, in the order of the fields."""
        return {item.name: getattr(self, item.name) for item in fields(self)}  # type: ignore[arg-type]

    def as_ms(self) -> dict[str, float]:
        """Milliseconds by name."""
        return {name: seconds * 1e3 for name, seconds in self.as_dict().items()}


@dataclass(frozen=True)
class Terms(TermSum):
    """Seconds of a predicted step by cause; `total` is their sum.

    `weights`, `kv`: streaming the weights and the cache (and, in a prefill, the residual stream with
    the cache). `compute`: arithmetic that does not hide behind that streaming. `collectives`: waiting
    for other devices, for their messages and (`Efficiency.skew`) for the slowest of them. `layers`,
    `step`: overhead paid once a layer and once a step.
    """

    weights: float
    kv: float
    compute: float
    collectives: float
    layers: float
    step: float


@dataclass(frozen=True)
class MeasuredTerms(TermSum):
    """Seconds of a measured step by cause; `total` is their sum.

    `weights`, `kv`: their bytes at the read bandwidth measured beside the step. `collectives`: what the step
    loses when they are taken out. `rest`: what remains (reading below that bandwidth, arithmetic, dispatch).
    """

    weights: float
    kv: float
    collectives: float
    rest: float

    @classmethod
    def of(
        cls, weight_bytes: float, kv_bytes: float, bytes_per_s: float, measured_s: float, removed_s: float
    ) -> MeasuredTerms:
        """Split a step of `measured_s` that takes `removed_s` without its collectives.

        No term is negative and they sum to `measured_s` when `bytes_per_s` is at least what both steps reached.
        A step that is slower without its collectives than with them (noise) has none.
        """
        weights, kv = weight_bytes / bytes_per_s, kv_bytes / bytes_per_s
        collectives = max(0.0, measured_s - removed_s)
        return cls(weights, kv, collectives, measured_s - collectives - weights - kv)


def _compute_dtype(case: Case) -> str:
    # Weight-only quantisation multiplies in 16 bits: the scales are applied to bf16 products.
    return "f32" if case.weight_format.name == "f32" else "bf16"


def _terms(work: Work, case: Case, chip: Chip, efficiency: Efficiency, collectives: float) -> Terms:
    """Price `work`: `max(streaming, arithmetic)` for the matrices and for attention, one after the other."""
    bandwidth = chip.bandwidth(case.tp) * efficiency.bandwidth
    rate = chip.flops(_compute_dtype(case), case.tp) * efficiency.compute
    weights = work.weight_bytes * case.weight_scale / bandwidth
    kv = (work.kv_bytes + work.activation_bytes) / bandwidth
    compute = max(0.0, work.linear_flops * case.weight_scale / rate - weights)
    compute += max(0.0, work.attention_flops / rate - kv)
    layers = case.config.num_layers * efficiency.layer_overhead_s
    if case.tp > 1:
        collectives += efficiency.skew * (weights + kv + compute)
    return Terms(weights, kv, compute, collectives, layers, efficiency.step_overhead_s)


def _model(chip: Chip, efficiency: Efficiency, collectives: CollectiveModel | None) -> CollectiveModel:
    return chip.interconnect.scaled(efficiency.collective_scale) if collectives is None else collectives


def tpot(
    case: Case,
    chip: Chip,
    efficiency: Efficiency | None = None,
    collectives: CollectiveModel | None = None,
) -> Terms:
    """Time per output token: one decode step of `case` on `case.tp` of `chip`.

    `efficiency` None takes the chip's own default. `collectives` prices them (measured constants, say);
    None takes the chip's interconnect with `efficiency.collective_scale` on its latencies.
    """
    efficiency = chip.efficiency if efficiency is None else efficiency
    work = decode_work(
        case.config,
        case.context,
        batch=case.batch,
        dtype=case.dtype,
        kv_dtype=case.kv_dtype,
        tp=case.tp,
        replicated=case.replicated,
        keep=case.keep,
    )
    waiting = collectives_s(step_collectives(case), _model(chip, efficiency, collectives))
    return _terms(work, case, chip, efficiency, waiting)


def ttft(
    case: Case,
    chip: Chip,
    prompt_len: int,
    efficiency: Efficiency | None = None,
    collectives: CollectiveModel | None = None,
) -> Terms:
    """Time to first token: one prefill of `case.batch` prompts of `prompt_len` tokens. No queueing.

    Raises RooflineError for a prompt of no tokens.
    """
    if prompt_len < 1:
        raise RooflineError(f"prompt_len is {prompt_len}: it must be 1 or more")
    efficiency = chip.efficiency if efficiency is None else efficiency
    work = prefill_work(
        case.config,
        prompt_len,
        batch=case.batch,
        dtype=case.dtype,
        kv_dtype=case.kv_dtype,
        tp=case.tp,
        replicated=case.replicated,
        keep=case.keep,
    )
    waiting = collectives_s(step_collectives(case, prompt_len), _model(chip, efficiency, collectives))
    return _terms(work, case, chip, efficiency, waiting)


def ideal_tpot_s(case: Case, chip: Chip) -> float:
    """The bound no decode step beats: streamed bytes at the full bandwidth, or arithmetic at the full rate.

    Collectives and overheads are free.
    """
    return tpot(case, chip, IDEAL, Constant(0.0)).total


@dataclass(frozen=True)
class Step:
    """One device count of a scaling run. `gain` is the speed-up over the count before it, less one."""

    tp: int
    terms: TermSum
    gain: float | None


@dataclass(frozen=True)
class Verdict:
    """Where adding devices stops paying.

    `pays_until` is the last device count that gained at least the threshold over the one before it.
    `stopped_by` names the term to blame, None when every count tried paid. `text` says it in words.
    """

    steps: tuple[Step, ...]
    pays_until: int
    stopped_by: str | None
    text: str


def scaling(
    case: Case,
    chip: Chip,
    tps: Iterable[int] = (1, 2, 4, 8),
    efficiency: Efficiency | None = None,
    collectives: CollectiveModel | None = None,
    threshold: float = 0.10,
) -> Verdict:
    """TPOT at each device count, and the verdict of `judge` on them."""
    return judge({tp: tpot(case.at(tp=tp), chip, efficiency, collectives) for tp in sorted(set(tps))}, threshold)


def doubling(
    case: Case,
    chip: Chip,
    efficiency: Efficiency | None = None,
    collectives: CollectiveModel | None = None,
    threshold: float = 0.10,
    limit: int = 1024,
    start: int = 1,
) -> Verdict:
    """Double the devices from `start` until a doubling gains less than `threshold`, and say what stopped it.

    Goes no further than `limit` or the devices that the chip's interconnect joins.
    """
    most = min(limit, chip.interconnect.max_devices or limit)
    terms = {start: tpot(case.at(tp=start), chip, efficiency, collectives)}
    verdict, tp = judge(terms, threshold), start * 2
    while verdict.stopped_by is None and tp <= most:
        terms[tp] = tpot(case.at(tp=tp), chip, efficiency, collectives)
        verdict, tp = judge(terms, threshold), tp * 2
    return verdict


def judge(terms: Mapping[int, TermSum], threshold: float = 0.10) -> Verdict:
    """Find the first device count that gains less than `threshold` over the one before it.

    The gain is `t(before) / t(after) - 1`: 100 % for a perfect doubling. The term to blame is the one
    furthest above what perfect scaling would make of it, `term(after) - term(before) x before / after`.
    `terms` maps device counts to predicted or measured terms. Raises RooflineError when it is empty.
    """
    if not terms:
        raise RooflineError("no device counts to judge: give one or more")
    counts = sorted(terms)
    steps = [Step(counts[0], terms[counts[0]], None)]
    pays_until, stopped_by, text = counts[0], None, ""
    for before, after in pairwise(counts):
        old, new = terms[before], terms[after]
        gain = old.total / new.total - 1
        steps.append(Step(after, new, gain))
        if stopped_by is not None:
            continue
        if gain >= threshold:
            pays_until = after
            continue
        excess = {name: value - old.as_dict()[name] * before / after for name, value in new.as_dict().items()}
        stopped_by = max(excess, key=lambda name: excess[name])
        verb = f"gains {gain:.0%}" if gain >= 0 else f"loses {-gain:.0%}"
        share = new.as_dict()[stopped_by] / new.total
        text = f"tp = {after} {verb} over tp = {before}: {TERM_WORDS[stopped_by]} {share:.0%} of the step"
    if stopped_by is None:
        text = f"every count up to tp = {pays_until} pays"
        if len(steps) > 1:
            text += f": the last gains {steps[-1].gain:.0%} over tp = {steps[-2].tp}"
        else:
            text = f"only tp = {pays_until} was asked for: nothing to compare"
    return Verdict(tuple(steps), pays_until, stopped_by, text)


TERM_WORDS = {
    "weights": "reading weights is",
    "kv": "reading the cache is",
    "compute": "arithmetic is",
    "collectives": "collectives are",
    "layers": "overhead paid once a layer is",
    "step": "overhead paid once a step is",
    "rest": "everything else is",
}
