"""Our server beside llama.cpp's under load: one run, the same cores, the same file, the same prompts.

    python -m scripts.bench_serving_peers --model demo --json serving-peers.json --plot serving-peers.png

Both servers are children of this process; at each number of concurrent requests they are asked in turns, and the one
that is not asked sleeps. Each request gets exactly as many tokens as it asks for, or the run fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from kernels.cache_dir import cache_dir
from model.checkpoint.resolve import ResolvedModel, open_model
from model.wording import number_of
from scripts import plots
from scripts._cli import (
    UsageError,
    check_writable,
    device_facts,
    hand_out,
    integers,
    not_negative,
    positive,
    run_command,
    set_up,
    versions,
    words,
)
from scripts._llama_cpp import check_llama_cpp, model_facts, quantized_file
from scripts._load import Lengths, shots
from scripts._servers import Server, check_peer_server, our_server, peer_server
from scripts._table import framed
from scripts.bench_peers import WIDTHS
from sharding.bandwidth import Bandwidth, measure_read_bandwidth
from sharding.mesh import make_mesh

try:
    from scripts._client import Client
    from scripts._serving_report import summarise
    from scripts.bench_serving import closed_loop
except ImportError as error:  # aiohttp is an extra
    raise SystemExit(f'error: {error}; install this project with its extra: pip install -e ".[peers]"') from None

FILE = "file"
OPTIONS = {FILE: ["--quant", "stored"], "f32": ["--dtype", "f32"], "bf16": ["--dtype", "bf16"]}
"""How ``scripts.serve`` is told to keep what the file holds; of int8 and int4 as of the file itself."""

REST_S = 0.5
"""Before each load: threads of the other server go on looking for work for a while."""

COLUMNS = """\
conc.       requests open at once; the next one is sent when one ends
tok/s       output tokens a second, from the first request to the last end; median over the rounds
ratio       ours over llama.cpp's
TTFT, TPOT  medians over requests, in ms: to the first text; mean time of the later tokens
rows        of a step of ours without prompt tokens, as it was compiled
measured    recent mean time of these steps in the server, in ms
predicted   what the roofline's step-time model, fitted to all steps of this server, says of them
weights     one read of the weights at the bandwidth of this machine, measured ahead of the run: the memory's limit"""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python -m scripts.bench_serving_peers",
        description="Measure our server beside llama.cpp's under closed-loop load, on the same file and cores.",
    )
    p.add_argument("--model", default="demo", help="'demo' or a .gguf file (default demo)")
    p.add_argument(
        "--widths",
        type=words([FILE, *WIDTHS]),
        default=[FILE, "f32"],
        metavar="LIST",
        help=f"weights, of {', '.join([FILE, *WIDTHS])}; file: a quantised file as it is (default file,f32)",
    )
    p.add_argument("--concurrency", type=integers, default=[1, 2, 4, 8, 16], metavar="N,...", help="default 1,2,4,8,16")
    p.add_argument(
        "--requests",
        type=positive,
        default=16,
        metavar="N",
        help="of each load, or twice the concurrency where that is more (default 16)",
    )
    p.add_argument("--prompt-tokens", type=positive, default=32, metavar="N", help="about so many (default 32)")
    p.add_argument("--output-tokens", type=positive, default=32, metavar="N", help="exactly so many (default 32)")
    p.add_argument("--rounds", type=positive, default=1, metavar="N", help="loads of each kind (default 1)")
    p.add_argument("--seed", type=not_negative, default=0, help="another seed, other prompts (default 0)")
    p.add_argument("--json", metavar="PATH", help="write all numbers; - is standard output")
    p.add_argument("--plot", metavar="PATH", help="draw throughput by concurrency and the step by rows to a PNG")
    p.add_argument("--quiet", action="store_true", help="say nothing while running")
    return p.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return run_command(lambda: bench(args), quiet=args.quiet)


