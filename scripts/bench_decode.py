"""Times decode steps against the read bandwidth of the machine, in one run: dtypes, tensor-parallel degrees, a peer.

    python -m scripts.bench_decode --model demo --dtype f32,bf16 --tp 1,2 --json decode.json

Every row is timed in rounds that alternate with the others and with the bandwidth measurement, so that a machine whose
speed drifts slows them alike. That needs all of them in memory together; ``--one-at-a-time`` loads, times and frees
each in turn. A sample is one dispatch of a dependent chain of steps.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from decode.decoder import Decoder
from decode.sampling import SamplingParams
from decode.step import MAX_STEPS, Rows
from model.checkpoint.resolve import ACCEPTED, ResolvedModel, open_model
from model.config import LlamaConfig
from model.presets import PRESETS, preset
from model.random_init import random_params
from model.wording import number_of
from scripts import bench_speculation
from scripts._cli import (
    DTYPES,
    UsageError,
    add_collective_option,
    add_device_options,
    add_kernels_option,
    add_kv_dtype_option,
    add_quant_rule_option,
    check_writable,
    chosen_collectives,
    chosen_kernels,
    chosen_kv_dtype,
    device_facts,
    hand_out,
    integers,
    kernel_facts,
    positive,
    run_command,
    set_up,
    versions,
    weight_dtypes,
    weights_as,
    words,
)
from scripts._progress import counted
from scripts._report import step_bytes, step_facts
from scripts._speculation import add_speculation_options, check_speculation_options
from scripts._table import framed, ranged
from scripts._transformers import TransformersChain, check_transformers
from sharding.bandwidth import Bandwidth, ReadProbe
from sharding.collective_chain import Meeting
from sharding.collectives import Collectives
from sharding.layout import Layout
from sharding.mesh import make_mesh, place_on_mesh
from sharding.self_check import check_mesh

READS = 3
"""Timed reads of the bandwidth probe in each round."""

HEAD = ["", "dtype", "tp", "ms/step", "tokens/s", "weights", "cache", "rest", "GB/s", "limit", "share"]
COLUMNS = """\
ms/step   median over the samples, and their range; a sample is one dispatch of a chain of dependent steps
tokens/s  batch over ms/step
weights, cache, rest
          the step in ms: weights and cache are their bytes over the limit; rest is what remains of the measured step
          (collectives, dispatch, small operations, and reading below the limit)
