"""Generation: where rows end, how tokens arrive, and what is refused.

What to generate is worked out one token at a time from the logits of the whole text so far, which shares no step,
loop or cache with generation.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decode.cache import PREFILL_CHUNK, UNROLLED_ROWS, CacheOverflowError
from decode.decoder import Arrival, Decoder, NumericsError, PromptError
from decode.sampling import SamplingParams
from decode.step import MAX_STEPS
from tests.decode.running import Row, make_decoder, run, small_model, some_tokens
from tests.model.checkpoint_files import small_config

pytestmark = pytest.mark.xdist_group("decoder")  # one worker compiles each program once

LIMIT = 64
SMALL = small_config(vocab_size=61, max_position_embeddings=LIMIT)
LONG = replace(SMALL, max_position_embeddings=4 * PREFILL_CHUNK)
PROMPTS = [some_tokens(SMALL, length, seed) for seed, length in enumerate((5, 17, 1))]
NEW = 20


@functools.cache
def decoder(tp: int = 1, data: int = 1, config: Any = SMALL) -> Decoder:
    return make_decoder(small_model(config), tp, data=data)


def expected_row(prompt: Sequence[int], new_tokens: int = NEW, penalty: float = 1.0) -> Row:
    """Greedy tokens and their log-probabilities."""
    row, text = Row([], []), list(prompt)
    for _ in range(new_tokens):
        logits = decoder().logits([text])[0, -1].astype(np.float64)
        scores = logits.copy()
        seen = sorted(set(text))
        scores[seen] = np.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
        token = int(scores.argmax())
        row.tokens.append(token)
        row.logprobs.append(float(logits[token] - np.logaddexp.reduce(logits)))
        text.append(token)
    return row


@functools.cache
def expected() -> list[Row]:
    return [expected_row(prompt) for prompt in PROMPTS]


def check(found: list[Row], wanted: list[Row]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def up_to(row: Row, count: int) -> Row:
    return Row(row.tokens[:count], row.logprobs[:count])


def stopped(row: Row, *stops: int) -> Row:
    """The row as far as the first stop token, which is part of it."""
    ends = [place + 1 for place, token in enumerate(row.tokens) if token in stops]
    return up_to(row, min(ends, default=len(row.tokens)))


# --- what is generated ---


@pytest.mark.parametrize(("tp", "data"), [(1, 1), (2, 1), (6, 1), (2, 3)])
def test_rows_of_a_batch_equal_repeated_full_passes(tp: int, data: int) -> None:
    """Prompts of 5, 17 and 1 tokens; at tp = 2 positions are split, at 6 heads too, and the rows over data = 3."""
    check(run(decoder(tp, data), PROMPTS, NEW, max_len=LIMIT), expected())


@pytest.mark.parametrize("steps", [1, 5, MAX_STEPS, None])
@pytest.mark.parametrize("sampling", [None, SamplingParams(1.5, seed=3)])
def test_steps_per_dispatch_do_not_change_the_text(steps: int | None, sampling: SamplingParams | None) -> None:
    found = run(decoder(), PROMPTS, NEW, sampling, max_len=LIMIT, steps_per_dispatch=steps)
    check(found, run(decoder(), PROMPTS, NEW, sampling, max_len=LIMIT, steps_per_dispatch=3))
    if sampling is None:
        check(found, expected())


@pytest.mark.parametrize("tp", [1, 2])
def test_the_repetition_penalty_sees_prompt_and_output(tp: int) -> None:
    penalty = 1.8
    found = run(decoder(tp), PROMPTS, NEW, SamplingParams(repetition_penalty=penalty), max_len=LIMIT)
    wanted = [expected_row(prompt, NEW, penalty) for prompt in PROMPTS]
    assert [row.tokens for row in wanted] != [row.tokens for row in expected()]
    check(found, wanted)


def test_seeds() -> None:
    def tokens(seed: int) -> list[list[int]]:
        sampling = SamplingParams(1.5, seed=seed)
        return [row.tokens for row in run(decoder(), PROMPTS, NEW, sampling, max_len=LIMIT)]

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)


def test_a_sampled_text_goes_on_the_same_from_any_point() -> None:
    """Prefill and decode draw the token at a position alike: noise belongs to the position, not to the step."""
    sampling = SamplingParams(1.5, seed=3)
    whole = run(decoder(), PROMPTS, NEW, sampling, max_len=LIMIT)
    for cut in (1, 2, 7):
        longer = [prompt + row.tokens[:cut] for prompt, row in zip(PROMPTS, whole, strict=True)]
        rest = run(decoder(), longer, NEW - cut, sampling, max_len=LIMIT)
        check(rest, [Row(row.tokens[cut:], row.logprobs[cut:]) for row in whole])


def test_many_rows_equal_rows_alone() -> None:
    """More rows than are written one by one, some ending long before others."""
    prompts = [some_tokens(SMALL, 3 + 5 * row, row) for row in range(UNROLLED_ROWS + 1)]
    sampling = SamplingParams(0.9, top_k=20, seed=8)
    together = run(decoder(), prompts, 40, sampling, max_len=LIMIT)
    assert len({len(row.tokens) for row in together}) > 3  # the longer prompts reach max_len
    for prompt, row in list(zip(prompts, together, strict=True))[::4]:
        check([row], run(decoder(), [prompt], 40, sampling, max_len=LIMIT))


def test_a_prompt_of_several_pieces() -> None:
    """Beside a short row, whose last hidden state waits for the long one's pieces."""
    long, short = some_tokens(LONG, PREFILL_CHUNK + 37, 1), some_tokens(LONG, 9, 2)
    one = decoder(2, config=LONG)
    together = run(one, [long, short], 4, max_len=600)
    text = list(long)
    for token in together[0].tokens:
        assert token == one.logits([text])[0, -1].argmax()
        text.append(token)
    check(together[1:], [expected_row(short, 4)])


