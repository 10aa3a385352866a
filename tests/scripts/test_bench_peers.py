"""bench_peers: what it refuses, with words that help, and its table. The timing itself is checked by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import bench_peers

RUN = {
    "model": "demo",
    "context": 128,
    "rounds": 5,
    "steps": 32,
    "threads": 2,
    "limit_gb_per_s": 28.0,
    "kernels": "cpu_native",
    "versions": {"jax": "0.10.2"},
    "device": {"kind": "cpu"},
}


def test_a_peer_that_is_not_installed_is_an_error_that_says_how(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert bench_peers.main([]) == 1
    assert "pip install -e '.[peers]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "33"], "one dispatch of ours runs at most 32"),
        (["--model", "{here}"], "--model takes"),
        (["--json", "{here}"], "it is a folder"),
    ],
)
def test_what_cannot_be_run_is_refused(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench_peers, "check_llama_cpp", lambda: "0")
    assert bench_peers.main([option.format(here=tmp_path) for option in options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--peers", "ollama"], ["--widths", "q4_1"], ["--rounds", "0"]])
def test_unknown_choices_are_refused_by_the_parser(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench_peers.parse_args(options)


def test_figures_are_medians_of_the_samples_and_shares_of_the_limit() -> None:
    row = bench_peers.Row("ours", "int8", 140_000_000, 7, lambda: 0.0, lambda: None)
    result = bench_peers._result(row, [0.010, 0.007, 0.008], 28e9)
    assert result["tpot_ms"] == pytest.approx(8)
    assert result["tokens_per_s"] == pytest.approx(125)
    assert result["achieved_gb_per_s"] == pytest.approx(17.5)
    assert result["limit_fraction"] == pytest.approx(0.625)
    text = bench_peers.table(RUN, [result])
    assert "| ours | int8    | 140 | 8.00 (7.00 to 10.00) | 125.0    | 17.5 | 62%   |" in text
    assert "reads 28.0 GB/s" in text
    for column in ("MB", "ms/step", "GB/s", "share"):
        assert f"\n{column}" in text  # each column is defined
