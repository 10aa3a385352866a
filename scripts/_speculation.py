"""``--speculate`` for every command that decodes: its options, what they build, and what they report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax

from decode.decoder import Decoder
from decode.speculation.control import Tally
from decode.speculation.decoder import SpeculativeDecoder
from decode.speculation.draft import DraftModel
from decode.speculation.ngram import PromptLookup
from decode.speculation.proposer import MOST_PROPOSALS, Proposer, SpeculationError
from model.checkpoint.resolve import ACCEPTED, open_model
from model.config import LlamaConfig
from model.training.draft_vocabulary import read_vocabulary
from scripts._cli import DTYPES, UsageError, not_negative

DEFAULT_K = 4
NGRAM = "ngram"


def add_speculation_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup, *, repeat: bool = False) -> None:
    """--speculate, which may be given several times where ``repeat``, --k and --draft-dtype."""
    parser.add_argument(
        "--speculate",
        metavar="ngram|PATH",
        action="append" if repeat else "store",
        help="propose several tokens for each pass of the model: ngram, what followed the same tokens before; or a "
        f"draft model with the same vocabulary ({ACCEPTED}; see scripts.train_draft)" + ("; repeatable" * repeat),
    )
    parser.add_argument(
        "--k",
        type=not_negative,
        metavar="N",
        help=f"most proposals a pass, 1 to {MOST_PROPOSALS} (default {DEFAULT_K}); fewer or none where that is faster",
    )
    parser.add_argument("--draft-dtype", choices=list(DTYPES), help="of the draft model (default bf16)")


def check_speculation_options(speculate: str | Sequence[str] | None, k: int | None, draft_dtype: str | None) -> int:
    """k as asked or by default.

    Raises:
        UsageError: an option that does nothing. SpeculationError: k out of range.
    """
    asked = [speculate] if isinstance(speculate, str) else list(speculate or [])
    for name, value in (("--k", k), ("--draft-dtype", draft_dtype)):
        if value is not None and not asked:
            raise UsageError(f"{name} goes with --speculate, which says what proposes")
    if draft_dtype is not None and set(asked) == {NGRAM}:
        raise UsageError("--draft-dtype goes with a draft model: ngram has none")
    if k is not None and not 1 <= k <= MOST_PROPOSALS:
        raise SpeculationError(f"--k is {k}; a pass takes from 1 to {MOST_PROPOSALS} proposals")
    return DEFAULT_K if k is None else k


def check_draft(name: str, target: LlamaConfig) -> None:
    """Refuse a draft that does not fit before anything large is loaded."""
    if name != NGRAM:
        DraftModel.check_config(open_model(name).config, target)


def make_proposer(name: str, decoder: Decoder, draft_dtype: str | None) -> Proposer:
    """What ``--speculate`` names, on the decoder's mesh.

    Raises:
        SpeculationError: a draft of another vocabulary, or larger than the model.
    """
    return make_draft(name, decoder, draft_dtype) or PromptLookup()


def make_draft(name: str, decoder: Decoder, draft_dtype: str | None) -> DraftModel | None:
    """The draft that ``--speculate`` names, on the decoder's mesh; None for ngram. Raises as ``make_proposer``."""
    if name == NGRAM:
        return None
    model = open_model(name)
    DraftModel.check_config(model.config, decoder.config)
    dtype = DTYPES[draft_dtype or "bf16"]
    params = model.load_params(decoder.layout, dtype)
    draft = Decoder(
        model.config, params, decoder.layout, dtype, collectives=decoder.collectives, kernels=decoder.programs.kernels
    )
    jax.block_until_ready(draft.params)
    vocabulary = read_vocabulary(model.path, model.config.vocab_size) if model.path.is_dir() else None
    return DraftModel(draft, vocabulary)


def speculation_facts(speculative: SpeculativeDecoder, costs: dict[int, float], rows: int) -> dict[str, Any]:
    """JSON fields: what was proposed, what stood, and what it gained. ``costs`` are seconds a pass by proposals."""
    tally = speculative.tally
    return {
        "proposer": speculative.proposer.name,
        "k": speculative.k,
        **tally_facts(tally),
        "pass_ms": {str(k): cost * 1e3 for k, cost in sorted(costs.items())},
        "predicted_speed_up": tally.predicted_speed_up(costs),
        "measured_speed_up": tally.measured_speed_up(costs, rows),
    }


def tally_facts(tally: Tally) -> dict[str, Any]:
    return {
        "acceptance": tally.acceptance,
        "acceptance_by_position": tally.acceptance_by_position,
        "tokens_per_pass": tally.tokens_per_pass,
        "passes": {str(k): count for k, count in sorted(tally.passes.items())},
        "turned_off": tally.stops,
    }


def speculation_lines(facts: dict[str, Any]) -> list[str]:
    """The report of ``speculation_facts`` for people."""
    if facts["acceptance"] is None:
        return [f"speculate {facts['proposer']}, k up to {facts['k']}: nothing was proposed"]
    places = ", ".join("-" if one is None else f"{one:.0%}" for one in facts["acceptance_by_position"])
    passes = ", ".join(f"{count} of k = {k}" for k, count in facts["passes"].items())
    gain = facts["measured_speed_up"]
    told = "" if gain is None else f"{gain:.2f}x the speed of plain steps, predicted {facts['predicted_speed_up']:.2f}x"
    off = f"; turned off {facts['turned_off']} times, as it did not pay" if facts["turned_off"] else ""
    return [
        f"speculate {facts['proposer']}, k up to {facts['k']}: {facts['acceptance']:.0%} of proposals stood (by place "
        f"{places}), {facts['tokens_per_pass']:.2f} tokens a pass",
        f"          passes: {passes}; {told}{off}",
    ]
