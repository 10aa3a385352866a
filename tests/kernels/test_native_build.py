"""Building the native library: what is kept, what is built anew, and what is said where it cannot be had."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from numpy._core import _multiarray_umath

from kernels.matmul import choose, matmul
from kernels.native import BuildError, build, problem
from kernels.select import KernelError
from scripts import build_native

build_module = sys.modules["kernels.native.build"]  # the package names its function so

REPOSITORY = Path(__file__).parents[2]
# A compiler's stand-in that notes its calls and makes a small file; what it does before that comes from a test.
STAND_IN = """#!/bin/sh
if [ "$1" = --version ]; then echo "{version}"; exit 0; fi
echo "$*" >> "{calls}"
{before}
while [ $# -gt 1 ]; do if [ "$1" = -o ]; then out=$2; fi; shift; done
printf 'first half, ' > "$out"
{between}
printf 'second half' >> "$out"
"""
WHOLE = b"first half, second half"


class StandIn:
    """The only compiler on the PATH."""

    def __init__(self, folder: Path):
        self.path, self._calls = folder / "c++", folder / "calls"

    def write(self, before: str = "", between: str = "", version: str = "stand-in 1.0") -> None:
        text = STAND_IN.format(version=version, calls=self._calls, before=before, between=between)
        self.path.write_text(text)
        self.path.chmod(0o755)

    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines() if self._calls.exists() else []


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stand_in = StandIn(folder)
    stand_in.write()
    return stand_in


@pytest.fixture
def first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has not asked for the library yet."""
    monkeypatch.setattr(build_module, "_first_use", functools.cache(build_module._first_use.__wrapped__))


def test_the_library_has_every_target() -> None:
    """Built by the system's compiler, where it has one."""
    if not any(map(shutil.which, build_module.COMPILERS)):
        pytest.skip("no C++ compiler")
    assert problem() is None
    library = ctypes.CDLL(str(build()))
    assert all(hasattr(library, name) for name in build_module.TARGETS)


def test_a_second_build_compiles_nothing(compiler: StandIn, tmp_path: Path) -> None:
    first = build(tmp_path / "made")
    assert first.read_bytes() == WHOLE
    assert build(tmp_path / "made") == first
    assert len(compiler.calls()) == 1
    assert list((tmp_path / "made").iterdir()) == [first]


def test_the_default_folder_is_in_the_cache(compiler: StandIn, tmp_path: Path) -> None:
    assert build().parent == tmp_path / "cache" / "shardstream" / "native"


CHANGES: dict[str, Callable[[pytest.MonkeyPatch, StandIn, Path], None]] = {
    "source": lambda patch, compiler, sources: (sources / "matmul.h").write_text("// changed\n") and None,
    "a new source": lambda patch, compiler, sources: (sources / "more.h").write_text("") and None,
    "compiler": lambda patch, compiler, sources: compiler.write(version="stand-in 2.0"),
    "flags": lambda patch, compiler, sources: patch.setattr(build_module, "FLAGS", (*build_module.FLAGS, "-g")),
    "flags of the CPU": lambda patch, compiler, sources: patch.setattr(build_module, "CPU_FLAGS", ((),)),
    "jaxlib": lambda patch, compiler, sources: patch.setattr(jaxlib, "__version__", "99.0"),
    "CPU": lambda patch, compiler, sources: patch.setattr(build_module, "_cpu", lambda: "another"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_library_depends_on_builds_another(
    compiler: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    sources = tmp_path / "src"
    shutil.copytree(build_module.SOURCES, sources)
    monkeypatch.setattr(build_module, "SOURCES", sources)
    first = build(tmp_path / "made")
    CHANGES[change](monkeypatch, compiler, sources)
    second = build(tmp_path / "made")
    assert second != first
    assert len(compiler.calls()) == 2
    assert sorted((tmp_path / "made").iterdir()) == sorted([first, second])


@pytest.mark.parametrize("damage", [b"", WHOLE[:10], WHOLE + b"more", b"\x7fELF of another machine"])
def test_a_damaged_library_is_built_again(compiler: StandIn, tmp_path: Path, damage: bytes) -> None:
    """Loading a file that was cut short would kill the process, so it is noticed before."""
    path = build(tmp_path / "made")
    path.write_bytes(damage)
    assert build(tmp_path / "made") == path
    assert path.read_bytes() == WHOLE
    assert len(compiler.calls()) == 2


def test_builds_at_once_leave_one_whole_library(compiler: StandIn, tmp_path: Path) -> None:
    """Each waits, in the middle of writing, until all have begun."""
    count = 3
    begun = tmp_path / "begun"
    begun.mkdir()
    everyone = " && ".join(f"[ -e {begun}/{i} ]" for i in range(count))
    compiler.write(between=f': > "{begun}/$WHO"\nuntil {everyone}; do /bin/sleep 0.01; done')
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "scripts.build_native"],
            cwd=REPOSITORY,
            env={**os.environ, "WHO": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]
    said = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0] * count, said
    (path,) = {Path(out.strip()) for out, _ in said}
    assert path.read_bytes() == WHOLE
    assert list(path.parent.iterdir()) == [path]
    assert len(compiler.calls()) == count


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (
            'echo "In file included" >&2; echo "a.h:1:1: error: no such thing" >&2; exit 1',
            "a.h:1:1: error: no such thing",
        ),
        ('echo "out of licences" >&2; exit 2', "out of licences"),
        ("printf '\\377 error: \\344\\n' >&2; exit 1", "\ufffd error: \ufffd"),
        ("exit 3", "exit status 3 and no message"),
        ("exit 0", "exit status 0 and no message"),  # which made no file
    ],
)
def test_a_failing_compiler_is_named_and_leaves_nothing(
    compiler: StandIn, tmp_path: Path, before: str, reason: str
) -> None:
    compiler.write(before=before)
    with pytest.raises(BuildError) as caught:
        build(tmp_path / "made")
    assert str(caught.value) == f"{compiler.path} failed: {reason}"
    assert len(compiler.calls()) == len(build_module.CPU_FLAGS)
    assert list((tmp_path / "made").iterdir()) == []