def test_scanned_layers_generate_the_same() -> None:
    scanned = make_decoder(small_model(SMALL), 2, layers="scan")
    check(run(scanned, PROMPTS, NEW, max_len=LIMIT), expected())


# --- where rows end ---


def test_each_row_ends_at_its_own_stop_token() -> None:
    first, second, third = expected()
    stops = (first.tokens[3], second.tokens[7])
    found = run(decoder(), PROMPTS, NEW, max_len=LIMIT, stop_token_ids=stops)
    check(found, [stopped(row, *stops) for row in (first, second, third)])
    assert len({len(row.tokens) for row in found}) > 1


def test_a_stop_token_may_come_first() -> None:
    first, second, third = expected()
    stop = second.tokens[0]
    found = run(decoder(), PROMPTS, NEW, max_len=LIMIT, stop_token_ids=[stop])
    check(found, [stopped(row, stop) for row in (first, second, third)])
    alone = run(decoder(), PROMPTS[1:2], NEW, max_len=LIMIT, stop_token_ids=[stop])
    check(alone, [up_to(second, 1)])


@pytest.mark.parametrize("count", [1, 2, NEW])
def test_max_new_tokens(count: int) -> None:
    found = run(decoder(), PROMPTS, count, max_len=LIMIT)
    check(found, [up_to(row, count) for row in expected()])


def test_max_len_counts_prompt_and_output() -> None:
    """The row of 17 has room for 16 more in 33; the others go on."""
    found = run(decoder(), PROMPTS, NEW, max_len=33)
    check(found, [expected()[0], up_to(expected()[1], 16), expected()[2]])


def test_the_models_own_limit_ends_a_row() -> None:
    prompt = some_tokens(SMALL, LIMIT - 2)
    found = run(decoder(), [prompt], 1000)
    assert len(found[0].tokens) == 2
    check(found, [expected_row(prompt, 2)])
    assert len(run(decoder(), [some_tokens(SMALL, 1)], 1000, max_len=LIMIT)[0].tokens) == LIMIT - 1


# --- how tokens arrive ---


