"""The fit against a published table it was not tuned on, and against tables whose truth is known."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.case import Case
from roofline.chips import CHIPS
from roofline.collectives import Constant
from roofline.efficiency import Efficiency
from roofline.errors import RooflineError
from roofline.fit import Measurement, fit
from roofline.latency import tpot
from tests.roofline.cases import LLAMA_7B, LLAMA_8B, LLAMA_70B, SMOL, gpt_fast_rows

A100 = CHIPS["a100"]


def made(truth, configs, tps, chip=A100, **options):
    """A table that the model itself would have produced with the efficiencies `truth`."""
    cases = [Case(config, tp=tp, context=200, **options) for config in configs for tp in tps]
    return [Measurement(case, tpot(case, chip, truth).total * 1e3) for case in cases]


def test_a_published_table_from_its_single_device_rows():
    """No collective constant is fitted: the chip's own alone predicts every row with several devices."""
    rows = gpt_fast_rows()
    fitted = fit([row for row in rows if row.case.tp == 1], A100)
    assert fitted.mean_error([row for row in rows if row.case.tp > 1]) < 0.10
    assert any("no row with tp > 1" in note for note in fitted.notes)


def test_a_published_table_with_its_collective_constant_from_one_row():
    rows = gpt_fast_rows()
    known = [row for row in rows if row.case.tp == 1 or row.label == "llama-2-7b bf16 x 2"]
    unseen = [row for row in rows if row not in known]
    fitted = fit(known, A100)
    assert len(unseen) == 15
    assert fitted.mean_error(unseen) < 0.06
    bf16 = [row for row in unseen if "bf16" in row.label]
    # One row of the table is odd (16.03 tokens/s on 2 GPUs beside 37.45 on 4): without it errors are 2 %.
    usual = [row for row in bf16 if row.label != "llama-3.1-70b bf16 x 2"]
    assert fitted.mean_error(usual) < 0.02


def test_a_published_table_from_one_row_alone():
    rows = gpt_fast_rows()
    fitted = fit([row for row in rows if row.label == "llama-2-7b bf16 x 1"], A100)
    bf16 = [row for row in rows if "bf16" in row.label and row.case.tp > 1]
    assert fitted.mean_error(bf16) < 0.05
    assert any("the prior splits its time" in note for note in fitted.notes)


def test_an_odd_row_does_not_bend_the_collective_constant():
    rows = [row for row in gpt_fast_rows() if "bf16" in row.label]
    with_it = fit(rows, A100).default.collective_scale
    without = fit([row for row in rows if row.label != "llama-3.1-70b bf16 x 2"], A100).default.collective_scale
    assert with_it == pytest.approx(without, rel=0.15)


@settings(max_examples=30, deadline=None)
@given(
    bandwidth=st.floats(0.6, 0.98),
    overhead=st.floats(5e-6, 60e-6),
    scale=st.floats(0.3, 4),
    name=st.sampled_from(sorted(CHIPS)),
)
def test_known_truth_is_recovered(bandwidth, overhead, scale, name):
    chip = CHIPS[name]
    truth = Efficiency(bandwidth=bandwidth, layer_overhead_s=overhead, collective_scale=scale)
    known = made(truth, [LLAMA_8B, SMOL], [1], chip) + made(truth, [LLAMA_8B], [2], chip)
    fitted = fit(known, chip)
    assert fitted.default.bandwidth == pytest.approx(bandwidth, rel=0.01)
    assert fitted.default.layer_overhead_s == pytest.approx(overhead, rel=0.05)
    assert fitted.mean_error(made(truth, [LLAMA_8B, LLAMA_7B, LLAMA_70B], [4, 8], chip)) < 0.05


@settings(max_examples=30, deadline=None)
@given(bandwidth=st.floats(0.75, 0.97), overhead=st.floats(0.3, 1.7), scale=st.floats(0.5, 3))
def test_one_model_and_one_scaled_row_predict_the_rest(bandwidth, overhead, scale):
    for name in ("h100", "tpu-v5e", "tpu-v5p"):
        chip = CHIPS[name]
        usual = chip.efficiency.layer_overhead_s
        truth = Efficiency(bandwidth=bandwidth, layer_overhead_s=overhead * usual, collective_scale=scale)
        fitted = fit(made(truth, [LLAMA_8B], [1, 2], chip), chip)
        assert fitted.mean_error(made(truth, [LLAMA_8B], [4, 8], chip)) < 0.10


def test_each_dtype_has_its_own_efficiency():
    slow = Efficiency(bandwidth=0.6, layer_overhead_s=50e-6)
    fast = Efficiency(bandwidth=0.9, layer_overhead_s=20e-6)
    models = [LLAMA_7B, SMOL, LLAMA_8B]
    fitted = fit(made(fast, models, [1]) + made(slow, models, [1], dtype="int8"), A100)
    assert fitted.by_dtype["bf16"].bandwidth == pytest.approx(0.9, rel=0.01)
    assert fitted.by_dtype["int8"].bandwidth == pytest.approx(0.6, rel=0.01)
    assert fitted.efficiency(Case(SMOL, dtype="int4")) == fitted.by_dtype["bf16"]


def test_a_fixed_collective_model_is_used_and_not_fitted():
    truth = Efficiency()
    fitted = fit(made(truth, [LLAMA_7B, SMOL], [1]), A100, collectives=Constant(8e-6))
    case = Case(LLAMA_7B, tp=4)
    assert fitted.predict(case).collectives == pytest.approx(66 * 8e-6)
    assert fitted.notes == ()


def test_estimates_stay_possible():
    """A table faster than the datasheet allows: the share is held at 1 and overhead at 0."""
    row = Measurement(Case(LLAMA_7B), 1.0)
    fitted = fit([row], A100)
    assert fitted.default.bandwidth == 1.0
    assert fitted.default.layer_overhead_s == 0.0


def test_batch_rows_state_tokens_of_the_whole_batch():
    assert Measurement.from_tokens_per_s(Case(SMOL, batch=4), 400.0).ms == pytest.approx(10.0)


def test_compute_bound_rows_do_not_pass_for_slow_memory():
    truth = Efficiency(bandwidth=0.9)
    rows = made(truth, [LLAMA_7B, SMOL], [1]) + made(truth, [LLAMA_7B], [1], batch=2048)
    assert fit(rows, A100).default.bandwidth == pytest.approx(0.9, rel=0.01)


def test_errors_are_signed_and_refusals_say_why():
    rows = made(Efficiency(), [LLAMA_7B, SMOL], [1])
    fitted = fit(rows, A100)
    half = replace(rows[0], ms=rows[0].ms / 2)
    assert fitted.errors([half])[0] == pytest.approx(1.0, rel=0.01)
    with pytest.raises(RooflineError, match="tp = 1"):
        fit(made(Efficiency(), [LLAMA_7B], [2]), A100)
    with pytest.raises(RooflineError, match="no measurements"):
        fitted.mean_error([])
    with pytest.raises(RooflineError, match="not positive"):
        Measurement(Case(SMOL), 0.0)
    with pytest.raises(RooflineError, match="not positive"):
        Measurement.from_tokens_per_s(Case(SMOL), 0.0)