def test_flags_that_a_compiler_does_not_know_are_left_out(compiler: StandIn, tmp_path: Path) -> None:
    compiler.write(before='case "$*" in *-march=*) echo "error: unknown -march" >&2; exit 1;; esac')
    assert build(tmp_path / "made").read_bytes() == WHOLE
    assert ["-mcpu=native" in call for call in compiler.calls()] == [False, False, True]


def test_a_compiler_that_does_not_end_is_ended(
    compiler: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the processes it started, which hold its output open."""
    held = tmp_path / "held"  # for writing, by each of them
    os.mkfifo(held)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    compiler.write(before=f'exec 3> "{held}"; /bin/sleep 1000 & wait')
    key = build_module._key(str(compiler.path))
    monkeypatch.setattr(build_module, "_key", lambda compiler: key)
    monkeypatch.setattr(build_module, "LONGEST", 0.5)
    with pytest.raises(BuildError, match=r"c\+\+ did not end in 0.5 seconds"):
        build(tmp_path / "made")
    assert list((tmp_path / "made").iterdir()) == []
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # returns once nobody can write
    os.close(reader)


def test_a_compiler_that_cannot_be_started(compiler: StandIn, tmp_path: Path) -> None:
    compiler.path.write_text("#!/no/such/shell\n")
    with pytest.raises(BuildError, match=r"No such file or directory: '.*bin/c\+\+'"):
        build(tmp_path / "made")


def test_a_folder_that_cannot_be_made(compiler: StandIn, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=rf"Not a directory: '{tmp_path}/file/made'"):
        build(tmp_path / "file" / "made")


def test_no_home_folder(compiler: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(BuildError, match="Could not determine home directory"):
        build()


@pytest.mark.usefixtures("first_use")
def test_without_a_compiler_xla_runs_and_one_line_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    x, weight = np.full((1, 3), 2.0, np.float32), np.ones((5, 3), np.float32)
    with caplog.at_level(logging.INFO, logger="kernels"):
        for _ in range(2):
            assert choose("matmul", x, weight, "cpu", None) == "xla"
            np.testing.assert_array_equal(matmul(jnp.asarray(x), jnp.asarray(weight), platform="cpu"), [[6.0] * 5])
    reason = "no C++ compiler found (looked for c++, g++, clang++)"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"native CPU kernels are off, XLA's own operations run instead: {reason}")
    ]
    with pytest.raises(KernelError) as caught:
        choose("matmul", x, weight, "cpu", "cpu_native")
    assert str(caught.value) == f"matmul: implementation 'cpu_native' cannot be had here: {reason}"


@pytest.mark.usefixtures("first_use")
def test_a_library_that_cannot_be_loaded_is_a_reason(compiler: StandIn) -> None:
    """Whole, but nothing that the system loads: XLA runs instead, and it is not built over and over."""
    said = problem()
    assert said is not None
    assert said.startswith(f"{build()} cannot be loaded: ")
    assert len(compiler.calls()) == 1


@pytest.mark.usefixtures("first_use")
def test_a_library_without_the_targets_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "build", lambda: Path(_multiarray_umath.__file__))
    said = problem()
    assert said is not None
    assert "undefined symbol: shardstream_matmul" in said


def test_the_command_prints_the_path(compiler: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert build_native.main([]) == 0
    assert capsys.readouterr() == (f"{build()}\n", "")
    assert len(compiler.calls()) == 1


def test_the_command_says_why_it_failed(compiler: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    compiler.write(before='echo "fatal error: cstdint: no such file" >&2; exit 1')
    assert build_native.main([]) == 1
    assert capsys.readouterr() == ("", f"error: {compiler.path} failed: fatal error: cstdint: no such file\n")
