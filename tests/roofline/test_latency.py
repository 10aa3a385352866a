import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from roofline.case import Case
from roofline.chips import CHIPS
from roofline.collectives import Constant
from roofline.efficiency import Efficiency
from roofline.errors import RooflineError
from roofline.footprint import decode_work
from roofline.latency import IDEAL, Terms, doubling, ideal_tpot_s, judge, scaling, tpot, ttft
from tests.roofline.cases import LLAMA_8B, LLAMA_70B, ODD, SMOL

H100 = CHIPS["h100"]
cases = st.builds(
    Case,
    st.sampled_from([LLAMA_8B, LLAMA_70B, SMOL, ODD]),
    dtype=st.sampled_from(["f32", "bf16", "int8", "int4"]),
    kv_dtype=st.sampled_from(["bf16", "int8"]),
    tp=st.sampled_from([1, 2, 3, 4, 8, 16]),
    batch=st.integers(1, 512),
    context=st.integers(0, 200_000),
)
efficiencies = st.builds(
    Efficiency,
    bandwidth=st.floats(0.1, 1),
    compute=st.floats(0.1, 1),
    layer_overhead_s=st.floats(0, 1e-4),
    step_overhead_s=st.floats(0, 1e-3),
    collective_scale=st.floats(0, 5),
)


def test_terms_by_hand():
    efficiency = Efficiency(bandwidth=0.5, layer_overhead_s=10e-6, step_overhead_s=100e-6)
    case = Case(LLAMA_8B, tp=2, context=1_000)
    terms = tpot(case, H100, efficiency, Constant(5e-6))
    head_and_layers = 8_030_261_248 - 128_256 * 4_096
    norms = 65 * 4_096  # on both devices
    assert terms.weights == pytest.approx(((head_and_layers - norms) / 2 + norms + 4_096) * 2 / (3.35e12 / 2))
    assert terms.kv == pytest.approx(1_000 * 131_072 / 2 / (3.35e12 / 2))
    assert terms.compute == 0
    assert terms.collectives == pytest.approx(66 * 5e-6)
    assert terms.layers == pytest.approx(320e-6)
    assert terms.step == 100e-6
    assert terms.total == pytest.approx(sum(terms.as_dict().values()))
    assert terms.as_ms()["step"] == pytest.approx(0.1)


def test_ideal_is_streamed_bytes_over_bandwidth():
    case = Case(LLAMA_70B, context=128_000)
    assert ideal_tpot_s(case, H100) == pytest.approx(decode_work(LLAMA_70B, 128_000).bytes / 3.35e12)


def test_a_large_batch_is_bound_by_arithmetic():
    case = Case(LLAMA_8B, batch=4096)
    terms = tpot(case, H100, IDEAL)
    assert terms.compute > 0
    assert terms.total == pytest.approx(decode_work(LLAMA_8B, 0, batch=4096).linear_flops / 989e12)


def test_prefill_is_bound_by_arithmetic():
    terms = ttft(Case(LLAMA_70B), H100, 2_000, IDEAL)
    assert terms.total == pytest.approx(0.28, rel=0.02)  # about 280 TFLOP at 989 TFLOP/s
    assert terms.compute > 5 * terms.weights


def test_a_given_count_scales_the_weights():
    exact, given_count = Case(LLAMA_70B), Case(LLAMA_70B, params=70e9)
    ratio = tpot(given_count, H100, IDEAL).weights / tpot(exact, H100, IDEAL).weights
    assert ratio == pytest.approx(70e9 / 70_553_706_496)


@settings(max_examples=100, deadline=None)
@given(case=cases, efficiency=efficiencies, name=st.sampled_from(["a100", "h100", "b200"]))
def test_terms_sum_and_the_ideal_bounds_them(case, efficiency, name):
    chip = CHIPS[name]
    terms = tpot(case, chip, efficiency)
    assert all(value >= 0 for value in terms.as_dict().values())
    assert terms.total == pytest.approx(sum(terms.as_ms().values()) / 1e3)
    assert ideal_tpot_s(case, chip) <= terms.total * (1 + 1e-12)
    first = ttft(case, chip, 64, efficiency)
    assert first.total == pytest.approx(sum(first.as_dict().values()))


@settings(max_examples=60, deadline=None)
@given(case=cases, efficiency=efficiencies, factor=st.floats(1, 10))
def test_more_bandwidth_or_compute_is_never_slower(case, efficiency, factor):
    base = tpot(case, H100, efficiency).total
    wider = replace(H100, bytes_per_s=H100.bytes_per_s * factor)
    faster = replace(H100, flops_per_s={k: v * factor for k, v in H100.flops_per_s.items()})
    assert tpot(case, wider, efficiency).total <= base * (1 + 1e-12)
    assert tpot(case, faster, efficiency).total <= base * (1 + 1e-12)


