"""Eight fake CPU devices for every test, programs compiled cheaply and once a session, and the demo model's file.

Compiling is most of what this suite costs, and most of compiling is LLVM making small programs fast. So XLA skips that
here, except in tests marked ``optimized``: those compare with goldens, read the compiled program or run the demo model,
and compile as users do. Commands that tests start as processes of their own always do. ``pytest --optimized`` is for
every test what the mark is for one.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--optimized", action="store_true", help="compile every test's programs as users do (slow)")


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts the tests in the background has them ignore Ctrl-C, and so would the commands that they start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "optimized: what this test compiles is compiled as users' programs are")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture of the test, the session's and the module's among them."""
    whole = item.config.getoption("optimized") or item.get_closest_marker("optimized") is not None
    jax.config.update("jax_disable_most_optimizations", not whole)


@pytest.fixture(scope="session", autouse=True)
def _compile_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The workers of a session share a compilation cache, which goes with the session's scratch folder."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model, fetched once into the user's cache folder and kept there."""
    from model.checkpoint.demo import fetch_demo

    return fetch_demo()
