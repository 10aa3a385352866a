"""Writes an Orbax checkpoint from any model that `--model` takes.

    python -m scripts.convert_checkpoint SRC DST [--dtype f32|bf16] [--quant int8|int4|fp8] [--tp N] [--overwrite]

The model is streamed onto a mesh of N devices and saved from there. The result restores onto a mesh of any
size.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from model.checkpoint.orbax import save_params
from model.checkpoint.orbax_folder import check_destination
from model.checkpoint.resolve import ACCEPTED, ResolvedModel, open_model
from model.quantize import WIDE
from model.tokenizer import Tokenizer, TokenizerError
from scripts._cli import (
    DTYPES,
    add_device_options,
    add_quant_options,
    chosen_quantization,
    positive,
    run_command,
    set_up,
)
from sharding.layout import Layout
from sharding.mesh import make_mesh


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.convert_checkpoint", description="Write an Orbax checkpoint from another one."
    )
    parser.add_argument("source", metavar="SRC", help=ACCEPTED)
    parser.add_argument("destination", metavar="DST", help="folder to make")
    parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        help="type of the weights written; by default bf16 if SRC stores nothing else, and f32 otherwise",
    )
    parser.add_argument(
        "--tp", type=positive, default=1, metavar="N", help="devices to spread the model over (default 1)"
    )
    add_device_options(parser)
    add_quant_options(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it is an Orbax checkpoint")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return run_command(lambda: run(args))


def run(args: argparse.Namespace) -> None:
    """The command: raises ``scripts._cli.USER_ERRORS`` for what the user can mend."""
    check_destination(args.destination, args.overwrite)
    set_up(args.cpu_devices)
    convert(args.source, args.destination, args.dtype, args.tp, args.overwrite, args)


def convert(
    source: str,
    destination: str,
    dtype: str | None,
    tp: int,
    overwrite: bool,
    quant: argparse.Namespace | None = None,
) -> None:
    """Loads `source` over `tp` devices and saves it at `destination`; raises the errors of its parts."""
    path = check_destination(destination, overwrite)
    model = open_model(source)
    tokenizer = _load_tokenizer(model)
    layout = Layout(make_mesh(tp, model.config.num_kv_heads))
    started = time.perf_counter()
    quantization = model.quantization_for(WIDE) if quant is None else chosen_quantization(quant, model)
    params = model.load_params(layout, dtype or _lossless_dtype(model), quantization=quantization)
    loaded = time.perf_counter()
    save_params(
        path,
        params,
        model.config,
        layout,
        tokenizer=tokenizer,
        files=model.generation_files(),
        overwrite=overwrite,
        quantization=quantization,
    )
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    kind = params["norm", "weight"].dtype
    kept = f" ({quantization.describe()})" if quantization != WIDE else ""
    print(
        f"{source} -> {path}: {model.config.parameter_count():,} parameters in {kind}{kept}, {size / 1e6:,.0f} MB; "
        f"{layout.describe()}; loaded in {loaded - started:.1f} s, saved in "
        f"{time.perf_counter() - loaded:.1f} s"
    )


def _load_tokenizer(model: ResolvedModel) -> Tokenizer | None:
    try:
        return model.load_tokenizer()
    except TokenizerError as error:
        print(f"warning: converting the weights without a tokenizer: {error}", file=sys.stderr)
        return None


def _lossless_dtype(model: ResolvedModel) -> str | None:
    """The smaller dtype that holds every stored value, or None for what an Orbax checkpoint has."""
    if model.source is None:
        return None
    return "bf16" if all(tensor.dtype == "BF16" for tensor in model.source.tensors.values()) else "f32"


if __name__ == "__main__":
    sys.exit(main())
