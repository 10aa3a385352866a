"""Times plain decoding and speculation side by side on four kinds of prompt: chat, summary, code edit, story.

    python -m scripts.bench_speculation --speculate ngram --speculate draft-demo --k 4

Greedy, one request at a time, or with ``--concurrency`` so many through the batching engine, in rounds that alternate
the modes, so that a machine whose speed drifts slows them alike. Each mode's text is compared with plain decoding's.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.decoder import Decoder
from decode.speculation.control import Tally
from decode.speculation.decoder import SpeculativeDecoder
from decode.speculation.draft import DraftModel
from decode.text import Generator, TextGeneration
from model.checkpoint.resolve import ACCEPTED, open_model
from model.config import LlamaConfig
from model.tokenizer import Tokenizer
from model.wording import number_of
from roofline.case import Case
from roofline.chips import get_chip
from roofline.speculation import expected_tokens, predict
from scripts._cli import (
    DTYPES,
    UsageError,
    add_device_options,
    add_kernels_option,
    check_writable,
    chosen_kernels,
    device_facts,
    hand_out,
    integers,
    kernel_facts,
    positive,
    run_command,
    set_up,
    versions,
)
from scripts._progress import counted
from scripts._speculation import (
    NGRAM,
    add_speculation_options,
    check_draft,
    check_speculation_options,
    make_draft,
    make_proposer,
    tally_facts,
)
from scripts._speculation_load import PLAIN, measure, render
from scripts._speculation_prompts import PROMPTS
from scripts._table import framed, ranged
from sharding.layout import Layout
from sharding.mesh import make_mesh
from sharding.self_check import check_mesh

ELSEWHERE = "h100"
"""The chip that a prediction is made for beside this machine."""

HEAD = ["prompt", "mode", "tokens/s", "gain", "predicted", "accepted", "by place", "tokens/pass", ELSEWHERE, "text"]
COLUMNS = f"""\
tokens/s     decoded tokens a second after the first, median over the rounds, and their range
gain         that over plain decoding's of the same round, median
predicted    the gain by the closed form of roofline.speculation: from the share of proposals that stood, how many
             passes ran with how many, and what a pass of each kind takes here
