"""Answers prompts with a Llama model, streaming the text, and says how near each token came to the machine's limit.

    python -m scripts.generate --chat "What is the capital of France?"

Without ``--model`` it uses a small real model (SmolLM2-135M-Instruct) that is fetched once and kept.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import jax

from decode.cache import check_fits
from decode.compile_cache import CompileCache
from decode.decoder import Decoder, NumericsError, PromptError
from decode.sampling import SamplingParams
from decode.speculation.decoder import SpeculativeDecoder
from decode.text import Completion, TextGeneration
from decode.timing import Timing
from model.checkpoint.resolve import ACCEPTED, open_model
from model.config import LlamaConfig
from model.quantize import WIDE, Quantization
from model.tokenizer import StopStrings, Tokenizer
from model.wording import prompt_at
from scripts._cli import (
    DTYPES,
    UsageError,
    add_machine_options,
    asked_quantization,
    check_writable,
    chosen_collectives,
    chosen_kernels,
    chosen_kv_dtype,
    chosen_quantization,
    default_dtype,
    device_facts,
    hand_out,
    kernel_facts,
    not_negative,
    positive,
    run_command,
    set_up,
    versions,
)
from scripts._many import ManyRun, run_many
from scripts._processes import add_process_options
from scripts._prompts import Prompt, add_prompt_options, asked_texts, encoded
from scripts._report import report_lines, step_bytes, step_facts
from scripts._speculation import (
    add_speculation_options,
    check_draft,
    check_speculation_options,
    make_draft,
    make_proposer,
    speculation_facts,
    speculation_lines,
)
from sharding.bandwidth import Bandwidth, measure_read_bandwidth
from sharding.layout import Layout
from sharding.mesh import check_every_process_has_a_device, make_mesh
from sharding.self_check import check_mesh

GROUPED = 32
"""Up to so many prompts run in groups of ``--batch``, each timed; more run through the engine."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.generate", description="Answer prompts with a Llama model, and time it."
    )
    parser.add_argument("--model", default="demo", help=f"{ACCEPTED}. Default: demo")

    prompts = add_prompt_options(parser)
    prompts.add_argument(
        "--batch",
        type=positive,
        default=8,
        metavar="N",
        help=f"prompts run together at most (default 8). Up to {GROUPED} prompts run in groups of N; more go through "
        "the batching engine, where the next one joins as soon as one is done",
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

    add_speculation_options(parser.add_argument_group("speculation (off by default; the output stays the same)"))

    add_machine_options(parser)
    add_process_options(parser)

    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", metavar="PATH", help="write results and measurements; - puts them alone on standard output"
    )
    output.add_argument("--quiet", action="store_true", help="print the text alone (with --json -, nothing but JSON)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return run_command(lambda: generate(args), quiet=args.quiet, processes=args)


@dataclass(frozen=True)
class Group:
    """Prompts that ran together, what they led to, and when."""

    prompts: list[Prompt]
    completions: list[Completion]
    timing: Timing


def generate(args: argparse.Namespace) -> None:
    """The command: raises ``scripts._cli.USER_ERRORS`` for what the user can mend."""
    # What can be refused is refused before anything slow.
    check_writable(args.json)
    sampling = _sampling(args)
    asked_quantization(args)
    StopStrings(args.stop)
    asked = asked_texts(args)
    k = check_speculation_options(args.speculate, args.k, args.draft_dtype)
    through_engine = len(asked) > max(GROUPED, args.batch)
    if through_engine and args.speculate and args.repetition_penalty != 1:
        raise UsageError(
            f"--speculate and --repetition-penalty do not go together for {len(asked)} prompts: they run "
            f"through the batching engine, which does not speculate where there is a penalty; leave one out"
        )
    say = _silent if args.quiet else _to_stderr

    cache = set_up(args.cpu_devices)
    began = time.perf_counter()
    model = open_model(args.model)
    if args.speculate:
        check_draft(args.speculate, model.config)
    layout = Layout(make_mesh(args.tp or jax.device_count(), model.config.num_kv_heads))
    check_every_process_has_a_device(layout.mesh)
    collectives = chosen_collectives(args.collective, layout.tp)
    tokenizer = model.load_tokenizer()
    opened = time.perf_counter() - began
    prompts = encoded(asked, args.system, tokenizer)
    max_len = _room(prompts, model.config, args.max_new_tokens, args.max_len)

    dtype = DTYPES[args.dtype or default_dtype()]
    quantization = chosen_quantization(args, model)
    say(
        f"{args.model}: {model.config.parameter_count():,} parameters in {dtype}{_quantised(quantization)}, "
        f"{args.layers} layers; {layout.describe()}"
    )
    if cache.problem:
        say(f"note: compilation {cache.describe()}")
    check_mesh(layout)
    limit = measure_read_bandwidth(layout.mesh)

    began = time.perf_counter()
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
    speculative = None
    if args.speculate and not through_engine:
        speculative = SpeculativeDecoder(decoder, make_proposer(args.speculate, decoder, args.draft_dtype), k)
    load_s = opened + time.perf_counter() - began

    say(f"loaded in {load_s:.1f} s; compiling")
    # With --json -, standard output holds JSON alone, and --quiet drops the rest.
    text_out = sys.stdout if args.json != "-" else None if args.quiet else sys.stderr
    screen = _Screen(text_out, alone=len(prompts) == 1, bare=args.quiet)
    if through_engine:
        many = _run_many(args, decoder, tokenizer, prompts, max_len, sampling, screen, k)
        if many is None:
            return
        facts = _many_facts(args, decoder, max_len, prompts, many, cache, load_s, sampling)
        lines = [f"load      {load_s:.2f} s", f"compile   {decoder.compile_s:.2f} s ({cache.describe()})"]
        lines += many.report_lines(args.batch)
        hand_out(None if args.quiet else "\n" + "\n".join(lines), facts, args.json, out=text_out)
        many.check_complete()
        return
    groups = []
    for at in range(0, len(prompts), args.batch):
        own = prompts[at : at + args.batch]
        generation = TextGeneration(
            speculative or decoder,
            tokenizer,
            [prompt.tokens for prompt in own],
            max_new_tokens=args.max_new_tokens,
            max_len=max_len,
            sampling=sampling,
            stop=args.stop,
            continuation=[prompt.continues for prompt in own],
        )
        try:
            screen.show(own, generation)
        except NumericsError as error:  # which counts the prompts of this group
            if len(own) == len(prompts):
                raise
            ends = dict.fromkeys(prompt_at(row, len(prompts)) for row in (at, at + len(own) - 1))
            raise NumericsError(f"{' to '.join(ends)}: {error}") from None
        groups.append(Group(own, generation.completions, generation.timing))
    # Once more: what else runs on the machine comes and goes, and a limit is what the machine can do.
    limit = Bandwidth.of([*limit.samples, *measure_read_bandwidth(layout.mesh).samples], limit.devices)

    facts = _facts(args, decoder, max_len, groups, limit, cache, load_s, sampling)
    lines = report_lines(facts, timed="pass" if speculative else "TPOT")
    if speculative:
        rows = len(groups[0].prompts)
        # What is timed is a pass, and the bytes above are a pass's; a token takes less.
        facts["pass_s"] = facts["tpot_s"]
        facts["tpot_s"] = rows / facts["tokens_per_s"] if facts["tokens_per_s"] else None
        facts["speculation"] = speculation_facts(speculative, speculative.costs(rows, max_len, sampling), rows)
        lines += speculation_lines(facts["speculation"])
    hand_out(None if args.quiet else "\n" + "\n".join(lines), facts, args.json, out=text_out)


def _run_many(
    args: argparse.Namespace,
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: list[Prompt],
    max_len: int,
    sampling: SamplingParams,
    screen: _Screen,
    k: int,
) -> ManyRun | None:
    """Every prompt through the engine. Texts are shown as they end, or after the bar where both are on a terminal."""
    held = screen.out is not None and screen.out.isatty() and sys.stderr.isatty() and not args.quiet
    ended: list[tuple[Prompt, Completion]] = []

    def done(place: int, completion: Completion) -> None:
        if held:
            ended.append((prompts[place], completion))
        else:
            screen.show_one(prompts[place], completion)

    try:
        return run_many(
            decoder,
            tokenizer,
            [prompt.tokens for prompt in prompts],
            batch=args.batch,
            max_new_tokens=args.max_new_tokens,
            max_len=max_len,
            sampling=sampling,
            stop=args.stop,
            continuation=[prompt.continues for prompt in prompts],
            progress=not args.quiet,
            done=done,
            proposals=k if args.speculate else 0,
            draft=make_draft(args.speculate, decoder, args.draft_dtype) if args.speculate else None,
        )
    finally:  # of a run that is interrupted or fails, too: what was computed is shown
        for prompt, completion in ended:
            screen.show_one(prompt, completion)


def _quantised(quantization: Quantization) -> str:
    return "" if quantization == WIDE else f" ({quantization.describe()})"


def _sampling(args: argparse.Namespace) -> SamplingParams:
    filters = {"--top-k": args.top_k != 0, "--top-p": args.top_p != 1, "--min-p": args.min_p != 0}
    given = [name for name, used in filters.items() if used]
    sampling = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
    )
    if given and args.temperature == 0:
        verb = "has" if len(given) == 1 else "have"
        raise UsageError(f"{', '.join(given)} {verb} no effect at temperature 0, which is greedy; add --temperature")
    return sampling


