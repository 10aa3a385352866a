"""`python -m scripts.bench_decode`: what it reports, not how fast this machine is."""

from __future__ import annotations

import json
import statistics
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.checkpoint.resolve import open_model
from scripts import bench_decode
from scripts._transformers import TransformersChain
from tests.decode.running import make_decoder, run
from tests.model.checkpoint_files import small_config
from tests.scripts.tiny import CONFIG, write_tiny

Run = Callable[..., tuple[int, str, str]]
SHORT = ["--context", "10", "--steps", "4", "--rounds", "3"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def command(in_process: None, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*options: str | Path) -> tuple[int, str, str]:
        status = bench_decode.main([*map(str, options)])
        return status, *capsys.readouterr()

    return call


def test_every_dtype_at_every_degree(command: Run, tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    options = ["--model", tiny, "--dtype", "f32,bf16", "--tp", "1,3", "--batch", "2", *SHORT, "--json", target]
    status, out, err = command(*options)
    assert (status, err) == (0, "")
    found = json.loads(target.read_text())
    assert (found["model"], found["weights"], found["layers"]) == (str(tiny), "checkpoint", "unrolled")
    assert [found[key] for key in ("batch", "context", "steps", "rounds", "one_at_a_time")] == [2, 10, 4, 3, False]
    assert found["versions"]["jax"]
    assert found["device"]["count"] == 8
    rows = found["rows"]
    assert [(row["name"], row["dtype"], row["tp"]) for row in rows] == [
        ("shardstream", "float32", 1),
        ("shardstream", "float32", 3),
        ("shardstream", "bfloat16", 1),
        ("shardstream", "bfloat16", 3),
    ]
    for row in rows:
        width = {"float32": 4, "bfloat16": 2}[row["dtype"]]
        assert len(row["samples_ms"]) == 3
        assert row["tpot_ms"] == pytest.approx(statistics.median(row["samples_ms"]))
        assert row["tokens_per_s"] == pytest.approx(2 / row["tpot_ms"] * 1e3)
        assert sum(row["terms_ms"].values()) == pytest.approx(row["tpot_ms"])
        moved = row["step_bytes_per_device"]
        assert row["achieved_gb_per_s"] == pytest.approx(moved / row["tpot_ms"] / 1e6)
        assert row["limit_fraction"] == pytest.approx(row["achieved_gb_per_s"] / row["limit_gb_per_s"])
        assert len(row["limit_samples_gb_per_s"]) == 9
        assert row["limit_gb_per_s"] == max(row["limit_samples_gb_per_s"])
        # Keys and values of 12 positions (the middle of the chain) of two rows, in two layers.
        heads = CONFIG.num_kv_heads // row["tp"]
        cache = 2 * 2 * CONFIG.num_layers * 12 * heads * CONFIG.head_dim * width
        assert row["step_cache_bytes_per_device"] == cache
        assert row["terms_ms"]["cache"] == pytest.approx(cache / row["limit_gb_per_s"] / 1e6)
        assert row["step_weight_bytes_per_device"] == moved - cache
        if row["tp"] == 1:
            assert row["weight_bytes_per_device"] == CONFIG.parameter_count() * width
            assert row["collectives_per_step"] == {}
        else:
            assert row["collectives_per_step"] == {"all-gather": 1, "all-reduce": 1 + 2 * CONFIG.num_layers}
        assert row["load_s"] > 0
        assert row["compile_s"] > 0

    lines = out.splitlines()
    assert lines[0] == f"{tiny} (checkpoint weights), batch 2, context 10, unrolled layers, 3 samples of 4 steps;"
    shown = [line for line in lines if line.startswith("|")]
    assert len(shown) == 6
    assert len({len(line) for line in shown}) == 1
    assert f"{rows[3]['tpot_ms']:.2f} ({min(rows[3]['samples_ms']):.2f} to " in shown[-1]
    for column in bench_decode.HEAD[3:]:
        assert any(line.startswith((f"{column} ", f"{column},")) or f", {column}" in line for line in lines[9:]), column


def test_a_preset_runs_with_random_weights(command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tie_word_embeddings=True)
    monkeypatch.setattr(bench_decode, "preset", {"tinyllama-1.1b": config}.__getitem__)
    options = ["--model", "TinyLlama-1.1B", "--tp", "2", "--layers", "scan", *SHORT, "--json", "-"]
    status, out, err = command(*options)
    assert status == 0
    found = json.loads(out)
    assert (found["weights"], found["layers"]) == ("random", "scan")
    (row,) = found["rows"]
    assert row["tp"] == 2
    assert row["weight_bytes_per_device"] > 4 * config.parameter_count() / 2
    assert "TinyLlama-1.1B (random weights)" in err


def test_one_at_a_time_frees_each_row_before_the_next(
    command: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[weakref.ref[Any]] = []
    alive: list[int] = []
    real = bench_decode._ours

    def watched(*arguments: Any) -> Any:
        alive.append(sum(one() is not None for one in built))
        contestant = real(*arguments)
        built.append(weakref.ref(contestant.chain.decoder.params[0]))
        return contestant

    monkeypatch.setattr(bench_decode, "_ours", watched)
    options = ["--model", tiny, "--tp", "1,2", *SHORT, "--json", tmp_path / "x.json"]
    assert command(*options)[0] == 0
    assert alive == [0, 1]
    built.clear()
    alive.clear()
    assert command(*options, "--one-at-a-time")[0] == 0
    assert alive == [0, 0]
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["one_at_a_time"] is True
    assert [row["tp"] for row in found["rows"]] == [1, 2]
    assert [len(row["limit_samples_gb_per_s"]) for row in found["rows"]] == [9, 9]


def test_a_sample_runs_the_same_steps_each_time(tiny: Path) -> None:
    decoder = make_decoder(open_model(str(tiny)))
    chain = bench_decode.Chain(decoder, 1, 10, 4)
    prompt = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, 10)).tolist()
    expected = run(make_decoder(open_model(str(tiny))), prompt, 5)[0].tokens
    assert chain.rows.token.tolist() == expected[:1]
    for _ in range(2):
        emitted: list[Any] = []
        real = chain.program

        def keep(*arguments: Any, real: Any = real, emitted: list[Any] = emitted) -> Any:
            emitted.append(real(*arguments))
            return emitted[-1]

        chain.program = keep
        assert chain.sample() > 0
        chain.program = real
        assert np.asarray(emitted[0][2].tokens)[:4, 0].tolist() == expected[1:]


def test_transformers_beside_us(command: Run, tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    status, out, err = command("--model", tiny, "--beside", "transformers", *SHORT)
    assert (status, out) == (1, "")
    assert err.startswith("error: transformers refuses this model: ")
    assert "hidden size (32) is not a multiple of the number of attention heads (6)" in err
    tiny = write_tiny(tmp_path / "even", replace(CONFIG, hidden_size=48))
    target = tmp_path / "x.json"
    status, out, _ = command("--model", tiny, "--beside", "transformers", *SHORT, "--json", target)
    assert status == 0
    ours, theirs = json.loads(target.read_text())["rows"]
    assert ours["name"] == "shardstream"
    assert theirs["name"].startswith("transformers 5.")
    assert (theirs["dtype"], theirs["tp"], len(theirs["samples_ms"])) == ("float32", 1, 3)
    assert theirs["tokens_per_s"] == pytest.approx(1e3 / theirs["tpot_ms"])
    assert "achieved_gb_per_s" not in theirs
    assert f"| {theirs['name']} | float32 |" in out
    # The same weights: the same first token after the same context.
    peer = TransformersChain(open_model(str(tiny)), 1, 10, 4)
    chain = bench_decode.Chain(make_decoder(open_model(str(tiny))), 1, 10, 4)
    assert peer.first.tolist() == [chain.rows.token.tolist()]


def test_bad_input_is_one_line(command: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in ("torch", "transformers"):
        monkeypatch.setitem(__import__("sys").modules, missing, None)
    cases: list[tuple[list[Any], str]] = [
        (["--model", tiny, "--beside", "transformers", *SHORT], "needs torch: pip install -e '.[parity]'"),
        (["--model", "llama-3.2-1b", "--beside", "transformers"], "not a preset's random weights"),
        (["--model", tiny, "--steps", "33"], "--steps is 33; one dispatch runs at most 32"),
        (["--model", tiny, "--context", "60", "--steps", "4"], "--context 60 and --steps 4 need 65 positions; this"),
        (["--model", tiny, "--tp", "1,9", *SHORT], "tp=9 (times data=1) needs 9 devices, but JAX sees 8 (cpu)"),
        (["--model", tiny, "--collective", "one_shot", *SHORT], "--collective one_shot has no effect on one device"),
        (["--model", tmp_path / "gone"], "there is no file or folder"),
        (["--model", tiny, "--json", tmp_path], "it is a folder"),
    ]
    for options, message in cases:
        status, out, err = command(*options)
        assert (status, out) == (1, ""), options
        assert err.startswith("error: "), options
        assert message in err, err
        assert err.count("\n") == 1, err


@pytest.mark.parametrize("options", [["--dtype", "f32,f16"], ["--tp", "1,0"], ["--beside", "vllm"], ["--rounds", "0"]])
def test_options_that_argparse_refuses(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench_decode.main(options)
    assert stop.value.code == 2
    assert options[0] in capsys.readouterr().err


def row(dtype: str, tp: int, weights: float, cache: float, rest: float) -> dict[str, Any]:
    total = weights + cache + rest
    return {
        "name": "shardstream",
        "dtype": dtype,
        "tp": tp,
        "tpot_ms": total,
        "samples_ms": [total, total + 1],
        "tokens_per_s": 1e3 / total,
        "terms_ms": {"weights": weights, "cache": cache, "rest": rest},
        "achieved_gb_per_s": 12345.6,
        "limit_gb_per_s": 23456.7,
        "limit_fraction": 0.5,
    }


def test_the_verdict_names_the_term_that_does_not_shrink() -> None:
    rows = [
        row("float32", 4, 4.0, 1.0, 15.0),
        row("float32", 1, 16.0, 4.0, 2.0),
        row("bfloat16", 1, 16.0, 4.0, 0.0),
        row("bfloat16", 2, 8.0, 2.0, 0.0),
        {**row("float32", 1, 1.0, 1.0, 1.0), "name": "peer"},
    ]
    del rows[-1]["terms_ms"]
    assert bench_decode._verdicts(rows) == [
        "",
        "float32: tp=4 is 1.10x as fast as tp=1, of 4x",
        "bfloat16: tp=2 is 2.00x as fast as tp=1, of 2x",
    ]
    slower = [row("float32", 2, 8.0, 2.0, 12.0), row("float32", 1, 16.0, 4.0, 1.0)]
    assert bench_decode._verdicts(slower)[1:] == [
        "float32: tp=2 is 0.95x as fast as tp=1, of 2x: it does not pay, for rest does not shrink "
        "(1.00 ms there, 12.00 ms here)"
    ]
    assert bench_decode._verdicts([row("float32", 1, 1, 1, 1)]) == []


def test_the_table_fits_a_terminal_with_large_numbers() -> None:
    run = {"model": "m", "weights": "random", "batch": 1, "context": 1, "layers": "scan", "rounds": 1, "steps": 1}
    run |= {"device": {"platform": "cpu", "kind": "cpu", "cpu_cores": 2}, "versions": {"jax": "0.12"}, "kernels": "xla"}
    text = bench_decode.table(run, [row("bfloat16", 128, 1234.5, 1234.5, 1234.5)])
    assert max(map(len, text.splitlines())) <= 140
    assert "the devices are fake: they share these cores" in text
    assert "the devices are fake" not in bench_decode.table(run, [row("bfloat16", 1, 1.0, 1.0, 1.0)])
