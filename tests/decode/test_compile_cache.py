"""The compilation cache: where it goes, when it is off, and what it counts. Hits of a real run: tests/scripts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from decode.compile_cache import HIT, MISS, CompileCache

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """Nothing compiles in these tests, so no folder set here is ever used."""
    kept = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", True)
    yield
    for name, value in kept.items():
        jax.config.update(name, value)


def folder_of_jax() -> str | None:
    return jax.config.jax_compilation_cache_dir


def test_the_folder_is_made_and_given_to_jax(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path / "a" / "b")
    assert folder_of_jax() == str(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.3
    assert cache.problem is None


def test_a_folder_that_was_chosen_before_is_kept(tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    cache = CompileCache(tmp_path / "ours")
    assert folder_of_jax() == str(tmp_path / "own")
    assert not (tmp_path / "ours").exists()
    assert cache.problem is None
    assert CompileCache(None, problem="no home").problem is None


def test_a_cache_that_was_switched_off_stays_off(tmp_path: Path) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    assert CompileCache(tmp_path / "ours").describe() == "cache off: switched off in JAX's own settings"
    assert folder_of_jax() is None


def test_an_unusable_folder_is_a_note_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    cache = CompileCache(tmp_path / "file" / "jax")
    assert cache.describe() == f"cache off: cannot write to {tmp_path / 'file' / 'jax'}: Not a directory"

    def read_only(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    cache = CompileCache(tmp_path)
    assert cache.describe() == f"cache off: cannot write to {tmp_path}: Read-only file system"
    assert CompileCache(None, problem="no home").describe() == "cache off: no home"
    assert folder_of_jax() is None


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([], "cache not used: each program compiled in less than 0.3 s"),
        ([HIT, HIT], "cache hit"),
        ([MISS], "cache miss"),
        ([HIT, MISS, HIT, "/jax/other"], "cache: 2 hits, 1 miss"),
        ([MISS, HIT, MISS], "cache: 1 hit, 2 misses"),
    ],
)
def test_hits_and_misses_are_counted_from_then_on(tmp_path: Path, events: list[str], told: str) -> None:
    jax.monitoring.record_event(MISS)
    cache = CompileCache(tmp_path)
    for event in events:
        jax.monitoring.record_event(event)
    assert cache.describe() == told
