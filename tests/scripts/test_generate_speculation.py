"""`--speculate` of `scripts.generate` and the bench, on a tiny model: the same text, a report, and what is refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from decode.batching.options import EngineOptions
from scripts import bench_decode, bench_speculation, generate
from scripts._cli import UsageError
from scripts._speculation_load import Sample, _row, render
from scripts.bench_speculation import _lengths
from tests.model.checkpoint_files import small_config
from tests.scripts.tiny import BOS, EOS, answer, text_of, tokens_of, write_tiny

PROMPT, N = "one two one two one", 10


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "model")


def call(model: Path, *options: str | Path) -> int:
    arguments = ["--model", model, "--prompt", PROMPT, "--max-new-tokens", N, "--tp", 1, *options]
    return generate.main([str(one) for one in arguments])


@pytest.mark.parametrize("proposer", ["ngram", "itself"])
def test_the_text_is_the_same_and_the_gain_is_told(
    in_process: None, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], proposer: str
) -> None:
    named = tiny if proposer == "itself" else proposer
    target = tmp_path / "found.json"
    assert call(tiny, "--speculate", named, "--k", "1", "--json", target) == 0
    expected = answer(tiny, tokens_of(PROMPT), N)
    out = capsys.readouterr().out
    assert out.startswith(text_of(expected) + "\n")
    assert "\nspeculate " in out
    assert "\npass " in out
    found = json.loads(target.read_text())
    assert found["token_ids"] == expected
    facts: dict[str, Any] = found["speculation"]
    assert facts["k"] == 1
    assert set(facts["pass_ms"]) == {"0", "1"}
    assert facts["tokens_per_pass"] >= 1
    assert sum(facts["passes"].values()) > 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--k", "2"), "goes with --speculate"),
        (("--draft-dtype", "f32"), "goes with --speculate"),
        (("--speculate", "ngram", "--draft-dtype", "f32"), "ngram has none"),
        (("--speculate", "ngram", "--k", "0"), "from 1 to 15"),
        (("--speculate", "ngram", "--k", "16"), "from 1 to 15"),
        (("--speculate", "nowhere.gguf"), "no file or folder"),
        (("--speculate", "ngram", "--k", "15", "--max-new-tokens", "3", "--max-len", "15"), "leaves no room"),
    ],
)
def test_what_does_not_fit_is_refused(
    in_process: None, tiny: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], told: str
) -> None:
    assert call(tiny, *options) == 1
    assert told in capsys.readouterr().err


def test_a_penalty_and_many_prompts_are_refused(
    in_process: None, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts").write_text("a\n" * 40)
    many = ("--prompts-file", tmp_path / "prompts", "--speculate", "ngram", "--repetition-penalty", "1.1")
    assert call(tiny, *many) == 1
    assert "--speculate and --repetition-penalty do not go together for 41 prompts" in capsys.readouterr().err


def test_drafts_that_do_not_fit_are_refused(
    in_process: None, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    larger = write_tiny(
        tmp_path / "larger", small_config(vocab_size=258, bos_token_id=BOS, eos_token_ids=(EOS,), num_layers=3)
    )
    assert call(tiny, "--speculate", larger) == 1
    assert "use a smaller one" in capsys.readouterr().err
    other = write_tiny(tmp_path / "other", small_config(vocab_size=260, bos_token_id=BOS, num_layers=1))
    assert call(tiny, "--speculate", other) == 1
    assert "a vocabulary of 260 tokens and the model one of 258" in capsys.readouterr().err


def test_bench_compares_modes(
    in_process: None, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.bench_speculation.PROMPTS", {"chat": "ab ab", "story": "abc"})
    target = tmp_path / "bench.json"
    options = ["--model", str(tiny), "--speculate", "ngram", "--k", "1", "--rounds", "1", "--json", str(target)]
    assert bench_decode.main(options) == 0
    assert "| story  | ngram |" in capsys.readouterr().out
    rows = json.loads(target.read_text())["rows"]
    assert [(row["prompt"], row["mode"]) for row in rows] == [
        ("chat", "plain"),
        ("chat", "ngram"),
        ("story", "plain"),
        ("story", "ngram"),
    ]
    assert all(row["left_plain_at"] is None for row in rows if row["mode"] == "ngram")
    assert bench_decode.main([*options, "--batch", "2"]) == 1
    assert "--batch" in capsys.readouterr().err


def test_bench_compares_modes_under_load(
    in_process: None, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.bench_speculation.PROMPTS", {"chat": "ab ab ab"})
    # By default a queue may be shorter than a load, and would refuse a part of it.
    monkeypatch.setattr("scripts._speculation_load.EngineOptions", functools.partial(EngineOptions, max_queue=1))
    target = tmp_path / "bench.json"
    options = ["--model", str(tiny), "--speculate", "ngram", "--k", "1", "--rounds", "2", "--json", str(target)]
    assert bench_speculation.main([*options, "--concurrency", "2,1", "--max-new-tokens", "6"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{tiny} in float32, tp=1, k up to 1, 6 tokens at most, 2 rounds;\n")
    found = json.loads(target.read_text())
    rows = found["rows"]
    assert [(row["concurrency"], row["mode"]) for row in rows] == [
        (1, "plain"),
        (1, "ngram"),
        (2, "plain"),
        (2, "ngram"),
    ]
    for row in rows:
        assert row["tokens"] == row["concurrency"] * 6 * 2  # the warming round is left out
        assert len(row["samples_tokens_per_s"]) == 2
        assert row["accepted"] <= row["proposed"] <= row["tokens"]
        assert row["other_texts"] == 0
    assert [row["gain"] for row in rows if row["mode"] == "plain"] == [1, 1]
    assert (found["max_new_tokens"], found["k"]) == (6, 1)


@pytest.mark.parametrize("options", [[], ["--concurrency", "1"]])
def test_bench_refuses_prompts_without_room(
    in_process: None,
    tiny: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
) -> None:
    monkeypatch.setattr("scripts.bench_speculation.PROMPTS", {"chat": "x" * 60})
    assert bench_speculation.main(["--model", str(tiny), *options]) == 1
    assert "tokens, and there are 64 positions for it and its answer: choose shorter" in capsys.readouterr().err


def test_an_answer_is_as_long_as_the_models_allow() -> None:
    prompts, configs = [[1] * 10, [1] * 4], [small_config(max_position_embeddings=most) for most in (64, 32)]
    assert _lengths(99, prompts, configs, least=1) == (22, 32)
    assert _lengths(3, prompts, configs, least=1) == (3, 13)
    with pytest.raises(UsageError, match="--max-new-tokens is 1; it must be at least 2"):
        _lengths(1, prompts, configs, least=2)


def test_a_row_of_a_load_by_hand() -> None:
    """Gains are of the same round; texts that differ and proposals are counted over all rounds."""
    plain = [Sample(10.0, 0, 0, [[1, 2], [3, 4]]), Sample(20.0, 0, 0, [[1, 2], [3, 4]])]
    own = [Sample(15.0, 4, 2, [[1, 2], [3, 4]]), Sample(40.0, 4, 4, [[1, 2], [3, 5]])]
    row = _row("chat", 2, "ngram", {("chat", 2, "plain"): plain, ("chat", 2, "ngram"): own})
    assert (row["gain"], row["tokens_per_s"]) == (1.75, 27.5)
    assert (row["tokens"], row["proposed"], row["accepted"], row["other_texts"]) == (8, 8, 6, 1)
    line = render([row])[2]
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "chat", "2", "ngram", "27.5 (15.0 to 40.0)", "1.75", "1.00", "75%", "other: 1",
    ]  # fmt: skip
