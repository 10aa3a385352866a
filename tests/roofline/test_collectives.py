import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.case import Case
from roofline.chips import CHIPS
from roofline.collectives import ALGORITHMS, OPS, AlphaBeta, Constant, Interconnect, Measured, torus_shape
from roofline.errors import RooflineError
from roofline.step_collectives import Call, collectives_s, step_collectives
from tests.roofline.cases import LLAMA_8B, LLAMA_70B, ODD, SMOL

SWITCH = Interconnect("switch", "switch", 100e9, launch_s=5e-6, hop_s=1e-6)
V5E, V5P = CHIPS["tpu-v5e"].interconnect, CHIPS["tpu-v5p"].interconnect
KB = 16_384.0


@pytest.mark.parametrize(
    ("algorithm", "seconds"),
    [
        ("ring", 5e-6 + 14 * (1e-6 + KB / 8 / 100e9)),
        ("tree", 5e-6 + 6 * (1e-6 + KB / 100e9)),
        ("one_shot", 5e-6 + 1e-6 + 7 * KB / 100e9),
        ("two_shot", 5e-6 + 2 * (1e-6 + KB * 7 / 8 / 100e9)),
        ("auto", 5e-6 + 6 * (1e-6 + KB / 100e9)),
    ],
)
def test_all_reduce_over_a_switch(algorithm, seconds):
    assert SWITCH.using(algorithm).time("all_reduce", KB, 8) == pytest.approx(seconds, rel=1e-12)


def test_auto_takes_the_ring_for_big_messages():
    assert SWITCH.time("all_reduce", 1e9, 8) == SWITCH.using("ring").time("all_reduce", 1e9, 8)


def test_gather_scatter_and_exchange_over_a_switch():
    gather = 5e-6 + 3 * (1e-6 + KB / 4 / 100e9)
    assert SWITCH.time("all_gather", KB, 4) == pytest.approx(gather)
    assert SWITCH.time("reduce_scatter", KB, 4) == pytest.approx(gather)
    assert SWITCH.using("one_shot").time("all_gather", KB, 4) == pytest.approx(6e-6 + KB * 3 / 4 / 100e9)
    assert SWITCH.time("all_to_all", KB, 4) == pytest.approx(6e-6 + KB * 3 / 4 / 100e9)


@pytest.mark.parametrize(
    ("devices", "dims", "shape"),
    [(1, 2, (1, 1)), (2, 2, (1, 2)), (8, 2, (2, 4)), (16, 2, (4, 4)), (256, 2, (16, 16)), (6, 2, (2, 3)),
     (7, 2, (1, 7)), (8, 3, (2, 2, 2)), (16, 3, (2, 2, 4)), (64, 3, (4, 4, 4)), (12, 1, (12,))],
)  # fmt: skip
def test_torus_shapes_are_the_most_cubic(devices, dims, shape):
    assert torus_shape(devices, dims) == shape


def test_latency_bound_gather_counts_hops():
    # 4 x 4 x 4 closes on every axis: 2 hops each of 1 us, and a launch.
    assert V5P.time("all_gather", 256, 64) == pytest.approx(1e-6 + 6e-6)
    # 2 x 4 on v5e is open: 1 + 3 hops. An all-reduce goes there and back.
    assert V5E.time("all_gather", 256, 8) == pytest.approx(1e-6 + 4e-6)
    assert V5E.time("all_reduce", KB, 8) == pytest.approx(1e-6 + 8e-6)


def test_bandwidth_bound_gather_uses_every_axis():
    # One closed axis of 16 moves 9e10 bytes/s both ways: 34 MB take 377 us (and the launch).
    ring = replace(V5E, topology="ring", launch_s=0.0)
    assert ring.time("all_gather", 34e6, 16) == pytest.approx(34e6 / 9e10)
    # Two closed axes of 16 take half of that.
    assert replace(V5E, launch_s=0.0).time("all_gather", 34e6, 256) == pytest.approx(34e6 / 18e10)


def test_algorithms_on_a_torus():
    assert V5E.using("one_shot").time("all_reduce", KB, 8) == pytest.approx(1e-6 + 4e-6)  # half the hops
    assert V5E.using("two_shot").time("all_reduce", KB, 8) == V5E.time("all_reduce", KB, 8)
    assert V5E.using("ring").time("all_reduce", KB, 8) == pytest.approx(1e-6 + 14e-6)
    with pytest.raises(RooflineError, match="tree does not exist on a torus"):
        V5E.using("tree").time("all_reduce", KB, 8)


