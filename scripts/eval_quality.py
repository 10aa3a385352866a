"""What fewer bits cost: perplexity, and the distance to the float32 model, for each way of keeping weights and cache.

    python -m scripts.eval_quality --model demo [--settings f32,bf16,int8,int4-g32,...] [--text FILE] [--json FILE]

A setting is f32 or bf16, a weight format (int8, fp8, int4-g32, int4-g128, int4-g32-symmetric: the matrices of every
layer; stored: every matrix as the checkpoint has it), or a cache (int8-kv, fp8-kv, bf16-kv), or both joined by a plus:
int4-g32+int8-kv.

Quantised weights are widened to float32 first, so that all of them run through the one program that was compiled for
float32, at its speed; the numbers that multiply are those that the quantised kernels read. Activations are float32,
save under bf16, where they are bf16 as well.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decode.decoder import Decoder
from model.checkpoint.resolve import ACCEPTED, ResolvedModel, open_model
from model.quantize import WIDE, Quantization, WeightFormat
from model.widen import widened
from model.wording import number_of
from scripts._cli import (
    DTYPES,
    STORED,
    UsageError,
    add_device_options,
    check_writable,
    device_facts,
    hand_out,
    positive,
    run_command,
    set_up,
    versions,
)
from scripts._progress import counted
from scripts.memory_wall_text import table
from sharding.layout import Layout
from sharding.mesh import make_mesh

CONTEXT = 512
SETTINGS = "f32,bf16,int8,fp8,int4-g32,int4-g128,int8-kv,fp8-kv"
_CACHES = {"int8-kv": "int8", "fp8-kv": "float8_e4m3fn", "bf16-kv": "bfloat16"}

COLUMNS = """\
weights     MB of all parameters as kept
perplexity  exp of the mean of -log p(token) over every token but the first of each row
rise        perplexity over that of f32, less one
KL          mean over the same places of sum p log(p / q), p the f32 model's probabilities, q the setting's; nats
top-1       share of these places where the likeliest token is the f32 model's"""


@dataclass(frozen=True)
class Setting:
    """One way of keeping a model. dtype: of what is not quantised, and of activations. quantization: None keeps what
    the checkpoint stores. cache: dtype of the KV cache."""

    name: str
    dtype: str = "float32"
    quantization: Quantization | None = WIDE
    cache: str | None = None

    @classmethod
    def parse(cls, name: str) -> Setting:
        """Raises QuantizationError for a name that is neither a dtype, a cache, nor a weight format."""
        weights, plus, cache = name.partition("+")
        if not plus and weights in _CACHES:
            return cls(name, cache=_CACHES[weights])
        if plus and cache not in _CACHES:
            raise UsageError(f"setting {name!r}: {cache!r} is not a cache; known: {', '.join(_CACHES)}")
        if weights in DTYPES:
            return cls(name, DTYPES[weights], cache=_CACHES.get(cache))
        if weights == STORED:
            return cls(name, quantization=None, cache=_CACHES.get(cache))
        return cls(name, quantization=Quantization.layers(WeightFormat.parse(weights)), cache=_CACHES.get(cache))


def rows_of(tokens: Sequence[int], context: int) -> list[list[int]]:
    """A text's tokens as rows of one length, the longest of at most ``context`` that wastes fewer than one a row.

    Raises:
        UsageError: fewer than two tokens.
    """
    if len(tokens) < 2:
        raise UsageError(f"the text has {number_of(len(tokens), 'token')}; at least two are needed")
    count = -(-len(tokens) // context)
    size = len(tokens) // count
    return [list(tokens[at * size : (at + 1) * size]) for at in range(count)]


@dataclass(frozen=True)
class Quality:
    """Means over the scored places of a text; see ``COLUMNS``. nll and kl in nats."""

    nll: float
    kl: float
    top1: float

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nll))


