"""What the commands share: exit statuses, notes, output files, option types, devices."""

from __future__ import annotations

import argparse
import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import jax
import pytest

from model.checkpoint.errors import CheckpointError
from scripts import _cli
from scripts._cli import (
    UsageError,
    check_writable,
    device_facts,
    integers,
    not_negative,
    positive,
    run_command,
    set_up,
    versions,
    words,
    write_json,
)


def raising(error: BaseException) -> Any:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (UsageError("two\n  lines"), 1, "error: two lines\n"),
        (CheckpointError("no such model"), 1, "error: no such model\n"),
        (PermissionError(13, "Permission denied", "a.safetensors"), 1, "Permission denied: 'a.safetensors'\n"),
        (MemoryError("64 GiB"), 1, "error: out of memory (64 GiB); try a larger --tp"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes\nstack"), 1, "(RESOURCE_EXHAUSTED: 9 bytes); try"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_errors_are_told_in_one_line(
    error: BaseException, status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(raising(error)) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert err.count("\n") <= 2


def test_our_own_faults_keep_their_traceback() -> None:
    for error in (RuntimeError("bug"), jax.errors.JaxRuntimeError("INTERNAL: bug"), AssertionError()):
        with pytest.raises(type(error)):
            run_command(raising(error))


@pytest.mark.parametrize(("quiet", "told"), [(False, "fetching\ndamaged\n"), (True, "damaged\n")])
def test_notes_of_the_loaders_show_once(quiet: bool, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("model.checkpoint.demo")

    def work() -> None:
        logger.info("fetching")
        logger.warning("damaged")
        print("text")

    before = logging.getLogger("model").level
    assert run_command(work, quiet=quiet) == 0
    assert run_command(work, quiet=quiet) == 0
    assert capsys.readouterr() == ("text\n" * 2, told * 2)
    assert logging.getLogger("model").handlers == []
    assert logging.getLogger("model").level == before


def test_json_is_written_whole_or_not_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    write_json(str(target), {"text": "é😀\udcff"})
    assert json.loads(target.read_bytes()) == {"text": "é😀\udcff"}
    assert "é😀" in target.read_text()
    with pytest.raises(TypeError):
        write_json(str(target), {"text": object()})
    assert json.loads(target.read_bytes())["text"] == "é😀\udcff"
    link = tmp_path / "link.json"
    link.symlink_to(target)
    write_json(str(link), [1])
    assert link.is_symlink()
    assert json.loads(target.read_text()) == [1]
    write_json("-", [2])
    assert json.loads(capsys.readouterr().out) == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "out.json"]


def test_json_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_json(str(tmp_path / "out.json"), [])
    assert os.stat(tmp_path / "out.json").st_mode == os.stat(tmp_path / "plain").st_mode


def test_json_to_a_device_does_not_replace_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_json(str(pipe), [3])
    assert json.loads(os.read(reader, 100)) == [3]
    os.close(reader)
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)


def test_a_failed_write_names_the_file_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UsageError, match=r"cannot write .*out\.json: No space left on device"):
        write_json(str(tmp_path / "out.json"), [])
    assert list(tmp_path.iterdir()) == []


def test_output_paths_are_checked_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for good in (None, "-", str(tmp_path / "new.json"), os.devnull):
        check_writable(good)
    with pytest.raises(UsageError, match="it is a folder"):
        check_writable(str(tmp_path))
    with pytest.raises(UsageError, match=r"there is no folder .*gone"):
        check_writable(str(tmp_path / "gone" / "x.json"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match="no permission"):
        check_writable(str(tmp_path / "x.json"))


def test_option_types() -> None:
    assert (positive("3"), not_negative("0"), integers("4,1,4")) == (3, 0, [4, 1])
    assert words(["f32", "bf16"])("bf16,f32,bf16") == ["bf16", "f32"]
    for function, text, message in (
        (positive, "0", "at least 1"),
        (not_negative, "-1", "at least 0"),
        (positive, "1.5", "'1.5' is not an integer"),
        (integers, "1,,2", "'' is not an integer"),
        (integers, "1,0", "at least 1"),
        (words(["f32", "bf16"]), "f32,f16", "'f16' is not one of f32, bf16"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            function(text)


@pytest.mark.usefixtures("in_process")
def test_devices_are_fixed_once_jax_has_started() -> None:
    count = jax.config.jax_num_cpu_devices
    for cpu_devices, spare in ((None, 1), (None, 100), (8, 1), (2, 1)):
        set_up(cpu_devices, spare=spare)
        assert (jax.device_count(), jax.config.jax_num_cpu_devices) == (8, count)
    with pytest.raises(UsageError, match=r"--cpu-devices 9 comes too late: JAX has started .* with 8 cpu devices"):
        set_up(9)


@pytest.mark.usefixtures("in_process")
def test_no_home_folder_costs_the_compilation_cache_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("no home")

    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", None)  # no folder that somebody chose
    monkeypatch.setattr(_cli, "cache_dir", homeless)
    assert set_up(None).describe() == "cache off: no home"


def test_a_platform_that_jax_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Unable to initialize backend 'tpu': no\n  TPU")

    monkeypatch.setattr(jax, "devices", fail)
    with pytest.raises(UsageError, match=r"JAX cannot start on the platforms 'cpu' \(JAX_PLATFORMS\): Unable to"):
        set_up(None)


def test_facts_about_the_run() -> None:
    found = versions()
    assert found["jax"] == jax.__version__
    assert set(found) == {"python", "shardstream", "jax", "jaxlib", "flax", "numpy"}
    facts = device_facts()
    assert (facts["platform"], facts["count"], facts["processes"]) == ("cpu", jax.device_count(), 1)
    assert facts["cpu_cores"] >= 1
