"""Speculation gives what plain decoding gives: tokens, log-probabilities, stops, and the distribution of samples."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from scipy.stats import chisquare

from decode.decoder import Decoder, PromptError
from decode.sampling import SamplingParams
from decode.speculation.control import Controller
from decode.speculation.decoder import SpeculativeDecoder
from decode.speculation.draft import DraftModel
from decode.speculation.ngram import PromptLookup
from decode.speculation.proposer import Proposer, SpeculationError
from decode.step import Rows
from model.training.draft import cut_draft, draft_config
from tests.decode.running import Row, log_softmax, make_decoder, run, small_model
from tests.model.checkpoint_files import small_config

# K = 2: at tp = 3 positions are split three ways, which writes of several positions must follow.
CONFIG = small_config(vocab_size=61, num_layers=2, num_heads=4, num_kv_heads=2, tie_word_embeddings=True)
LISTED = np.arange(0, 61, 2).astype(np.int32)
# Rows that accept much, little and nothing: one that repeats itself, one short, one of another length.
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [3, 1, 4], [9] * 12]
N, K = 24, 3
TOLERANCE = 1e-5


@functools.cache
def target(tp: int) -> Decoder:
    return make_decoder(small_model(CONFIG), tp)


@functools.cache
def proposer(name: str, tp: int) -> Proposer:
    if name == "ngram":
        return PromptLookup(longest=4, shortest=1)
    decoder = target(tp)
    if name == "itself":
        return DraftModel(decoder, copies=False)
    config = draft_config(CONFIG, 1)
    params = dict(zip(decoder.programs.paths, decoder.params, strict=True))
    draft = Decoder(config, cut_draft(params, CONFIG, 1), decoder.layout, "float32")
    return DraftModel(draft, LISTED if name in ("cut", "alone") else None, copies=name != "alone")


@functools.cache
def speculative(name: str, tp: int, adaptive: bool = False, k: int = K) -> SpeculativeDecoder:
    return SpeculativeDecoder(target(tp), proposer(name, tp), k, adaptive=adaptive)


def check_same(found: Sequence[Row], expected: Sequence[Row]) -> None:
    assert [row.tokens for row in found] == [row.tokens for row in expected]
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=TOLERANCE)


@functools.cache
def plain(tp: int) -> list[Row]:
    return run(target(tp), PROMPTS, N)


@pytest.mark.parametrize(("name", "tp"), [("ngram", 1), ("cut", 1), ("ngram", 2), ("cut", 3)])
def test_greedy_text_is_that_of_plain_decoding(name: str, tp: int) -> None:
    one = speculative(name, tp)
    check_same(run(one, PROMPTS, N), plain(tp))
    assert 0 < one.tally.acceptance < 1  # something stood and something fell


def test_a_draft_that_is_the_target_is_always_right() -> None:
    one = speculative("itself", 1)
    check_same(run(one, PROMPTS, N), plain(1))
    assert one.tally.acceptance == 1
    # One token is prefill's. 23 are 5 whole passes and the rest of one.
    assert one.tally.row_passes == 3 * 6


def test_the_draft_has_seen_every_token_that_stood() -> None:
    """Its proposals after a pass whose proposals all stood are those of one that decoded the text by itself."""
    one = speculative("cut", 1)
    one.tally = type(one.tally)(K)
    run(one, PROMPTS, N)
    first = list(one.tally.looked), list(one.tally.stood)
    one.tally = type(one.tally)(K)
    run(one, PROMPTS, N, steps_per_dispatch=1)
    assert (one.tally.looked, one.tally.stood) == first


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_copies_where_the_text_repeats_itself(temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3)
    repeats, not_yet = [5, 6, 7, 5, 6, 7, 5, 6], [3, 1, 4, 20, 22, 8, 9, 2]
    copying, log_q = proposals("cut", [repeats, not_yet], sampling)
    alone, _ = proposals("alone", [repeats, not_yet], sampling)
    assert copying[0].tolist() == [7, 5, 6]
    assert copying[1].tolist() == alone[1].tolist()
    assert set(alone.ravel().tolist()) <= set(LISTED.tolist())  # 7 and 5 it cannot say itself
    if log_q is not None:
        certain = np.full((K, 61), -np.inf)
        certain[np.arange(K), [7, 5, 6]] = 0
        np.testing.assert_array_equal(log_q[0, :, :61], certain)
        np.testing.assert_allclose(np.exp(log_q[1]).sum(axis=-1), 1, rtol=1e-5)


def proposals(name: str, texts: list[list[int]], sampling: SamplingParams) -> tuple[np.ndarray, np.ndarray | None]:
    """(tokens [B, K], log_q) that a draft proposes after texts of one length, the last token of each the newest."""
    draft, at = proposer(name, 1), len(texts[0]) - 1
    form, values = sampling.form, target(1).step_args((), sampling)[1]

    def propose(leaves: Any, state: Any, rows: Rows, history: jax.Array) -> Any:
        return draft.propose(leaves, state, rows, history, K, values, form)[1]

    whole = PartitionSpec()
    mapped = jax.shard_map(
        propose,
        mesh=target(1).layout.mesh,
        in_specs=(draft.leaf_specs(), draft.state_specs(), whole, whole),
        out_specs=whole,
        check_vma=False,
    )
    number = np.full(len(texts), at, np.int32)
    rows = Rows(np.array([text[-1] for text in texts], np.int32), number, number + 10, number < 0, None)
    history = np.pad(np.array(texts, np.int32), ((0, 0), (0, 8)))
    state = draft.begin([text[:-1] for text in texts], at + 8)
    found = jax.jit(mapped)(draft.leaves(), state, rows, history)
    return np.asarray(found.tokens), None if found.log_q is None else np.asarray(found.log_q)


@pytest.mark.parametrize("name", ["ngram", "cut"])
def test_stop_tokens_and_ends_are_met_inside_a_pass(name: str) -> None:
    stops = [plain(1)[0].tokens[9], plain(1)[2].tokens[4]]
    expected = run(target(1), PROMPTS, N, stop_token_ids=stops)
    assert len(expected[0].tokens) <= 10
    check_same(run(speculative(name, 1), PROMPTS, N, stop_token_ids=stops), expected)
    for new in (1, 2, 5):
        # The size of the cache stays, and with it the compiled programs.
        expected = run(target(1), PROMPTS, new, max_len=36)
        check_same(run(speculative(name, 1), PROMPTS, new, max_len=36), expected)


def test_repetition_penalty_counts_the_proposals_before() -> None:
    sampling = SamplingParams(repetition_penalty=1.4)
    one = speculative("ngram", 1)
    check_same(run(one, PROMPTS, N, sampling), run(target(1), PROMPTS, N, sampling))


def test_it_turns_itself_off_and_on_and_the_text_stays() -> None:
    one = speculative("ngram", 1, adaptive=True)
    dear, cheap = {0: 1.0, 1: 1.4, 3: 1.5}, {0: 1.0, 1: 1.01, 3: 1.02}
    for costs in (dear, cheap):
        one._costs[3, 36, SamplingParams().form] = costs
        one.tally = type(one.tally)(K)
        check_same(run(one, PROMPTS, N, max_len=36, steps_per_dispatch=2), plain(1))
        assert (one.tally.stops > 0) == (costs is dear)
        assert sum(one.tally.passes.values()) > 0
        assert one.tally.tokens == 3 * (N - 1)


def test_it_comes_back_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.speculation.decoder.Controller", functools.partial(Controller, pause=2))
    one = speculative("ngram", 1, adaptive=True)
    # A first refusal is enough to lose.
    one._costs[3, 36, SamplingParams().form] = {0: 1.0, 1: 1.67, 3: 2.45}
    one.tally = type(one.tally)(K)
    check_same(run(one, PROMPTS, N, max_len=36, steps_per_dispatch=1), plain(1))
    assert one.tally.stops > 1
    assert one.tally.tokens == 3 * (N - 1)


@pytest.mark.parametrize("name", ["ngram", "cut"])
def test_samples_have_the_targets_distribution(name: str) -> None:
    """The second and third token of many seeds, against the exact distribution from the model's logits."""
    decoder, prompt, size = target(1), [5, 6, 7, 5, 6, 7, 5, 6], 3
    one = speculative(name, 1)
    options = {"temperature": 0.9, "top_k": size, "top_p": 0.97}
    found = [tuple(run(one, [prompt], 3, SamplingParams(seed=seed, **options))[0].tokens) for seed in range(300)]
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        texts = list(exact)
        logits = decoder.logits([[*prompt, *text] for text in texts])[:, -1]
        for text, row in zip(texts, logits, strict=True):
            p = np.exp(log_softmax(row[None] / 0.9)[0])
            order = np.argsort(-p)[:size]
            p_kept = p[order] / p[order].sum()
            inside = np.cumsum(p_kept) - p_kept < 0.97
            p_kept = p_kept * inside / (p_kept * inside).sum()
            longer |= {(*text, int(token)): exact[text] * chance for token, chance in zip(order, p_kept, strict=True)}
        exact = {text: chance for text, chance in longer.items() if chance > 0}
    assert set(found) <= set(exact)
    for place in (1, 2):  # the first token is prefill's
        chances = np.zeros(61)
        for text, chance in exact.items():
            chances[text[place]] += chance
        counts = np.bincount([text[place] for text in found], minlength=61)
        assert chisquare(counts[chances > 0], chances[chances > 0] / chances.sum() * len(found)).pvalue > 1e-3


