"""One computation cut in different ways: batch and solo, prefill and decode, pieces and whole, scan and unrolled."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from decode.cache import PREFILL_CHUNK, UNROLLED_ROWS, capacity, chunk_size
from decode.decoder import Decoder
from decode.sampling import SamplingParams
from tests.decode.running import (
    Row,
    log_softmax,
    make_decoder,
    run,
    small_model,
    small_tensors,
    some_tokens,
)
from tests.model.checkpoint_files import small_config
from tests.model.llama_reference import reference_logits

TOLERANCE = 2e-5
"""On float32 log-probabilities; five times the largest difference seen. Products of one row and of several rows
add up in different orders."""

SMALL = small_config(vocab_size=101, tie_word_embeddings=True, max_position_embeddings=2048)
TINY = replace(SMALL, num_layers=1, num_heads=4, num_kv_heads=2)

# K = 3: one device; heads split; positions split; both split.
MESHES = (1, 3, 2, 6)

HOT = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2, seed=11)


@functools.cache
def decoder(tp: int, data: int = 1) -> Decoder:
    return make_decoder(small_model(SMALL), tp, data=data)


@functools.cache
def tiny(tp: int) -> Decoder:
    return make_decoder(small_model(TINY), tp)


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    return [some_tokens(SMALL, length, seed) for seed, length in enumerate(lengths)]


def check_rows(found: Sequence[Row], expected: Sequence[Row]) -> None:
    for row, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.tokens == other.tokens, f"row {row}"
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=TOLERANCE)


def check_against_reference(batch: Sequence[list[int]], rows: Sequence[Row]) -> None:
    """Every token that TINY generated is the best one by the numpy reference, with its log-probability."""
    for prompt, row in zip(batch, rows, strict=True):
        logits = reference_logits(TINY, small_tensors(TINY), [*prompt, *row.tokens[:-1]])[len(prompt) - 1 :]
        assert row.tokens == logits.argmax(axis=-1).tolist()
        chosen = log_softmax(logits)[np.arange(len(row.tokens)), row.tokens]
        np.testing.assert_allclose(row.logprobs, chosen, rtol=0, atol=TOLERANCE)


@pytest.mark.xdist_group("rows")
class TestBatch:
    """A row of a batch is what it is alone. All runs share one max_len, so that few programs are compiled."""

    # Lengths at and around compiled sizes (16, 32), and one that is alone in its size.
    BATCH = prompts((1, 2, 7, 15, 16, 17, 23, 31))

    @pytest.mark.parametrize(("tp", "sampling"), [*[(tp, None) for tp in MESHES], (2, HOT), (6, HOT)])
    def test_rows_equal_solo_rows_at_odd_lengths(self, tp: int, sampling: SamplingParams | None) -> None:
        together = run(decoder(tp), self.BATCH, 12, sampling, max_len=64)
        alone = [run(decoder(tp), [prompt], 12, sampling, max_len=64)[0] for prompt in self.BATCH]
        check_rows(together, alone)
        assert all(len(row.tokens) == 12 for row in together)

    @pytest.mark.parametrize("tp", [1, 6])
    def test_more_rows_than_are_written_one_by_one(self, tp: int) -> None:
        """Past 8 rows the cache is written by one scatter."""
        batch = [*self.BATCH, *prompts((3, 9, 1))]
        assert len(batch) > UNROLLED_ROWS
        alone = [run(decoder(tp), [prompt], 12, max_len=64)[0] for prompt in batch]
        check_rows(run(decoder(tp), batch, 12, max_len=64), alone)

    @pytest.mark.parametrize("tp", [1, 2])
    def test_a_row_that_stops_leaves_the_others_alone(self, tp: int) -> None:
        """Rows end at a stop token, which is kept, or where max_len ends them; the others go on."""
        free = run(decoder(tp), self.BATCH, 12, max_len=64)
        stop = free[1].tokens[4]
        stopped = run(decoder(tp), self.BATCH, 12, max_len=64, stop_token_ids=[stop])
        assert [row.tokens for row in stopped] == [until(row.tokens, stop) for row in free]
        assert len({len(row.tokens) for row in stopped}) > 1
        short = run(decoder(tp), self.BATCH, 12, max_len=36)
        wanted = [min(12, 36 - len(prompt)) for prompt in self.BATCH]
        assert wanted[-1] == 5
        assert [row.tokens for row in short] == [row.tokens[:count] for row, count in zip(free, wanted, strict=True)]

    def test_equal_prompts_give_equal_rows(self) -> None:
        rows = run(decoder(2), [self.BATCH[4]] * 8, 12, HOT, max_len=64)
        assert len({tuple(row.tokens) for row in rows}) == 1

    @pytest.mark.parametrize(("tp", "sampling"), [(1, None), (2, HOT)])
    def test_rows_split_over_a_data_axis(self, tp: int, sampling: SamplingParams | None) -> None:
        """Two replicas with four rows each; with a stop token they end after different numbers of steps."""
        split = run(decoder(tp, 2), self.BATCH, 12, sampling, max_len=64)
        check_rows(split, run(decoder(tp), self.BATCH, 12, sampling, max_len=64))
        stop = split[0].tokens[2]
        ended = run(decoder(tp, 2), self.BATCH, 12, sampling, max_len=64, stop_token_ids=[stop])
        assert [row.tokens for row in ended] == [until(row.tokens, stop) for row in split]


def until(tokens: list[int], stop: int) -> list[int]:
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


@pytest.mark.xdist_group("rows")
class TestPrefillAndDecode:
    """Prefill and then decode is one full pass over the whole text."""

    @pytest.mark.parametrize("tp", MESHES)
    def test_equals_one_full_pass(self, tp: int) -> None:
        """Every log-probability that decode reported is that of one pass over prompt and output together, and
        every greedy token the best one there. Lengths at and around compiled sizes."""
        for prompt in prompts((1, 15, 16, 17)):
            row = run(decoder(tp), [prompt], 15, max_len=64)[0]
            logits = log_softmax(decoder(tp).logits([[*prompt, *row.tokens]])[0, len(prompt) - 1 : -1])
            assert row.tokens == logits.argmax(axis=-1).tolist()
            chosen = logits[np.arange(15), row.tokens]
            np.testing.assert_allclose(row.logprobs, chosen, rtol=0, atol=TOLERANCE)

    @pytest.mark.parametrize(("tp", "sampling"), [(1, None), (2, HOT)])
    def test_where_the_prompt_ends_does_not_matter(self, tp: int, sampling: SamplingParams | None) -> None:
        """A text continued from any point of itself goes on in the same way."""
        start = prompts((3,))[0]
        row = run(decoder(tp), [start], 20, sampling, max_len=64)[0]
        for cut in (1, 8, 13, 14):
            rest = run(decoder(tp), [[*start, *row.tokens[:cut]]], 20 - cut, sampling, max_len=64)[0]
            check_rows([rest], [Row(row.tokens[cut:], row.logprobs[cut:])])

    @pytest.mark.parametrize("steps", [1, 2, 5, 32])
    def test_steps_a_dispatch_do_not_matter(self, steps: int) -> None:
        batch = TestBatch.BATCH
        free = run(decoder(2), batch, 12, HOT, max_len=64)
        check_rows(run(decoder(2), batch, 12, HOT, max_len=64, steps_per_dispatch=steps), free)

    @pytest.mark.parametrize("tp", [1, 4])
    def test_the_cache_filled_to_its_last_position(self, tp: int) -> None:
        """64 positions by max_len; the last token is made from all the others, and nothing was overwritten."""
        prompt = prompts((30,))[0]
        row = run(tiny(tp), [prompt], 1000, max_len=64)[0]
        assert len(row.tokens) == 64 - 30
        check_against_reference([prompt], [row])


@pytest.mark.xdist_group("pieces")
class TestPieces:
    """Prompts longer than one prefill piece."""

    @pytest.mark.parametrize("tp", [1, 3, 4])
    @pytest.mark.parametrize("length", [512, 513, 700, 1030])
    def test_long_prompt(self, length: int, tp: int) -> None:
        """Against the numpy reference. kv_seq is 1, 3 and 2, so pieces are 512, 513 and 512 long."""
        prompt = some_tokens(TINY, length, length)
        row = run(tiny(tp), [prompt], 6, max_len=1100)[0]
        check_against_reference([prompt], [row])

    def test_pieces_are_as_long_as_the_tests_assume(self) -> None:
        assert PREFILL_CHUNK == 512
        assert [chunk_size(tiny(tp).layout.kv_seq) for tp in (1, 3, 4)] == [512, 513, 512]
        assert capacity(1100, 3) >= 1100

    @pytest.mark.parametrize("tp", [1, 3])
    def test_short_rows_beside_long_ones(self, tp: int) -> None:
        """Rows whose prompt ends in the first, second and third piece, and on a boundary."""
        batch = [some_tokens(TINY, length, length) for length in (5, 600, 512, 513, 1030)]
        rows = run(tiny(tp), batch, 6, max_len=1100)
        check_against_reference(batch, rows)

    @pytest.mark.parametrize("tp", [1, 3])
    def test_logits_in_pieces(self, tp: int) -> None:
        tokens = some_tokens(TINY, 1030)
        found = tiny(tp).logits([tokens])[0]
        wanted = reference_logits(TINY, small_tensors(TINY), tokens)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.xdist_group("rows")
class TestScan:
    """Scanned layers are the unrolled ones."""

    def test_equals_unrolled(self) -> None:
        """Heads and positions both split. tests/model/test_llama_reference.py has more meshes."""
        scanned, unrolled = make_decoder(small_model(SMALL), 6, layers="scan"), decoder(6)
        text = [some_tokens(SMALL, 30)]
        np.testing.assert_allclose(scanned.logits(text), unrolled.logits(text), rtol=0, atol=TOLERANCE)
        rows = (run(one, TestBatch.BATCH, 12, HOT, max_len=64) for one in (scanned, unrolled))
        check_rows(*rows)
