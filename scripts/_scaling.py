"""What a scaling run says of its samples: the split of each step, what it gained, what was predicted, and a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from model.config import LlamaConfig
from model.wording import number_of
from roofline.case import Case
from roofline.chips import CHIPS, Chip
from roofline.collectives import Interconnect, Measured, SumForm
from roofline.efficiency import Efficiency
from roofline.fit import Measurement, fit
from roofline.latency import MeasuredTerms, Verdict, judge, tpot
from scripts._table import framed, ranged
from sharding.collectives import KERNEL_FORMS, CollectiveForm

GOOD_ERROR = 0.15
"""A prediction within this share of the measurement is called good."""


IDLE_SHARE = 0.75
"""CPU devices that use less of a core each are told of."""


@dataclass
class Samples:
    """What was measured at one device count.

    case: the model and its load at this count. weight_bytes, kv_bytes: what one device reads in a step.
    steps: seconds of one step, a sample each. removed: the same without its collectives (none on one device).
    alone: seconds of the collectives of one step in a chain of their own (none on one device).
    reads: bytes/s that one device read while all read, in the same rounds.
    cpu_per_s: CPU seconds that the steps took in a second, on a CPU.
    met, bare: seconds of one of equal reads, with devices meeting after each (none on one device) and without, in
        samples as long as those of the steps.
    read_bytes: what one device read in each of these.
    """

    case: Case
    weight_bytes: float
    kv_bytes: float
    steps: list[float] = field(default_factory=list)
    removed: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)
    cpu_per_s: float | None = None
    met: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    read_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    @property
    def limit(self) -> float:
        """Bytes/s that one device was seen to reach: the best read, or a step that read faster (out of a cache)."""
        return max(*self.reads, self.bytes / min(self.steps + self.removed))

    @property
    def typical(self) -> float | None:
        """Bytes/s of one device in a typical moment, where equal reads were timed."""
        return self.read_bytes / statistics.median(self.bare) if self.bare else None

    @property
    def measured_s(self) -> float:
        return statistics.median(self.steps)

    @property
    def removed_s(self) -> float:
        return statistics.median(self.removed) if self.removed else self.measured_s

    @property
    def terms(self) -> MeasuredTerms:
        return MeasuredTerms.of(self.weight_bytes, self.kv_bytes, self.limit, self.measured_s, self.removed_s)


def report_rows(
    measured: Mapping[int, Samples], predicted: Mapping[int, float], cores: int | None
) -> list[dict[str, Any]]:
    """One JSON row for each device count. Gains are over the smallest count.

    predicted: seconds of a step, for the counts that could be predicted.
    cores: of a CPU whose devices share them; None where each device is one of its own.
    """
    rows = []
    first = min(measured)
    for tp, one in sorted(measured.items()):
        speedup = measured[first].measured_s / one.measured_s
        error = predicted[tp] / one.measured_s - 1 if tp in predicted else None
        rows.append(
            {
                "tp": tp,
                "measured_ms": one.measured_s * 1e3,
                "samples_ms": [sample * 1e3 for sample in one.steps],
                "ideal_ms": one.bytes / one.limit * 1e3,
                "predicted_ms": predicted[tp] * 1e3 if tp in predicted else None,
                "predicted_error": error,
                "terms_ms": one.terms.as_ms(),
                "removed_ms": one.removed_s * 1e3,
                "removed_samples_ms": [sample * 1e3 for sample in one.removed],
                "collectives_ms_removed": (one.measured_s - one.removed_s) * 1e3,
                "collectives_ms_alone": statistics.median(one.alone) * 1e3 if one.alone else 0.0,
                "speedup": speedup,
                "efficiency": speedup * first / tp,
                "limit_gb_per_s": one.limit / 1e9,
                "limit_samples_gb_per_s": [read / 1e9 for read in one.reads],
                "limit_is_the_step": one.limit > max(one.reads),
                "step_bytes_per_device": one.bytes,
                "cpu_seconds_per_s": one.cpu_per_s,
                "functional_only": cores is not None and tp > cores,
            }
        )
    return rows


def verdict(measured: Mapping[int, Samples], cores: int | None) -> Verdict:
    """Where more devices stopped paying, and for what; counts beyond the cores of a CPU say nothing of that."""
    real = {tp: one.terms for tp, one in measured.items() if cores is None or tp <= cores}
    found = judge(real or {tp: one.terms for tp, one in measured.items()})
    beyond = sorted(set(measured) - set(real))
    if beyond:
        counts = ", ".join(map(str, beyond))
        text = f"{found.text}; tp = {counts}: functional only, more devices than the {cores} cores"
        found = replace(found, text=text)
    return found


def deepened(config: LlamaConfig) -> LlamaConfig:
    """Twice as many layers of about half the width: as many bytes a step, and twice the overhead of layers.

    What a device does at tp = 2 in a layer, done by one device alone. Beside the model itself it tells how much of a
    layer's time is not for its bytes, which one row cannot.
    """
    kv_heads = -(-config.num_kv_heads // 2)
    return replace(
        config,
        num_layers=2 * config.num_layers,
        num_kv_heads=kv_heads,
        num_heads=kv_heads * config.group_size,
        intermediate_size=-(-config.intermediate_size // 2),
    )


def predict(
    measured: Mapping[int, Samples],
    constants: Measured,
    flops: Callable[[int], float],
    prior: Efficiency | None = None,
    deep: Samples | None = None,
) -> tuple[dict[int, float], Efficiency | None]:
    """Seconds of a step at each count, from rows at tp = 1, each count's read limit and the collective constants.

    The efficiency (share of the read limit, overhead a layer) is fitted to tp = 1, whose own prediction is therefore
    that fit, and the others wait for their slowest device by the skew of their count. Without that row nothing is
    predicted. flops: operations/s of one of n devices. deep: the ``deepened`` model at tp = 1, which tells the share of
    the limit from the overhead.
    """
    if 1 not in measured:
        return {}, None

    base = measured[1]
    chips = {tp: read_chip(_bandwidth(base, one), flops(tp)) for tp, one in measured.items()}
    single = [Measurement(base.case, base.measured_s * 1e3)]
    if deep is not None:
        single.append(Measurement(deep.case, deep.measured_s * 1e3))
        # The prior is for what was not measured: it is not to pull at what two rows say between them.
        prior = replace(prior or chips[1].efficiency, layer_overhead_s=_layer_overhead_s(base, deep))
    efficiency = fit(single, chips[1], prior, constants).efficiency(base.case)
    at = {tp: replace(efficiency, skew=constants.skew.get(tp, 0.0)) for tp in measured}
    return {tp: tpot(one.case, chips[tp], at[tp], constants).total for tp, one in measured.items()}, efficiency


def _layer_overhead_s(base: Samples, deep: Samples) -> float:
    """Seconds that more layers cost beyond the bytes they bring, a layer; 0 where noise says less."""
    extra = deep.measured_s - base.measured_s * deep.bytes / base.bytes
    layers = deep.case.config.num_layers - base.case.config.num_layers * deep.bytes / base.bytes
    return max(0.0, extra / layers)


def _bandwidth(base: Samples, one: Samples) -> float:
    """Bytes/s of one device at a count: the limit on one device, by how much slower a device typically reads while so
    many do. A limit is a best moment, and at each count another share of the moments are as good. Company makes no
    device faster: where it seems so the machine's speed drifted."""
    if base.typical is None or one.typical is None:
        return one.limit
    return base.limit * min(1.0, one.typical / base.typical)


