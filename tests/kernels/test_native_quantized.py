"""Quantised products in C++ against float64 NumPy, within a bound that follows from rounding x to bytes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import native
from kernels.normed_gate import normed_gate
from kernels.normed_matmul import normed_matmul
from kernels.quantized import QuantizedWeight, pack
from kernels.quantized_matmul import quantized_matmul
from kernels.select import KernelError
from tests.kernels.native_results import NATIVE


@pytest.fixture(autouse=True, scope="module")
def _native() -> None:
    if problem := native.problem():
        pytest.skip(f"no native kernels: {problem}")


F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
UNIT = {F32: 2**-24, BF16: 2**-8, jnp.dtype(jnp.float16): 2**-11}
EPS = 1e-5
BLOCK = 32  # values of x that share a scale


def weight(
    rng: np.random.Generator, outer: int, inner: int, bits: int, group: int | None, offsets: bool, scales: Any
) -> QuantizedWeight:
    """Any codes, scales within 1 and 2 of either sign."""
    codes = rng.integers(*((-128, 128) if bits == 8 else (-8, 8)), (outer, inner)).astype(np.int8)
    groups = 1 if group is None else -(-inner // group)
    made = rng.choice([-1, 1], (2, outer, groups)) * rng.uniform(1, 2, (2, outer, groups))
    values = jnp.asarray(codes) if bits == 8 else pack(jnp.asarray(codes))
    arrays = [jnp.asarray(array, scales) for array in made[: 2 if offsets else 1]]
    return QuantizedWeight(values, arrays[0], arrays[1] if offsets else None, group)


def wide(weight: QuantizedWeight) -> tuple[np.ndarray, np.ndarray]:
    """The weight in float64, and without its offsets: what x in bytes is multiplied with."""
    per = weight.shape[-1] if weight.group is None else weight.group

    def each(array: jax.Array) -> np.ndarray:
        return np.repeat(np.asarray(array).astype(np.float64), max(per, 1), axis=-1)[:, : weight.shape[-1]]

    scaled = np.asarray(weight.codes()).astype(np.float64) * each(weight.scales)
    return scaled + (0 if weight.offsets is None else each(weight.offsets)), scaled


def error(x: np.ndarray, weight: QuantizedWeight) -> np.ndarray:
    """Half a step of 1/127/254 of a block's largest magnitude a value, and float32 sums of 16 lanes."""
    short = -x.shape[1] % BLOCK
    blocks = np.pad(np.abs(x), ((0, 0), (0, short))).reshape(len(x), -1, BLOCK)
    steps = np.repeat(blocks.max(-1) / (127 * 254), BLOCK, axis=1)[:, : x.shape[1]]
    both, scaled = wide(weight)
    size = np.abs(x) @ np.abs(scaled).T + np.abs(x) @ np.abs(both - scaled).T
    roundings = (x.shape[1] // 16 + 40) * 2**-24
    return 0.5001 * steps @ np.abs(scaled).T + 2 * roundings * size + 1e-28 * np.abs(scaled).sum(1)


@functools.partial(jax.jit, static_argnames=("out_dtype", "how"))
def product(x: jax.Array, weight: QuantizedWeight, add: jax.Array | None, out_dtype: Any, how: str) -> jax.Array:
    return quantized_matmul(x, weight, add=add, out_dtype=out_dtype, platform="cpu", implementation=how)


ROWS, GROUPS = st.integers(1, 17), st.sampled_from([None, 32, 64, 128])
OUTER, INNER = st.sampled_from([1, 7, 8, 9, 33]), st.sampled_from([32, 64, 96, 160, 576])
DTYPE = st.sampled_from([F32, BF16])
SCALES = st.sampled_from([jnp.float16, jnp.bfloat16, jnp.float32])


@settings(max_examples=40, deadline=None)
@given(ROWS, OUTER, INNER, st.sampled_from([8, 4]), GROUPS, st.booleans(), SCALES, DTYPE, DTYPE, st.booleans())
def test_products(
    rows: int,
    outer: int,
    inner: int,
    bits: int,
    group: int | None,
    offsets: bool,
    scales: Any,
    x_dtype: Any,
    out_dtype: Any,
    adds: bool,
) -> None:
    rng = np.random.default_rng(rows * 1000 + inner)
    x = jnp.asarray(rng.standard_normal((rows, inner)) * 10.0 ** rng.integers(-3, 3, (rows, 1)), x_dtype)
    w = weight(rng, outer, inner, bits, group, offsets, scales)
    add = jnp.asarray(rng.standard_normal((rows, outer)), out_dtype) if adds else None
    found = product(x, w, add, out_dtype, "cpu_native")
    assert found.dtype == out_dtype
    wide_x = np.asarray(x).astype(np.float64)
    expected = wide_x @ wide(w)[0].T + (np.asarray(add).astype(np.float64) if adds else 0)
    bound = error(wide_x, w)
    bound += UNIT[out_dtype] * (np.abs(expected) + bound)
    assert (np.abs(np.asarray(found).astype(np.float64) - expected) <= bound).all()


@pytest.mark.parametrize("inner", [1, 31, 33, 63, 65, 577])
def test_eight_bits_take_any_number_of_columns(inner: int) -> None:
    rng = np.random.default_rng(inner)
    x = rng.standard_normal((3, inner)).astype(np.float32)
    for group in (None, 32):
        w = weight(rng, 9, inner, 8, group, False, jnp.float32)
        found = np.asarray(product(x, w, None, F32, "cpu_native"))
        assert (np.abs(found - x.astype(np.float64) @ wide(w)[0].T) <= error(x.astype(np.float64), w)).all()


@pytest.mark.parametrize("implementation", ["xla", "reference", "cpu_native"])
@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 64), (4, 32)])
def test_every_implementation_computes_the_same(implementation: str, bits: int, group: int | None) -> None:
    """The others keep x as it is: only native's bound has the step of its bytes."""
    rng = np.random.default_rng(bits)
    x = rng.standard_normal((2, 3, 96)).astype(np.float32)
    w = weight(rng, 10, 96, bits, group, bits == 4, jnp.float16)
    add = rng.standard_normal((2, 3, 10)).astype(np.float32)
    found = np.asarray(product(x, w, add, F32, implementation))
    flat = x.reshape(6, 96).astype(np.float64)
    expected = flat @ wide(w)[0].T + add.reshape(6, 10)
    bound = error(flat, w) if implementation == "cpu_native" else 1e-5 * np.abs(flat) @ np.abs(wide(w)[0]).T
    assert found.shape == (2, 3, 10)
    assert (np.abs(found.reshape(6, 10) - expected) <= bound).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_bytes_of_activations_cost_less_than_one_in_ten_thousand(bits: int) -> None:
    """The stated accuracy cost: on normal numbers the error's deviation is 2.4e-5 of the result's own."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((16, 1024)), weight(rng, 64, 1024, bits, 32, False, jnp.float32)
    expected = x @ wide(w)[0].T
    found = np.asarray(product(jnp.asarray(x, F32), w, None, F32, "cpu_native"))
    assert 1e-5 < np.std(found - expected) / np.std(expected) < 4e-5


def test_many_rows() -> None:
    """More than are worked on together, and enough of them to be prepared by several threads. A row's result is its own
    whatever its company, but for the order in which CPUs that work in tiles add up from some rows on."""
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((130, 288)).astype(np.float32), weight(rng, 19, 288, 4, 32, True, jnp.float16)
    found = np.asarray(product(x, w, None, F32, "cpu_native"))
    assert (np.abs(found - x.astype(np.float64) @ wide(w)[0].T) <= error(x.astype(np.float64), w)).all()
    for first in (0, 56, 63, 114):
        np.testing.assert_array_equal(product(x[first : first + 16], w, None, F32, "cpu_native"), found[first:][:16])
    few = product(x[:4], w, None, F32, "cpu_native")
    np.testing.assert_array_equal(product(x[3:4], w, None, F32, "cpu_native")[0], few[3])


@pytest.mark.parametrize("rows", [3, 18])
def test_what_is_not_a_number_stays_in_its_row_and_column(rows: int) -> None:
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((rows, 64)).astype(np.float32), weight(rng, 10, 64, 4, 32, False, jnp.float32)
    clean = np.asarray(product(x, w, None, F32, "cpu_native"))
    x[1, 40] = np.inf
    scales = np.array(w.scales)
    scales[4, 1] = np.nan
    found = np.asarray(product(x, QuantizedWeight(w.values, jnp.asarray(scales), None, 32), None, F32, "cpu_native"))
    assert np.isnan(found[1]).all()
    assert np.isnan(found[:, 4]).all()
    others = np.ix_([0, *range(2, rows)], [0, 1, 2, 3, 5, 6, 7, 8, 9])
    np.testing.assert_array_equal(found[others], clean[others])


def test_zeros_and_denormals_are_zero() -> None:
    w = weight(np.random.default_rng(0), 9, 64, 8, 32, False, jnp.float32)
    for value in (0.0, 1e-40):
        found = product(np.full((1, 64), value, np.float32), w, None, F32, "cpu_native")
        np.testing.assert_array_equal(found, np.zeros((1, 9)))


NORMED = given(ROWS, OUTER, INNER, st.sampled_from([8, 4]), GROUPS, st.booleans(), DTYPE)


@functools.partial(jax.jit, static_argnames=("operation", "how"))
def of_normed(operation: Any, x: jax.Array, scale: jax.Array, weight: QuantizedWeight, how: str) -> jax.Array:
    return operation(x, scale, EPS, weight, platform="cpu", implementation=how)


@settings(max_examples=25, deadline=None)
@NORMED
def test_normed_products_and_gates(
    rows: int, outer: int, inner: int, bits: int, group: int | None, offsets: bool, dtype: Any
) -> None:
    """|silu'| is at most 1.1; the norm, the exponential and what follows are good for 100 roundings of float32."""
    rng = np.random.default_rng(rows * 1000 + inner)
    x, scale = jnp.asarray(rng.standard_normal((rows, inner)), dtype), jnp.asarray(rng.standard_normal(inner), F32)
    w = weight(rng, 2 * outer, inner, bits, group, offsets, jnp.float16)
    w = QuantizedWeight(w.values, w.scales / 64, None if w.offsets is None else w.offsets / 64, group)
    wide_x = np.asarray(x).astype(np.float64)
    normed = wide_x / np.sqrt((wide_x**2).mean(-1, keepdims=True) + EPS) * np.asarray(scale).astype(np.float64)
    expected, bound = normed @ wide(w)[0].T, error(normed, w) + 100 * 2**-24 * np.abs(normed) @ np.abs(wide(w)[0]).T
    found = np.asarray(of_normed(normed_matmul, x, scale, w, "cpu_native")).astype(np.float64)
    assert (np.abs(found - expected) <= bound * (1 + UNIT[dtype]) + UNIT[dtype] * np.abs(expected)).all()

    (gate, up), (gate_error, up_error) = ((both[:, :outer], both[:, outer:]) for both in (expected, bound))
    with np.errstate(over="ignore"):
        silu = gate / (1 + np.exp(-gate))
    bound = 1.1 * gate_error * (np.abs(up) + up_error) + np.abs(silu) * up_error + 1e-5 * np.abs(silu * up)
    found = np.asarray(of_normed(normed_gate, x, scale, w, "cpu_native")).astype(np.float64)
    assert (np.abs(found - silu * up) <= bound * (1 + UNIT[dtype]) + UNIT[dtype] * np.abs(silu * up) + 1e-30).all()


