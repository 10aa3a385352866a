"""eval_quality: its measures against closed forms, and a whole run on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from model.quantize import QuantizationError
from scripts._cli import UsageError
from scripts.eval_quality import COLUMNS, Setting, main, rows_of, score, shipped_text
from tests.scripts.tiny import write_tiny


def test_measures_are_those_of_float64() -> None:
    rng = np.random.default_rng(0)
    rows = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]
    own, other = (rng.standard_normal((2, 5, 11)).astype(np.float32) * 3 for _ in range(2))
    found = score(rows, list(own), list(other))
    nll, kl, same = [], [], []
    for row, a, b in zip(rows, own.astype(np.float64), other.astype(np.float64), strict=True):
        for at in range(4):
            q, p = (np.exp(x[at]) / np.exp(x[at]).sum() for x in (a, b))
            nll.append(-np.log(q[row[at + 1]]))
            kl.append((p * np.log(p / q)).sum())
            same.append(p.argmax() == q.argmax())
    assert found.nll == pytest.approx(np.mean(nll), rel=1e-5)
    assert found.kl == pytest.approx(np.mean(kl), rel=1e-5)
    assert found.top1 == np.mean(same)
    assert found.perplexity == pytest.approx(np.exp(np.mean(nll)), rel=1e-5)


def test_a_model_is_no_distance_from_itself() -> None:
    logits = [np.random.default_rng(1).standard_normal((6, 7)).astype(np.float32)]
    found = score([[0, 1, 2, 3, 4, 5]], logits, logits)
    assert (found.kl, found.top1) == (0.0, 1.0)
    uniform = [np.zeros((6, 7), np.float32)]
    assert score([[0, 1, 2, 3, 4, 5]], uniform, uniform).perplexity == pytest.approx(7, rel=1e-6)


def test_rows_waste_fewer_than_one_token_each() -> None:
    assert rows_of(range(10), 4) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert rows_of(range(8), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows_of(range(3), 100) == [[0, 1, 2]]
    with pytest.raises(UsageError, match="has 1 token;"):
        rows_of([1], 4)


def test_settings() -> None:
    both = Setting.parse("int4-g32+int8-kv")
    assert (both.cache, both.dtype, both.quantization.of("layers.0.mlp.down").name) == ("int8", "float32", "int4-g32")  # type: ignore[union-attr]
    assert Setting.parse("bf16").dtype == "bfloat16"
    with pytest.raises(QuantizationError, match="unknown quantisation 'int7'"):
        Setting.parse("int7")
    with pytest.raises(UsageError, match="'int8' is not a cache"):
        Setting.parse("int4+int8")


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """f32 is itself; 8 bits are near it, and the KV cache in 8 bits is too; the table defines its columns."""
    folder, out = write_tiny(tmp_path / "model"), tmp_path / "out.json"
    text = tmp_path / "text"
    text.write_text(shipped_text()[:120])
    settings = "f32,int8,int8-kv"
    assert main(["--model", str(folder), "--settings", settings, "--text", str(text), "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["scored_tokens"] == result["rows"] * (result["row_tokens"] - 1) > 100
    f32, int8, cache = result["settings"]
    assert (f32["perplexity_rise"], f32["mean_kl_nats"], f32["top1_agreement"]) == (0, 0, 1)
    assert int8["weight_bytes"] < f32["weight_bytes"] == cache["weight_bytes"]
    for one in (int8, cache):
        assert 0 < one["mean_kl_nats"] < 0.01
        assert abs(one["perplexity_rise"]) < 0.02
    printed = capsys.readouterr().out
    assert COLUMNS in printed
    assert all(name in printed for name in settings.split(","))


def test_the_shipped_text_is_ordinary() -> None:
    """Enough of it, in short lines of plain characters, with code and numbers among the prose."""
    text = shipped_text()
    assert 1000 < len(text.split()) < 2000
    assert text.isascii()
    assert "def " in text
    assert any(character.isdigit() for character in text)