def test_what_cannot_work_is_refused() -> None:
    decoder = target(1)
    for k in (0, 16):
        with pytest.raises(SpeculationError, match="from 1 to 15"):
            SpeculativeDecoder(decoder, PromptLookup(), k)
    with pytest.raises(SpeculationError, match="propose fewer"):
        speculative("ngram", 1, k=12).generate([[1]], max_new_tokens=4, max_len=8)
    other = make_decoder(small_model(small_config(vocab_size=64, num_layers=1)))
    with pytest.raises(SpeculationError, match="64 tokens and the model one of 61"):
        SpeculativeDecoder(decoder, DraftModel(other), 2)
    with pytest.raises(SpeculationError, match="more than"):
        SpeculativeDecoder(
            Decoder(draft_config(CONFIG, 1), dict(_draft_params()), decoder.layout, "float32"), DraftModel(decoder), 2
        )
    with pytest.raises(PromptError, match="from 1 to 16"):
        speculative("ngram", 1).generate([[1]], max_new_tokens=4, steps_per_dispatch=17)
    with pytest.raises(PromptError, match="at least 1"):
        speculative("ngram", 1).generate([[1]], max_new_tokens=0)


def _draft_params() -> list[tuple[tuple[str | int, ...], object]]:
    decoder = target(1)
    return list(cut_draft(dict(zip(decoder.programs.paths, decoder.params, strict=True)), CONFIG, 1).items())
