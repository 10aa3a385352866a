"""`python -m scripts.bench_collectives`: what it fits and writes, not how fast this machine is."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roofline.collectives import Measured
from scripts import bench_collectives
from sharding.skew import SkewProbe
from tests.scripts.several import run_several

pytestmark = pytest.mark.xdist_group("several-processes")

Run = Callable[..., tuple[int, str, str]]
SMALL = ["--sizes", "64,1KiB,4KiB", "--rounds", "3"]


@pytest.fixture
def command(in_process: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(SkewProbe, "__init__", functools.partialmethod(SkewProbe.__init__, total_bytes=1 << 20))

    def call(*options: str | Path) -> tuple[int, str, str]:
        status = bench_collectives.main([*map(str, options)])
        return status, *capsys.readouterr()

    return call


def check(found: dict[str, Any], counts: list[int]) -> None:
    rows = found["measured"]
    ops = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    assert [(row["devices"], row["op"]) for row in rows] == [(count, op) for count in counts for op in ops]
    for row in rows:
        assert [one["bytes"] for one in row["sizes"]] == [64, 1024, 4096]
        for one in row["sizes"]:
            assert len(one["samples_us"]) == 3
            assert one["us"] == np.median(one["samples_us"]) > 0


def test_the_file_is_what_the_latency_model_reads(command: Run, tmp_path: Path) -> None:
    target = tmp_path / "collectives.json"
    status, out, err = command("--devices", "2,4", *SMALL, "--json", target)
    assert (status, err) == (0, "")
    found = json.loads(target.read_text())
    check(found, [2, 4])
    assert found["device"]["count"] == 8
    read = Measured.load(target)
    for row in found["measured"]:
        for one in row["sizes"]:
            assert read.time(row["op"], one["bytes"], row["devices"]) == pytest.approx(one["line_us"] / 1e6)
    assert "all_to_all over 4 devices: alpha " in out
    assert "64 B" in out


def test_two_processes(tmp_path: Path) -> None:
    options = ["--ops", "all_reduce", "--sizes", "1MiB,2MiB", "--rounds", "3", "--cpu-devices", "1", "--json", "-"]
    first, second = run_several("scripts.bench_collectives", tmp_path, options)
    assert (first.status, second.status, second.out) == (0, 0, ""), (first.err, second.err)
    found = json.loads(first.out)
    (row,) = found["measured"]
    assert (row["op"], row["devices"], [len(one["samples_us"]) for one in row["sizes"]]) == ("all_reduce", 2, [3, 3])
    assert found["processes"] == 2


def test_the_line_goes_through_exact_times() -> None:
    """20 us and 1 GB/s."""
    samples = {size: [20e-6 + size / 1e9] * 3 for size in (1024, 65536, 1 << 20)}
    row = bench_collectives.result("all_gather", 2, samples)
    assert row["alpha_us"] == pytest.approx(20)
    assert row["bytes_per_s"] == pytest.approx(1e9)
    assert bench_collectives.constants([row]).time("all_gather", 1e6, 2) == pytest.approx(1020e-6)
    flat = bench_collectives.result("all_gather", 2, {64: [1e-6], 128: [1e-6]})
    assert flat["bytes_per_s"] is None
    assert bench_collectives.constants([flat]).time("all_gather", 1e9, 2) == pytest.approx(1e-6)


def test_sizes_and_counts() -> None:
    assert bench_collectives.sizes("4MiB, 1k,64,64B,2KiB") == [64, 1024, 2048, 4 << 20]
    assert bench_collectives.SIZES[0] == 1 << 10
    assert bench_collectives.SIZES[-1] == 64 << 20
    assert [bench_collectives.default_counts(n) for n in (2, 6, 8)] == [[2], [2, 4, 6], [2, 4, 8]]
    assert [bench_collectives.size_text(n) for n in (100, 65536, 4 << 20)] == ["100 B", "64 KiB", "4 MiB"]


def test_bad_input_is_one_line(command: Run, tmp_path: Path) -> None:
    cases: list[tuple[list[Any], str]] = [
        (["--sizes", "64"], "--sizes needs two or more"),
        (["--devices", "1,2"], "--devices 1 has no collectives"),
        (["--devices", "16"], "needs 16 devices, but JAX sees 8 (cpu)"),
        (["--json", tmp_path], "it is a folder"),
    ]
    for options, message in cases:
        status, out, err = command(*options)
        assert (status, out) == (1, ""), options
        assert err.startswith("error: "), options
        assert message in err, err
        assert err.count("\n") == 1, err


@pytest.mark.parametrize("options", [["--sizes", "0"], ["--sizes", "1TiB"], ["--ops", "broadcast"], ["--devices", "0"]])
def test_options_that_argparse_refuses(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench_collectives.main(options)
    assert stop.value.code == 2
    assert options[0] in capsys.readouterr().err
