"""Commands run inside the test process: nothing they set stays behind, and the bandwidth buffer is small.

They find what the session compiled before them, as a user's second run does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from scripts import bench_decode, generate
from sharding.bandwidth import ReadProbe, measure_read_bandwidth


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """For tests that call ``main``: eight CPU devices, a cache folder of their own."""
    assert jax.device_count() == 8  # and so JAX has started
    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir")
    kept = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = functools.partial(measure_read_bandwidth, total_bytes=1 << 20, repeats=2)
    monkeypatch.setattr(generate, "measure_read_bandwidth", small)
    monkeypatch.setattr(bench_decode, "ReadProbe", functools.partial(ReadProbe, total_bytes=1 << 20))
    yield
    for name, value in kept.items():
        jax.config.update(name, value)