def _room(prompts: list[Prompt], config: LlamaConfig, new_tokens: int, max_len: int | None) -> int:
    """The ``max_len`` of every group: as asked, or what the longest prompt and its output need.

    Raises:
        PromptError: an empty prompt, or tokens that the model does not have.
        CacheOverflowError: a prompt that does not fit.
    """
    for row, prompt in enumerate(prompts):
        which = prompt_at(row, len(prompts))
        if not prompt.tokens:
            raise PromptError(f"{which} ({prompt.text!r}) is empty: it has no token; give some text to continue")
        if max(prompt.tokens) >= config.vocab_size:
            raise PromptError(
                f"{which} has token id {max(prompt.tokens)}, and this model's ids end at {config.vocab_size - 1}: "
                f"its tokenizer and its weights do not belong together"
            )
    lens = [len(prompt.tokens) for prompt in prompts]
    max_len = max_len or min(max(lens) + new_tokens, config.max_position_embeddings)
    check_fits(config, lens, max_len)
    return max_len


class _Screen:
    """Shows texts as they arrive: one prompt's token by token, several prompts' each when it and those before are done.

    Args:
        out: where to; None shows nothing.
        alone: there is one prompt in all.
        bare: leave out the prompts that head several texts.
    """

    def __init__(self, out: TextIO | None, *, alone: bool, bare: bool):
        self.out, self.alone, self.bare = out, alone, bare

    def show(self, prompts: list[Prompt], generation: TextGeneration) -> None:
        """Run a generation to its end, printing it."""
        shown = 0
        for _, text in generation:
            if self.alone:
                self._print(text)
                continue
            while shown < len(prompts) and generation.completions[shown].finish_reason:
                self._print_whole(prompts[shown], generation.completions[shown])
                shown += 1
        if self.alone:
            self._print("\n")
        else:
            for prompt, completion in zip(prompts[shown:], generation.completions[shown:], strict=True):
                self._print_whole(prompt, completion)

    def show_one(self, prompt: Prompt, completion: Completion) -> None:
        """Print a prompt that is done."""
        self._print_whole(prompt, completion)

    def _print_whole(self, prompt: Prompt, completion: Completion) -> None:
        failed = "" if completion.error is None else f"error: {completion.error}\n"
        self._print(f"{completion.text}\n" if self.bare else f"### {prompt.text}\n{completion.text}\n{failed}\n")

    def _print(self, text: str) -> None:
        if self.out is not None:
            print(text, end="", flush=True, file=self.out)


