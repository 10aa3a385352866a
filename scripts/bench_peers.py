"""Times decode steps beside llama.cpp and Hugging Face transformers: one run, the same cores, the same weights.

    python -m scripts.bench_peers --model demo --json peers.json

llama.cpp's own tool makes F32, BF16, Q8_0 and Q4_0 files of a GGUF file, in a folder that is removed at the end; both
sides load these. Rows are timed in rounds that alternate, with the read bandwidth of the machine in each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from decode.decoder import Decoder
from decode.step import MAX_STEPS
from kernels.cache_dir import cache_dir
from model.checkpoint.resolve import ResolvedModel, open_model
from model.checkpoint.stored import stored_quantization
from model.quantize import WIDE
from model.wording import number_of
from scripts._cli import (
    UsageError,
    check_writable,
    device_facts,
    hand_out,
    kernel_facts,
    positive,
    run_command,
    set_up,
    versions,
    words,
)
from scripts._llama_cpp import LlamaCppChain, check_llama_cpp, quantized_file
from scripts._report import step_bytes
from scripts._table import framed, ranged
from scripts._transformers import TransformersChain, check_transformers
from scripts.bench_decode import Chain, check_room, take_turns
from sharding.bandwidth import Bandwidth, ReadProbe
from sharding.layout import Layout
from sharding.mesh import make_mesh

PEERS = ("llama.cpp", "transformers")
WIDTHS = {"f32": "f32", "bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}
"""Ours, and what llama.cpp calls it."""

TORCH_DTYPES = {"f32": "float32", "bf16": "bfloat16"}
PAUSE = 0.1
"""Seconds before each sample: threads of the one before go on looking for work for a while, on our cores."""

HEAD = ["", "weights", "MB", "ms/step", "tokens/s", "GB/s", "share"]
COLUMNS = """\
MB        bytes of the weights that a step reads, in millions
ms/step   median over the samples, and their range; a sample is a chain of dependent greedy steps
GB/s      these bytes over ms/step; the cache, a few MB at this context, is left out for all alike
share     GB/s over the read bandwidth of this machine, measured in the same rounds"""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_peers",
        description="Time decode steps beside llama.cpp and transformers: the same cores and the same weights.",
    )
    parser.add_argument("--model", default="demo", help="'demo' or a .gguf file (default demo)")
    parser.add_argument(
        "--peers", type=words(PEERS), default=list(PEERS), metavar="LIST", help=f"of {', '.join(PEERS)} (default both)"
    )
    parser.add_argument(
        "--widths",
        type=words(list(WIDTHS)),
        default=list(WIDTHS),
        metavar="LIST",
        help=f"of {', '.join(WIDTHS)} (default all); transformers runs f32 and bf16",
    )
    parser.add_argument("--context", type=positive, default=128, metavar="N", help="positions filled (default 128)")
    parser.add_argument(
        "--steps", type=positive, default=MAX_STEPS, metavar="N", help=f"steps a sample, at most {MAX_STEPS} (default)"
    )
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="samples a row (default 7)")
    parser.add_argument("--json", metavar="PATH", help="write every sample; - is standard output")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return run_command(lambda: bench(args))


@dataclass
class Row:
    """One row of the table: who runs which weights, and how a sample of it is taken."""

    name: str
    weights: str
    weight_bytes: int
    first_token: int
    sample: Callable[[], float]
    close: Callable[[], None]


def bench(args: argparse.Namespace) -> None:
    check_writable(args.json)
    if args.steps > MAX_STEPS:
        raise UsageError(f"--steps is {args.steps}; one dispatch of ours runs at most {MAX_STEPS}")
    llama_cpp = check_llama_cpp()  # its tool makes the files that everyone loads
    set_up(1)
    model = open_model(args.model)
    if model.kind != "gguf":
        raise UsageError(f"llama.cpp reads GGUF files, which {args.model} is not; give --model a .gguf file")
    check_room(args, model.config)
    if "transformers" in args.peers:
        check_transformers(model)
    threads = device_facts()["cpu_cores"]
    layout = Layout(make_mesh(1, model.config.num_kv_heads))
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, args.context)).tolist()[0]

    cache_dir().mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="peers-") as folder:
        source = quantized_file(model.path, Path(folder) / "f32.gguf", "f32", threads)
        for width in args.widths:
            kind = WIDTHS[width]
            path = source if kind == "f32" else quantized_file(source, Path(folder) / f"{kind}.gguf", kind, threads)
            same = open_model(os.fspath(path))
            rows.append(_ours(same, width, layout, args))
            if "llama.cpp" in args.peers:
                chain = LlamaCppChain(path, prompt, args.steps, threads)
                name = f"llama.cpp ({llama_cpp})"
                rows.append(Row(name, kind, chain.weight_bytes, chain.first, chain.sample, chain.close))
            if "transformers" in args.peers and width in TORCH_DTYPES:
                rows.append(_transformers(same, width, args))
        probe = ReadProbe(layout.mesh)
        samples, limits = take_turns([_after_pause(row.sample) for row in rows], {1: probe}, args.rounds)
    for row in rows:
        row.close()

    limit = Bandwidth.of(limits[1], 1).per_device
    run = {
        "model": args.model,
        "context": args.context,
        "steps": args.steps,
        "rounds": args.rounds,
        "threads": threads,
        "limit_gb_per_s": limit / 1e9,
        "versions": {**versions(), "llama-cpp-python": llama_cpp},
        "kernels": kernel_facts("best"),
        "device": device_facts(),
    }
    results = [_result(row, taken, limit) for row, taken in zip(rows, samples, strict=True)]
    hand_out(table(run, results), {**run, "rows": results}, args.json)


def _ours(model: ResolvedModel, width: str, layout: Layout, args: argparse.Namespace) -> Row:
    """The file as it is: its blocks of 8 and 4 bits are not unpacked."""
    assert model.source is not None
    stored = WIDE if width in TORCH_DTYPES else stored_quantization(model.source, model.config)
    dtype = TORCH_DTYPES.get(width, "float32")  # beside quantised matrices, whose products take float32 as it is
    params = model.load_params(layout, dtype, progress=False, quantization=stored)
    decoder = Decoder(model.config, params, layout, dtype, quantization=stored)
    jax.block_until_ready(decoder.params)
    chain = Chain(decoder, 1, args.context, args.steps)
    weights = step_bytes(decoder, 1, args.context).weights
    return Row("shardstream", width, weights, int(chain.rows.token[0]), chain.sample, lambda: None)


def _transformers(model: ResolvedModel, width: str, args: argparse.Namespace) -> Row:
    chain = TransformersChain(model, 1, args.context, args.steps, TORCH_DTYPES[width])
    first = int(chain.first.reshape(-1)[0])
    return Row(chain.name, width, chain.weight_bytes, first, chain.sample, lambda: None)


def _after_pause(sample: Callable[[], float]) -> Callable[[], float]:
    def paused() -> float:
        time.sleep(PAUSE)
        return sample()

    return paused


def _result(row: Row, samples: Sequence[float], limit: float) -> dict[str, Any]:
    tpot_s = statistics.median(samples)
    return {
        "name": row.name,
        "weights": row.weights,
        "weight_bytes": row.weight_bytes,
        "first_token": row.first_token,
        "tpot_ms": tpot_s * 1e3,
        "samples_ms": [sample * 1e3 for sample in samples],
        "tokens_per_s": 1 / tpot_s,
        "achieved_gb_per_s": row.weight_bytes / tpot_s / 1e9,
        "limit_fraction": row.weight_bytes / tpot_s / limit,
    }


def table(run: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """The results for people: what was run, a row for each, and what the columns mean."""
    device = run["device"]
    title = (
        f"{run['model']}, batch 1, context {run['context']}, {number_of(run['rounds'], 'sample')} of "
        f"{number_of(run['steps'], 'greedy step')};\n"
        f"{device['kind']}, {run['threads']} threads each, {run['kernels']} kernels, jax {run['versions']['jax']}; "
        f"reads {run['limit_gb_per_s']:.1f} GB/s"
    )
    cells = [HEAD]
    for row in results:
        cells.append(
            [
                row["name"],
                row["weights"],
                f"{row['weight_bytes'] / 1e6:.0f}",
                ranged(row["tpot_ms"], row["samples_ms"], 2),
                f"{row['tokens_per_s']:.1f}",
                f"{row['achieved_gb_per_s']:.1f}",
                f"{row['limit_fraction']:.0%}",
            ]
        )
    return "\n".join([title, "", *framed(cells), "", COLUMNS])


if __name__ == "__main__":
    sys.exit(main())