def test_an_exchange_moves_a_quarter_of_a_gather():
    big = 1e9
    free = replace(V5E, launch_s=0.0)
    assert free.time("all_to_all", big, 16) == free.time("all_gather", big, 16) / 4


@settings(max_examples=80, deadline=None)
@given(
    op=st.sampled_from(OPS),
    algorithm=st.sampled_from([a for a in ALGORITHMS if a != "tree"]),
    name=st.sampled_from(sorted(CHIPS)),
    nbytes=st.floats(1, 1e9),
    devices=st.integers(2, 64),
)
def test_collectives_cost_something_and_more_for_more_bytes(op, algorithm, name, nbytes, devices):
    link = CHIPS[name].interconnect.using(algorithm)
    assert link.time(op, nbytes, 1) == 0.0
    assert 0 < link.launch_s < link.time(op, nbytes, devices) <= link.time(op, 2 * nbytes, devices)
    assert link.time(op, nbytes, devices) < link.scaled(2).time(op, nbytes, devices) + 1e-15


def test_bad_values_are_refused():
    with pytest.raises(RooflineError, match="use one of all_reduce"):
        SWITCH.time("broadcast", 1, 2)
    with pytest.raises(RooflineError, match="algorithm is 'butterfly'"):
        SWITCH.using("butterfly")
    with pytest.raises(RooflineError, match="hop_s is -1"):
        replace(SWITCH, hop_s=-1)


def test_alpha_beta_recovers_an_exact_line():
    samples = [(v, 7e-6 + v / 50e9) for v in (1e3, 1e5, 1e7)]
    line = AlphaBeta.from_samples("all_reduce", 4, samples)
    assert line.alpha_s == pytest.approx(7e-6)
    assert line.bytes_per_s == pytest.approx(50e9)


def test_alpha_beta_never_goes_negative():
    flat = AlphaBeta.from_samples("all_reduce", 2, [(1e3, 2e-5), (1e6, 1e-5)])
    assert flat.bytes_per_s == float("inf")
    assert 1e-5 <= flat.alpha_s <= 2e-5
    steep = AlphaBeta.from_samples("all_reduce", 2, [(1e3, 1e-9), (1e6, 1e-3)])
    assert steep.alpha_s == 0.0
    assert steep.bytes_per_s > 0


def test_alpha_beta_needs_two_sizes():
    with pytest.raises(RooflineError, match="two message sizes"):
        AlphaBeta.from_samples("all_reduce", 2, [(1e3, 1e-5), (1e3, 2e-5)])


def test_measured_round_trip(tmp_path):
    measured = Measured((AlphaBeta("all_reduce", 2, 9e-6, 2e10), AlphaBeta("all_gather", 2, 4e-6, float("inf"))))
    measured.save(tmp_path / "c.json")
    assert Measured.load(tmp_path / "c.json") == measured
    assert json.loads((tmp_path / "c.json").read_text())["collectives"][1]["bytes_per_s"] is None


def test_measured_stands_in_for_what_is_close():
    measured = Measured((AlphaBeta("all_reduce", 2, 8e-6, 1e10), AlphaBeta("all_gather", 4, 5e-6, 1e10)))
    assert measured.time("all_reduce", 1e4, 2) == pytest.approx(9e-6)
    assert measured.time("all_gather", 1e4, 2) == pytest.approx(4.5e-6)
    assert measured.time("all_to_all", 1e4, 4) == pytest.approx(6e-6)
    assert measured.time("all_reduce", 1e4, 1) == 0.0
    with pytest.raises(RooflineError, match="all_gather x 4, all_reduce x 2"):
        measured.time("all_reduce", 1, 8)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"op": "all_reduce", "devices": 2, "alpha_s": 1e-6}, "row 0 has no key 'bytes_per_s'"),
        ({"op": "all_reduce", "devices": "x", "alpha_s": 1e-6, "bytes_per_s": 1}, "row 0 is not numeric"),
        ({"op": "psum", "devices": 2, "alpha_s": 1e-6, "bytes_per_s": 1}, "row 0 is out of range"),
    ],
)
def test_bad_measured_rows_are_named(row, message):
    with pytest.raises(RooflineError, match=message):
        Measured.from_json([row])


def test_a_file_without_the_list_is_refused(tmp_path):
    (tmp_path / "c.json").write_text("[]")
    with pytest.raises(RooflineError, match="'collectives'"):
        Measured.load(tmp_path / "c.json")


def test_one_device_calls_nothing():
    assert step_collectives(Case(LLAMA_70B)) == ()


