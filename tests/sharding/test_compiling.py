"""What a step's compiler is told: taken by every kind of TPU, and left out where it is not known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from sharding import compiling
from sharding.aot import problem, target
from sharding.compiling import compile_lowered


@pytest.mark.xdist_group("aot")
@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_every_tpu_compiler_takes_it(name: str) -> None:
    if missing := problem("tpu"):
        pytest.skip(missing)
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=SingleDeviceSharding(target(name).devices[0]))
    lowered = jax.jit(lambda x, y: jnp.tanh(x @ y) @ x).lower(x, x)
    assert compile_lowered(lowered, "tpu").memory_analysis().argument_size_in_bytes == 2 * x.size * 2


def test_an_option_that_a_compiler_does_not_know_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lowered = jax.jit(lambda x: x + 1).lower(jnp.float32(1))
    monkeypatch.setattr(compiling, "OPTIONS", {"cpu": {"xla_no_such_option": "1"}})
    assert compile_lowered(lowered, "cpu")(jnp.float32(1)) == 2
    assert "xla_no_such_option" in caplog.text
    monkeypatch.setattr(compiling, "OPTIONS", {"cpu": {"xla_cpu_enable_fast_math": "perhaps"}})
    with pytest.raises(jax.errors.JaxRuntimeError, match="perhaps"):  # a known one with a wrong value is an error
        compile_lowered(lowered, "cpu")
