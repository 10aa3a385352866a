"""How a decode step scales with devices, and where the time goes: measured, split, predicted, judged.

    python -m scripts.bench_scaling --model demo --tp 1,2 --threads-per-device 1 --json scaling.json --plot scaling.png

At each device count: the step; the same compiled step with local no-ops in place of its collectives; those collectives
alone, as many and as large, in a dependent chain; and the read bandwidth of each device. All take turns, so that a
machine whose speed drifts slows them alike.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from decode.decoder import Decoder
from decode.step import MAX_STEPS
from model.checkpoint.resolve import ACCEPTED, ResolvedModel
from model.config import LlamaConfig
from model.presets import PRESETS
from model.random_init import random_params
from roofline.case import Case
from roofline.collectives import Measured
from roofline.cpu import matmul
from roofline.step_collectives import Call, collectives_s, step_collectives
from scripts import _one_core as one_core
from scripts import plots
from scripts._cli import (
    DTYPES,
    UsageError,
    add_collective_option,
    add_device_options,
    check_writable,
    chosen_collectives,
    default_dtype,
    device_facts,
    hand_out,
    integers,
    positive,
    run_command,
    set_up,
    versions,
)
from scripts._processes import add_process_options
from scripts._progress import counted
from scripts._report import step_bytes, step_facts
from scripts._scaling import Samples, chip_flops, deepened, predict, priced_as, render, report_rows, verdict
from scripts.bench_collectives import constants as fitted
from scripts.bench_collectives import measure, result, skew_share
from scripts.bench_decode import Chain, check_room, open_shape, take_turns
from sharding.bandwidth import Bandwidth, ReadProbe
from sharding.collective_chain import CollectiveChain, Step
from sharding.collectives import Collectives
from sharding.layout import Layout
from sharding.mesh import KV_SEQ, TENSOR, make_mesh, owns_a_device
from sharding.self_check import check_mesh
from sharding.skew import BUFFERS, ROUNDS, SkewProbe

MOST_CPU_PER_DEVICE = 1.3
"""CPU seconds a second of one device that count as one thread: the host's own work comes on top."""