GB/s      bytes a step must move on one device (weights once, filled cache once) over ms/step
limit     read bandwidth of one device in GB/s, while all tp devices read, measured in the same rounds
share     GB/s over limit"""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_decode", description="Time decode steps against the machine's read bandwidth."
    )
    parser.add_argument(
        "--model",
        default="demo",
        help=f"{ACCEPTED}; or a preset, run with random weights: {', '.join(PRESETS)}. Default: demo",
    )
    parser.add_argument(
        "--dtype",
        type=words(weight_dtypes()),
        default=["f32"],
        metavar="LIST",
        help="such as f32,bf16,int8,int4-g128; beside quantised matrices the rest is bf16 (default f32)",
    )
    parser.add_argument(
        "--tp", type=integers, default=[1], metavar="LIST", help="tensor-parallel degrees, such as 1,2,4 (default 1)"
    )
    add_device_options(parser)
    add_collective_option(parser)
    add_kernels_option(parser)
    add_kv_dtype_option(parser)
    add_quant_rule_option(parser)
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="rows decoded together (default 1)")
    parser.add_argument(
        "--context", type=positive, default=128, metavar="N", help="positions filled before a step (default 128)"
    )
    parser.add_argument(
        "--steps", type=positive, default=MAX_STEPS, metavar="N", help=f"steps a sample, at most {MAX_STEPS} (default)"
    )
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="samples a row (default 7)")
    parser.add_argument(
        "--layers", choices=("unrolled", "scan"), default="unrolled", help="scan compiles faster (default unrolled)"
    )
    parser.add_argument(
        "--one-at-a-time",
        action="store_true",
        help="load, time and free each row in turn, for models that do not fit beside each other",
    )
    parser.add_argument(
        "--beside",
        choices=("transformers",),
        help="time Hugging Face transformers on the same weights in f32 (pip install -e '.[parity]')",
    )
    add_speculation_options(parser, repeat=True)
    parser.add_argument("--json", metavar="PATH", help="write every sample; - is standard output")
    args = parser.parse_args(argv)
    # What was asked for beside the defaults, which speculation may have no use for.
    args.given = [action.option_strings[0] for action in parser._actions if _is_given(action, args)]
    return args


def _is_given(action: argparse.Action, args: argparse.Namespace) -> bool:
    return bool(action.option_strings) and getattr(args, action.dest, action.default) != action.default


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return run_command(lambda: bench(args))


class Chain:
    """Our decoder at one dtype and degree: a filled cache, and the same chain of steps from it each time."""

    def __init__(self, decoder: Decoder, batch: int, context: int, steps: int):
        self.decoder, self.steps = decoder, steps
        sampling, max_len = SamplingParams(), context + steps + 1
        rng = np.random.default_rng(0)
        prompts = rng.integers(0, decoder.config.vocab_size, (batch, context)).tolist()
        self.cache, rows, _ = decoder.start(prompts, [max_len + 1] * batch, max_len, sampling)
        # Host copies: the rows are donated with every dispatch, and each sample starts from the same place.
        self.rows = jax.tree.map(np.asarray, rows)
        self.shardings = jax.tree.map(lambda x: x.sharding, rows)
        self.stop_ids, self.values = decoder.step_args((), sampling)
        self.program = decoder.decode_program(batch, max_len, sampling.form)
        self.meeting = Meeting(decoder.layout.mesh)

    def sample(self) -> float:
        """Seconds a step of one dispatch."""
        rows: Rows = jax.tree.map(place_on_mesh, self.rows, self.shardings)
        jax.block_until_ready((rows, self.cache))
        self.meeting.wait()
        began = time.perf_counter()
        arguments = (self.decoder.params, self.cache, rows, self.stop_ids, np.int32(self.steps), self.values)
        self.cache, _, emitted = self.program(*arguments)
        tokens = np.asarray(emitted.tokens)[: self.steps]
        elapsed = time.perf_counter() - began
        if (tokens < 0).any():
            raise RuntimeError("a timed step did not run")
        return elapsed / self.steps


@dataclass
class Contestant:
    """One row of the table: what is timed, what is known of it, and its samples in seconds a step."""

    chain: Chain | TransformersChain
    name: str
    dtype: str
    tp: int
    load_s: float
    samples: list[float] = field(default_factory=list)


SPECULATING = ("--model", "--dtype", "--tp", "--cpu-devices", "--kernels", "--rounds", "--json")
SPECULATING_TOO = ("--speculate", "--k", "--draft-dtype")


def bench_modes(args: argparse.Namespace) -> None:
    """With --speculate: plain decoding and each proposer on four kinds of prompt, by ``scripts.bench_speculation``."""
    if unused := [name for name in args.given if name not in (*SPECULATING, *SPECULATING_TOO)]:
        raise UsageError(f"{', '.join(unused)} has no effect with --speculate, which decodes four kinds of prompt")
    if len(args.dtype) > 1 or len(args.tp) > 1:
        raise UsageError("--speculate takes one --dtype and one --tp")
    options = ["--model", args.model, "--dtype", args.dtype[0], "--tp", str(args.tp[0]), "--rounds", str(args.rounds)]
    options += [part for name in args.speculate for part in ("--speculate", name)] + ["--kernels", args.kernels]
    for name, value in (("k", args.k), ("draft-dtype", args.draft_dtype), ("json", args.json)):
        options += [] if value is None else [f"--{name}", str(value)]
    options += [] if args.cpu_devices is None else ["--cpu-devices", str(args.cpu_devices)]
    bench_speculation.bench(bench_speculation.parse_args(options))


def bench(args: argparse.Namespace) -> None:
    if args.speculate:
        return bench_modes(args)
    check_speculation_options(args.speculate, args.k, args.draft_dtype)
    check_writable(args.json)
    if args.steps > MAX_STEPS:
        raise UsageError(f"--steps is {args.steps}; one dispatch runs at most {MAX_STEPS}")
    collectives = chosen_collectives(args.collective, max(args.tp))
    cache = set_up(args.cpu_devices, spare=max(args.tp))
    model, config = open_shape(args.model)
    check_room(args, config)
    peers: list[Callable[[], Contestant]] = []
    if args.beside:
        if model is None:
            raise UsageError("--beside needs a checkpoint that both can load, not a preset's random weights")
        check_transformers(model)
        peers.append(functools.partial(_peer, args, model))
    layouts = {tp: Layout(make_mesh(tp, config.num_kv_heads)) for tp in args.tp}
    for layout in layouts.values():
        check_mesh(layout)

    build = functools.partial(_ours, args, model, config, collectives)
    ours = [functools.partial(build, dtype, layouts[tp]) for dtype in args.dtype for tp in args.tp]
    builders: list[Callable[[], Contestant]] = [*ours, *peers]
    turns = [[build] for build in builders] if args.one_at_a_time else [builders]
    results = [row for turn in turns for row in _measure(turn, layouts, args)]

    run = {
        "model": args.model,
        "weights": "random" if model is None else "checkpoint",
        "batch": args.batch,
        "context": args.context,
        "steps": args.steps,
        "rounds": args.rounds,
        "layers": args.layers,
        "kv_dtype": args.kv_dtype,
        "one_at_a_time": args.one_at_a_time,
        "compile_cache": cache.describe(),
        "versions": versions(),
        "kernels": kernel_facts(args.kernels),
        "device": device_facts(),
    }
    hand_out(table(run, results), {**run, "rows": results}, args.json)


def _ours(
    args: argparse.Namespace,
    model: ResolvedModel | None,
    config: LlamaConfig,
    collectives: Collectives,
    dtype: str,
    layout: Layout,
) -> Contestant:
    began = time.perf_counter()
    wide, quantization = weights_as(dtype, args.quant_rule)
    if model is None:
        params = random_params(config, layout, wide, layers=args.layers, quantization=quantization)
    else:
        params = model.load_params(layout, wide, args.layers, quantization=quantization)
    decoder = Decoder(
        config,
        params,
        layout,
        wide,
        layers=args.layers,
        collectives=collectives,
        kernels=chosen_kernels(args.kernels),
        cache_dtype=chosen_kv_dtype(args.kv_dtype),
        quantization=quantization,
    )
    jax.block_until_ready(decoder.params)
    load_s = time.perf_counter() - began
    chain = Chain(decoder, args.batch, args.context, args.steps)
    return Contestant(chain, "shardstream", DTYPES.get(dtype, dtype), layout.tp, load_s)


def _peer(args: argparse.Namespace, model: ResolvedModel) -> Contestant:
    began = time.perf_counter()
    chain = TransformersChain(model, args.batch, args.context, args.steps)
    return Contestant(chain, chain.name, DTYPES["f32"], 1, time.perf_counter() - began)


def _measure(
    builders: Sequence[Callable[[], Contestant]], layouts: Mapping[int, Layout], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rows timed in turns, with the bandwidth of their devices; everything is freed on return."""
    contestants = [build() for build in counted(builders, "loading and compiling")]
    probes = {tp: ReadProbe(layouts[tp].mesh) for tp in {one.tp for one in contestants}}
    samples, limits = take_turns([one.chain.sample for one in contestants], probes, args.rounds)
    for one, taken in zip(contestants, samples, strict=True):
        one.samples = taken
    return [_result(one, Bandwidth.of(limits[one.tp], one.tp), args) for one in contestants]


