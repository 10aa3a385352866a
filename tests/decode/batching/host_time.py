"""What the host does for a step, beside what the device does, with so many requests decoding at once.

python -m tests.decode.batching.host_time                # the demo model
python -m tests.decode.batching.host_time --hidden 64    # its depth, and matrices so small that a step is short
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace

import jax

from decode.batching.engine import Engine
from decode.batching.options import EngineOptions, EngineStats
from decode.batching.request import Request
from decode.decoder import Decoder
from model.checkpoint.resolve import open_model
from model.random_init import random_params
from scripts._cli import positive, set_up
from sharding.layout import Layout
from sharding.mesh import make_mesh

STEPS = 300
"""Tokens of each request; the first and last hundred steps are left out."""

COLUMNS = {
    "host_s": "CPU time of the engine's thread for a step: schedule, pack, dispatch, deliver",
    "host_wall_s": "the same by the clock",
    "dispatch_s": "of that, until the runtime has taken the step",
    "device_s": "how long the host then waited for the device",
    "step_s": "from one step's results to the next one's",
}


def measure(decoder: Decoder, sequences: int) -> list[EngineStats]:
    """The engine's own recent means, read now and then while every sequence decodes."""
    engine = Engine(decoder, EngineOptions(max_batch=sequences, max_len=512, token_budget=64))
    engine.start()
    tickets = [engine.submit(Request([row + 1] * 20, STEPS)) for row in range(sequences)]
    seen, done = [], 0
    while done < sequences * (STEPS - 100):
        time.sleep(0.05)
        stats = engine.stats()
        done = stats.generated_tokens
        if done > sequences * 100:
            seen.append(stats)
    for ticket in tickets:
        ticket.result()
    engine.close()
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.decode.batching.host_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sequences", type=positive, default=64, metavar="N", help="that decode at once (default 64)")
    parser.add_argument("--hidden", type=positive, metavar="N", help="a multiple of 32 (default: the model's own)")
    parser.add_argument("--layers", default="unrolled", choices=["unrolled", "scan"], help="default unrolled")
    args = parser.parse_args()
    if args.hidden is not None and args.hidden % 32:
        parser.error(f"--hidden {args.hidden} is not a multiple of 32")
    set_up(None)
    print("compiling every shape of the engine, and decoding: a minute or two", file=sys.stderr, flush=True)
    model = open_model("demo")
    layout = Layout(make_mesh(1, model.config.num_kv_heads))
    if args.hidden is None:
        config, params = model.config, model.load_params(layout, "bfloat16", args.layers)
    else:
        D = args.hidden
        small = {"hidden_size": D, "intermediate_size": 2 * D, "num_heads": D // 16, "num_kv_heads": D // 32}
        config = replace(model.config, head_dim=16, vocab_size=1024, **small)
        params = random_params(config, layout, "bfloat16", layers=args.layers)
    decoder = Decoder(config, params, layout, "bfloat16", layers=args.layers)
    seen = measure(decoder, args.sequences)
    what = f"{config.num_layers} layers of {config.hidden_size} in bf16"
    print(f"{args.sequences} sequences, {what}, jax {jax.__version__}")
    for name, meaning in COLUMNS.items():
        values = sorted(1e3 * getattr(stats, name) for stats in seen)
        print(f"{name:12} {statistics.median(values):7.2f} ms ({values[0]:.2f} to {values[-1]:.2f})   {meaning}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