def _facts(
    args: argparse.Namespace,
    decoder: Decoder,
    max_len: int,
    groups: list[Group],
    limit: Bandwidth,
    cache: CompileCache,
    load_s: float,
    sampling: SamplingParams,
) -> dict[str, Any]:
    """Everything measured, as JSON. The first prompt's result is at the top level, all of them in ``completions``.

    Times and bytes are those of the groups as large as the first: the last may be smaller, and faster for it.
    """
    results = _results([one for group in groups for one in group.completions])
    prompts = [prompt.text for group in groups for prompt in group.prompts]
    batch = len(groups[0].prompts)
    alike = [group for group in groups if len(group.prompts) == batch]
    context = round(
        statistics.mean(one.prompt_tokens + len(one.token_ids) / 2 for group in alike for one in group.completions)
    )
    timings = [group.timing for group in alike]
    hlo_text = decoder.decode_program(batch, max_len, sampling.form).as_text()
    tpot_s = _median(timing.tpot_s for timing in timings)
    return {
        **results[0],
        "completions": [{"prompt": prompt, **result} for prompt, result in zip(prompts, results, strict=True)],
        "model": args.model,
        "dtype": decoder.dtype.name,
        "layers": args.layers,
        "batch": batch,
        "max_len": max_len,
        "context": context,
        "sampling": asdict(sampling),
        "load_s": load_s,
        "compile_s": decoder.compile_s,
        "compile_cache": cache.describe(),
        "ttft_s": _median(timing.ttft_s for timing in timings),
        "tpot_s": tpot_s,
        "tpot_samples_s": [sample for timing in timings for sample in timing.step_samples_s],
        "tokens_per_s": _median(timing.tokens_per_s for timing in timings),
        **step_facts(decoder, step_bytes(decoder, batch, context), tpot_s, limit, hlo_text),
        "versions": versions(),
        "kernels": kernel_facts(args.kernels),
        "device": device_facts(),
    }