def take_turns(
    samplers: Sequence[Callable[[], float]], probes: Mapping[int, ReadProbe], rounds: int
) -> tuple[list[list[float]], dict[int, list[float]]]:
    """Samples of each, in rounds that begin with reads of every probe; a first round warms up. Closes the probes.

    Returns:
        ``rounds`` samples for each sampler, and the bytes/s that each probe read, by its key.
    """
    samples: list[list[float]] = [[] for _ in samplers]
    limits: dict[int, list[float]] = {tp: [] for tp in probes}
    for turn in counted(range(rounds + 1), "rounds"):
        for tp, probe in probes.items():
            read = [probe.sample() for _ in range(READS)]
            limits[tp] += read if turn else []
        for taken, sampler in zip(samples, samplers, strict=True):
            seconds = sampler()
            taken += [seconds] if turn else []
    for probe in probes.values():
        probe.close()
    return samples, limits


def _result(one: Contestant, limit: Bandwidth, args: argparse.Namespace) -> dict[str, Any]:
    """One row as JSON. A peer's has no bytes: what it must move is its own affair."""
    tpot_s = statistics.median(one.samples)
    timed = {
        "name": one.name,
        "dtype": one.dtype,
        "tp": one.tp,
        "tpot_ms": tpot_s * 1e3,
        "samples_ms": [sample * 1e3 for sample in one.samples],
        "tokens_per_s": args.batch / tpot_s,
        "load_s": one.load_s,
    }
    if not isinstance(one.chain, Chain):
        return timed
    decoder = one.chain.decoder
    moved = step_bytes(decoder, args.batch, args.context + args.steps // 2)
    terms = {"weights": moved.weights / limit.per_device * 1e3, "cache": moved.cache / limit.per_device * 1e3}
    return {
        **timed,
        **step_facts(decoder, moved, tpot_s, limit, one.chain.program.as_text()),
        "terms_ms": {**terms, "rest": tpot_s * 1e3 - sum(terms.values())},
        "compile_s": decoder.compile_s,
    }


def check_room(args: argparse.Namespace, config: LlamaConfig) -> None:
    """Refuse more positions than the model was made for."""
    if args.context + args.steps >= config.max_position_embeddings:
        raise UsageError(
            f"--context {args.context} and --steps {args.steps} need {args.context + args.steps + 1} positions; this "
            f"model was made for {config.max_position_embeddings} (max_position_embeddings)"
        )


def open_shape(name: str) -> tuple[ResolvedModel | None, LlamaConfig]:
    """A checkpoint, or no checkpoint and a preset's configuration."""
    if name.lower() in PRESETS and not Path(name).exists():
        return None, preset(name.lower())
    model = open_model(name)
    return model, model.config


def table(run: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    """The results for people: what was run, a row for each, what the columns mean, and whether more devices paid."""
    device = run["device"]
    title = (
        f"{run['model']} ({run['weights']} weights), batch {run['batch']}, context {run['context']}, "
        f"{run['layers']} layers,{_cache_note(run)} {number_of(run['rounds'], 'sample')} of "
        f"{number_of(run['steps'], 'step')};\n"
        f"{device['kind']}, {device['cpu_cores']} CPU cores, {run['kernels']} kernels, jax {run['versions']['jax']}"
    )
    if device["platform"] == "cpu" and any(row["tp"] > 1 for row in results):
        title += (
            "\nthe devices are fake: they share these cores and their memory, so tp > 1 shows that it works, not a gain"
        )
    cells = [HEAD, *map(_cells, results)]
    return "\n".join([title, "", *framed(cells), "", COLUMNS, *_verdicts(results)])


def _cache_note(run: Mapping[str, Any]) -> str:
    return f" {run['kv_dtype']} cache," if run.get("kv_dtype") else ""


def _cells(row: Mapping[str, Any]) -> list[str]:
    cells = [
        row["name"],
        row["dtype"],
        str(row["tp"]),
        ranged(row["tpot_ms"], row["samples_ms"], 2),
        f"{row['tokens_per_s']:.1f}",
    ]
    if "terms_ms" not in row:
        return cells + ["-"] * 6
    cells += [f"{row['terms_ms'][name]:.2f}" for name in ("weights", "cache", "rest")]
    return [*cells, f"{row['achieved_gb_per_s']:.1f}", f"{row['limit_gb_per_s']:.1f}", f"{row['limit_fraction']:.0%}"]


def _verdicts(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each dtype, whether each higher degree paid against the lowest, and the term that decided."""
    lines = []
    ours = [row for row in results if "terms_ms" in row]
    for dtype in dict.fromkeys(row["dtype"] for row in ours):
        base, *more = sorted((row for row in ours if row["dtype"] == dtype), key=_degree)
        for row in more:
            gain = base["tpot_ms"] / row["tpot_ms"]
            ideal = row["tp"] / base["tp"]
            verdict = f"{dtype}: tp={row['tp']} is {gain:.2f}x as fast as tp={base['tp']}, of {ideal:g}x"
            if gain < 1.05:
                grown = {term: row["terms_ms"][term] * ideal - base["terms_ms"][term] for term in row["terms_ms"]}
                worst = max(grown, key=lambda term: grown[term])
                shares = f"{base['terms_ms'][worst]:.2f} ms there, {row['terms_ms'][worst]:.2f} ms here"
                verdict += f": it does not pay, for {worst} does not shrink ({shares})"
            lines.append(verdict)
    return ["", *lines] if lines else []


def _degree(row: Mapping[str, Any]) -> int:
    return row["tp"]


if __name__ == "__main__":
    sys.exit(main())
