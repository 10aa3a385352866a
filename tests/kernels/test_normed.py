"""normed_matmul and normed_gate: every implementation against float64 NumPy, with and without a bias."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.matmul import IMPLEMENTATIONS
from kernels.normed_gate import normed_gate
from kernels.normed_matmul import normed_matmul

EPS = 1e-5
HOW = [(name, "cpu") for name in (None, *IMPLEMENTATIONS)] + [(None, "tpu"), ("xla", "gpu")]
SHAPES = {"x": (2, 3, 33), "scale": (33,), "weight": (2, 20, 33), "bias": (2, 20)}


def operands() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def products(x: np.ndarray, scale: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """[..., 2, F] in float64."""
    wide = x.astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * scale
    return np.einsum("bti,nfi->btnf", normed, weight) + bias


@pytest.mark.parametrize(("implementation", "platform"), HOW)
def test_normed_products(implementation: str | None, platform: str) -> None:
    """Sums of 33 products of numbers around 1, in float32."""
    x, scale, weight, bias = operands().values()
    out = normed_matmul(
        jnp.asarray(x), scale, EPS, jnp.asarray(weight[0]), platform=platform, implementation=implementation
    )
    np.testing.assert_allclose(out, products(x, scale, weight, 0 * bias)[..., 0, :], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("implementation", "platform"), HOW)
def test_gates(implementation: str | None, platform: str, biased: bool) -> None:
    """Products of two such sums, up to 100."""
    x, scale, weight, bias = operands().values()
    both = products(x, scale, weight, bias if biased else 0 * bias)
    expected = both[..., 0, :] / (1 + np.exp(-both[..., 0, :])) * both[..., 1, :]
    how: dict[str, Any] = {"platform": platform, "implementation": implementation}
    given = jnp.asarray(bias) if biased else None
    out = jax.jit(lambda x, weight: normed_gate(x, scale, EPS, weight.reshape(-1, weight.shape[-1]), given, **how))(
        x, weight
    )
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("implementation", "platform"), HOW)
def test_the_result_has_the_dtype_of_x(implementation: str | None, platform: str) -> None:
    """Whatever the norm's scale is in."""
    x, scale, weight, _ = operands().values()
    narrow = [jnp.asarray(a, jnp.bfloat16) for a in (x, weight)]
    how: dict[str, Any] = {"platform": platform, "implementation": implementation}
    for out in (
        normed_matmul(narrow[0], jnp.asarray(scale), EPS, narrow[1][0], **how),
        normed_gate(narrow[0], jnp.asarray(scale), EPS, narrow[1].reshape(-1, x.shape[-1]), **how),
    ):
        assert out.dtype == jnp.bfloat16
