"""What a command says and refuses before its work begins, and while it lasts: files, Ctrl-C, progress."""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from model.wording import number_of
from scripts import generate
from scripts._progress import counted

ROOT = Path(generate.__file__).parents[1]
COMMANDS = sorted(path.stem for path in (ROOT / "scripts").glob("[a-z]*.py"))
NEEDED = {
    "bench_serving": ["--url", "http://127.0.0.1:9", "--concurrency", "1"],
    "compile_report": ["--model", "llama-3-8b", "--target", "v5e:2x4"],
    "generate": ["--prompt", "x"],
    "memory_wall": ["--model", "llama-3-8b"],
    "train_draft": ["--model", "demo"],
    "convert_checkpoint": ["SOURCE"],
}
"""Options that a command cannot do without."""
OUTPUTS = {"train_draft": ["--out"], "convert_checkpoint": [""]}
"""Where it is not --json or --plot; "" is an argument that has no name."""


def writing() -> list[tuple[str, str]]:
    """Each command with each option of its that names what to write."""
    found = []
    for name in COMMANDS:
        source = (ROOT / "scripts" / f"{name}.py").read_text()
        options = [
            option for option in ("--json", "--plot") if f'"{option}", metavar' in source or f'"{option}"' in source
        ]
        found += [(name, option) for option in OUTPUTS.get(name, options)]
    return found


@pytest.mark.parametrize(("name", "option"), writing())
def test_what_cannot_be_written_is_refused_before_anything_starts(
    name: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("it began to work")

    monkeypatch.setattr(jax, "devices", started)
    (tmp_path / "file").touch()
    given = [*NEEDED.get(name, []), *filter(None, [option]), str(tmp_path / "file" / "new")]
    assert importlib.import_module(f"scripts.{name}").main(given) != 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: cannot write {tmp_path / 'file' / 'new'}: "), err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["generate", "serve", "bench_decode"])
def test_an_interrupt_while_a_command_is_being_imported(name: str, tmp_path: Path) -> None:
    """By somebody who saw a mistake in it at once. In place of JAX stands a module that is interrupted."""
    (tmp_path / "jax.py").write_text(
        "import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\n"
        "except BaseException:\n    raise ImportError('half imported') from None\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", f"scripts.{name}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen, file = Terminal(), io.StringIO()
    for stderr in (screen, file):
        monkeypatch.setattr(sys, "stderr", stderr)
        assert list(counted(range(3), "rounds")) == [0, 1, 2]
        assert list(counted(iter("ab"), "letters", 2)) == ["a", "b"]
    for shown in ("rounds", "0/3", "3/3", "letters", "2/2"):
        assert shown in screen.getvalue()
    assert file.getvalue() == ""


def test_one_is_singular() -> None:
    assert [number_of(count, "prompt token") for count in (0, 1, 2, 2048)] == [
        "0 prompt tokens",
        "1 prompt token",
        "2 prompt tokens",
        "2,048 prompt tokens",
    ]