def bench(args: argparse.Namespace) -> None:
    """The command."""
    check_writable(args.json)
    check_writable(args.plot)
    llama_cpp = check_llama_cpp()
    check_peer_server()
    if args.plot:
        plots.new_figure(1, 1)  # without matplotlib, say so now
    set_up(1)
    model = open_model(args.model)
    if model.kind != "gguf":
        raise UsageError(f"llama.cpp reads GGUF files, which {args.model} is not; give --model a .gguf file")
    threads = device_facts()["cpu_cores"]
    limit = measure_read_bandwidth(make_mesh(1, model.config.num_kv_heads))
    rows: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="peers-") as folder:
        for width in args.widths:
            path = _file_of(model, width, Path(folder), threads)
            own_rows, own_steps = _beside(args, width, path, threads, limit)
            rows += own_rows
            steps += own_steps
    report = {
        "model": args.model,
        "requests": args.requests,
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
        "rounds": args.rounds,
        "threads": threads,
        "limit_gb_per_s": limit.per_device / 1e9,
        "versions": {**versions(), "llama-cpp-python": llama_cpp, "aiohttp": version("aiohttp")},
        "device": device_facts(),
        "rows": rows,
        "steps": steps,
    }
    hand_out(table(report), report, args.json, image=(args.plot, lambda: plots.png(plots.draw_serving_peers(report))))


def _file_of(model: ResolvedModel, width: str, folder: Path, threads: int) -> Path:
    """The model with weights of this width; llama.cpp's own tool makes what the file is not."""
    if width == FILE:
        return Path(model.path)
    wide = folder / "f32.gguf"
    if not wide.exists():
        quantized_file(Path(model.path), wide, "f32", threads)
    kind = WIDTHS[width]
    return wide if kind == "f32" else quantized_file(wide, folder / f"{kind}.gguf", kind, threads)


