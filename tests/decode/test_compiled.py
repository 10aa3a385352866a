"""The compiled decode program: its collectives, what it writes over, and what it never copies.

Nothing runs: a decoder compiles from shapes alone.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

from decode.cache import UNROLLED_ROWS, capacity
from decode.decoder import Decoder
from decode.sampling import SamplingParams
from decode.step import Programs
from kernels.cache_attention.xla import BLOCK
from kernels.matmul.xla import STREAMED_ROWS
from model.config import LlamaConfig
from roofline.case import Case
from roofline.step_collectives import SAMPLER_BYTES, step_collectives
from sharding.collectives import CollectiveForm, Collectives
from sharding.hlo import collectives, count_collectives
from sharding.layout import Layout
from sharding.mesh import make_mesh
from tests.decode.hlo_reading import aliases, buffers, loops

pytestmark = [pytest.mark.xdist_group("compiled"), pytest.mark.optimized]  # one worker compiles each program once

# Llama's proportions, small. Caches of 2048 positions are many blocks of attention, those of 64 less than one.
LLAMA = LlamaConfig(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=528,
    num_layers=2,
    num_heads=16,
    num_kv_heads=8,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)
TWO_HEADS = replace(LLAMA, num_kv_heads=2, vocab_size=997, tie_word_embeddings=True)
LONG, SHORT = 2048, 64
L = LLAMA.num_layers
LARGE = 16384
"""Elements; one row of activations or logits has about a thousand."""
UPDATES = ("dynamic-update-slice", "scatter")
GREEDY = SamplingParams()
FILTERED = SamplingParams(1.0, top_k=50, top_p=0.9, min_p=0.05, repetition_penalty=1.1)

KV_HEADS_ONLY = [(LLAMA, 2), (LLAMA, 4), (LLAMA, 8)]
WITH_KV_SEQ = [(TWO_HEADS, 4), (TWO_HEADS, 8)]  # kv_seq 2 and 4
PSUM = Collectives("psum")
F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


@functools.cache
def decoder(
    config: LlamaConfig, tp: int, dtype: Any = F32, collectives: Collectives = PSUM, kernels: str | None = None
) -> Decoder:
    layout = Layout(make_mesh(tp, config.num_kv_heads))
    programs = Programs(config, dtype, layout, "unrolled")
    shapes = dict(zip(programs.paths, programs.abstract_params(), strict=True))
    return Decoder(config, shapes, layout, dtype, collectives=collectives, kernels=kernels)  # type: ignore[arg-type]


@functools.cache
def program(
    config: LlamaConfig,
    tp: int,
    dtype: Any = F32,
    batch: int = 1,
    max_len: int = LONG,
    sampling: SamplingParams = GREEDY,
    collectives: Collectives = PSUM,
    kernels: str | None = None,
) -> Any:
    return decoder(config, tp, dtype, collectives, kernels).decode_program(batch, max_len, sampling.form)


class Sizes(NamedTuple):
    """Elements on one device: of the smallest matrix, of one cache array, and of a block that attention reads."""

    matrix: int
    cache: int
    block: int


def local_sizes(config: LlamaConfig, tp: int, batch: int = 1, max_len: int = LONG) -> Sizes:
    one = decoder(config, tp)
    shapes = zip(one.programs.shapes, one.programs.axes, strict=True)
    matrices = [math.prod(one.layout.local_shape(leaf.shape, axes)) for leaf, axes in shapes if len(leaf.shape) > 1]
    slots = capacity(max_len, one.layout.kv_seq) // one.layout.kv_seq
    slot = batch * config.num_kv_heads // one.layout.kv_head * config.head_dim
    return Sizes(min(matrices), slots * slot, min(BLOCK, slots) * slot)


# --- collectives ---


@pytest.mark.parametrize(("tp", "dtype"), [(2, F32), (4, F32), (8, F32), (4, BF16)])
def test_two_all_reduces_a_layer(tp: int, dtype: Any) -> None:
    """And one for the embedding, and the sampler's one gather: nothing else crosses devices."""
    text = program(LLAMA, tp, dtype).as_text()
    assert count_collectives(text) == {"all-gather": 1, "all-reduce": 2 * L + 1}


@pytest.mark.parametrize(("config", "tp"), WITH_KV_SEQ)
def test_split_positions_add_one_gather_and_one_exchange_a_layer(config: LlamaConfig, tp: int) -> None:
    text = program(config, tp).as_text()
    assert count_collectives(text) == {"all-gather": L + 1, "all-reduce": 2 * L + 1, "all-to-all": L}


