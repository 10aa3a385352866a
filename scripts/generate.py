"""Answers prompts with a Llama model, streaming the text, and says how near each token came to the machine's limit.

    python -m scripts.generate --chat "What is the capital of France?"

Without ``--model`` it uses a small real model (SmolLM2-135M-Instruct) that is fetched once and kept.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from decode.compile_cache import CompileCache
from decode.decoder import Decoder
from decode.sampling import SamplingParams
from decode.text import Completion, TextGeneration
from decode.timing import Timing
from model.checkpoint.resolve import ACCEPTED, open_model
from model.tokenizer import Tokenizer
from scripts._cli import (
    DTYPES,
    UsageError,
    add_device_options,
    check_writable,
    default_dtype,
    device_facts,
    not_negative,
    positive,
    run_command,
    set_up,
    versions,
    write_json,
)
from scripts._report import report_lines, step_bytes, step_facts
from sharding.bandwidth import measure_read_bandwidth
from sharding.layout import Layout
from sharding.mesh import make_mesh
from sharding.self_check import check_mesh


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.generate", description="Answer prompts with a Llama model, and time it."
    )
    parser.add_argument("--model", default="demo", help=f"{ACCEPTED}. Default: demo")

    prompts = parser.add_argument_group("prompts (at least one; options may be repeated)")
    prompts.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="text to continue")
    prompts.add_argument(
        "--chat",
        action="append",
        default=[],
        metavar="TEXT",
        help="a user's message, in the model's chat template",
    )
    prompts.add_argument("--system", metavar="TEXT", help="system message for every --chat")
    prompts.add_argument("--prompts-file", metavar="PATH", help="text to continue, one a line; - is standard input")
    prompts.add_argument(
        "--batch", type=positive, default=8, metavar="N", help="prompts run together at most (default 8)"
    )

    length = parser.add_argument_group("length")
    length.add_argument("--max-new-tokens", type=positive, default=256, metavar="N", help="default 256")
    length.add_argument(
        "--max-len",
        type=positive,
        metavar="N",
        help="positions of prompt and output (default: what is needed)",
    )
    length.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")

    chosen = parser.add_argument_group("sampling (greedy by default)")
    chosen.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    chosen.add_argument("--top-k", type=not_negative, default=0, help="keep the k likeliest tokens; 0 is off")
    chosen.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this mass; 1 is off")
    chosen.add_argument("--min-p", type=float, default=0.0, help="drop tokens below this share of the best; 0 is off")
    chosen.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1 avoids tokens seen; 1 is off")
    chosen.add_argument("--seed", type=not_negative, default=0, help="same seed, same text, at every --tp (default 0)")

    machine = parser.add_argument_group("machine")
    machine.add_argument("--tp", type=positive, metavar="N", help="tensor-parallel devices (default: all)")
    add_device_options(machine)
    machine.add_argument("--dtype", choices=list(DTYPES), help="default: bf16, on CPU f32")
    machine.add_argument("--layers", choices=("unrolled", "scan"), default="unrolled", help="scan compiles faster")

    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="PATH", help="write results and measurements; - is standard output")
    output.add_argument("--quiet", action="store_true", help="print the text alone")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return run_command(lambda: generate(args))


@dataclass(frozen=True)
class Prompt:
    """One prompt as given, as tokens, and whether the output continues it or answers it."""

    text: str
    tokens: list[int]
    continues: bool


def generate(args: argparse.Namespace) -> None:
    """The command: raises ``scripts._cli.USER_ERRORS`` for what the user can mend."""
    check_writable(args.json)
    sampling = _sampling(args)
    cache = set_up(args.cpu_devices)
    say = _silent if args.quiet else _to_stderr

    began = time.perf_counter()
    model = open_model(args.model)
    tokenizer = model.load_tokenizer()
    opened = time.perf_counter() - began
    prompts = _prompts(args, tokenizer)

    layout = Layout(make_mesh(args.tp or jax.device_count(), model.config.num_kv_heads))
    dtype = DTYPES[args.dtype or default_dtype()]
    say(
        f"{args.model}: {model.config.parameter_count():,} parameters in {dtype}, {args.layers} layers; "
        f"{layout.describe()}"
    )
    if cache.problem:
        say(f"compilation {cache.describe()}")
    check_mesh(layout)
    limit = measure_read_bandwidth(layout.mesh)

    began = time.perf_counter()
    params = model.load_params(layout, dtype, args.layers, progress=not args.quiet)
    decoder = Decoder(model.config, params, layout, dtype, layers=args.layers)
    load_s = opened + time.perf_counter() - began

    groups = [prompts[at : at + args.batch] for at in range(0, len(prompts), args.batch)]
    done: list[Completion] = []
    timings: list[Timing] = []
    text_out = sys.stderr if args.json == "-" else sys.stdout
    for group in groups:
        generation = TextGeneration(
            decoder,
            tokenizer,
            [prompt.tokens for prompt in group],
            max_new_tokens=args.max_new_tokens,
            max_len=args.max_len,
            sampling=sampling,
            stop=args.stop,
            continuation=[prompt.continues for prompt in group],
        )
        for _, text in generation:
            if len(prompts) == 1:
                print(text, end="", flush=True, file=text_out)
        if len(prompts) == 1:
            print(file=text_out)
        else:
            for prompt, completion in zip(group, generation.completions, strict=True):
                print(f"### {prompt.text}\n{completion.text}\n", flush=True, file=text_out)
        done += generation.completions
        timings.append(generation.timing)

    facts = _facts(args, decoder, prompts, groups, done, timings, limit, cache, load_s, sampling)
    if not args.quiet:
        print("\n" + "\n".join(report_lines(facts)), file=text_out)
    if args.json:
        write_json(args.json, facts)


def _sampling(args: argparse.Namespace) -> SamplingParams:
    filters = {"--top-k": args.top_k != 0, "--top-p": args.top_p != 1, "--min-p": args.min_p != 0}
    given = [name for name, used in filters.items() if used]
    if given and args.temperature == 0:
        raise UsageError(f"{', '.join(given)} has no effect at temperature 0, which is greedy; add --temperature")
    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
    )


def _prompts(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Prompt]:
    """Every prompt that was asked for, in the order --chat, --prompt, --prompts-file."""
    if args.system is not None and not args.chat:
        raise UsageError("--system goes with --chat: a plain --prompt has no system message")
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    prompts = [
        Prompt(text, tokenizer.encode_chat([*system, {"role": "user", "content": text}]), continues=False)
        for text in args.chat
    ]
    texts = list(args.prompt)
    if args.prompts_file:
        texts += _lines(args.prompts_file)
    prompts += [Prompt(text, tokenizer.encode(text), continues=True) for text in texts]
    if not prompts:
        raise UsageError('nothing to do: give --chat "a message", --prompt "a text", or --prompts-file PATH')
    return prompts


def _lines(path: str) -> list[str]:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read --prompts-file {path}: {error}") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise UsageError(f"--prompts-file {path} holds no prompt")
    return lines


def _facts(
    args: argparse.Namespace,
    decoder: Decoder,
    prompts: list[Prompt],
    groups: list[list[Prompt]],
    done: list[Completion],
    timings: list[Timing],
    limit: Any,
    cache: CompileCache,
    load_s: float,
    sampling: SamplingParams,
) -> dict[str, Any]:
    """Everything measured, as JSON. The first prompt's result is at the top level, all of them in ``completions``."""
    results = [
        {
            "token_ids": one.token_ids,
            "logprobs": one.logprobs,
            "text": one.text,
            "finish_reason": one.finish_reason,
            "prompt_tokens": one.prompt_tokens,
            "generated_tokens": len(one.token_ids),
        }
        for one in done
    ]
    batch = len(groups[0])
    context = round(statistics.mean(one.prompt_tokens + len(one.token_ids) / 2 for one in done[:batch]))
    longest = max(len(prompt.tokens) for prompt in groups[0])
    max_len = args.max_len or decoder.room_for(longest, args.max_new_tokens)
    hlo_text = decoder.decode_program(batch, max_len, sampling.form).as_text()
    tpots = [timing.tpot_s for timing in timings if timing.tpot_s is not None]
    tpot_s = statistics.median(tpots) if tpots else None
    rates = [timing.tokens_per_s for timing in timings if timing.tokens_per_s is not None]
    return {
        **results[0],
        "completions": results,
        "model": args.model,
        "dtype": decoder.dtype.name,
        "layers": args.layers,
        "batch": batch,
        "load_s": load_s,
        "compile_s": decoder.compile_s,
        "compile_cache": cache.describe(),
        "ttft_s": statistics.median(timing.ttft_s for timing in timings if timing.ttft_s is not None),
        "tpot_s": tpot_s,
        "tpot_samples_s": [sample for timing in timings for sample in timing.step_samples_s],
        "tokens_per_s": statistics.median(rates) if rates else None,
        **step_facts(decoder, step_bytes(decoder, batch, context), tpot_s, limit, hlo_text),
        "versions": versions(),
        "device": device_facts(),
    }


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silent(line: str) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