def test_two_all_reduces_a_layer_one_for_the_embedding_one_gather():
    calls = step_collectives(Case(LLAMA_70B, tp=8, batch=2))
    assert calls == (
        Call("embedding", "all_reduce", 1, 2 * 8192 * 2.0, 8),
        Call("attention output", "all_reduce", 80, 2 * 8192 * 4.0, 8),
        Call("MLP output", "all_reduce", 80, 2 * 8192 * 4.0, 8),
        Call("sampler", "all_gather", 1, 2 * 20 * 8.0, 8),
    )


def test_the_message_of_the_memory_wall():
    """One row of the hidden size of the 70B in bf16 is 16 KiB."""
    calls = step_collectives(Case(LLAMA_70B, tp=2, sum_bytes=2))
    assert [call.nbytes for call in calls[:3]] == [16 * 1024] * 3


def test_f32_weights_have_f32_activations():
    assert step_collectives(Case(LLAMA_70B, dtype="f32", tp=2))[0].nbytes == 32 * 1024


def test_devices_that_share_a_head_exchange_rows_and_partials():
    calls = {call.purpose: call for call in step_collectives(Case(SMOL, tp=2))}
    assert calls["q, k, v rows"] == Call("q, k, v rows", "all_gather", 30, 3 * 5 * 64 * 2, 2)
    assert calls["attention partials"] == Call("attention partials", "all_to_all", 30, 3 * (3 * 64 + 2 * 6) * 4, 2)


def test_exchanges_are_padded_to_the_devices_that_share_a_head():
    calls = {call.purpose: call for call in step_collectives(Case(ODD, tp=4))}  # G = 3, H = 6, kv_seq 4
    assert calls["q, k, v rows"].nbytes == 5 * 32 * 2  # 30 rows
    assert calls["attention partials"].nbytes == 5 * (20 + 4 * 6) * 4  # 18 columns


def test_replicated_parts_need_no_collective():
    calls = step_collectives(Case(LLAMA_8B, tp=4, replicated=("embed", "head")))
    assert [call.purpose for call in calls] == ["attention output", "MLP output"]
    shared = step_collectives(Case(SMOL, tp=2, replicated=("kv",)))
    assert "attention partials" not in {call.purpose for call in shared}


def test_a_prefill_sums_every_position_and_samples_once():
    calls = {call.purpose: call for call in step_collectives(Case(LLAMA_8B, tp=2), tokens=100)}
    assert calls["MLP output"].nbytes == 100 * 4096 * 4
    assert calls["sampler"].nbytes == 40


def test_a_scattered_residual_is_gathered_for_each_norm_with_its_sum_of_squares():
    """D = 36 over 8 devices: 40 with padding, so 5 bf16 numbers and one f32 a device."""
    calls = step_collectives(Case(ODD, tp=8, batch=3, collective="scatter"))
    sums = [call for call in calls if call.op == "reduce_scatter"]
    assert sums == [
        Call("embedding", "reduce_scatter", 1, 3 * 40 * 2.0, 8),
        Call("attention output", "reduce_scatter", 2, 3 * 40 * 4.0, 8),
        Call("MLP output", "reduce_scatter", 2, 3 * 40 * 4.0, 8),
    ]
    assert Call("norms", "all_gather", 5, 3 * 8 * (5 * 2 + 4.0), 8) in calls


def test_one_shot_gathers_the_terms_of_every_device():
    calls = {call.purpose: call for call in step_collectives(Case(LLAMA_8B, tp=4, collective="one_shot"))}
    assert calls["embedding"] == Call("embedding", "all_gather", 1, 4 * 4096 * 2.0, 4)
    assert calls["MLP output"] == Call("MLP output", "all_gather", 32, 4 * 4096 * 4.0, 4)


@pytest.mark.parametrize("form", ["scatter", "one_shot"])
def test_a_prefill_sums_by_all_reduce_whatever_the_step_does(form):
    case = Case(LLAMA_8B, tp=4, collective=form)
    assert step_collectives(case, tokens=64) == step_collectives(case.at(collective="psum"), tokens=64)


def test_forms_that_cannot_be_are_refused():
    with pytest.raises(RooflineError, match="collective is 'ring': use one of psum, scatter, one_shot"):
        Case(LLAMA_8B, tp=2, collective="ring")
    with pytest.raises(RooflineError, match="embed, out cannot be replicated; use psum"):
        Case(LLAMA_8B, tp=2, collective="scatter", replicated=("embed", "out", "head"))


def test_the_sum_of_calls():
    calls = step_collectives(Case(LLAMA_8B, tp=2))
    assert collectives_s(calls, Constant(10e-6)) == pytest.approx(66 * 10e-6)
    assert Constant(10e-6, 1e9).time("all_reduce", 1e3, 2) == pytest.approx(11e-6)