def test_one_device_has_no_collectives() -> None:
    for dtype in (F32, BF16):
        assert count_collectives(program(LLAMA, 1, dtype).as_text()) == {}


NARROW = replace(TWO_HEADS, hidden_size=250)  # does not divide over 3 or 4 devices


@pytest.mark.parametrize(
    ("config", "tp", "form"),
    [
        *[(config, tp, "psum") for config, tp in [*KV_HEADS_ONLY, *WITH_KV_SEQ, (TWO_HEADS, 3)]],
        *[(config, tp, form) for form in ("scatter", "one_shot") for config, tp in ((LLAMA, 4), (TWO_HEADS, 8))],
        (NARROW, 3, "scatter"),
    ],
)
def test_the_arithmetic_predicts_every_collective_and_its_bytes(
    config: LlamaConfig, tp: int, form: CollectiveForm
) -> None:
    predicted: Counter[tuple[str, int]] = Counter()
    for call in step_collectives(Case(config, dtype="f32", kv_dtype="f32", tp=tp, collective=form)):
        result = call.nbytes / call.devices if call.op == "reduce_scatter" else call.nbytes
        predicted[call.op.replace("_", "-"), int(result)] += call.count
    text = program(config, tp, max_len=SHORT, collectives=Collectives(form)).as_text()
    assert Counter((one.kind, one.result_bytes) for one in collectives(text)) == predicted


@pytest.mark.parametrize(("form", "width"), [("scatter", 2), ("one_shot", 2)])
def test_activations_travel_in_16_bits_and_sums_in_32(form: CollectiveForm, width: int) -> None:
    case = Case(LLAMA, dtype="bf16", kv_dtype="bf16", tp=4, collective=form)
    predicted = Counter({call.op.replace("_", "-"): 0 for call in step_collectives(case)})
    for call in step_collectives(case):
        predicted[call.op.replace("_", "-")] += call.count
    text = program(LLAMA, 4, BF16, max_len=SHORT, collectives=Collectives(form)).as_text()
    assert count_collectives(text) == predicted
    D = LLAMA.hidden_size
    expected = {"scatter": ("all-gather", D * width + 4 * 4), "one_shot": ("all-gather", 4 * D * 4)}[form]
    assert sum((one.kind, one.result_bytes) == expected for one in collectives(text)) >= 2 * L


@pytest.mark.parametrize("form", ["psum", "scatter", "one_shot"])
def test_a_program_without_its_collectives_has_none_and_is_otherwise_as_large(form: CollectiveForm) -> None:
    """The same matrices are read: the arguments, and the bytes of the results, are those of the whole step."""
    whole = program(TWO_HEADS, 8, max_len=SHORT, collectives=Collectives(form), kernels="xla")
    bare = program(TWO_HEADS, 8, max_len=SHORT, collectives=Collectives(form, removed=True), kernels="xla")
    assert count_collectives(bare.as_text()) == {}
    for size in ("argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes"):
        assert getattr(bare.memory_analysis(), size) == getattr(whole.memory_analysis(), size)
    products = [sum(one.opcode == "dot" for one in buffers(text.as_text())) for text in (whole, bare)]
    assert products[0] == products[1] > 0


@pytest.mark.parametrize(("config", "tp"), KV_HEADS_ONLY + WITH_KV_SEQ)
def test_no_weight_and_no_cache_crosses_devices(config: LlamaConfig, tp: int) -> None:
    """The largest result is a few rows of activations."""
    sizes = local_sizes(config, tp)
    rows = config.num_kv_heads * (config.group_size + 2) * config.head_dim
    for one in collectives(program(config, tp).as_text()):
        assert one.kind in ("all-reduce", "all-gather", "all-to-all")
        assert one.result_bytes <= 4 * max(config.hidden_size, rows)
        assert one.result_bytes < min(sizes.matrix, sizes.cache)


def test_filters_add_small_sums_and_never_gather_logits() -> None:
    batch = 3
    found = collectives(program(LLAMA, 4, F32, batch, sampling=FILTERED).as_text())
    assert [one.result_bytes for one in found if one.kind == "all-gather"] == [batch * SAMPLER_BYTES * 4]
    layers = 4 * batch * LLAMA.hidden_size
    sums = [one for one in found if one.kind == "all-reduce" and one.result_bytes != layers]
    # The largest score, top-p's whole mass, and in each filter's loop (counted once) the mass above a threshold.
    assert [one.result_bytes for one in sums] == [4 * batch] * 4
    assert len(found) == 2 * L + 1 + 4 + 1


# --- memory ---


