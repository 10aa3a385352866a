"""The decode step or prefill of any model, compiled for a machine that is not here, and what the compiler made of it.

    python -m scripts.compile_report --model llama-3-70b --target v5e:2x4 --dtype int8 --batch 8 --context 8192

Whether it fits, which collectives it makes, what it copies, and how many bytes it reads against the least it must. No
weights are read or made, and nothing runs: every figure is the vendor's compiler's (``pip install -e ".[aot]"``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args

import jax

from model.checkpoint.resolve import ACCEPTED
from model.presets import PRESETS
from model.quantize import KINDS, WeightFormat
from scripts._cli import (
    KV_DTYPES,
    UsageError,
    add_collective_option,
    add_kernels_option,
    check_writable,
    chosen_collectives,
    chosen_kernels,
    hand_out,
    positive,
    run_command,
    versions,
)
from scripts._compiled import CompileCase, Layers, compile_facts, memory_floor_s, tokens
from scripts._compiled_text import difference, render
from scripts.bench_decode import open_shape
from sharding.aot import EXAMPLES, target

WEIGHTS = ("bf16", *KINDS)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.compile_report",
        description="Compile a decode step or prefill for a machine that is not here, and report what came of it.",
    )
    parser.add_argument(
        "--model", default="llama-3-70b", help=f"a preset ({', '.join(PRESETS)}), or {ACCEPTED}. Default: llama-3-70b"
    )
    parser.add_argument("--target", required=True, help=f"the machine, such as {EXAMPLES}")
    parser.add_argument("--tp", type=positive, metavar="N", help="tensor-parallel devices (default: all of the target)")
    parser.add_argument("--dtype", choices=WEIGHTS, default="bf16", help="of the layers' matrices (default bf16)")
    parser.add_argument("--group", type=positive, metavar="N", help="values a scale, for int8 and int4 (int4: 32)")
    parser.add_argument("--kv-dtype", choices=list(KV_DTYPES), default="bf16", help="of the KV cache (default bf16)")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="rows decoded together (default 1)")
    parser.add_argument(
        "--context", type=positive, default=2048, metavar="N", help="positions that each row holds (default 2048)"
    )
    parser.add_argument(
        "--program", choices=("decode", "prefill"), default="decode", help="prefill: the last piece of a prompt"
    )
    parser.add_argument(
        "--layers",
        choices=get_args(Layers),
        default="sampled",
        help="unrolled compiles every layer, as what runs by default does, which may take minutes; sampled compiles two"
        " and three of them, and takes each further one to add as much (default); scan compiles one and loops over it",
    )
    add_collective_option(parser)
    add_kernels_option(parser)
    parser.add_argument("--json", metavar="PATH", help="write everything here too; - is standard output")
    parser.add_argument("--diff", metavar="OTHER", help="a JSON written before: print what changed since then")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return run_command(lambda: report(args))


def report(args: argparse.Namespace) -> None:
    check_writable(args.json)
    before = None if args.diff is None else _read(args.diff)
    with contextlib.suppress(RuntimeError):  # started before, which is as well
        jax.config.update("jax_platforms", "cpu")  # the compilers are asked by name: no device is looked for
    _, config = open_shape(args.model)
    if args.context > config.max_position_embeddings:
        raise UsageError(
            f"--context {args.context} is more than the {config.max_position_embeddings} positions that {args.model} "
            "was made for (max_position_embeddings)"
        )
    if args.dtype == "bf16" and args.group is not None:
        raise UsageError("--group has no effect on bf16; choose --dtype int8 or int4")
    machine = target(args.target)
    tp = args.tp or len(machine.devices)
    case = CompileCase(
        config,
        machine,
        tp,
        None if args.dtype == "bf16" else WeightFormat.of(args.dtype, args.group),
        args.kv_dtype,
        args.batch,
        args.context,
        args.program,
        args.layers,
        chosen_collectives(args.collective, tp),
        chosen_kernels(args.kernels),
    )
    facts = run_facts(args, case) | compile_facts(case)
    floor = memory_floor_s(machine, facts["ideal_bytes"])
    facts["ideal_s"] = floor
    lines = render(facts)
    if before is not None:
        lines += "\n\n" + difference(before, facts, args.diff)
    hand_out(lines, facts, args.json)


def run_facts(args: argparse.Namespace, case: CompileCase) -> dict[str, Any]:
    """The JSON fields that say what was compiled."""
    found = versions()
    for name in ("libtpu", "jax-cuda13-plugin"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return {
        "model": args.model,
        "target": case.target.name,
        "tp": case.tp,
        "dtype": "bf16" if case.format is None else case.format.name,
        "kv_dtype": case.kv_dtype,
        "batch": case.batch,
        "context": case.context,
        "program": case.program,
        "piece": tokens(case) if case.program == "prefill" else None,
        "layers": case.layers,
        "num_layers": case.config.num_layers,
        "collective": case.collectives.collective,
        "kernels": args.kernels,
        "versions": found,
    }


def _read(path: str) -> dict[str, Any]:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not JSON ({error}); name a file that --json wrote") from None
    if not isinstance(data, dict) or not {"fits", "target", "ideal_bytes"} <= data.keys():
        raise UsageError(f"{path} is no report of this command; name a file that --json wrote")
    return data


if __name__ == "__main__":
    sys.exit(main())
