"""Times collectives over message sizes and device counts, and fits each with a latency and a bandwidth.

    python -m scripts.bench_collectives --cpu-devices 2 --json collectives.json
    python -m scripts.memory_wall --model llama-3.1-8b --chip cpu --tp 1,2 --collectives collectives.json

A sample is one dispatch of a dependent chain of calls. The fit is the line ``alpha + bytes / bandwidth`` that the
latency model reads: ``scripts.memory_wall --collectives``, ``scripts.bench_scaling --constants``.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from model.wording import number_of
from roofline.collectives import OPS, AlphaBeta, Measured
from scripts import _one_core as one_core
from scripts._cli import (
    UsageError,
    add_device_options,
    check_writable,
    device_facts,
    hand_out,
    integers,
    positive,
    run_command,
    set_up,
    versions,
    words,
)
from scripts._processes import add_process_options
from scripts._progress import counted
from sharding.collective_chain import CollectiveChain, Step
from sharding.mesh import TENSOR, make_mesh, owns_a_device
from sharding.multihost import process_count
from sharding.skew import SkewProbe

KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple(KIB * 4**power for power in range(9))
"""1 KiB to 64 MiB."""

ROUNDS = 7
CHAINED_BYTES = 4 * MIB
MOST_CHAINED, FEWEST_CHAINED = 512, 2
"""Calls in one dispatch: as many as move ``CHAINED_BYTES``, within these. Not by the clock: processes must agree."""

CPU_WORK = 4096
"""float32 numbers that a CPU device goes over between two calls: about 4 us."""

POOR_FIT = 2.0
"""A line this many times off at some size is remarked on."""

SHORTEST = 1e-7
"""Seconds; what a call is taken for where the chain without it was no faster."""

UNITS = {"": 1, "B": 1, "KIB": KIB, "MIB": MIB, "K": KIB, "M": MIB}
COLUMNS = """\
bytes     of the array that is summed (all_reduce), else of the whole array over the group
us        median time of one call in a chain where each needs the one before (on CPU with a little work in between,
          which is subtracted: devices that only wait share a core, and look faster than they are)
line      what the fitted line says: alpha + bytes / bandwidth, least squares on relative errors
skew      how much longer equal reads take where devices meet after each, beyond the call itself: the wait for the
          slowest, as a share of the work"""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_collectives",
        description="Time collectives over sizes and device counts, and fit latency and bandwidth.",
    )
    parser.add_argument(
        "--devices",
        type=integers,
        metavar="LIST",
        help="device counts, such as 2,4,8 (default: powers of two, and all)",
    )
    parser.add_argument("--ops", type=words(OPS), default=list(OPS), metavar="LIST", help=f"default {','.join(OPS)}")
    parser.add_argument(
        "--sizes",
        type=sizes,
        default=list(SIZES),
        metavar="LIST",
        help="message sizes, such as 1KiB,64KiB,4MiB (default 1KiB to 64MiB, each four times the one before)",
    )
    parser.add_argument(
        "--rounds", type=positive, default=ROUNDS, metavar="N", help=f"samples a size (default {ROUNDS})"
    )
    add_device_options(parser)
    one_core.add_option(parser)
    add_process_options(parser)
    parser.add_argument("--json", metavar="PATH", help="write samples and fits; - is standard output")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    status = one_core.start_again(args, "scripts.bench_collectives", argv)
    return run_command(lambda: bench(args), processes=args) if status is None else status


def sizes(text: str) -> list[int]:
    """argparse type: message sizes in bytes, KiB or MiB, separated by commas; ascending, each once."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", part.strip())
        if not match or match[2].upper() not in UNITS or int(match[1]) == 0:
            raise argparse.ArgumentTypeError(f"{part!r} is not a size such as 4096, 64KiB or 4MiB")
        found.append(int(match[1]) * UNITS[match[2].upper()])
    return sorted(set(found))


def bench(args: argparse.Namespace) -> None:
    check_writable(args.json)
    if len(args.sizes) < 2:
        raise UsageError("--sizes needs two or more: a line has a latency and a bandwidth")
    set_up(args.cpu_devices, spare=max(args.devices or [2]))
    device = device_facts()
    one_core.check(args, device)
    counts = args.devices or default_counts(jax.device_count())
    if min(counts) < 2:
        raise UsageError("--devices 1 has no collectives: give 2 or more, on CPU with --cpu-devices")
    meshes = {count: make_mesh(count, count) for count in counts}
    rows, skew = [], {}
    for count, mesh in meshes.items():
        if not owns_a_device(mesh):
            continue
        with one_core.held_to(one_core.own_cores(len(mesh.local_devices)) if args.threads_per_device else None):
            timed = counted(args.ops, f"collectives over {number_of(count, 'device')}")
            rows += [result(op, count, measure(mesh, op, args.sizes, args.rounds)) for op in timed]
            sum_of_one = result("all_reduce", count, measure(mesh, "all_reduce", (4, 1024), args.rounds))
            skew[count] = measure_skew(mesh, sum_of_one["alpha_us"] / 1e6, args.rounds)
    found = constants(rows, skew)
    run = {
        "rounds": args.rounds,
        "threads_per_device": args.threads_per_device,
        "processes": process_count(),
        "versions": versions(),
        "device": device,
    }
    data = {**run, "collectives": found.to_json(), "skew": found.skew_to_json(), "measured": rows}
    hand_out(table(run, rows, skew), data, args.json)


