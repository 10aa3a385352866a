"""The native operations under the compiler's sanitizers, in a program of their own: see native/check.cc."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import jax
import pytest

from kernels.native.build import COMPILERS, SOURCES

CHECK = Path(__file__).parent / "native" / "check.cc"


def compiled(source: Path, program: Path, flags: list[str]) -> subprocess.CompletedProcess[str]:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    command = [compiler, "-std=c++17", *flags, "-pthread", "-isystem", jax.ffi.include_dir(), f"-I{SOURCES}"]
    return subprocess.run([*command, str(source), "-o", str(program)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        (["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"], []),
        (["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-march=native"], []),
        (["-O1", "-g1", "-fsanitize=thread"], ["threads"]),
    ],
    ids=["address,undefined", "address,undefined,this CPU", "thread"],
)
def test_sanitizers_find_nothing(tmp_path: Path, flags: list[str], arguments: list[str]) -> None:
    """No read or write out of bounds, no undefined operation, no race; and every value is right: in what any CPU of the
    kind can do, and in what this one can."""
    empty, program = tmp_path / "empty.cc", tmp_path / "check"
    empty.write_text("int main() { return 0; }\n")
    probe = compiled(empty, program, flags)
    if probe.returncode or subprocess.run([program], capture_output=True, check=False).returncode:
        pytest.skip(f"the compiler has no working runtime for {flags[2]}: {probe.stderr[-300:]}")
    built = compiled(CHECK, program, [*flags, "-Wall", "-Wextra", "-Wno-psabi"])
    assert (built.returncode, built.stderr) == (0, "")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "every check holds\n", "")
