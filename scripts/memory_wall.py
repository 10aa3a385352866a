"""The memory wall of one model on one chip, from parameter count to milliseconds a token.

    python -m scripts.memory_wall --model llama-3-70b --chip h100

Prints each quantity beside its formula; `--json` writes the numbers, `--plot` draws them. Nothing here
needs JAX or an accelerator.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from model.config import ConfigError, LlamaConfig
from model.presets import PRESETS
from roofline.case import Case
from roofline.chain import memory_wall
from roofline.chips import CHIPS, get_chip
from roofline.collectives import ALGORITHMS, Measured
from roofline.errors import RooflineError
from scripts._files import UsageError, check_writable, hand_out
from scripts.memory_wall_text import render


def load_config(name: str) -> LlamaConfig:
    """The config of a preset, of a folder with `config.json`, of a `config.json`, or of a `.gguf` file.

    Raises ConfigError listing the presets when `name` is none of these.
    """
    if name.lower() in PRESETS:
        return PRESETS[name.lower()]
    path = Path(name)
    if path.suffix == ".gguf" and path.is_file():
        from model.checkpoint.errors import CheckpointError
        from model.checkpoint.gguf import GgufSource  # NumPy and gguf, needed for this one form

        try:
            source = GgufSource(path)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        return LlamaConfig.from_gguf(source.metadata, tensor_names=source.stored_names, rope_freqs=source.rope_freqs())
    file = path / "config.json" if path.is_dir() else path
    if file.suffix == ".json" and file.is_file():
        try:
            data = json.loads(file.read_text())
        except ValueError as error:  # not JSON, or not even text
            raise ConfigError(f"{file} is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{file} holds a {type(data).__name__}: a model's config is an object")
        return LlamaConfig.from_hf(data)
    raise ConfigError(
        f"unknown model {name!r}: use one of {', '.join(PRESETS)}, a folder with config.json, or a .gguf file"
    )


def _integers(low: int) -> Callable[[str], list[int]]:
    def parse(text: str) -> list[int]:
        try:
            values = [int(item.replace("_", "")) for item in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1,2,4") from None
        if min(values) < low:
            raise argparse.ArgumentTypeError(f"{text!r} has a number below {low}")
        return values

    return parse


def _positive(text: str) -> int:
    (value,) = _integers(1)(text) if "," not in text else [0]
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not one whole number")
    return value


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m scripts.memory_wall",
        description="The memory wall of one model on one chip: each quantity beside its formula.",
        epilog="JSON is in bytes, bytes/s and operations/s; keys that end in _ms are milliseconds.",
    )
    p.add_argument("--model", required=True, help=f"{', '.join(PRESETS)}, a folder with config.json, or a .gguf file")
    p.add_argument(
        "--chip",
        default="h100",
        help=f"{', '.join(CHIPS)}, cpu (measured here), or a .toml file (default h100)",
    )
    p.add_argument("--tp", type=_integers(1), default=[1, 2, 4, 8], help="device counts (default 1,2,4,8)")
    p.add_argument("--dtype", default="bf16", help="bf16, f16, f32, fp8, int8, int4, int8-gN, int4-gN (default bf16)")
    p.add_argument("--kv-dtype", default="bf16", help="bf16, f16, f32, fp8, int8 (default bf16)")
    p.add_argument("--batch", type=_positive, default=1, help="sequences decoded at once (default 1)")
    p.add_argument(
        "--context",
        type=_integers(0),
        default=[0, 8_000, 32_000, 128_000],
        help="positions in the cache (default 0,8000,32000,128000); the split is shown at the largest",
    )
    p.add_argument("--prompt-len", type=_positive, default=2_000, help="tokens of the prefill (default 2000)")
    p.add_argument("--params", type=float, help="a parameter count instead of the config's own, such as 70e9")
    p.add_argument("--json", metavar="PATH", help="write all numbers there; - prints them instead of the table")
    p.add_argument("--plot", metavar="PATH", help="draw roofline, decay and latency to a PNG")
    e = p.add_argument_group("efficiency of the software, used by the latency split only; defaults are the chip's")
    e.add_argument("--bandwidth-efficiency", type=float, metavar="SHARE", help="share of B that is reached")
    e.add_argument("--compute-efficiency", type=float, metavar="SHARE", help="share of C that is reached")
    e.add_argument("--layer-overhead-us", type=float, metavar="US", help="paid once a layer")
    e.add_argument("--step-overhead-us", type=float, metavar="US", help="paid once a step")
    e.add_argument("--collective-scale", type=float, metavar="X", help="factor on the wires' latencies")
    e.add_argument("--all-reduce", choices=ALGORITHMS, help="its algorithm (default: the chip's)")
    e.add_argument("--collectives", metavar="PATH", help="measured alpha and beta, JSON with a `collectives` list")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 on success, 2 with a message on stderr for bad input."""
    args = parser().parse_args(argv)
    try:
        for path in (args.json, args.plot):
            check_writable(path)
        if args.plot:
            from scripts import plots  # matplotlib is an extra

            plots.new_figure(1, 1)  # says now what is missing
        result = report(args)
        image = (args.plot, lambda: plots.png(plots.draw_memory_wall(result)))
        hand_out(None if args.json == "-" else render(result), result, args.json, image=image)
    except (RooflineError, ConfigError, UsageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def report(args: argparse.Namespace) -> dict[str, Any]:
    """All numbers for the parsed command line."""
    case = Case(
        load_config(args.model),
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        batch=args.batch,
        params=args.params,
    )
    if args.collectives and (args.all_reduce or args.collective_scale is not None):
        raise RooflineError("--collectives gives measured times: --all-reduce and --collective-scale do not apply")
    chip = get_chip(args.chip)
    if args.all_reduce:
        chip = replace(chip, interconnect=chip.interconnect.using(args.all_reduce))
    given = {
        "bandwidth": args.bandwidth_efficiency,
        "compute": args.compute_efficiency,
        "layer_overhead_s": None if args.layer_overhead_us is None else args.layer_overhead_us / 1e6,
        "step_overhead_s": None if args.step_overhead_us is None else args.step_overhead_us / 1e6,
        "collective_scale": args.collective_scale,
    }
    result = memory_wall(
        case,
        chip,
        tps=args.tp,
        contexts=args.context,
        prompt_len=args.prompt_len,
        efficiency=replace(chip.efficiency, **{key: value for key, value in given.items() if value is not None}),
        collectives=Measured.load(args.collectives) if args.collectives else None,
    )
    name = args.model if args.model.lower() in PRESETS else Path(args.model).resolve().name
    return {
        "model": args.model,
        "name": name,
        "max_position_embeddings": case.config.max_position_embeddings,
    } | result


if __name__ == "__main__":
    sys.exit(main())
