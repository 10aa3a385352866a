from math import gcd

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.presets import PRESETS
from roofline.dtypes import BF16, parse_dtype
from roofline.errors import RooflineError
from roofline.footprint import (
    Split,
    decode_work,
    kv_bytes_per_device,
    kv_bytes_per_token,
    model_decode,
    model_prefill,
    parameters,
    prefill_work,
    streamed_bytes_per_device,
    tensors,
    weight_bytes_per_device,
)
from tests.roofline.cases import LLAMA_8B, LLAMA_70B, ODD, SMOL


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_parts_sum_to_the_published_count(name, count):
    assert sum(parameters(PRESETS[name]).values()) == count == PRESETS[name].parameter_count()


def test_biases_are_counted():
    assert sum(parameters(ODD).values()) == ODD.parameter_count()
    # q, k, v rows 5 x 5 x 6, output 36, gate and up 100, down 36; two layers
    assert parameters(ODD)["bias"] == 2 * (150 + 36 + 100 + 36)


def test_one_device_holds_every_parameter():
    assert sum(weight_bytes_per_device(LLAMA_70B).values()) == 2 * 70_553_706_496


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8, 10, 16])
def test_held_bytes_against_padding_by_hand(tp):
    """Each matrix written out: 5 KV heads over gcd(tp, 5), everything else rounded up."""
    kv_head = gcd(tp, 5)
    kv_seq = tp // kv_head

    def up(size, ways):
        return -(-size // ways)

    held = weight_bytes_per_device(ODD, "bf16", tp)
    rows, columns = up(30, kv_seq), up(18, kv_seq)  # (G + 2) H and G H, G = 3, H = 6
    assert held["qkv"] == 2 * 2 * (5 // kv_head) * rows * 36
    assert held["out"] == 2 * 2 * 36 * (5 // kv_head) * columns
    assert held["gate_up"] == 2 * 2 * 2 * up(50, tp) * 36
    assert held["down"] == 2 * 2 * 36 * up(50, tp)
    assert held["embed"] == held["head"] == 2 * up(101, tp) * 36
    assert held["norm"] == 2 * 5 * 36
    assert held["bias"] == 2 * 2 * ((5 // kv_head) * rows + 36 + 2 * up(50, tp) + 36)


def test_replicated_parts_stay_whole():
    held = weight_bytes_per_device(LLAMA_8B, "bf16", 8, replicated=("head",))
    assert held["head"] == 128256 * 4096 * 2
    assert held["down"] == 32 * 4096 * 14336 * 2 // 8


def test_quantised_matrices_keep_vectors_and_chosen_parts_in_bf16():
    held = weight_bytes_per_device(LLAMA_8B, "int8", keep=("embed",))
    assert held["embed"] == 128256 * 4096 * 2
    assert held["down"] == 32 * (4096 * 14336 + 4096 * 2)
    assert held["norm"] == 65 * 4096 * 2


def test_a_step_reads_all_but_the_unused_embedding_rows():
    read = streamed_bytes_per_device(LLAMA_8B, "bf16", rows=3)
    held = weight_bytes_per_device(LLAMA_8B, "bf16")
    assert read["embed"] == 3 * 4096 * 2
    assert {k: v for k, v in read.items() if k != "embed"} == {k: v for k, v in held.items() if k != "embed"}


def test_a_tied_table_is_read_whole():
    assert streamed_bytes_per_device(SMOL) == weight_bytes_per_device(SMOL)


def test_kv_bytes_of_the_memory_wall():
    assert kv_bytes_per_token(LLAMA_70B) == 327_680
    assert kv_bytes_per_device(LLAMA_70B, 100_000) == pytest.approx(32.8e9, rel=2e-3)
    assert kv_bytes_per_token(LLAMA_70B, "int8") == 163_840


def test_kv_without_grouped_queries():
    from dataclasses import replace

    wide = replace(LLAMA_70B, num_layers=61, num_heads=128, num_kv_heads=128)
    assert kv_bytes_per_device(wide, 100_000) == pytest.approx(400e9, rel=1e-2)


@pytest.mark.parametrize(("tp", "share"), [(1, 1), (2, 2), (8, 8), (16, 16), (64, 64)])
def test_cache_falls_as_one_over_tp_beyond_the_heads(tp, share):
    whole = kv_bytes_per_device(LLAMA_70B, 6400, batch=3)
    assert kv_bytes_per_device(LLAMA_70B, 6400, tp=tp, batch=3) == whole / share


def test_cache_not_divided_by_position_stops_at_the_heads():
    whole = kv_bytes_per_device(LLAMA_70B, 6400)
    assert kv_bytes_per_device(LLAMA_70B, 6400, tp=16, replicated=("kv",)) == whole / 8


def test_positions_are_rounded_up():
    one = kv_bytes_per_device(SMOL, 1)
    assert kv_bytes_per_device(SMOL, 5, tp=2) == 3 * one  # 3 heads: kv_head 1, kv_seq 2


def test_split_of_the_demo_model():
    split = Split.of(SMOL, 6)
    assert (split.kv_head, split.kv_seq) == (3, 2)


@pytest.mark.parametrize("bad", [("router",), "head"])
def test_unknown_parts_are_refused(bad):
    with pytest.raises(RooflineError, match="gate_up"):
        weight_bytes_per_device(SMOL, replicated=bad)


def test_zero_devices_are_refused():
    with pytest.raises(RooflineError, match="tp is 0"):
        weight_bytes_per_device(SMOL, tp=0)


def test_textbook_prefill_of_the_memory_wall():
    """2 x 70e9 x 2,000 = 280 TFLOP, about 290 with attention, over about 146 GB: about 2,000 op/byte."""
    work = model_prefill(70e9, LLAMA_70B, 2_000, BF16, "bf16")
    assert work.linear_flops == 280e12
    assert work.flops == pytest.approx(290e12, rel=0.02)
    assert work.bytes == pytest.approx(146e9, rel=0.005)
    assert work.intensity == pytest.approx(2_000, rel=0.03)


def test_textbook_decode_is_one_operation_a_byte():
    assert model_decode(70e9, LLAMA_70B, 0, BF16, "bf16").intensity == 1.0
    assert model_decode(70e9, LLAMA_70B, 0, BF16, "bf16", batch=8).intensity == 8.0
    assert model_decode(70e9, LLAMA_70B, 0, parse_dtype("int8"), "bf16").intensity == 2.0


def test_decode_work_by_hand():
    work = decode_work(ODD, 10, batch=2)
    matrices = 2 * (5 * 30 * 36 + 36 * 90 + 3 * 36 * 50) + 101 * 36  # the embedding is a lookup
    assert work.linear_flops == 2 * 2 * matrices
    assert work.attention_flops == 4 * 2 * 10 * 2 * 15 * 6
    assert work.kv_bytes == 2 * 10 * 2 * 2 * 5 * 6 * 2


def test_prefill_work_by_hand():
    work = prefill_work(ODD, 4, batch=2)
    layers = 2 * (5 * 30 * 36 + 36 * 90 + 3 * 36 * 50)
    assert work.linear_flops == 2 * 8 * layers + 2 * 2 * 101 * 36  # the head for the last position only
    assert work.attention_flops == 4 * (2 * 10) * 2 * 15 * 6  # 1 + 2 + 3 + 4 pairs
    assert work.activation_bytes == 2 * 2 * 8 * 36 * 2


def test_work_is_divided_over_devices():
    one, eight = decode_work(LLAMA_70B, 8000), decode_work(LLAMA_70B, 8000, tp=8)
    assert eight.linear_flops == one.linear_flops / 8
    assert eight.attention_flops == one.attention_flops / 8
    assert eight.kv_bytes == one.kv_bytes / 8


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["odd", "smollm2-135m", "llama-3.1-8b", "llama-3-70b"]),
    tp=st.integers(1, 40),
    dtype=st.sampled_from(["f32", "bf16", "int8", "int4", "int4-g32"]),
)
def test_devices_together_hold_at_least_the_model(name, tp, dtype):
    config = ODD if name == "odd" else PRESETS[name]
    whole, held = weight_bytes_per_device(config, dtype), weight_bytes_per_device(config, dtype, tp)
    for part, size in held.items():
        assert size * tp >= whole[part]
        # Padding adds less than one row or column a device; scales of a split row are counted on each.
        assert size <= whole[part]


@settings(max_examples=40, deadline=None)
@given(tp=st.integers(1, 40), positions=st.integers(0, 3000), batch=st.integers(1, 5))
def test_devices_together_hold_at_least_the_cache(tp, positions, batch):
    whole = kv_bytes_per_device(SMOL, positions, batch=batch)
    held = kv_bytes_per_device(SMOL, positions, tp=tp, batch=batch)
    assert whole <= held * tp <= whole + tp * kv_bytes_per_device(SMOL, 1, batch=batch)


def test_logical_axes_are_those_of_the_runtime():
    axes = {tensor.part: tensor.axes for tensor in tensors(LLAMA_8B)}
    assert axes == {
        "embed": ("vocab", None),
        "qkv": ("kv_heads", "head_rows", None),
        "out": (None, "kv_heads", "head_columns"),
        "gate_up": (None, "ff", None),
        "down": (None, "ff"),
        "norm": (None,),
        "head": ("vocab", None),
    }