def read_chip(bytes_per_s: float, flops_per_s: float) -> Chip:
    """A device as it was measured. Its wires are never asked: collectives have measured constants."""
    wires = Interconnect("as measured", "switch", 1.0, 0.0, 0.0)
    rates = {"bf16": flops_per_s, "f32": flops_per_s}
    return Chip("as measured", rates, bytes_per_s, float("inf"), wires, measured=True)


def priced_as(form: CollectiveForm) -> SumForm:
    """How the latency model prices a form of sum: one made by a kernel sends each term to all, as one-shot does."""
    return "one_shot" if form in KERNEL_FORMS else form  # type: ignore[return-value]  # the others are the model's own


def chip_flops(device_kind: str, dtype: str) -> float:
    """Operations/s of an accelerator as JAX names it, from its datasheet; infinite where it is not in the list."""
    kind = device_kind.lower().replace(" lite", "e").replace("tpu ", "tpu-").replace("ee", "e")
    for name, chip in CHIPS.items():
        if name in kind:
            rates = chip.flops_per_s
            return rates.get(dtype, rates["bf16"])
    return float("inf")


COLUMNS = """\
all times in ms a step
ms/step      median over the samples and their range; a sample is one dispatch of a chain of dependent steps
ideal        bytes that one device reads in a step over the read limit: no step beats it
weights, KV  the two parts of ideal
collectives  ms/step less the same compiled step with local no-ops of equal shape in their place
alone        the step's collectives, as many and as large, in a dependent chain of their own
rest         what remains: reading below the limit, arithmetic, dispatch
limit GB/s   read limit of one device while all of them read, measured in the same rounds
speed-up     ms/step at the smallest tp over ms/step here; efficiency: that over the ratio of devices
predicted    the latency model, fitted to tp = 1, with measured latency, bandwidth and skew of the collectives"""

