"""Eight fake CPU devices for every test, and the demo model's file."""

from pathlib import Path

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model, fetched once into the user's cache folder and kept there."""
    from model.checkpoint.demo import fetch_demo

    return fetch_demo()
