"""Prefill attention is bounded in memory: no matrix of scores grows with the prompt."""

from __future__ import annotations

from decode.cache import PREFILL_CHUNK, bucket
from decode.sampling import SamplingParams
from tests.decode.running import make_decoder, small_model
from tests.model.checkpoint_files import small_config

LONG = 16384
CONFIG = small_config(num_layers=1, max_position_embeddings=LONG)


def test_a_prompt_of_16k_tokens_takes_the_memory_of_a_piece() -> None:
    """It runs in pieces of ``PREFILL_CHUNK``, each against blocks of the cache. Whole, one head's scores would take a
    gigabyte."""
    decoder = make_decoder(small_model(CONFIG))
    pieces = decoder._pieces(LONG - 1)
    assert [size for _, size in pieces] == [PREFILL_CHUNK] * (LONG // PREFILL_CHUNK)
    temp = {
        max_len: decoder._prefill_program(1, bucket(LONG, 1), max_len, SamplingParams().form)
        .memory_analysis()
        .temp_size_in_bytes
        for max_len in (2048, LONG)
    }
    one_head = LONG * LONG * 4
    assert temp[LONG] < one_head / 100
    assert temp[LONG] <= temp[2048] + LONG * 64  # nothing that grows with the cache but the cache
