"""Serves a Llama model over OpenAI's API: many conversations share each read of the weights.

    python -m scripts.serve --model demo --port 8000

Then point any OpenAI client at http://127.0.0.1:8000/v1. /health, /ready and /metrics are for operators.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from decode.batching.engine import Engine
from decode.batching.options import EngineOptions
from decode.decoder import Decoder
from model.checkpoint.resolve import ACCEPTED, open_model
from model.wording import number_of
from scripts._cli import (
    DTYPES,
    UsageError,
    add_machine_options,
    asked_quantization,
    chosen_collectives,
    chosen_kernels,
    chosen_kv_dtype,
    chosen_quantization,
    default_dtype,
    not_negative,
    positive,
    positive_number,
    run_command,
    set_up,
)
from scripts._processes import add_process_options
from scripts._speculation import add_speculation_options, check_draft, check_speculation_options, make_draft
from sharding.layout import Layout
from sharding.mesh import check_every_process_has_a_device, make_mesh
from sharding.self_check import check_mesh

try:
    from serve.app import Service
    from serve.limits import Limits
    from serve.server import SIGNALS, bind, serve
except ImportError as error:  # the server's libraries are an extra
    raise SystemExit(f'error: {error}; install this project with its extra: pip install -e ".[serve]"') from None

MEBIBYTE = 1 << 20


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.serve", description="Serve a Llama model over OpenAI's API, with continuous batching."
    )
    parser.add_argument("--model", default="demo", help=f"{ACCEPTED}. Default: demo")

    surface = parser.add_argument_group("server")
    surface.add_argument("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1; 0.0.0.0, all)")
    surface.add_argument("--port", type=_port, default=8000, help="default 8000; 0 takes a free one")
    surface.add_argument("--served-name", metavar="NAME", help="what clients call the model (default: as --model)")
    surface.add_argument("--api-key", action="append", default=[], metavar="KEY", help="ask for this key; repeatable")
    surface.add_argument("--api-key-file", metavar="PATH", help="keys, one a line; other users cannot see them in ps")
    surface.add_argument(
        "--drain-timeout",
        type=positive_number,
        default=120.0,
        metavar="SECONDS",
        help="on SIGTERM or SIGINT, how long running requests may take to end (default 120)",
    )

    goal = parser.add_argument_group("targets: with them, what would be late is refused at once (429)")
    goal.add_argument("--ttft-slo", type=positive_number, metavar="MS", help="time to first token, in milliseconds")
    goal.add_argument("--tpot-slo", type=positive_number, metavar="MS", help="time per output token, in milliseconds")

    limits = EngineOptions()
    batch = parser.add_argument_group("batching")
    batch.add_argument(
        "--max-batch",
        type=positive,
        default=limits.max_batch,
        metavar="N",
        help=f"requests that run together at most (default {limits.max_batch})",
    )
    batch.add_argument(
        "--max-len",
        type=positive,
        metavar="N",
        help="positions of a request, prompt and output (default: the model's, at most 8192, and what --pages hold)",
    )
    batch.add_argument(
        "--page-size",
        type=positive,
        default=limits.page_size,
        metavar="N",
        help=f"positions of a cache page (default {limits.page_size})",
    )
    batch.add_argument("--pages", type=positive, metavar="N", help="pages of the cache (default: for a full batch)")
    batch.add_argument(
        "--token-budget",
        type=positive,
        default=limits.token_budget,
        metavar="N",
        help="prompt tokens that share a step with decodes (default 256, on CPU 64)",
    )
    batch.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt anew")
    batch.add_argument(
        "--max-queue",
        type=positive,
        default=limits.max_queue,
        metavar="N",
        help=f"requests that wait at most (default {limits.max_queue})",
    )

    bounds = Limits()
    one = parser.add_argument_group("limits of one request")
    one.add_argument(
        "--max-body-mib",
        type=positive_number,
        default=bounds.body_bytes / MEBIBYTE,
        metavar="N",
        help=f"its body, in MiB (default {bounds.body_bytes / MEBIBYTE:g})",
    )
    one.add_argument(
        "--max-choices",
        type=positive,
        default=bounds.choices,
        metavar="N",
        help=f"sequences it makes, prompts times n (default {bounds.choices})",
    )

    guesses = parser.add_argument_group(
        "speculation (off by default; every text stays the same; a request with a repetition penalty runs without)"
    )
    add_speculation_options(guesses)

    add_machine_options(parser)
    add_process_options(parser)
    parser.add_argument("--quiet", action="store_true", help="print the address alone")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return run_command(lambda: run(args), quiet=args.quiet, processes=args)


def run(args: argparse.Namespace) -> None:
    """The command: raises ``scripts._cli.USER_ERRORS`` for what the user can mend."""
    keys = _api_keys(args)
    asked_quantization(args)
    k = check_speculation_options(args.speculate, args.k, args.draft_dtype)
    cache = set_up(args.cpu_devices)
    # The address is taken before anything slow, and not yet listened at.
    held = bind(args.host, args.port) if jax.process_index() == 0 else None
    model = open_model(args.model)
    if args.speculate:
        check_draft(args.speculate, model.config)
    layout = Layout(make_mesh(args.tp or jax.device_count(), model.config.num_kv_heads))
    check_every_process_has_a_device(layout.mesh)
    collectives = chosen_collectives(args.collective, layout.tp)
    tokenizer = model.load_tokenizer()
    dtype = DTYPES[args.dtype or default_dtype()]
    _say(
        args,
        f"{args.model}: {model.config.parameter_count():,} parameters in {dtype}, {args.layers} layers; "
        f"{layout.describe()}",
    )
    if cache.problem:
        _say(args, f"note: compilation {cache.describe()}")
    check_mesh(layout)
    quantization = chosen_quantization(args, model)
    params = model.load_params(layout, dtype, args.layers, progress=not args.quiet, quantization=quantization)
    decoder = Decoder(
        model.config,
        params,
        layout,
        dtype,
        layers=args.layers,
        collectives=collectives,
        kernels=chosen_kernels(args.kernels),
        cache_dtype=chosen_kv_dtype(args.kv_dtype),
        quantization=quantization,
    )
    draft = make_draft(args.speculate, decoder, args.draft_dtype) if args.speculate else None
    engine = Engine(decoder, _engine_options(args, k if args.speculate else 0), draft)
    if held is None:
        # Who stops a job signals all of its processes: process 0 drains, and then ends the others.
        for one in SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        engine.follow()
        return
    limits = Limits(body_bytes=int(args.max_body_mib * MEBIBYTE), choices=args.max_choices)
    service = Service(engine, tokenizer, args.served_name or args.model, api_keys=keys, limits=limits)
    try:
        if not asyncio.run(_serve(args, engine, service, held)):
            _say(args, f"some requests were cut off, after --drain-timeout {args.drain_timeout:g} or a second signal")
    finally:
        service.close()
        engine.close()


async def _serve(args: argparse.Namespace, engine: Engine, service: Service, held: socket.socket) -> bool:
    """Listen, and compile meanwhile: /health answers at once, /ready when it is done."""
    stop = asyncio.Event()
    host, port = held.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def start() -> None:
        began = time.perf_counter()
        try:
            await asyncio.to_thread(engine.start)
        except BaseException:
            stop.set()
            raise
        options = engine.options
        _say(
            args,
            f"ready after {time.perf_counter() - began:.1f} s: {number_of(options.max_batch, 'request')} at once, "
            f"{engine.max_len} "
            f"positions each, {number_of(engine.stats().pages_total, 'page')} of {options.page_size}",
        )

    _say(args, "compiling; /ready says when it is done")
    starting = asyncio.create_task(start())
    answered = await serve(
        service,
        held,
        drain_s=args.drain_timeout,
        on_listening=lambda: print(f"listening at {url}", flush=True),
        on_draining=lambda: _say(args, _draining(args, service.open_requests)),
        stop=stop,
    )
    if not starting.done():
        # Nothing was taken on, and a compilation cannot be interrupted: waiting for it would only look like a hang.
        _say(args, "stopped while compiling")
        sys.stdout.flush()
        os._exit(0)
    starting.result()
    return answered


def _draining(args: argparse.Namespace, open_requests: int) -> str:
    if not open_requests:
        return "stopping"
    return (
        f"draining {number_of(open_requests, 'request')} for {args.drain_timeout:g} s at most; a second signal ends it"
    )


def _engine_options(args: argparse.Namespace, proposals: int) -> EngineOptions:
    return EngineOptions(
        max_batch=args.max_batch,
        max_len=args.max_len,
        page_size=args.page_size,
        pages=args.pages,
        token_budget=args.token_budget,
        prefix_cache=not args.no_prefix_cache,
        max_queue=args.max_queue,
        proposals=proposals,
        ttft_slo_s=None if args.ttft_slo is None else args.ttft_slo / 1e3,
        tpot_slo_s=None if args.tpot_slo is None else args.tpot_slo / 1e3,
    )


def _api_keys(args: argparse.Namespace) -> list[str]:
    keys = list(args.api_key)
    if args.api_key_file is not None:
        try:
            keys += Path(args.api_key_file).read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read --api-key-file {args.api_key_file}: {error}") from None
        if not keys:
            raise UsageError(f"--api-key-file {args.api_key_file} holds no key")
    if any(not key.strip() for key in keys):
        raise UsageError("--api-key is empty; leave it out to ask for no key")
    return keys


def _port(text: str) -> int:
    value = not_negative(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{value} is no port: they end at 65535")
    return value


def _say(args: argparse.Namespace, line: str) -> None:
    if not args.quiet:
        with contextlib.suppress(BrokenPipeError):  # Ctrl-C ends ``| tee``, too, and what runs is to end well
            print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
