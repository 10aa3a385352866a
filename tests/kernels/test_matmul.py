"""matmul: every implementation against float64 NumPy, for each dtype and each row count that picks a form."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.matmul import IMPLEMENTATIONS, choose, matmul
from kernels.matmul.xla import STREAMED_ROWS
from kernels.native.product import MOST_ROWS, TILED_ROWS
from kernels.select import KernelError

HOW = [
    (implementation, platform)
    for implementation in (None, *IMPLEMENTATIONS)
    for platform in ("cpu", "tpu")
    if implementation != "cpu_native" or platform == "cpu"
]
ROWS = [(1,), (3,), (STREAMED_ROWS,), (STREAMED_ROWS + 1,), (2, MOST_ROWS["float32"] // 2), (2, 2, 2)]


def operands(rows: tuple[int, ...], inner: int, outer: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(inner)
    x, weight = rng.standard_normal((*rows, inner)), rng.standard_normal((outer, inner))
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


def expected(x: jax.Array, weight: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


@pytest.mark.parametrize(("implementation", "platform"), HOW)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), [(96, 40), (1, 7), (33, 1)])
def test_sums_are_float32(
    implementation: str | None, platform: str, rows: tuple[int, ...], dtype: Any, inner: int, outer: int
) -> None:
    """Products of bf16 numbers are exact in float32, so bf16 operands get no wider tolerance."""
    x, weight = operands(rows, inner, outer, dtype)
    how = {"platform": platform, "implementation": implementation}
    out = jax.jit(lambda x, w: matmul(x, w, out_dtype=jnp.float32, **how))(x, weight)
    assert out.shape == (*rows, outer)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected(x, weight), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("implementation", "platform"), HOW)
@pytest.mark.parametrize("rows", [1, STREAMED_ROWS + 1])
def test_the_result_is_rounded_once_to_the_dtype_of_x(implementation: str | None, platform: str, rows: int) -> None:
    x, weight = operands((rows,), 64, 32, jnp.bfloat16)
    out = matmul(x, weight, platform=platform, implementation=implementation)
    assert out.dtype == jnp.bfloat16
    # Half a unit in the last of bf16's 8 bits, and no more.
    np.testing.assert_allclose(np.asarray(out, np.float64), expected(x, weight), rtol=2**-8 * 1.01, atol=1e-4)


@pytest.mark.parametrize("tiles", [True, False])
def test_bf16_goes_to_the_cpus_tiles_from_some_rows_on(tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.native.product.has_bf16_tiles", lambda: tiles)
    monkeypatch.setattr("kernels.native.problem", lambda: None)  # the native kernels can be built
    for rows, dtype, native in (
        (TILED_ROWS, jnp.bfloat16, True),
        (TILED_ROWS + 1, jnp.bfloat16, not tiles),
        (TILED_ROWS + 1, jnp.float32, True),
    ):
        x, weight = operands((rows,), 96, 40, dtype)
        assert (choose("matmul", x, weight, "cpu", None) == "cpu_native") == native
        assert choose("matmul", x, weight, "cpu", "cpu_native") == "cpu_native"  # what is asked for is what runs


def test_padding_columns_add_nothing() -> None:
    x, weight = operands((2,), 24, 8, jnp.float32)
    wide = [jnp.pad(operand, ((0, 0), (0, 8))) for operand in (x, weight)]
    np.testing.assert_allclose(matmul(*wide, platform="cpu"), matmul(x, weight, platform="cpu"), rtol=1e-5, atol=1e-5)


def test_unknown_implementation() -> None:
    x, weight = operands((1,), 4, 4, jnp.float32)
    with pytest.raises(KernelError, match=r"matmul has no implementation 'cublas'; it has xla, .*reference"):
        matmul(x, weight, platform="gpu", implementation="cublas")