accepted     proposals that stood, of those whose predecessors stood; by place: first, second...
tokens/pass  tokens that a pass of the model gave, plain steps among the passes
{ELSEWHERE}         the gain predicted there from the same acceptance, in bf16, with the best k up to --k
text         same: token for token that of plain decoding; else the token at which it left it"""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_speculation", description="Time speculation against plain decoding."
    )
    parser.add_argument("--model", default="demo", help=f"{ACCEPTED}. Default: demo")
    add_speculation_options(parser, repeat=True)
    parser.add_argument("--dtype", choices=list(DTYPES), default="f32", help="of the model (default f32)")
    parser.add_argument("--tp", type=positive, default=1, metavar="N", help="tensor-parallel devices (default 1)")
    add_device_options(parser)
    add_kernels_option(parser)
    parser.add_argument(
        "--max-new-tokens", type=positive, default=160, metavar="N", help="tokens of an answer (default 160)"
    )
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="samples of each (default 3)")
    parser.add_argument(
        "--concurrency",
        type=integers,
        metavar="LIST",
        help="in place of one request alone: so many at once through the batching engine, such as 1,2,4,8",
    )
    parser.add_argument("--prompts", metavar="LIST", help=f"some of {','.join(PROMPTS)} (default all)")
    parser.add_argument("--json", metavar="PATH", help="write every sample; - is standard output")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    return run_command(lambda: bench(args))


@dataclass
class Mode:
    """One way of decoding, and what was measured of it for each kind of prompt."""

    name: str
    generator: Generator
    rates: dict[str, list[float]] = field(default_factory=dict)
    tallies: dict[str, Tally] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    costs: dict[str, dict[int, float]] = field(default_factory=dict)


def bench(args: argparse.Namespace) -> None:
    """The command: raises ``scripts._cli.USER_ERRORS`` for what the user can mend."""
    check_writable(args.json)
    proposers = args.speculate or [NGRAM]
    k = check_speculation_options(proposers, args.k, args.draft_dtype)
    kinds = args.prompts.split(",") if args.prompts else list(PROMPTS)
    if unknown := [kind for kind in kinds if kind not in PROMPTS]:
        raise UsageError(f"--prompts has {', '.join(unknown)}; there are {', '.join(PROMPTS)}")
    cache = set_up(args.cpu_devices, spare=args.tp)
    model = open_model(args.model)
    for name in proposers:
        check_draft(name, model.config)
    layout = Layout(make_mesh(args.tp, model.config.num_kv_heads))
    check_mesh(layout)
    tokenizer = model.load_tokenizer()
    dtype = DTYPES[args.dtype]
    kernels = chosen_kernels(args.kernels)
    decoder = Decoder(model.config, model.load_params(layout, dtype), layout, dtype, kernels=kernels)
    run = {
        "model": args.model,
        "dtype": dtype,
        "tp": args.tp,
        "k": k,
        "max_new_tokens": args.max_new_tokens,
        "rounds": args.rounds,
        "compile_cache": cache.describe(),
        "versions": versions(),
        "kernels": kernel_facts(args.kernels),
        "device": device_facts(),
    }
    if args.concurrency:
        _bench_load(args, decoder, tokenizer, kinds, proposers, run)
        return
    modes = [Mode(PLAIN, decoder)]
    for name in proposers:
        modes.append(Mode(name, SpeculativeDecoder(decoder, make_proposer(name, decoder, args.draft_dtype), k)))
    prompts = {kind: _prompt(tokenizer, PROMPTS[kind]) for kind in kinds}
    # One size for all: a program is compiled for the cache's. What is timed begins after the first token.
    new_tokens, max_len = _lengths(args.max_new_tokens, list(prompts.values()), [model.config], least=2)
    runs = list(itertools.product(prompts.items(), range(args.rounds + 1), modes))
    for (kind, prompt), turn, mode in counted(runs, "generations"):
        _sample(mode, kind, prompt, tokenizer, new_tokens, max_len, keep=turn > 0)
    rows = [_row(mode, modes[0], kind, model.config) for kind in kinds for mode in modes]
    lines = framed([HEAD, *map(_cells, rows)])
    run["max_new_tokens"] = new_tokens
    hand_out("\n".join([*_title(run), "", *lines, "", COLUMNS]), {**run, "rows": rows}, args.json)


def _bench_load(
    args: argparse.Namespace,
    decoder: Decoder,
    tokenizer: Tokenizer,
    kinds: Sequence[str],
    proposers: Sequence[str],
    run: dict[str, Any],
) -> None:
    """The same with many requests at once, each of which opens with a number of its own: else all would go alike."""
    levels = sorted(args.concurrency)
    prompts = {
        kind: [_prompt(tokenizer, f"{number}. {PROMPTS[kind]}") for number in range(1, levels[-1] + 1)]
        for kind in kinds
    }
    modes = {name: make_draft(name, decoder, args.draft_dtype) for name in proposers}
    configs = [decoder.config, *(draft.decoder.config for draft in modes.values() if draft is not None)]
    new_tokens, max_len = _lengths(args.max_new_tokens, list(itertools.chain(*prompts.values())), configs, least=1)
    run["max_new_tokens"] = new_tokens
    rows = measure(
        decoder,
        modes,
        prompts,
        levels,
        k=run["k"],
        new_tokens=new_tokens,
        max_len=max_len,
        rounds=args.rounds,
    )
    hand_out("\n".join([*_title(run), "", *render(rows)]), {**run, "rows": rows}, args.json)


def _lengths(
    asked: int, prompts: Sequence[list[int]], configs: Sequence[LlamaConfig], *, least: int
) -> tuple[int, int]:
    """Tokens of an answer, as many as are asked for and fit, and positions of the longest prompt with them.

    Raises:
        UsageError: fewer than ``least`` are asked for, or fit.
    """
    longest, most = max(map(len, prompts)), min(config.max_position_embeddings for config in configs)
    if asked < least:
        raise UsageError(f"--max-new-tokens is {asked}; it must be at least {least} here, as the first is not timed")
    if most - longest < least:
        raise UsageError(
            f"the longest prompt has {number_of(longest, 'token')}, and there are {most} positions for it and its "
            f"answer: choose shorter ones with --prompts, or another model"
        )
    new_tokens = min(asked, most - longest)
    return new_tokens, longest + new_tokens


def _prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    if not tokenizer.has_chat_template:
        return tokenizer.encode(text)
    return tokenizer.encode_chat([{"role": "user", "content": text}])


def _sample(
    mode: Mode, kind: str, prompt: list[int], tokenizer: Tokenizer, new_tokens: int, max_len: int, *, keep: bool
) -> None:
    """One generation; ``keep`` is False for the first, which warms up."""
    speculative = mode.generator if isinstance(mode.generator, SpeculativeDecoder) else None
    if speculative:
        speculative.tally = Tally(speculative.k)
    generation = TextGeneration(mode.generator, tokenizer, [prompt], max_new_tokens=new_tokens, max_len=max_len)
    completion = generation.run()[0]
    mode.tokens[kind] = completion.token_ids
    if speculative:
        mode.tallies[kind] = speculative.tally
        mode.costs[kind] = speculative.costs(1, max_len)
    taken = generation.timing.dispatches
    if not taken:
        raise UsageError(f"the answer to the {kind} prompt ends with its first token, and no later one can be timed")
    rate = sum(tokens for *_, tokens in taken) / sum(seconds for _, seconds, _ in taken)
    if keep:
        mode.rates.setdefault(kind, []).append(rate)


def _row(mode: Mode, plain: Mode, kind: str, target: LlamaConfig) -> dict[str, Any]:
    """One line of the table as JSON."""
    gains = [mine / base for mine, base in zip(mode.rates[kind], plain.rates[kind], strict=True)]
    row: dict[str, Any] = {
        "prompt": kind,
        "mode": mode.name,
        "tokens": len(mode.tokens[kind]),
        "tokens_per_s": statistics.median(mode.rates[kind]),
        "samples_tokens_per_s": mode.rates[kind],
        "gain": statistics.median(gains),
    }
    if mode is plain:
        return row
    pairs = zip(mode.tokens[kind], plain.tokens[kind], strict=False)
    parted = next((place for place, (mine, base) in enumerate(pairs) if mine != base), None)
    tally, costs = mode.tallies[kind], mode.costs[kind]
    return {
        **row,
        **tally_facts(tally),
        "pass_ms": {str(k): cost * 1e3 for k, cost in sorted(costs.items())},
        "predicted": tally.predicted_speed_up(costs),
        "elsewhere": elsewhere(mode.generator, tally, target),
        "left_plain_at": parted,
    }


def elsewhere(speculative: Any, tally: Tally, target: LlamaConfig) -> float | None:
    """The gain predicted on ``ELSEWHERE`` in bf16 from a tally's acceptance, and its share of passes with proposals.

    With the best k up to the most that was allowed; 1 where none gains. A cut head counts as the draft reading its
    share of the vocabulary.
    """
    if tally.acceptance is None:
        return None
    chip, context = get_chip(ELSEWHERE), 256
    draft_s_share, draft_case = 1.0, None
    if isinstance(speculative.proposer, DraftModel):
        draft = speculative.proposer.decoder.config
        draft_case = Case(draft, context=context)
        unread = (draft.vocab_size - speculative.proposer.listed) * draft.hidden_size
        read = draft.parameter_count() - (0 if draft.tie_word_embeddings else draft.vocab_size * draft.hidden_size)
        draft_s_share = 1 - unread / read
    with_some = sum(count for k, count in tally.passes.items() if k)
    without = tally.passes.get(0, 0) if speculative.proposer.name == NGRAM else 0
    best = 1.0
    for k in speculative.choices:
        found = predict(Case(target, context=context), chip, tally.acceptance, k, draft_case)
        tokens = with_some * expected_tokens(tally.acceptance, k) + without
        time = with_some * (found.verify_s + k * found.draft_s * draft_s_share) + without * found.plain_s
        best = max(best, tokens * found.plain_s / time)
    return best


def _title(run: Mapping[str, Any]) -> list[str]:
    """What was run."""
    device = run["device"]
    return [
        f"{run['model']} in {run['dtype']}, tp={run['tp']}, k up to {run['k']}, "
        f"{number_of(run['max_new_tokens'], 'token')} at most, {number_of(run['rounds'], 'round')};",
        f"{device['kind']}, {device['cpu_cores']} CPU cores, {run['kernels']} kernels, jax {run['versions']['jax']}",
    ]


def _cells(row: Mapping[str, Any]) -> list[str]:
    cells = [
        row["prompt"],
        row["mode"],
        ranged(row["tokens_per_s"], row["samples_tokens_per_s"], 1),
        f"{row['gain']:.2f}",
    ]
    if "predicted" not in row:
        return cells + ["-"] * (len(HEAD) - len(cells))
    places = " ".join("-" if one is None else f"{one:.0%}" for one in row["acceptance_by_position"])
    numbers = [row["predicted"], row["elsewhere"]]
    predicted, there = ("-" if one is None else f"{one:.2f}" for one in numbers)
    accepted = "-" if row["acceptance"] is None else f"{row['acceptance']:.0%}"
    per_pass = "-" if row["tokens_per_pass"] is None else f"{row['tokens_per_pass']:.2f}"
    same = "same" if row["left_plain_at"] is None else str(row["left_plain_at"])
    return [*cells, predicted, accepted, places, per_pass, there, same]


if __name__ == "__main__":
    sys.exit(main())
