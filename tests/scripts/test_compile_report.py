"""scripts.compile_report: what it refuses, what it prints and writes, and what changed between two reports."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from scripts._compiled_text import difference
from scripts.compile_report import main
from sharding.aot import problem
from tests.scripts.tiny import write_tiny

pytestmark = [pytest.mark.xdist_group("aot"), pytest.mark.optimized]

KEYS = {
    "fits",
    "argument_bytes",
    "temp_bytes",
    "alias_bytes",
    "collectives",
    "large_copies",
    "step_bytes",
    "ideal_bytes",
    "estimated_cycles",
    "compile_s",
}


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 1
    return capsys.readouterr().err


def needs(platform: str) -> None:
    if missing := problem(platform):
        pytest.skip(missing)


@pytest.mark.parametrize("name", ["v9:2x2", "h100", "h100x0", "v5e", "cpu", "h100:2x2", "v5ex8"])
def test_an_unknown_machine_lists_the_known(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "--target", name)
    assert repr(name) in told
    assert all(known in told for known in ("v5e:2x4", "tpu7x:2x2x1", "h100x8", "b200x8"))


def test_an_unknown_model_or_dtype_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no-such" in refused(capsys, "--target", "v5e:2x4", "--model", "no-such")
    with pytest.raises(SystemExit):
        main(["--target", "v5e:2x4", "--dtype", "int3"])
    told = capsys.readouterr().err
    assert all(known in told for known in ("bf16", "int8", "int4", "fp8"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--group", "64"), "--group has no effect on bf16"),
        (("--dtype", "int4", "--group", "48"), "48"),
        (("--context", "9000"), "8192 positions"),
        (("--diff", "no-such-file.json"), "no-such-file.json"),
        (("--json", "no/such/folder.json"), "no folder"),
    ],
)
def test_options_that_do_not_go_together(options: tuple[str, ...], told: str, capsys: Any) -> None:
    needs("tpu")
    assert told in refused(capsys, "--model", "llama-3-8b", "--target", "v5e:2x4", *options)


def test_more_devices_than_the_machine_has(capsys: pytest.CaptureFixture[str]) -> None:
    needs("tpu")
    told = refused(capsys, "--target", "v5e:2x4", "--tp", "16")
    assert "tp=16 needs 16 devices, but v5e:2x4 has 8" in told
    assert "v5e:4x4" in told


def test_a_file_that_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in ("{", "[]", "{}"):
        (tmp_path / "other.json").write_text(content)
        assert "name a file that --json wrote" in refused(
            capsys, "--target", "v5e:2x4", "--diff", str(tmp_path / "other.json")
        )


@pytest.mark.parametrize(("machine", "package"), [("v5e:2x4", "[aot]"), ("h100x8", "jax-cuda13-plugin==")])
def test_a_compiler_that_is_not_installed(
    machine: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    told = refused(capsys, "--target", machine)
    assert "is not installed" in told
    assert package in told
    assert "--no-deps" in told


def test_the_report_and_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs("tpu")
    folder, before = write_tiny(tmp_path / "tiny"), tmp_path / "before.json"
    asked = ["--model", str(folder), "--target", "v5e:2x2", "--tp", "2", "--context", "64", "--layers", "unrolled"]
    assert main([*asked, "--json", str(before)]) == 0
    text = capsys.readouterr().out
    for column in ("argument", "alias", "temp", "needs", "read", "ideal", "made", "design", "copies", "cycles"):
        assert f"\n{column} " in text or f"  {column}" in text
    facts = json.loads(before.read_text())
    assert facts.keys() >= KEYS
    assert facts["fits"]
    assert facts["large_copies"] == []
    assert facts["estimated_cycles"] > 0
    assert facts["collectives"]["design"]["all-reduce"]["count"] == 3

    after = tmp_path / "after.json"
    assert main([*asked, "--program", "prefill", "--batch", "2", "--json", str(after), "--diff", str(before)]) == 0
    text = capsys.readouterr().out
    assert "prefill piece of 64 tokens" in text
    assert f"changed since {before}" in text
    assert "argument_bytes" in text


def test_differences_are_told_by_name() -> None:
    one = {"fits": True, "temp_bytes": 1000, "large_copies": [{"op": "copy", "of": "cache", "bytes": 7, "times": 2}]}
    two = {"fits": False, "temp_bytes": 1500, "large_copies": []}
    told = difference(one, two, "one.json").splitlines()
    assert told[0].split() == ["changed", "since", "one.json", "before", "now"]
    assert [line.split()[0] for line in told[1:]] == ["fits", "temp_bytes", "large_copies[copy", "large_copies[copy"]
    assert "+50.0%" in told[2]
    assert difference(one, dict(one), "one.json") == "nothing changed since one.json"


def test_of_many_fusions_those_are_told_that_changed_most() -> None:
    one, two = ({"cycles": [{"of": f"op{n}", "cycles": 100 + sign * n} for n in range(13)]} for sign in (0, 1))
    told = difference(one, two, "one.json").splitlines()
    assert [line.split()[0] for line in told[1:-1]] == [f"cycles[op{n}].cycles" for n in range(3, 13)]
    assert told[-1] == "  and the cycles of 2 more, which changed less"
