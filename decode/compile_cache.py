"""JAX's persistent compilation cache, on by default: the second run of a model compiles nothing."""

from __future__ import annotations

import os
from pathlib import Path

import jax

HIT = "/jax/compilation_cache/cache_hits"
MISS = "/jax/compilation_cache/cache_misses"


class CompileCache:
    """Points JAX at a folder and counts what was found there.

    A folder given to JAX already (``JAX_COMPILATION_CACHE_DIR``) is kept. ``problem`` says why the cache is off, if it
    is: an unwritable folder costs compile time and nothing else.
    """

    def __init__(self, folder: Path):
        self.hits = self.misses = 0
        self.problem: str | None = None
        jax.monitoring.register_event_listener(self._count)
        if jax.config.jax_compilation_cache_dir:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.problem = f"cannot make {folder}: {error.strerror}"
            return
        if not os.access(folder, os.W_OK):
            self.problem = f"{folder} is not writable"
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

    def describe(self) -> str:
        if self.problem:
            return f"cache off: {self.problem}"
        if self.hits and not self.misses:
            return "cache hit"
        return f"cache: {self.hits} hits, {self.misses} misses" if self.hits else "cache miss"

    def _count(self, event: str, **_: object) -> None:
        self.hits += event == HIT
        self.misses += event == MISS
