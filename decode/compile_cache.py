"""JAX's persistent compilation cache, on by default: the second run of a model compiles nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax

from model.wording import number_of

HIT = "/jax/compilation_cache/cache_hits"
MISS = "/jax/compilation_cache/cache_misses"
LEAST_SECONDS = 0.3
"""Programs that compile faster than this are not kept."""


class CompileCache:
    """Points JAX at a folder and counts what was found there from then on.

    A folder given to JAX already (``JAX_COMPILATION_CACHE_DIR``) is kept, and a cache switched off
    (``JAX_ENABLE_COMPILATION_CACHE=0``) stays off. ``problem`` says why the cache is off, if it is: an unwritable
    folder costs compile time and nothing else.

    Args:
        folder: made where it is not there yet; None where there is no place for one, which ``problem`` explains.
    """

    def __init__(self, folder: Path | None, *, problem: str | None = None):
        self.hits = self.misses = 0
        self.problem = problem
        jax.monitoring.register_event_listener(self._count)
        if not jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
            self.problem = "switched off in JAX's own settings"
            return
        if jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
            self.problem = None
            return
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):  # the permission bits do not tell of a full or read-only disk
                pass
        except OSError as error:
            self.problem = f"cannot write to {folder}: {error.strerror or error}"
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)

    def describe(self) -> str:
        """The state in a few words: whether everything was found, or how much of it."""
        if self.problem:
            return f"cache off: {self.problem}"
        if self.hits and self.misses:
            missed = "1 miss" if self.misses == 1 else f"{self.misses} misses"
            return f"cache: {number_of(self.hits, 'hit')}, {missed}"
        if self.hits or self.misses:
            return "cache hit" if self.hits else "cache miss"
        return f"cache not used: each program compiled in less than {LEAST_SECONDS} s"

    def _count(self, event: str, **_: object) -> None:
        self.hits += event == HIT
        self.misses += event == MISS