def score(rows: Sequence[Sequence[int]], logits: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> Quality:
    """How logits [T, V] of each row predict its tokens, and how far they are from the reference's."""
    places = [
        _places(own[:-1], other[:-1], np.asarray(row[1:]))
        for row, own, other in zip(rows, logits, reference, strict=True)
    ]
    nll, kl, agree = (float(np.mean(np.concatenate(each), dtype=np.float64)) for each in zip(*places, strict=True))
    return Quality(nll, kl, agree)


@jax.jit
def _places(own: jax.Array, reference: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """-log q(token), KL and agreement, float32 [T]."""
    q, p = jax.nn.log_softmax(own), jax.nn.log_softmax(reference)
    nll = -jnp.take_along_axis(q, tokens[:, None], axis=-1)[:, 0]
    agree = jnp.argmax(own, axis=-1) == jnp.argmax(reference, axis=-1)
    return nll, jnp.sum(jnp.exp(p) * (p - q), axis=-1), agree.astype(jnp.float32)


class Evaluator:
    """Runs one model's rows under any setting, each compiled program used for all settings that it serves."""

    def __init__(self, model: ResolvedModel, rows: Sequence[Sequence[int]]) -> None:
        self.model, self.rows = model, rows
        self.layout = Layout(make_mesh(1, model.config.num_kv_heads))
        self._decoders: dict[tuple[str, str | None], Decoder] = {}

    def load(self, setting: Setting) -> tuple[Mapping[Any, jax.Array], int]:
        """Parameters as the setting's program takes them, and the bytes that the setting keeps."""
        quantization = self.model.stored_quantization() if setting.quantization is None else setting.quantization
        kept = self.model.load_params(self.layout, setting.dtype, progress=False, quantization=quantization)
        size = sum(array.nbytes for array in kept.values())
        return widened(kept, self.model.config, self.layout, quantization), size

    def logits(self, params: Mapping[Any, jax.Array], dtype: str, cache: str | None = None) -> list[np.ndarray]:
        """Of every row, float32 [T, V]."""
        key = dtype, cache
        if key not in self._decoders:
            self._decoders[key] = Decoder(self.model.config, params, self.layout, dtype, cache_dtype=cache)
        decoder = self._decoders[key]
        decoder.params = decoder.programs.leaves(params)
        found = [decoder.logits([row])[0] for row in self.rows]
        decoder.params = []  # programs are kept, weights are not
        return found


def evaluate(model: ResolvedModel, settings: Sequence[Setting], text: str, context: int = CONTEXT) -> dict[str, Any]:
    """The JSON of the command but for what it ran on: one entry of ``settings`` each, the f32 model first asked."""
    tokens = model.load_tokenizer().encode(text)
    context = min(context, model.config.max_position_embeddings)
    rows = rows_of(tokens, context)
    evaluator = Evaluator(model, rows)
    base = Setting("f32")
    params, size = evaluator.load(base)
    reference = evaluator.logits(params, base.dtype)
    del params
    found = []
    plain = score(rows, reference, reference).perplexity
    for setting in counted(settings, "settings"):
        began = time.perf_counter()
        if setting.name == base.name:
            logits, kept = reference, size
        else:
            params, kept = evaluator.load(setting)
            logits = evaluator.logits(params, setting.dtype, setting.cache)
            del params
        quality = score(rows, logits, reference)
        found.append(
            {
                "setting": setting.name,
                "weight_bytes": kept,
                "perplexity": quality.perplexity,
                "perplexity_rise": quality.perplexity / plain - 1,
                "mean_kl_nats": quality.kl,
                "top1_agreement": quality.top1,
                "seconds": time.perf_counter() - began,
            }
        )
    scored = sum(len(row) - 1 for row in rows)
    return {"rows": len(rows), "row_tokens": len(rows[0]), "scored_tokens": scored, "settings": found}


def report(result: Mapping[str, Any]) -> str:
    """The table, and what its columns are."""
    lines = [("setting", "weights", "perplexity", "rise", "KL", "top-1")]
    for one in result["settings"]:
        lines.append(
            (
                one["setting"],
                f"{one['weight_bytes'] / 1e6:.1f}",
                f"{one['perplexity']:.3f}",
                f"{one['perplexity_rise']:+.2%}",
                f"{one['mean_kl_nats']:.5f}",
                f"{one['top1_agreement']:.1%}",
            )
        )
    head = (
        f"{result['model']}: {number_of(result['scored_tokens'], 'token')} scored, "
        f"{number_of(result['rows'], 'row')} of {result['row_tokens']}"
    )
    return "\n".join([head, *table(lines, right=range(1, 6)), "", COLUMNS])


def shipped_text() -> str:
    """English prose, questions and answers, letters, tables and code, written for this command."""
    return (files("scripts") / "data" / "eval_text.txt").read_text(encoding="utf-8")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.eval_quality", description="Perplexity and distance to f32 of each way to keep a model."
    )
    parser.add_argument("--model", default="demo", help=ACCEPTED)
    parser.add_argument(
        "--settings",
        default=SETTINGS,
        metavar="A,B,...",
        help="f32, bf16, int8, fp8, int4-gN, int4-gN-symmetric, stored, int8-kv, fp8-kv, bf16-kv, or weights+cache "
        f"such as int4-g32+int8-kv (default {SETTINGS})",
    )
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text to score instead of the one that is shipped")
    parser.add_argument(
        "--context", type=positive, default=CONTEXT, metavar="N", help=f"most tokens a row (default {CONTEXT})"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - is standard output")
    add_device_options(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return run_command(lambda: run(args), quiet=args.json == "-")


def run(args: argparse.Namespace) -> None:
    """The command: raises ``scripts._cli.USER_ERRORS`` for what the user can mend."""
    check_writable(args.json)
    settings = [Setting.parse(name) for name in dict.fromkeys(args.settings.split(","))]
    text = shipped_text() if args.text is None else Path(args.text).read_text(encoding="utf-8")
    set_up(args.cpu_devices)
    model = open_model(args.model)
    result = {"model": args.model, **evaluate(model, settings, text, args.context)}
    data = {**result, "device": device_facts(), "versions": versions()}
    hand_out(None if args.json == "-" else report(result), data, args.json)


if __name__ == "__main__":
    sys.exit(main())