@settings(max_examples=60, deadline=None)
@given(case=cases, more=st.integers(1, 50_000))
def test_longer_contexts_and_larger_batches_are_never_faster(case, more):
    base = tpot(case, H100).total
    assert tpot(case.at(context=case.context + more), H100).total >= base
    assert tpot(case.at(batch=case.batch + more % 64 + 1), H100).total >= base * (1 - 1e-12)


@settings(max_examples=60, deadline=None)
@given(case=cases)
def test_the_ideal_never_grows_with_devices_that_divide(case):
    assume(case.config is LLAMA_70B or case.config is LLAMA_8B)
    one, two = case.at(tp=1, context=1600), case.at(tp=2, context=1600)
    # Norms and the embedding row are read by both, so a little less than half is saved.
    assert ideal_tpot_s(two, H100) == pytest.approx(ideal_tpot_s(one, H100) / 2, rel=0.01)


def flat(**changes):
    return Terms(**({"weights": 0, "kv": 0, "compute": 0, "collectives": 0, "layers": 0, "step": 0} | changes))


def test_the_verdict_names_what_stopped_it():
    terms = {
        1: flat(weights=8.0),
        2: flat(weights=4.0, collectives=0.5),
        4: flat(weights=2.0, collectives=2.2),
        8: flat(weights=1.0, collectives=4.0),
    }
    verdict = judge(terms)
    assert [step.tp for step in verdict.steps] == [1, 2, 4, 8]
    assert verdict.steps[1].gain == pytest.approx(8 / 4.5 - 1)
    assert (verdict.pays_until, verdict.stopped_by) == (2, "collectives")
    assert verdict.text == "tp = 4 gains 7% over tp = 2: collectives are 52% of the step"


def test_the_verdict_on_a_loss_on_overhead_and_on_success():
    slower = judge({1: flat(weights=1.0), 2: flat(weights=0.5, collectives=1.0)})
    assert slower.text == "tp = 2 loses 33% over tp = 1: collectives are 67% of the step"
    overhead = judge({1: flat(weights=0.1, layers=2.0), 2: flat(weights=0.05, layers=2.0)})
    assert overhead.stopped_by == "layers"
    good = judge({1: flat(weights=2.0), 2: flat(weights=1.0)})
    assert good.stopped_by is None
    assert good.pays_until == 2
    assert "100%" in good.text
    assert "nothing to compare" in judge({4: flat(weights=1.0)}).text
    with pytest.raises(RooflineError, match="one or more"):
        judge({})


def test_doubling_ends_where_it_stops_paying_or_the_wires_end():
    verdict = doubling(Case(LLAMA_8B), CHIPS["tpu-v5e"])
    assert verdict.stopped_by == "collectives"
    assert verdict.steps[-1].tp == 2 * verdict.pays_until
    assert [step.tp for step in doubling(Case(LLAMA_70B), H100).steps] == [1, 2, 4, 8]


def test_scaling_sorts_and_keeps_only_what_was_asked():
    assert [step.tp for step in scaling(Case(LLAMA_70B), H100, (8, 1, 8)).steps] == [1, 8]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"batch": 0}, "batch is 0"), ({"context": -1}, "context is -1"), ({"tp": 0}, "tp is 0"),
     ({"dtype": "int3"}, "int3"), ({"kv_dtype": "int4"}, "cache dtype"), ({"params": 0}, "params is 0"),
     ({"replicated": ("all",)}, "replicated"), ({"keep": ("kv",)}, "keep")],
)  # fmt: skip
def test_bad_cases_are_refused(changes, message):
    with pytest.raises(RooflineError, match=message):
        Case(SMOL, **changes)


@pytest.mark.parametrize(
    "changes", [{"bandwidth": 0}, {"bandwidth": 1.1}, {"compute": -1}, {"layer_overhead_s": -1e-6}]
)
def test_bad_efficiencies_are_refused(changes):
    with pytest.raises(RooflineError, match=next(iter(changes))):
        Efficiency(**changes)


def test_a_prompt_of_no_tokens_is_refused():
    with pytest.raises(RooflineError, match="prompt_len is 0"):
        ttft(Case(SMOL), H100, 0)


def test_importing_the_arithmetic_does_not_import_jax_or_numpy():
    code = (
        "import roofline.latency, roofline.fit, roofline.chain, roofline.goodput, roofline.cpu, sys; "
        "assert 'jax' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