CONSTANT_SPAN = 4
"""Constants are measured from the smallest of a step's messages to this many times the largest."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_scaling",
        description="Time decode steps at several device counts, and split, predict and judge them.",
    )
    parser.add_argument(
        "--model",
        default="demo",
        help=f"{ACCEPTED}; or a preset, run with random weights: {', '.join(PRESETS)}. Default: demo",
    )
    parser.add_argument(
        "--layers",
        type=positive,
        metavar="N",
        help="run only so many of the model's layers, with random weights made in place on each device",
    )
    parser.add_argument(
        "--tp", type=integers, default=[1, 2], metavar="LIST", help="device counts, such as 1,2,4,8 (default 1,2)"
    )
    add_device_options(parser)
    one_core.add_option(parser)
    add_collective_option(parser)
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: bf16, on CPU f32")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="rows decoded together (default 1)")
    parser.add_argument(
        "--context", type=positive, default=128, metavar="N", help="positions filled before a step (default 128)"
    )
    parser.add_argument(
        "--steps", type=positive, default=MAX_STEPS, metavar="N", help=f"steps a sample, at most {MAX_STEPS} (default)"
    )
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="samples a count (default 7)")
    parser.add_argument(
        "--one-at-a-time",
        action="store_true",
        help="load, time and free each count in turn, for models that do not fit beside each other",
    )
    parser.add_argument(
        "--constants",
        metavar="PATH",
        help="latency and bandwidth of collectives, from bench_collectives --json (default: measured in this run)",
    )
    add_process_options(parser)
    parser.add_argument("--json", metavar="PATH", help="write every sample; - is standard output")
    parser.add_argument("--plot", metavar="PATH", help="draw measured, ideal and predicted steps to a PNG")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    status = one_core.start_again(args, "scripts.bench_scaling", argv)
    return run_command(lambda: bench(args), processes=args) if status is None else status


@dataclass
class Count:
    """One device count: what is timed, and what is known of it."""

    layout: Layout
    decoder: Decoder
    samples: Samples
    cores: Set[int] | None
    step: Chain
    skew: SkewProbe | None = None
    removed: Chain | None = None
    alone: CollectiveChain | None = None


def bench(args: argparse.Namespace) -> None:
    for path in (args.json, args.plot):
        check_writable(path)
    if args.plot:
        plots.new_figure(1, 1)  # says now what is missing
    if args.steps > MAX_STEPS:
        raise UsageError(f"--steps is {args.steps}; one dispatch runs at most {MAX_STEPS}")
    collectives = chosen_collectives(args.collective, max(args.tp))
    given = Measured.load(args.constants) if args.constants else None
    cache = set_up(args.cpu_devices, spare=max(args.tp))
    device = device_facts()
    on_cpu = device["platform"] == "cpu"
    one_core.check(args, device)
    model, whole = open_shape(args.model)
    model, config = _sliced(args, model, whole)
    check_room(args, config)
    dtype = args.dtype or default_dtype()
    layouts = {tp: Layout(make_mesh(tp, config.num_kv_heads)) for tp in sorted(args.tp)}
    cases = {
        tp: Case(
            config,
            dtype,
            dtype,
            tp=tp,
            batch=args.batch,
            context=args.context + args.steps // 2,
            collective=priced_as(collectives.collective),
        )
        for tp in layouts
    }
    if given is not None:
        for case in cases.values():
            collectives_s(step_collectives(case), given)  # refuses a file that lacks one, before anything is timed
    mine = {tp: layout for tp, layout in layouts.items() if owns_a_device(layout.mesh)}
    for layout in mine.values():
        check_mesh(layout)

    timed = [cases[tp] for tp in mine]
    if 1 in mine and len(cases) > 1:
        timed.append(replace(cases[1], config=deepened(config)))
    found: dict[Case, tuple[Samples, dict[str, Any]]] = {}
    for turn in [[case] for case in timed] if args.one_at_a_time else [timed]:
        weights = {case: model if case.config is config else None for case in turn}
        found |= _measure(args, weights, mine, collectives)
    measured = {case.tp: found[case][0] for case in timed if case.config is config}
    facts = {case.tp: found[case][1] for case in timed if case.config is config}
    deep = next((found[case][0] for case in timed if case.config is not config), None)
    constants = given or _measure_constants(cases, mine, measured, bool(args.threads_per_device))
    if jax.process_index() != 0:
        return

    cores = device["cpu_cores"] if on_cpu else None
    flops = _flops(on_cpu, device, dtype, args.threads_per_device)
    predicted, efficiency = predict(measured, constants, flops, deep=deep)
    rows = [{**facts[row["tp"]], **row} for row in report_rows(measured, predicted, cores)]
    run = {
        "model": args.model,
        "weights": "random" if model is None else "checkpoint",
        "num_layers": config.num_layers,
        "model_layers": whole.num_layers,
        "sliced": config.num_layers < whole.num_layers,
        "dtype": DTYPES[dtype],
        "batch": args.batch,
        "context": args.context,
        "steps": args.steps,
        "rounds": args.rounds,
        "collective": collectives.collective,
        "threads_per_device": args.threads_per_device,
        "threads_are_limited": all(
            row["cpu_seconds_per_s"] <= MOST_CPU_PER_DEVICE * row["devices_here"] for row in rows
        ),
        "constants": args.constants or "this run",
        "real_time": bool(args.threads_per_device) and one_core.may_be_real_time(),
        "collectives": constants.to_json(),
        "skew": constants.skew_to_json(),
        "efficiency": None if efficiency is None else asdict(efficiency),
        "deep": None if deep is None else _deep_facts(deep),
        "one_at_a_time": args.one_at_a_time,
        "compile_cache": cache.describe(),
        "versions": versions(),
        "device": device,
        "verdict": verdict(measured, cores).text,
    }
    data = {**run, "rows": rows}
    hand_out(render(run, rows), data, args.json, image=(args.plot, lambda: plots.png(plots.draw_scaling(data))))


def _sliced(
    args: argparse.Namespace, model: ResolvedModel | None, config: LlamaConfig
) -> tuple[ResolvedModel | None, LlamaConfig]:
    """The model as asked for: whole, or so many layers of its shape without its weights."""
    if args.layers is None:
        return model, config
    if args.layers > config.num_layers:
        raise UsageError(f"--layers is {args.layers}; {args.model} has {config.num_layers}")
    return None, replace(config, num_layers=args.layers)


def _deep_facts(deep: Samples) -> dict[str, Any]:
    """The ``deepened`` model at tp = 1, as JSON."""
    return {
        "num_layers": deep.case.config.num_layers,
        "step_bytes": deep.bytes,
        "measured_ms": deep.measured_s * 1e3,
        "samples_ms": [sample * 1e3 for sample in deep.steps],
    }


def _measure(
    args: argparse.Namespace,
    models: Mapping[Case, ResolvedModel | None],
    layouts: Mapping[int, Layout],
    collectives: Collectives,
) -> dict[Case, tuple[Samples, dict[str, Any]]]:
    """Cases timed in turns: the samples of each, and what else is known of it. Everything is freed on return."""
    counts = [
        _build(args, model, case, layouts[case.tp], collectives)
        for case, model in counted(models.items(), "loading and compiling")
    ]
    for count in counts:
        if count.layout.tp > 1 or count is counts[0]:  # the model and its deep twin read alike
            count.skew = SkewProbe(count.layout.mesh)
            count.samples.read_bytes = count.skew.bytes_per_read
    _time(counts, args.rounds)
    found = {}
    for count in counts:
        samples = count.samples
        limit = Bandwidth.of([*samples.reads, samples.limit], samples.case.tp)
        moved = step_bytes(count.decoder, args.batch, samples.case.context)
        facts = step_facts(count.decoder, moved, samples.measured_s, limit, count.step.program.as_text())
        found[samples.case] = samples, {**facts, "devices_here": len(count.layout.mesh.local_devices)}
    return found


def _build(
    args: argparse.Namespace, model: ResolvedModel | None, case: Case, layout: Layout, collectives: Collectives
) -> Count:
    dtype = DTYPES[case.weight_format.name]
    params = random_params(case.config, layout, dtype) if model is None else model.load_params(layout, dtype)
    decoder = Decoder(case.config, params, layout, dtype, collectives=collectives)
    moved = step_bytes(decoder, args.batch, case.context)
    samples = Samples(case, moved.weights, moved.cache)
    step = Chain(decoder, args.batch, args.context, args.steps)
    cores = one_core.own_cores(len(layout.mesh.local_devices)) if args.threads_per_device else None
    if layout.tp == 1:
        return Count(layout, decoder, samples, cores, step)
    bare = Decoder(case.config, params, layout, dtype, collectives=replace(collectives, removed=True))
    removed = Chain(bare, args.batch, args.context, args.steps)
    alone = CollectiveChain(layout.mesh, [_chained(call, layout) for call in step_collectives(case)])
    return Count(layout, decoder, samples, cores, step, removed=removed, alone=alone)


def _chained(call: Call, layout: Layout) -> Step:
    """A collective of the step as part of the chain that has nothing else."""
    axes = TENSOR if call.devices == layout.tp else KV_SEQ
    return Step(call.op, int(call.nbytes), axes, call.count)


def _time(counts: Sequence[Count], rounds: int) -> None:
    """Fill in the samples of every count, in turns."""
    clocks = [_Clock(count.step.sample, count.cores) for count in counts]
    samplers: list[Callable[[], float]] = []
    taken: list[list[float]] = []
    for count, clock in zip(counts, clocks, strict=True):
        samplers.append(clock.sample)
        taken.append(count.samples.steps)
        if count.removed is not None and count.alone is not None:
            alone = functools.partial(count.alone.sample, count.removed.steps)
            samplers += [_Clock(sample, count.cores).sample for sample in (count.removed.sample, alone)]
            taken += [count.samples.removed, count.samples.alone]
        if count.skew is None:
            continue
        for meet in (True, False) if count.layout.tp > 1 else (False,):
            probe = functools.partial(count.skew.seconds, meet, _rounds(count))
            samplers.append(_Clock(probe, count.cores).sample)
            taken.append(count.samples.met if meet else count.samples.bare)
    probes = {count.layout.tp: _Probe(count.layout.mesh, count.cores) for count in counts}
    found, reads = take_turns(samplers, probes, rounds)
    for target, samples in zip(taken, found, strict=True):
        target += samples
    for count, clock in zip(counts, clocks, strict=True):
        count.samples.reads = reads[count.layout.tp]
        count.samples.cpu_per_s = clock.cpu_s / clock.wall_s


def _rounds(count: Count) -> int:
    """Rounds of equal reads that take about as long as a sample of the step."""
    assert count.skew is not None
    return max(ROUNDS, round(count.step.steps * count.samples.bytes / (BUFFERS * count.skew.bytes_per_read)))


class _Clock:
    """A sampler held to some cores, which also notes the CPU time of this process, all threads together."""

    def __init__(self, sample: Callable[[], float], cores: Set[int] | None):
        self._sample, self._cores, self.cpu_s, self.wall_s = sample, cores, 0.0, 0.0

    def sample(self) -> float:
        with one_core.held_to(self._cores):
            cpu, wall = time.process_time(), time.perf_counter()
            found = self._sample()
            self.cpu_s += time.process_time() - cpu
            self.wall_s += time.perf_counter() - wall
        return found


class _Probe(ReadProbe):
    """A read probe held to some cores."""

    def __init__(self, mesh: Mesh, cores: Set[int] | None):
        super().__init__(mesh)
        self._cores = cores

    def sample(self) -> float:
        with one_core.held_to(self._cores):
            return super().sample()


def _measure_constants(
    cases: Mapping[int, Case], layouts: Mapping[int, Layout], measured: Mapping[int, Samples], one_core_each: bool
) -> Measured:
    """A line for each collective that a step makes, at each count, as ``scripts.bench_collectives`` fits it.

    At the sizes that the step sends: a line through all sizes may be far off at the small ones. The skew of each count
    was sampled in turns with its steps.
    """
    rows: list[dict[str, Any]] = []
    for tp, layout in layouts.items():
        sizes: dict[tuple[str, int], list[int]] = {}
        for call in step_collectives(cases[tp]):
            sizes.setdefault((call.op, call.devices), []).append(int(call.nbytes))
        for (op, devices), sent in sorted(sizes.items()):
            mesh = layout.mesh if devices == tp else make_mesh(devices, devices)
            if owns_a_device(mesh) and not any((row["op"], row["devices"]) == (op, devices) for row in rows):
                span = {*sent, CONSTANT_SPAN * max(sent)}
                with one_core.held_to(one_core.own_cores(len(layout.mesh.local_devices)) if one_core_each else None):
                    rows.append(result(op, devices, measure(mesh, op, sorted(span), rounds=5)))
    calls = fitted(rows)
    skew = {
        tp: skew_share(one.met, one.bare, min(line.time(4.0) for line in calls.lines if line.devices == tp))
        for tp, one in measured.items()
        if one.met and one.bare
    }
    return replace(calls, skew=skew)


def _flops(on_cpu: bool, device: Mapping[str, Any], dtype: str, threads: int | None) -> Callable[[int], float]:
    """Operations/s of one of n devices. CPU devices share what NumPy reaches on all cores."""
    if not on_cpu:
        rate = chip_flops(device["kind"], dtype)
        return lambda devices: rate
    total, cores = matmul(), device["cpu_cores"]
    return lambda devices: total / max(devices, cores if threads else 1)


if __name__ == "__main__":
    sys.exit(main())