HEAD = (
    "tp",
    "ms/step",
    "ideal",
    "weights",
    "KV",
    "collectives",
    "rest",
    "alone",
    "limit GB/s",
    "speed-up",
    "efficiency",
)


def render(run: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The run for people."""
    lines = framed([[*HEAD, "predicted"], *map(_cells, rows)])
    return "\n".join([_title(run), "", *lines, "", COLUMNS, "", *_notes(run, rows), run["verdict"]])


def _title(run: Mapping[str, Any]) -> str:
    device = run["device"]
    layers = number_of(run["model_layers"], "layer")
    if run["sliced"]:
        layers = f"{run['num_layers']} of {layers}"
    processes = f", {device['processes']} processes" if device["processes"] > 1 else ""
    return (
        f"{run['model']}: {layers}, {run['weights']} weights, {run['dtype']}, batch {run['batch']}, context "
        f"{run['context']}, all-reduce by {run['collective']};\n{device['kind']}, {device['cpu_cores']} CPU cores"
        f"{processes}, jax {run['versions']['jax']}; {number_of(run['rounds'], 'sample')} of "
        f"{number_of(run['steps'], 'step')}"
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    terms = row["terms_ms"]
    label = f"{row['tp']} (functional only)" if row["functional_only"] else str(row["tp"])
    predicted = "-"
    if row["predicted_ms"] is not None:
        predicted = f"{row['predicted_ms']:.2f} ({row['predicted_error']:+.0%})"
    return [
        label,
        ranged(row["measured_ms"], row["samples_ms"], 2),
        f"{row['ideal_ms']:.2f}",
        *(f"{terms[name]:.2f}" for name in ("weights", "kv", "collectives", "rest")),
        f"{row['collectives_ms_alone']:.2f}",
        f"{row['limit_gb_per_s']:.1f}",
        f"{row['speedup']:.2f}x",
        f"{row['efficiency']:.0%}",
        predicted,
    ]


def _notes(run: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    notes = []
    on_cpu, cores = run["device"]["platform"] == "cpu", run["device"]["cpu_cores"]
    if on_cpu and run["threads_per_device"] is None:
        notes.append(
            f"CPU devices share {cores} cores here, and one may use them all: a gain is not that of devices alone "
            f"(--threads-per-device 1 makes each device one core)"
        )
    if on_cpu:
        told = ", ".join(f"{row['cpu_seconds_per_s']:.2f} at tp = {row['tp']}" for row in rows)
        kind = "one core a device" if run["threads_per_device"] else "as many threads as a device likes"
        where = " of process 0" if run["device"]["processes"] > 1 else ""
        notes.append(f"CPU seconds a second{where} ({kind}): {told}")
        short = [
            str(row["tp"]) for row in rows if row["cpu_seconds_per_s"] < IDLE_SHARE * min(row["devices_here"], cores)
        ]
        if short:
            notes.append(
                f"at tp = {', '.join(short)} devices had or used less than {IDLE_SHARE:.0%} of a core each: something "
                f"else was running, or they waited for each other"
            )
        if run["threads_per_device"] and not run["real_time"]:
            notes.append(
                "devices' threads had no real-time priority (root, or CAP_SYS_NICE), so two may share a core for some "
                "milliseconds after a collective: collectives cost less than what is shown"
            )
        if run["threads_per_device"] and not run["threads_are_limited"]:
            notes.append("warning: devices used more than one core each, so no gain is real")
    if any(row["limit_is_the_step"] for row in rows):
        counts = ", ".join(str(row["tp"]) for row in rows if row["limit_is_the_step"])
        notes.append(
            f"at tp = {counts} a step read faster than the probe (part of it stayed in a cache): that is the limit"
        )
    errors = [
        abs(row["predicted_error"]) for row in rows if row["predicted_error"] is not None and not row["functional_only"]
    ]
    if errors:
        source = run["constants"]
        word = "within" if max(errors) <= GOOD_ERROR else "not within"
        notes.append(
            f"predicted with collectives from {source}: off by {max(errors):.0%} at most, {word} {GOOD_ERROR:.0%}"
        )
    else:
        notes.append("nothing was predicted: that needs tp = 1 among --tp")
    return notes