def _beside(
    args: argparse.Namespace, width: str, path: Path, threads: int, limit: Bandwidth
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The loads of one file on both servers, and the steps of ours."""
    weight_bytes, end_tokens = model_facts(path)
    context = 2 * args.prompt_tokens + args.output_tokens
    ours_options = ["--cpu-devices", "1", "--max-batch", str(max(args.concurrency)), "--max-len", str(context)]
    ours_options += OPTIONS.get(width, OPTIONS[FILE])
    _say(args, f"{width}: starting both servers")
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(our_server(path, ours_options)),
            stack.enter_context(peer_server(path, threads=threads, context=context, end_tokens=end_tokens)),
        ]
        same = _check_same(servers, args)
        found: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for turn in range(args.rounds):
            for place, concurrency in enumerate(args.concurrency):
                _say(args, f"{width}: round {turn + 1}, {concurrency} at once")
                for server in servers if (turn + place) % 2 == 0 else servers[::-1]:
                    time.sleep(REST_S)
                    point = asyncio.run(_load(server, concurrency, turn, args))
                    found.setdefault((server.name, concurrency), []).append(point)
        shapes = step_shapes(servers[0].text("/metrics"))
    ours, peer = (server.name for server in servers)
    rows = []
    for concurrency in args.concurrency:
        row: dict[str, Any] = {"width": width, "concurrency": concurrency, "weight_bytes": weight_bytes, **same}
        for key, name in (("ours", ours), ("peer", peer)):
            row[key] = found[name, concurrency]
            row[f"{key}_tokens_per_s"] = _median(row[key], lambda point: point["output_tokens_per_s"])
        rows.append({**row, "ratio": row["ours_tokens_per_s"] / row["peer_tokens_per_s"]})
    floor_ms = weight_bytes / limit.per_device * 1e3
    steps = [
        {"width": width, "rows": count, "measured_ms": 1e3 * taken, "predicted_ms": 1e3 * said, "weights_ms": floor_ms}
        for (count, prompt), (taken, said) in sorted(shapes.items())
        if prompt == 0
    ]
    return rows, steps


def _check_same(servers: Sequence[Server], args: argparse.Namespace) -> dict[str, Any]:
    """Both read a prompt as the same number of tokens and make as many as they are asked for. Raises OSError where not.

    Returns:
        same_text: whether they also answer alike; weights in fewer bits are multiplied differently.
    """
    (shot,) = shots(_rng(args, 0, 0), [0.0], *_lengths(args), 0)
    answers = [server.complete(shot.text, args.output_tokens) for server in servers]
    usages = [(answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) for answer in answers]
    if usages[0] != usages[1] or usages[0][1] != args.output_tokens:
        raise OSError(
            f"the servers differ: of one prompt {usages[0][0]} and {usages[1][0]} tokens were read, and {usages[0][1]} "
            f"and {usages[1][1]} made, where {args.output_tokens} were asked for"
        )
    return {"same_text": answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]}


async def _load(server: Server, concurrency: int, turn: int, args: argparse.Namespace) -> dict[str, Any]:
    """One load on one server, after one request that is not counted. Raises OSError where a request went wrong."""
    count = max(args.requests, 2 * concurrency)
    own = shots(_rng(args, concurrency, turn + 1), [0.0] * (count + 1), *_lengths(args), 0)
    async with Client(server.url, chat=False, api_key=None, timeout_s=3600.0, extra=server.extra) as client:
        model = await client.first_model()
        await client.ask(model, own[0].text, own[0].new_tokens)
        outcomes = await closed_loop(client, model, own[1:], concurrency)
    for one in outcomes:
        if one.status != "completed" or one.counted_by == "parts" or one.tokens != args.output_tokens:
            raise OSError(f"{server.name}: a request made {one.tokens} of {args.output_tokens} tokens; {one.error}")
    return summarise(outcomes, ttft_slo_s=None, tpot_slo_s=None, load={"concurrency": concurrency})


def _lengths(args: argparse.Namespace) -> tuple[Lengths, Lengths]:
    return Lengths("fixed", (args.prompt_tokens,)), Lengths("fixed", (args.output_tokens,))


def _rng(args: argparse.Namespace, concurrency: int, turn: int) -> np.random.Generator:
    return np.random.default_rng([args.seed, concurrency, turn])


_SHAPE = re.compile(r'^shardstream_step_shape_seconds\{kind="(\w+)",prompt_tokens="(\d+)",rows="(\d+)"\} (\S+)$', re.M)


def step_shapes(metrics: str) -> dict[tuple[int, int], tuple[float, float]]:
    """(rows, prompt tokens) -> measured and predicted seconds, from what ``/metrics`` says."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for kind, prompt, rows, seconds in _SHAPE.findall(metrics):
        found.setdefault((int(rows), int(prompt)), {})[kind] = float(seconds)
    return {shape: (kinds["measured"], kinds["predicted"]) for shape, kinds in found.items()}


def _median(points: Sequence[dict[str, Any]], of: Any) -> float:
    return float(statistics.median(of(point) for point in points))


def table(report: dict[str, Any]) -> str:
    """The results for people: the loads, the steps, and what the columns mean."""
    device = report["device"]
    title = (
        f"{report['model']}, about {number_of(report['prompt_tokens'], 'prompt token')} and "
        f"{number_of(report['output_tokens'], 'output token')} "
        f"a request, {number_of(report['rounds'], 'round')};\n{device['kind']}, "
        f"{report['threads']} threads each, jax {report['versions']['jax']}, llama.cpp "
        f"{report['versions']['llama-cpp-python']}; reads {report['limit_gb_per_s']:.1f} GB/s"
    )
    loads = [["weights", "conc.", "tok/s", "llama.cpp", "ratio", "TTFT", "llama.cpp", "TPOT", "llama.cpp"]]
    for row in report["rows"]:
        times = [
            f"{_median(row[side], lambda point, key=key: point[key]['median']):.1f}"
            for key in ("ttft_ms", "tpot_ms")
            for side in ("ours", "peer")
        ]
        rates = [f"{row['ours_tokens_per_s']:.1f}", f"{row['peer_tokens_per_s']:.1f}", f"{row['ratio']:.2f}x"]
        loads.append([row["width"], str(row["concurrency"]), *rates, *times])
    steps = [["weights", "rows", "measured", "predicted", "weights' read", "tok/s"]]
    for step in report["steps"]:
        times = [f"{step[key]:.2f}" for key in ("measured_ms", "predicted_ms", "weights_ms")]
        steps.append([step["width"], str(step["rows"]), *times, f"{1e3 * step['rows'] / step['measured_ms']:.1f}"])
    same = {row["width"]: row["same_text"] for row in report["rows"]}
    told = [f"{width}: the first answer is {'the same' if alike else 'another'} text" for width, alike in same.items()]
    return "\n".join([title, "", *framed(loads), "", *framed(steps), "", COLUMNS, "", *told])


def _say(args: argparse.Namespace, line: str) -> None:
    if not args.quiet:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
