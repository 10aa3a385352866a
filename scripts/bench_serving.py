"""Measures a server that speaks OpenAI's API, ours or another: latency, throughput and goodput under load.

    python -m scripts.bench_serving --url http://127.0.0.1:8000 --rate 1,2,4,8 --ttft-slo 500 --tpot-slo 50

Open loop (``--rate``): requests come when a Poisson process says, whether or not the server keeps up, as users do.
Closed loop (``--concurrency``): so many are always open; the next one waits for an end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from model.wording import number_of
from scripts import plots
from scripts._cli import (
    UsageError,
    check_writable,
    hand_out,
    integers,
    not_negative,
    positive,
    positive_number,
    run_command,
)
from scripts._load import Lengths, Shot, arrivals, lengths, shots

try:
    from scripts._client import Client, Outcome
    from scripts._serving_report import render, summarise
except ImportError as error:  # aiohttp is an extra
    raise SystemExit(f'error: {error}; install this project with its extra: pip install -e ".[bench]"') from None


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python -m scripts.bench_serving",
        description="Latency, throughput and goodput of an OpenAI-compatible server under load.",
    )
    p.add_argument("--url", required=True, type=_url, help="the server, such as http://127.0.0.1:8000")
    p.add_argument("--model", help="the model's name there (default: the first that it lists)")
    p.add_argument("--endpoint", choices=("completions", "chat"), default="completions", help="default: completions")
    p.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")

    load = p.add_argument_group("load (one of the first two)")
    how = load.add_mutually_exclusive_group(required=True)
    how.add_argument("--rate", type=_rates, metavar="R,...", help="open loop: requests a second, one run for each")
    how.add_argument("--concurrency", type=integers, metavar="N,...", help="closed loop: requests open at once")
    size = load.add_mutually_exclusive_group()
    size.add_argument("--requests", type=positive, metavar="N", help="requests of each run (default 64)")
    size.add_argument("--duration", type=positive_number, metavar="SECONDS", help="with --rate: arrivals for so long")
    load.add_argument(
        "--prompt-tokens",
        type=lengths,
        default=Lengths("fixed", (128,)),
        metavar="LENGTHS",
        help="about so many tokens a prompt: 128, uniform:16:256 or lognormal:128:0.6 (default 128)",
    )
    load.add_argument(
        "--output-tokens",
        type=lengths,
        default=Lengths("fixed", (64,)),
        metavar="LENGTHS",
        help="tokens to ask for, written likewise (default 64); a model may end earlier",
    )
    load.add_argument(
        "--shared-prefix",
        type=not_negative,
        default=0,
        metavar="N",
        help="so many tokens at the start of every prompt are the same (default 0)",
    )
    load.add_argument(
        "--extra-body",
        type=_json_object,
        default={},
        metavar="JSON",
        help='fields to add to each request, such as {"ignore_eos": true}',
    )
    load.add_argument(
        "--warmup",
        type=not_negative,
        default=2,
        metavar="N",
        help="requests ahead, not counted; they wait for a server that still starts (default 2)",
    )
    load.add_argument("--seed", type=not_negative, default=0, help="another seed, other prompts (default 0)")
    load.add_argument(
        "--timeout", type=positive_number, default=600.0, metavar="SECONDS", help="of a request (default 600)"
    )

    goal = p.add_argument_group("targets of goodput")
    goal.add_argument("--ttft-slo", type=positive_number, metavar="MS", help="time to first token, in milliseconds")
    goal.add_argument("--tpot-slo", type=positive_number, metavar="MS", help="time per output token, in milliseconds")

    out = p.add_argument_group("output")
    out.add_argument("--label", help="what to call this server in a plot (default: the model's name)")
    out.add_argument("--json", metavar="PATH", help="write all numbers; - puts them alone on standard output")
    out.add_argument("--plot", metavar="PATH", help="draw throughput and goodput against the load to a PNG")
    out.add_argument(
        "--beside", action="append", default=[], metavar="PATH", help="JSON of an earlier run to draw too; repeatable"
    )
    out.add_argument("--quiet", action="store_true", help="say nothing while running")
    return p.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return run_command(lambda: bench(args), quiet=args.quiet)


def bench(args: argparse.Namespace) -> None:
    """The command."""
    check_writable(args.json)
    check_writable(args.plot)
    if args.duration is not None and args.concurrency:
        raise UsageError("--duration goes with --rate; with --concurrency give --requests")
    if args.beside and not args.plot:
        raise UsageError("--beside adds curves to a plot; give --plot PATH, too")
    beside = [_earlier(path) for path in args.beside]
    if args.plot:
        plots.new_figure(1, 1)  # without matplotlib, say so now

    report = asyncio.run(_sweep(args))
    image = (args.plot, lambda: plots.png(plots.draw_serving([report, *beside])))
    hand_out(render(report["points"]), report, args.json, image=image)


async def _sweep(args: argparse.Namespace) -> dict[str, Any]:
    ttft_slo_s, tpot_slo_s = (None if ms is None else ms / 1e3 for ms in (args.ttft_slo, args.tpot_slo))
    points = []
    async with Client(
        args.url,
        chat=args.endpoint == "chat",
        api_key=args.api_key,
        timeout_s=args.timeout,
        extra=args.extra_body,
    ) as client:
        model = args.model or await client.first_model()
        rng = np.random.default_rng([args.seed, 0])
        ahead = shots(rng, [0.0] * args.warmup, args.prompt_tokens, args.output_tokens, args.shared_prefix)
        await _warm_up(args, client, model, ahead)
        for index, level in enumerate(args.rate or args.concurrency):
            rng = np.random.default_rng([args.seed, index + 1])
            load: dict[str, float]
            if args.rate:
                load = {"rate": level}
                count = None if args.duration else args.requests or 64
                times = arrivals(rng, level, count=count, seconds=args.duration)
            else:
                load = {"concurrency": level}
                times = [0.0] * (args.requests or 64)
            own = shots(rng, times, args.prompt_tokens, args.output_tokens, args.shared_prefix)
            if not own:
                raise UsageError(f"no request came within {args.duration:g} s at {level:g} a second; give more time")
            _say(args, f"{next(iter(load))} {level:g}: {number_of(len(own), 'request')}")
            run = open_loop(client, model, own) if args.rate else closed_loop(client, model, own, level)
            points.append(summarise(await run, ttft_slo_s=ttft_slo_s, tpot_slo_s=tpot_slo_s, load=load))
    return {
        "url": args.url,
        "model": model,
        "label": args.label or model,
        "endpoint": args.endpoint,
        "prompt_tokens": [args.prompt_tokens.kind, *args.prompt_tokens.values],
        "output_tokens": [args.output_tokens.kind, *args.output_tokens.values],
        "shared_prefix": args.shared_prefix,
        "extra_body": args.extra_body,
        "seed": args.seed,
        "versions": {"python": sys.version.split()[0], "aiohttp": version("aiohttp")},
        "points": points,
    }


async def _warm_up(args: argparse.Namespace, client: Client, model: str, ahead: Sequence[Shot]) -> None:
    """Send these one after the other. A server that still refuses them, as one that compiles does, is waited for."""
    until, told = time.monotonic() + args.timeout, False
    for shot in ahead:
        while (outcome := await client.ask(model, shot.text, shot.new_tokens)).status == "refused":
            if time.monotonic() > until:
                break
            if not told:
                _say(args, f"waiting for the server, which answers {outcome.error}")
                told = True
            await asyncio.sleep(0.5)
        if outcome.status != "completed":
            became = "failed" if outcome.status == "failed" else "was refused"
            raise OSError(f"the first request to {args.url} {became}: {outcome.error}")


async def open_loop(client: Client, model: str, own: Sequence[Shot]) -> list[Outcome]:
    """Each shot at its time, however many are open."""
    start = time.perf_counter()

    async def one(shot: Shot) -> Outcome:
        due = start + shot.at_s
        await asyncio.sleep(due - time.perf_counter())
        return await client.ask(model, shot.text, shot.new_tokens, due)

    return list(await asyncio.gather(*(one(shot) for shot in own)))


async def closed_loop(client: Client, model: str, own: Sequence[Shot], concurrency: int) -> list[Outcome]:
    """The shots in order, ``concurrency`` of them open at a time."""
    left: Iterator[Shot] = iter(own)

    async def worker() -> list[Outcome]:
        return [await client.ask(model, shot.text, shot.new_tokens) for shot in left]

    return [one for mine in await asyncio.gather(*(worker() for _ in range(concurrency))) for one in mine]


def _earlier(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            report: dict[str, Any] = json.load(file)
        if not report["points"] or "label" not in report:
            raise KeyError
    except (ValueError, LookupError, TypeError):
        raise UsageError(f"--beside {path} is not JSON that this command wrote") from None
    return report


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} begins with neither http:// nor https://")
    return text


def _rates(text: str) -> list[float]:
    return [positive_number(part) for part in text.split(",")]


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _say(args: argparse.Namespace, line: str) -> None:
    if not args.quiet:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
