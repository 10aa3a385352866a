"""bench_serving_peers: what it refuses, its numbers and its table. The servers themselves are measured by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from decode.batching.options import EngineStats
from scripts import bench_serving_peers, plots
from serve.metrics import Metrics
from tests.serve.fake_engine import FakeEngine


def point(rate: float) -> dict[str, Any]:
    return {"output_tokens_per_s": rate, "ttft_ms": {"median": 50.0}, "tpot_ms": {"median": 10.0}}


REPORT = {
    "model": "demo",
    "prompt_tokens": 32,
    "output_tokens": 32,
    "rounds": 1,
    "threads": 2,
    "limit_gb_per_s": 28.0,
    "versions": {"jax": "0.10.2", "llama-cpp-python": "0.3.36"},
    "device": {"kind": "cpu"},
    "rows": [
        {
            "width": "file",
            "concurrency": 8,
            "same_text": True,
            "ours": [point(300.0)],
            "peer": [point(60.0)],
            "ours_tokens_per_s": 300.0,
            "peer_tokens_per_s": 60.0,
            "ratio": 5.0,
        }
    ],
    "steps": [{"width": "file", "rows": 8, "measured_ms": 20.0, "predicted_ms": 19.0, "weights_ms": 3.0}],
}


def test_a_peer_that_is_not_installed_is_an_error_that_says_how(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert bench_serving_peers.main([]) == 1
    assert "pip install -e '.[peers]'" in capsys.readouterr().err


def test_a_part_of_its_server_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_serving_peers, "check_llama_cpp", lambda: "0")
    monkeypatch.setattr("scripts._servers.PEER_PARTS", ("json", "no_such_package"))
    assert bench_serving_peers.main([]) == 1
    assert "needs no_such_package: pip install -e '.[peers]'" in capsys.readouterr().err


def test_a_model_that_is_no_gguf_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_serving_peers, "check_llama_cpp", lambda: "0")
    monkeypatch.setattr(bench_serving_peers, "check_peer_server", lambda: None)
    assert bench_serving_peers.main(["--model", str(tmp_path)]) == 1
    assert "--model takes" in capsys.readouterr().err


def test_steps_are_read_from_the_metrics() -> None:
    """What the server's own metrics write is what is read here."""
    engine = FakeEngine()
    plain = engine.stats()
    engine.close()

    def stats() -> EngineStats:
        shapes = {(8, 0): (0.02, 0.019), (4, 32): (0.06, 0.05)}
        return EngineStats(**{**plain.__dict__, "shapes_s": shapes})

    text = Metrics(stats).text().decode()
    assert bench_serving_peers.step_shapes(text) == {(8, 0): (0.02, 0.019), (4, 32): (0.06, 0.05)}


def test_the_table_and_the_plot() -> None:
    text = bench_serving_peers.table(REPORT)
    assert "| file    | 8     | 300.0 | 60.0      | 5.00x | 50.0 | 50.0      | 10.0 | 10.0      |" in text
    assert "| file    | 8    | 20.00    | 19.00     | 3.00          | 400.0 |" in text
    for column in ("conc.", "ratio", "rows", "measured", "predicted", "weights"):
        assert f"\n{column}" in text  # each column is defined
    assert "the first answer is the same text" in text
    assert plots.png(plots.draw_serving_peers(REPORT))[:4] == b"\x89PNG"