@pytest.mark.parametrize("kernels", [None, "xla"])
@pytest.mark.parametrize(
    ("config", "tp", "dtype", "batch", "max_len"),
    [
        (LLAMA, 1, F32, 1, LONG),
        (LLAMA, 1, F32, 1, SHORT),
        (LLAMA, 1, BF16, 1, LONG),
        (LLAMA, 1, BF16, 1, SHORT),
        (LLAMA, 1, BF16, STREAMED_ROWS, LONG),
        (LLAMA, 1, F32, UNROLLED_ROWS + 1, LONG),
        (LLAMA, 1, F32, UNROLLED_ROWS + 1, SHORT),
        (LLAMA, 4, F32, 1, LONG),
        (LLAMA, 4, BF16, 1, LONG),
        (TWO_HEADS, 8, F32, 1, LONG),
        (TWO_HEADS, 4, F32, 1, SHORT),
    ],
)
class TestMemory:
    def test_the_cache_is_written_in_place(
        self, config: LlamaConfig, tp: int, dtype: Any, batch: int, max_len: int, kernels: str | None
    ) -> None:
        """Every cache array of the result is the buffer of the one passed in."""
        compiled = program(config, tp, dtype, batch, max_len, kernels=kernels)
        parameters = len(decoder(config, tp, dtype).params)
        expected = {index: parameters + index for index in range(2 * L)}
        found = aliases(compiled.as_text())
        assert {output: found.get(output) for output in expected} == expected
        cache = local_sizes(config, tp, batch, max_len).cache
        assert compiled.memory_analysis().alias_size_in_bytes >= 2 * L * cache * dtype.itemsize

    def test_no_copy_of_a_weight_or_of_the_cache(
        self, config: LlamaConfig, tp: int, dtype: Any, batch: int, max_len: int, kernels: str | None
    ) -> None:
        """Nothing fills a buffer that large (a copy, a conversion, a transpose), but updates of the cache in place.

        The blocks that attention reads are another matter: a batch of them may be larger than a matrix.
        """
        sizes = local_sizes(config, tp, batch, max_len)
        text = program(config, tp, dtype, batch, max_len, kernels=kernels).as_text()
        written = buffers(text)
        updates = [one for one in written if one.opcode in UPDATES and one.elements == sizes.cache]
        in_place = [one for one in written if 'custom_call_target="shardstream_rope_attention"' in one.text]
        if in_place:  # one call a layer, which writes both arrays where they lie
            assert kernels is None
            assert len(in_place) == L
            assert all("output_to_operand_aliasing={{1}: (3, {}), {2}: (4, {})}" in one.text for one in in_place)
            (cache_type,) = {kind for one in in_place for kind in one.type.strip("()").split(", ")[1:]}
        else:
            assert len(updates) == 2 * L * (batch if batch <= UNROLLED_ROWS else 1)
            (cache_type,) = {one.type for one in updates}
        updates += in_place
        assert [one for one in written if one.type == cache_type and one not in updates] == []
        large = [one for one in written if one.elements >= min(sizes.matrix, LARGE) and one not in updates]
        assert [one for one in large if "/attention/while/body/" not in one.text] == []

    def test_scratch_memory_is_smaller_than_a_matrix(
        self, config: LlamaConfig, tp: int, dtype: Any, batch: int, max_len: int, kernels: str | None
    ) -> None:
        """Whatever the text says: the buffers that XLA sets aside beside arguments, results and blocks."""
        sizes = local_sizes(config, tp, batch, max_len)
        scratch = program(config, tp, dtype, batch, max_len, kernels=kernels).memory_analysis().temp_size_in_bytes
        blocks = 2 * 4 * sizes.block  # of keys and of values, in float32 whatever the matrices' dtype
        assert scratch < blocks + 4 * sizes.matrix


# --- the length of the conversation ---


@pytest.mark.parametrize(
    ("config", "tp", "sampling"), [(LLAMA, 1, GREEDY), (TWO_HEADS, 8, GREEDY), (LLAMA, 4, FILTERED)]
)
def test_attention_runs_over_as_many_blocks_as_are_filled(
    config: LlamaConfig, tp: int, sampling: SamplingParams
) -> None:
    """One loop a layer whose trip count is found at run time. tests/kernels counts the blocks it reads."""
    batch = 3 if sampling is FILTERED else 1
    text = program(config, tp, F32, batch, sampling=sampling, kernels="xla").as_text()
    assert loops(text, "attention/while") == [False] * L
    filters = loops(text, "body/while")
    assert filters == ([True] * 2 if sampling is FILTERED else [])  # the reading does see fixed counts