def _results(completions: list[Completion]) -> list[dict[str, Any]]:
    """Each completion's JSON fields."""
    return [
        {
            "token_ids": one.token_ids,
            "logprobs": one.logprobs,
            "text": one.text,
            "finish_reason": one.finish_reason,
            **({} if one.error is None else {"error": one.error}),
            "prompt_tokens": one.prompt_tokens,
            "generated_tokens": len(one.token_ids),
        }
        for one in completions
    ]


def _many_facts(
    args: argparse.Namespace,
    decoder: Decoder,
    max_len: int,
    prompts: list[Prompt],
    many: ManyRun,
    cache: CompileCache,
    load_s: float,
    sampling: SamplingParams,
) -> dict[str, Any]:
    """The JSON of a run through the engine: as ``_facts``, with the engine's own measurements."""
    results = _results(many.completions)
    return {
        "completions": [{"prompt": one.text, **result} for one, result in zip(prompts, results, strict=True)],
        "model": args.model,
        "dtype": decoder.dtype.name,
        "quantization": decoder.quantization.to_json(),
        "kv_dtype": decoder.cache_dtype.name,
        "layers": args.layers,
        "batch": args.batch,
        "max_len": max_len,
        "sampling": asdict(sampling),
        "load_s": load_s,
        "compile_s": decoder.compile_s,
        "compile_cache": cache.describe(),
        **many.facts(),
        "tp": decoder.layout.tp,
        "mesh": dict(decoder.layout.mesh.shape),
        "versions": versions(),
        "kernels": kernel_facts(args.kernels),
        "device": device_facts(),
    }


def _median(values: Iterable[float | None]) -> float | None:
    """The median of what was measured, or None where nothing was."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silent(line: str) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