def test_arrivals() -> None:
    stop = expected()[0].tokens[3]
    ends = [len(stopped(row, stop).tokens) for row in expected()]
    options: dict[str, Any] = {"max_len": LIMIT, "stop_token_ids": [stop], "steps_per_dispatch": 2}
    arrivals = list(decoder().generate(PROMPTS, max_new_tokens=NEW, **options))
    assert [len(tokens) for tokens in arrivals[0].tokens] == [1, 1, 1]  # the first comes from prefill, at once
    assert arrivals[0].steps == 0
    assert sum(arrival.steps for arrival in arrivals) == max(ends) - 1
    assert all(1 <= arrival.steps <= 2 for arrival in arrivals[1:])
    assert [arrival.at for arrival in arrivals] == sorted(arrival.at for arrival in arrivals)
    for arrival in arrivals:
        assert [len(row) for row in arrival.logprobs] == [len(row) for row in arrival.tokens]
        assert all(type(token) is int for row in arrival.tokens for token in row)
    # A row that has ended sends nothing more.
    early = ends.index(min(ends))
    sent = [len(arrival.tokens[early]) for arrival in arrivals]
    assert sum(sent) == min(ends)
    assert sent[-1] == 0


def test_closing_early_leaves_the_decoder_usable() -> None:
    arrivals = decoder().generate(PROMPTS, max_new_tokens=NEW, max_len=LIMIT, steps_per_dispatch=1)
    assert isinstance(next(arrivals), Arrival)
    next(arrivals)
    arrivals.close()  # type: ignore[attr-defined]
    with pytest.raises(StopIteration):
        next(arrivals)
    check(run(decoder(), PROMPTS, NEW, max_len=LIMIT), expected())


def test_two_generations_may_take_turns() -> None:
    """Nothing of one lives in the decoder: each has a cache of its own."""
    options: dict[str, Any] = {"max_new_tokens": NEW, "max_len": LIMIT, "steps_per_dispatch": 1}
    first, second = decoder().generate(PROMPTS, **options), decoder().generate(PROMPTS[::-1], **options)
    rows: list[list[int]] = [[], []]
    for one, other in zip(first, second, strict=True):
        rows[0] += one.tokens[0]
        rows[1] += other.tokens[2]
    assert rows == [expected()[0].tokens] * 2


def test_after_prepare_nothing_compiles(caplog: pytest.LogCaptureFixture) -> None:
    """The time to the first token holds no compilation, and no program changes with the values it is given."""
    one = make_decoder(small_model(SMALL), 2)
    sampling = SamplingParams(1.0, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
    one.prepare([7, 12, 1, 1, 2], 40, sampling)  # a batch that no other test has
    assert one.compile_s > 0
    with jax.log_compiles():
        prompts = [some_tokens(SMALL, length, length) for length in (1, 2, 3, 8, 16)]
        run(one, prompts, 9, sampling, max_len=40, stop_token_ids=[3])
        other = SamplingParams(0.5, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=2.0, seed=2**63)
        run(one, prompts[::-1], 20, other, max_len=33, steps_per_dispatch=3)
    compiled = [record.getMessage()[:60] for record in caplog.records]
    assert [message for message in compiled if message.startswith("Compiling")] == []


# --- logits ---


def test_logits_are_of_real_tokens_and_positions_only() -> None:
    text = [some_tokens(SMALL, 19, 4)]
    found = decoder(2).logits(text)  # 61 tokens are padded to 62, 19 positions to 32
    assert found.shape == (1, 19, SMALL.vocab_size)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, decoder().logits(text), atol=1e-4)
    np.testing.assert_allclose(found[:, :7], decoder().logits([text[0][:7]]), atol=1e-4)


def test_logits_refuse_rows_of_different_lengths() -> None:
    with pytest.raises(PromptError, match=r"rows of one length, got lengths \[2, 3\]"):
        decoder().logits([[1, 2], [1, 2, 3]])
    with pytest.raises(CacheOverflowError, match=f"{LIMIT + 1} tokens; this model allows {LIMIT}"):
        decoder().logits([some_tokens(SMALL, LIMIT + 1)])