def call(rows: int = 1, inner: int = 64, **how: Any) -> jax.Array:
    w = QuantizedWeight(
        jnp.zeros((3, 64), how.pop("values", jnp.int8)),
        jnp.ones((3, how.pop("groups", 2)), how.pop("scales", jnp.float16)),
        None,
        how.pop("group", 32),
    )
    x = jnp.zeros((rows, inner), how.pop("dtype", F32))
    return quantized_matmul(x, w, **{**NATIVE, **how})


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"values": jnp.float8_e4m3fn}, "takes quantised values in int8, and int4 packed in uint8, not float8_e4m3fn"),
        ({"scales": jnp.float64 if jax.config.jax_enable_x64 else jnp.int32}, "takes scales in float16"),
        ({"group": 96, "groups": 1}, "takes groups of 32, 64 and 128 and one a row, not 96"),
        ({"groups": 3}, "takes 2 scales a row for groups of 32, not 3"),
        ({"dtype": jnp.float16}, "takes float32 and bfloat16, not float16"),
        ({"rows": 513}, "takes 1 to 512 rows of a weight in int8, not 513"),
        ({"platform": "gpu"}, "implementation 'cpu_native' runs on CPU, not gpu"),
    ],
)
def test_what_is_not_taken_is_refused_by_name(how: dict[str, Any], reason: str) -> None:
    with pytest.raises(KernelError, match=reason):
        call(**how)