def default_counts(devices: int) -> list[int]:
    """2, 4, 8... and all of them."""
    powers = [2**power for power in range(1, devices.bit_length()) if 2**power <= devices]
    return sorted({*powers, devices})


def measure(mesh: Mesh, op: str, nbytes: Iterable[int], rounds: int) -> dict[int, list[float]]:
    """Seconds of one call of ``op`` over all devices of ``mesh``: ``rounds`` samples for each size in bytes.

    On CPU each sample is a chain with work between the calls, less the same chain without the calls, in turns.
    """
    work = CPU_WORK if mesh.devices.flat[0].platform == "cpu" else 0
    found = {}
    for size in nbytes:
        step = [Step(op, size, TENSOR)]
        chains = [CollectiveChain(mesh, step, work=work)]
        if work:
            chains.append(CollectiveChain(mesh, step, work=work, bare=True))
        calls = min(MOST_CHAINED, max(FEWEST_CHAINED, CHAINED_BYTES // size))
        for chain in chains:
            chain.sample(calls)  # the first warms up
        samples = []
        for _ in range(rounds):
            whole, *bare = [chain.sample(calls) for chain in chains]
            samples.append(max(whole - sum(bare), SHORTEST))
        found[size] = samples
        for chain in chains:
            chain.close()
    return found


def result(op: str, devices: int, samples: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """One op over one device count as JSON: medians, every sample, and the line through the medians."""
    medians = {size: statistics.median(taken) for size, taken in samples.items()}
    line = AlphaBeta.from_samples(op, devices, medians.items())
    return {
        "op": op,
        "devices": devices,
        "alpha_us": line.alpha_s * 1e6,
        "bytes_per_s": None if line.bytes_per_s == float("inf") else line.bytes_per_s,
        "sizes": [
            {
                "bytes": size,
                "us": medians[size] * 1e6,
                "line_us": line.time(size) * 1e6,
                "samples_us": [one * 1e6 for one in taken],
            }
            for size, taken in samples.items()
        ],
    }


def skew_share(met: Sequence[float], bare: Sequence[float], call_s: float) -> float:
    """The share of equal reads that devices wait for the slowest, from seconds of ``SkewProbe`` with meetings and
    without, in turns. call_s: seconds that one of the calls takes by itself, which is not waiting."""
    alone = statistics.median(bare)
    return max(0.0, statistics.median(met) - call_s - alone) / alone


def measure_skew(mesh: Mesh, call_s: float, rounds: int) -> float:
    """``skew_share`` over all devices of ``mesh``."""
    probe = SkewProbe(mesh)
    pairs = [(probe.seconds(True), probe.seconds(False)) for _ in range(rounds)]
    probe.close()
    return skew_share([met for met, _ in pairs], [bare for _, bare in pairs], call_s)


def constants(rows: Iterable[Mapping[str, Any]], skew: Mapping[int, float] | None = None) -> Measured:
    """The fitted lines, as the latency model takes them."""
    lines = []
    for row in rows:
        width = float("inf") if row["bytes_per_s"] is None else row["bytes_per_s"]
        lines.append(AlphaBeta(row["op"], row["devices"], row["alpha_us"] / 1e6, width))
    return Measured(tuple(lines), skew or {})


def table(run: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], skew: Mapping[int, float]) -> str:
    """For people: each line's two numbers, and under them the sizes they were fitted to."""
    device = run["device"]
    title = f"collectives on {device['kind']}, {device['cpu_cores']} CPU cores, jax {run['versions']['jax']}"
    if run["processes"] > 1:
        title += f", {run['processes']} processes"
    if device["platform"] == "cpu":
        title += "; one core a device" if run["threads_per_device"] else "; CPU devices share cores and memory"
    lines = [f"{title}; {number_of(run['rounds'], 'sample')} a size", ""]
    for row in rows:
        width = "no limit seen" if row["bytes_per_s"] is None else f"{row['bytes_per_s'] / 1e9:.2f} GB/s"
        lines.append(f"{row['op']} over {row['devices']} devices: alpha {row['alpha_us']:.1f} us, {width}")
        lines.append("  " + "".join(f"{one:>10}" for one in ("bytes", "us", "line")))
        lines += [f"  {size_text(one['bytes']):>10}{one['us']:>10.1f}{one['line_us']:>10.1f}" for one in row["sizes"]]
        times, size = max(
            (max(one["us"] / one["line_us"], one["line_us"] / one["us"]), one["bytes"]) for one in row["sizes"]
        )
        if times > POOR_FIT:
            lines.append(f"  note: no line fits these times: {times:.1f}x off at {size_text(size)}")
        lines.append("")
    lines += [f"skew over {count} devices: {share:.1%} of their work" for count, share in skew.items()]
    return "\n".join([*lines, "", COLUMNS])


def size_text(nbytes: int) -> str:
    """``65536`` -> ``64 KiB``."""
    for unit, size in (("MiB", MIB), ("KiB", KIB)):
        if nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


if __name__ == "__main__":
    sys.exit(main())
