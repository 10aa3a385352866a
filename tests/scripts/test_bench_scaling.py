"""`python -m scripts.bench_scaling`: what it reports of its samples, not how fast this machine is."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.presets import PRESETS, preset
from model.random_init import random_params
from roofline.case import Case
from roofline.collectives import AlphaBeta, Measured
from roofline.latency import tpot
from roofline.step_collectives import step_collectives
from scripts import _one_core, _scaling, bench_scaling
from scripts._scaling import Samples, deepened, predict, render, report_rows, verdict
from sharding.bandwidth import ReadProbe
from sharding.hlo import count_collectives
from sharding.layout import Layout
from sharding.mesh import make_mesh
from sharding.skew import SkewProbe
from tests.scripts.several import run_several
from tests.scripts.tiny import CONFIG, write_tiny

Run = Callable[..., tuple[int, str, str]]
SHORT = ["--context", "10", "--steps", "4", "--rounds", "3"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def command(in_process: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(ReadProbe, "__init__", functools.partialmethod(ReadProbe.__init__, total_bytes=1 << 20))
    monkeypatch.setattr(SkewProbe, "__init__", functools.partialmethod(SkewProbe.__init__, total_bytes=1 << 20))
    monkeypatch.setattr(bench_scaling, "CONSTANT_SPAN", 2)

    def call(*options: str | Path) -> tuple[int, str, str]:
        status = bench_scaling.main([*map(str, options)])
        return status, *capsys.readouterr()

    return call


@pytest.mark.parametrize(("form", "counts"), [("psum", [1, 2]), ("scatter", [1, 3])])
def test_a_run_at_several_counts(command: Run, tiny: Path, tmp_path: Path, form: str, counts: list[int]) -> None:
    target, picture = tmp_path / "scaling.json", tmp_path / "scaling.png"
    options = ["--model", tiny, "--tp", ",".join(map(str, counts)), *SHORT, "--json", target, "--collective", form]
    drawn = form == "psum" and importlib.util.find_spec("matplotlib") is not None
    status, out, err = command(*options, *(["--plot", picture] if drawn else []))
    assert (status, err) == (0, "")
    found = json.loads(target.read_text())
    assert (found["model"], found["weights"], found["sliced"]) == (str(tiny), "checkpoint", False)
    assert (found["collective"], found["constants"]) == (form, "this run")
    assert [row["tp"] for row in found["rows"]] == counts
    first, *rest = found["rows"]
    assert (first["speedup"], first["efficiency"], first["collectives_ms_alone"]) == (1, 1, 0)
    assert first["terms_ms"]["collectives"] == first["collectives_ms_removed"] == 0
    for row in found["rows"]:
        assert row["measured_ms"] == pytest.approx(statistics.median(row["samples_ms"]))
        assert len(row["samples_ms"]) == 3
        assert len(row["limit_samples_gb_per_s"]) == 9
        assert sum(row["terms_ms"].values()) == pytest.approx(row["measured_ms"])
        assert min(row["terms_ms"].values()) >= -1e-9
        assert row["ideal_ms"] <= min(row["samples_ms"]) * (1 + 1e-9)
        assert row["predicted_ms"] > 0
        assert row["cpu_seconds_per_s"] > 0
        assert row["functional_only"] == (row["tp"] > found["device"]["cpu_cores"])
    for row in rest:
        assert row["speedup"] == pytest.approx(first["measured_ms"] / row["measured_ms"])
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["tp"])
        assert row["collectives_ms_removed"] == pytest.approx(row["measured_ms"] - row["removed_ms"])
        assert row["collectives_ms_alone"] > 0
        kinds: dict[str, int] = {}
        for call in step_collectives(Case(CONFIG, "f32", "f32", tp=row["tp"], collective=form)):  # type: ignore[arg-type]
            kinds[call.op.replace("_", "-")] = kinds.get(call.op.replace("_", "-"), 0) + call.count
        assert row["collectives_per_step"] == kinds
    assert found["verdict"] in out
    assert "CPU devices share" in out
    if max(counts) > max(2, found["device"]["cpu_cores"]):
        assert "3 (functional only)" in out
    if drawn:
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_slice_of_a_preset_has_random_weights_and_the_constants_of_a_file(
    command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, num_layers=6)
    monkeypatch.setattr("scripts.bench_decode.preset", {"llama-3-70b": config}.__getitem__)
    made: list[int] = []

    def counted(config: Any, *arguments: Any, **options: Any) -> Any:
        made.append(config.num_layers)
        return random_params(config, *arguments, **options)

    monkeypatch.setattr(bench_scaling, "random_params", counted)
    lines = [AlphaBeta(op, 2, 1e-6, 1e9) for op in ("all_reduce", "all_gather", "all_to_all")]
    constants = tmp_path / "constants.json"
    Measured(tuple(lines)).save(constants)
    options = ["--model", "llama-3-70b", "--layers", "2", *SHORT, "--constants", constants, "--one-at-a-time"]
    status, out, err = command(*options, "--json", "-")
    assert status == 0
    found = json.loads(out)
    assert made == [2, 2, 4]
    assert found["deep"]["num_layers"] == 4
    assert (found["weights"], found["num_layers"], found["model_layers"], found["sliced"]) == ("random", 2, 6, True)
    assert found["constants"] == str(constants)
    assert found["collectives"] == Measured(tuple(lines)).to_json()
    assert "2 of 6 layers, random weights" in err


@pytest.mark.xdist_group("several-processes")
def test_two_processes(tiny: Path, tmp_path: Path) -> None:
    """Process 0 alone runs tp = 1 while the other waits for it; both run tp = 2."""
    lines = [AlphaBeta(op, 2, 1e-6, 1e9) for op in ("all_reduce", "all_gather", "all_to_all")]
    Measured(tuple(lines)).save(tmp_path / "constants.json")
    options = ["--model", tiny, "--tp", "1,2", *SHORT, "--constants", tmp_path / "constants.json", "--json", "-"]
    first, second = run_several("scripts.bench_scaling", tmp_path, [*options, "--cpu-devices", "1"])
    assert (first.status, second.status, second.out, second.err) == (0, 0, "", ""), (first.err, second.err)
    found = json.loads(first.out)
    assert [(row["tp"], row["devices_here"]) for row in found["rows"]] == [(1, 1), (2, 1)]
    assert found["device"]["processes"] == 2
    assert "2 processes" in first.err


def test_one_thread_a_device_is_a_child_with_its_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    class Child:
        def __init__(self, command: list[str], env: dict[str, str]):
            started.append((command, env))

        def wait(self) -> int:
            return 7

    monkeypatch.setattr(_one_core.subprocess, "Popen", Child)
    for name in _one_core.ONE_THREAD:
        monkeypatch.delenv(name, raising=False)
    assert bench_scaling.main(["--threads-per-device", "1", "--tp", "2"]) == 7
    ((command, environment),) = started
    assert command[1:] == ["-m", "scripts.bench_scaling", "--threads-per-device", "1", "--tp", "2"]
    assert {name: environment[name] for name in _one_core.ONE_THREAD} == _one_core.ONE_THREAD
    assert not set(_one_core.ONE_THREAD) & set(os.environ)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are held to cores on Linux alone")
def test_threads_are_held_to_cores_for_the_while() -> None:
    before = os.sched_getaffinity(0)
    (core,) = _one_core.own_cores(1)
    seen: list[set[int]] = []
    policies: set[int] = set()

    def look() -> float:
        threads = [int(thread) for thread in os.listdir("/proc/self/task")]
        seen.extend(map(os.sched_getaffinity, threads))
        policies.update(map(os.sched_getscheduler, threads))
        return 1.0

    assert bench_scaling._Clock(look, {core}).sample() == 1.0
    assert len(seen) > 1  # XLA's threads too
    assert all(cores == {core} for cores in seen)
    assert os.sched_getaffinity(0) == before
    assert policies == {os.SCHED_FIFO if _one_core.may_be_real_time() else os.SCHED_OTHER}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert _one_core.own_cores(1 + len(before)) == before


# --- what is said of samples ---

CASE = Case(CONFIG, "f32", "f32", context=12)


def samples(tp: int, ms: float, removed_ms: float | None = None, gb_per_s: float = 10, nbytes: float = 1e6) -> Samples:
    removed = [] if removed_ms is None else [removed_ms / 1e3] * 3
    alone = [] if removed_ms is None else [1e-4] * 3
    steps = [ms / 1e3] * 3
    return Samples(CASE.at(tp=tp), nbytes * 0.9, nbytes * 0.1, steps, removed, alone, [gb_per_s * 1e9], 1.0)


times = st.floats(1e-6, 10)


@given(
    weights=st.floats(1, 1e12),
    kv=st.floats(0, 1e12),
    steps=st.lists(times, min_size=1, max_size=5),
    removed=st.lists(times, max_size=5),
    reads=st.lists(st.floats(1e6, 1e13), min_size=1, max_size=5),
)
def test_ideal_is_a_lower_bound_and_terms_sum_to_the_measured_step(
    weights: float, kv: float, steps: list[float], removed: list[float], reads: list[float]
) -> None:
    """Whatever was measured: even a step that beats the probe, or one that is slower without its collectives."""
    one = Samples(CASE, weights, kv, steps, removed, [], reads, 1.0)
    (row,) = report_rows({1: one}, {}, None)
    assert row["ideal_ms"] <= min(row["samples_ms"]) * (1 + 1e-9)
    assert row["ideal_ms"] <= row["measured_ms"] * (1 + 1e-9)
    assert sum(row["terms_ms"].values()) == pytest.approx(row["measured_ms"])
    assert row["terms_ms"]["weights"] + row["terms_ms"]["kv"] == pytest.approx(row["ideal_ms"])
    assert min(row["terms_ms"].values()) >= -1e-9 * row["measured_ms"]
    # More bandwidth is never slower.
    (faster,) = report_rows({1: replace(one, reads=[2 * read for read in reads])}, {}, None)
    assert faster["ideal_ms"] <= row["ideal_ms"]


def test_the_verdict_names_what_stopped_it() -> None:
    measured = {1: samples(1, 1.0), 2: samples(2, 0.95, 0.55, nbytes=5e6), 4: samples(4, 0.94, 0.3, nbytes=2.5e6)}
    measured[1] = samples(1, 1.0, nbytes=1e7)
    assert verdict(measured, None).text == "tp = 2 gains 5% over tp = 1: collectives are 42% of the step"
    assert verdict(measured, 2).text.endswith("; tp = 4: functional only, more devices than the 2 cores")
    assert verdict(measured, 1).text == (
        "only tp = 1 was asked for: nothing to compare; tp = 2, 4: functional only, more devices than the 1 cores"
    )


def test_a_prediction_from_one_device_finds_an_exact_model_again() -> None:
    """Steps that follow the latency model at 80 % of the limit: predicted at every count, collectives included."""
    lines = [AlphaBeta(op, tp, 5e-6 * tp, 1e9) for tp in (2, 3) for op in ("all_reduce", "all_gather", "all_to_all")]
    constants = Measured(tuple(lines))
    limit, measured = 1e9, {}
    for tp in (1, 2, 3):
        case = CASE.at(tp=tp)
        exact = tpot(case, _scaling.read_chip(limit, float("inf")), _scaling.Efficiency(0.8, 1, 0, 0), constants)
        work = exact.as_dict()
        nbytes = [work[name] * 0.8 * limit for name in ("weights", "kv")]
        measured[tp] = Samples(case, *nbytes, [exact.total], [], [], [limit], 1.0)
    prior = _scaling.Efficiency(0.85, 1, 0, 0)
    predicted, efficiency = predict(measured, constants, lambda tp: float("inf"), prior)
    assert efficiency is not None
    for tp, one in measured.items():
        assert predicted[tp] == pytest.approx(one.measured_s, rel=0.02)
    assert predict({2: measured[2]}, constants, lambda tp: 1.0) == ({}, None)


def test_twice_the_layers_of_half_the_width_tell_overhead_from_bandwidth() -> None:
    constants = Measured(tuple(AlphaBeta(op, 2, 1e-5, 1e9) for op in ("all_reduce", "all_gather", "all_to_all")))
    big = replace(CASE, config=preset("smollm2-135m"))
    deep = big.at(config=deepened(big.config))
    exact = _scaling.Efficiency(0.75, 1, 150e-6, 0)
    chip = _scaling.read_chip(13e9, float("inf"))

    def samples(case: Case) -> Samples:
        terms = tpot(case, chip, exact, constants)
        return Samples(case, terms.weights * 0.75 * 13e9, terms.kv * 0.75 * 13e9, [terms.total], [], [], [13e9])

    measured = {tp: samples(big.at(tp=tp)) for tp in (1, 2)}
    prior = _scaling.Efficiency(0.85, 1, 20e-6, 0)
    predicted, found = predict(measured, constants, lambda tp: float("inf"), prior, samples(deep))
    assert found is not None
    assert (found.bandwidth, found.layer_overhead_s) == pytest.approx((0.75, 150e-6), rel=0.15)
    assert predicted[2] == pytest.approx(measured[2].measured_s, rel=0.01)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_deepened_model_reads_about_as_much(name: str) -> None:
    config = preset(name)
    deep = deepened(config)
    assert deep.num_layers == 2 * config.num_layers
    assert deep.parameter_count() == pytest.approx(config.parameter_count(), rel=0.1)


def test_datasheet_rates_by_the_names_that_jax_gives() -> None:
    assert _scaling.chip_flops("NVIDIA H100 80GB HBM3", "bf16") == 989e12
    assert _scaling.chip_flops("NVIDIA H200", "f32") == 67e12
    assert _scaling.chip_flops("TPU v5 lite", "bf16") == 197e12
    assert _scaling.chip_flops("TPU v4", "bf16") == 275e12
    assert _scaling.chip_flops("abacus", "bf16") == float("inf")


def run_facts(**changes: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "num_layers": 2,
        "model_layers": 2,
        "sliced": False,
        "weights": "random",
        "dtype": "float32",
        "batch": 1,
        "context": 10,
        "collective": "psum",
        "rounds": 3,
        "steps": 4,
        "threads_per_device": 1,
        "real_time": True,
        "threads_are_limited": True,
        "constants": "this run",
        "versions": {"jax": "0"},
        "device": {"kind": "cpu", "platform": "cpu", "cpu_cores": 2, "processes": 1},
        "verdict": "so it is",
        **changes,
    }


def test_the_report_says_how_good_the_prediction_was_and_what_the_cores_did() -> None:
    measured = {1: samples(1, 1.0), 2: samples(2, 0.6, 0.55)}
    rows = [{**row, "devices_here": row["tp"]} for row in report_rows(measured, {1: 1e-3, 2: 0.66e-3}, 2)]
    text = render(run_facts(), rows)
    assert "predicted with collectives from this run: off by 10% at most, within 15%" in text
    assert "CPU seconds a second (one core a device): 1.00 at tp = 1, 1.00 at tp = 2" in text
    assert "at tp = 2 devices had or used less than 75% of a core each" in text
    assert text.endswith("so it is")
    worse = [{**row, "devices_here": 1} for row in report_rows(measured, {1: 1e-3, 2: 0.72e-3}, 2)]
    text = render(run_facts(threads_are_limited=False), worse)
    assert "off by 20% at most, not within 15%" in text
    assert "devices used more than one core each, so no gain is real" in text
    fast = [{**row, "devices_here": 1} for row in report_rows({2: samples(2, 0.01, 0.01)}, {}, 2)]
    text = render(run_facts(), fast)
    assert "nothing was predicted" in text
    assert "at tp = 2 a step read faster than the probe" in text


def test_the_picture_is_labelled_and_shows_what_was_measured() -> None:
    pytest.importorskip("matplotlib")
    from scripts.plots import draw_scaling

    measured = {1: samples(1, 1.0), 2: samples(2, 0.6, 0.55), 4: samples(4, 0.7, 0.3)}
    rows = report_rows(measured, {1: 1e-3, 2: 0.66e-3, 4: 0.5e-3}, 2)
    lines, bars = draw_scaling({**run_facts(), "rows": rows}).axes
    assert (lines.get_xlabel(), lines.get_ylabel()) == ("devices (tp)", "time per output token (ms)")
    assert [label.get_text() for label in lines.get_xticklabels()] == ["1", "2", "4"]
    shown = {text.get_text() for text in lines.get_legend().get_texts()}
    assert shown == {"measured (median, range)", "ideal", "predicted", "collectives (by removal)", "functional only"}
    by_label = {line.get_label(): list(line.get_ydata()) for line in lines.get_lines()}
    assert by_label["predicted"] == [1.0, 0.66, 0.5]
    assert by_label["ideal"] == [row["ideal_ms"] for row in rows]
    assert {text.get_text() for text in bars.get_legend().get_texts()} == {
        "weights",
        "KV cache",
        "collectives",
        "everything else",
    }
    top = [sum(patch.get_height() for patch in group) for group in zip(*bars.containers, strict=True)]
    assert top == pytest.approx([1.0, 0.6, 0.7])


def test_bad_input_is_one_line(command: Run, tiny: Path, tmp_path: Path) -> None:
    Measured((AlphaBeta("all_reduce", 4, 1e-6, 1e9),)).save(tmp_path / "four.json")
    cases: list[tuple[list[Any], str]] = [
        (["--model", tiny, "--layers", "9"], f"--layers is 9; {tiny} has {CONFIG.num_layers}"),
        (["--model", tiny, "--steps", "33"], "--steps is 33; one dispatch runs at most 32"),
        (["--model", tiny, "--context", "60", "--steps", "4"], "--context 60 and --steps 4 need 65 positions"),
        (["--model", tiny, "--tp", "1,9", *SHORT], "needs 9 devices, but JAX sees 8 (cpu)"),
        (["--model", tiny, "--tp", "1", "--collective", "scatter"], "--collective scatter has no effect on one device"),
        (
            ["--model", tiny, *SHORT, "--constants", tmp_path / "four.json"],
            "no measurement of all_reduce over 2 devices",
        ),
        (["--model", tiny, *SHORT, "--constants", tmp_path / "gone.json"], "gone.json"),
        (["--model", tiny, "--process-count", "2"], "need --coordinator HOST:PORT"),
        (["--model", tiny, "--peer-timeout", "2"], "--peer-timeout has no effect without --coordinator"),
        (["--model", tiny, "--plot", tmp_path], "it is a folder"),
        (["--model", tiny, "--json", tmp_path / "no" / "x.json"], "there is no folder"),
    ]
    for options, message in cases:
        status, out, err = command(*options)
        assert (status, out) == (1, ""), options
        assert err.startswith("error: "), options
        assert message in err, err
        assert err.count("\n") == 1, err


@pytest.mark.parametrize("options", [["--threads-per-device", "2"], ["--layers", "0"], ["--dtype", "f16"]])
def test_options_that_argparse_refuses(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench_scaling.main(options)
    assert stop.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_the_chain_of_collectives_is_that_of_the_step() -> None:
    """As many of each kind as the compiled step has: ``collectives_ms_alone`` times these."""
    config = replace(CONFIG, num_kv_heads=1, num_heads=2)
    layout = Layout(make_mesh(4, 1))
    calls = step_collectives(Case(config, "f32", "f32", tp=4))
    chain = bench_scaling.CollectiveChain(layout.mesh, [bench_scaling._chained(call, layout) for call in calls])
    L = config.num_layers
    assert count_collectives(chain.program.as_text()) == {"all-gather": L + 1, "all-reduce": 2 * L + 1, "all-to-all": L}