def test_the_default_is_native_where_it_takes_the_operands() -> None:
    assert "shardstream" in str(jax.make_jaxpr(lambda: call(implementation=None))())
    for how in ({"values": jnp.float8_e4m3fn, "group": None, "groups": 1}, {"rows": 513}, {"platform": "tpu"}):
        assert "shardstream" not in str(jax.make_jaxpr(functools.partial(call, implementation=None, **how))())


@pytest.mark.parametrize(
    ("values", "scales", "group", "reason"),
    [
        ((3, 64), (3, 1), 32, "a column for each group"),
        ((3, 64), (2, 2), 32, "a row for each of w"),
        ((3, 63), (3, 2), 32, "x and w differ in their last axis"),
        ((3, 64), (3, 2), 31, "a group must be 32, 64 or 128 values, or 0 for a whole row, not 31"),
        ((3, 64), (3,), 0, "scales and offsets must have a row"),
    ],
)
def test_wrong_shapes_are_an_error_that_says_which(
    values: tuple[int, ...], scales: tuple[int, ...], group: int, reason: str
) -> None:
    out = jax.ShapeDtypeStruct((1, 3), jnp.float32)
    arrays = jnp.zeros((1, 64)), jnp.zeros(values, jnp.int8), jnp.zeros(scales)
    run = jax.jit(lambda *a: jax.ffi.ffi_call("shardstream_matmul", out)(*a, arrays=np.int32(2), group=np.int32(group)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=reason):
        jax.block_until_ready(run(*arrays))