# --- bad input ---


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ([], {}, PromptError, "no prompt given"),
        ([[1], []], {}, PromptError, "prompt 2 of 2 is empty; give at least one token"),
        ([[1, 61]], {}, PromptError, "the prompt has token id 61 at place 1; .* from 0 to 60"),
        ([[1], [2, 3, -1]], {}, PromptError, "prompt 2 of 2 has token id -1 at place 2"),
        ([[1]], {"max_new_tokens": 0}, PromptError, "max_new_tokens is 0; it must be at least 1"),
        ([[1]], {"steps_per_dispatch": 0}, PromptError, f"steps_per_dispatch is 0; .* from 1 to {MAX_STEPS}"),
        ([[1]], {"steps_per_dispatch": MAX_STEPS + 1}, PromptError, f"from 1 to {MAX_STEPS}"),
        ([[1]], {"stop_token_ids": range(17)}, PromptError, "17 stop tokens given; at most 16"),
        ([[1] * 9, [1] * 32], {"max_len": 32}, CacheOverflowError, "prompt 2 of 2 has 32 tokens.* max_len 32"),
        ([[1] * LIMIT], {}, CacheOverflowError, f"the prompt has {LIMIT} tokens"),
        ([[1] * (LIMIT + 1)], {}, CacheOverflowError, f"the prompt has {LIMIT + 1} tokens"),
        ([[1]], {"max_len": LIMIT + 1}, CacheOverflowError, f"max_len {LIMIT + 1} .* {LIMIT} positions"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    prompts: list[list[int]], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """On the call itself: an iterator that was never advanced would hide it."""
    with pytest.raises(error, match=message):
        decoder().generate(prompts, **{"max_new_tokens": NEW, **options})


def test_as_many_stop_tokens_as_there_are_slots() -> None:
    unused = [token for token in range(SMALL.vocab_size) if token not in expected()[0].tokens][:16]
    check(run(decoder(), PROMPTS[:1], NEW, max_len=LIMIT, stop_token_ids=unused), expected()[:1])


def test_prompts_that_the_data_axis_does_not_divide() -> None:
    with pytest.raises(PromptError, match="2 prompts do not divide over the data axis of 3"):
        decoder(2, 3).generate(PROMPTS[:2], max_new_tokens=1)


@contextlib.contextmanager
def nan_in(one: Decoder, path: tuple[str | int, ...], row: int | slice = slice(None)) -> Iterator[None]:
    """A decoder with NaN in one parameter, or in one row of it, for a while."""
    at = one.programs.paths.index(path)
    sound = one.params[at]
    value = np.array(sound)
    value[row] = np.nan
    one.params[at] = jax.device_put(value, sound.sharding)
    yield
    one.params[at] = sound


@pytest.mark.parametrize("tp", [1, 2])
def test_nan_weights_are_reported(tp: int) -> None:
    one = decoder(tp)
    with (
        nan_in(one, ("layers", 1, "mlp", "down", "weight")),
        pytest.raises(NumericsError, match="NaN or infinite logits for prompt 1 of 3; check the checkpoint"),
    ):
        run(one, PROMPTS, NEW, max_len=LIMIT)
    check(run(one, PROMPTS, NEW, max_len=LIMIT), expected())


def test_a_nan_that_turns_up_later_is_reported_for_its_row() -> None:
    """The embedding of a token that one row alone generates. What came before is delivered."""
    whole = [row.tokens for row in expected()]
    places = [(row, place) for row in range(3) for place in range(1, NEW - 1)]

    def alone(row: int, place: int) -> bool:
        others = [*PROMPTS, *(tokens for other, tokens in enumerate(whole) if other != row)]
        token = whole[row][place]
        return token not in whole[row][:place] and all(token not in tokens for tokens in others)

    row, place = next(at for at in places if alone(*at))
    with nan_in(decoder(), ("embed", "weight"), whole[row][place]):
        arrivals = decoder().generate(PROMPTS, max_new_tokens=NEW, max_len=LIMIT, steps_per_dispatch=1)
        found = [next(arrivals).tokens[row] for _ in range(place + 1)]
        assert found == [[token] for token in whole[row][: place + 1]]
        with pytest.raises(NumericsError, match=f"prompt {row + 1} of 3"):
            next(arrivals)


def test_bf16_generates_with_a_bf16_cache() -> None:
    one = make_decoder(small_model(SMALL), dtype="bfloat16")
    assert one.make_cache(1, 20).keys[0].dtype == jnp.uint16
    found = run(one, PROMPTS, NEW, max_len=LIMIT)
    # bf16 may choose another token where two are close; each choice is still near the best in float32.
    for prompt, row in zip(PROMPTS, found, strict=True):
        logits = decoder().logits([prompt + row.tokens])[0, len(prompt) - 1 : -1]
        taken = np.take_along_axis(logits, np.array(row.tokens)[:, None], axis=1)[:, 0]
        assert (logits.max(axis=1) - taken).max() < 0.1
