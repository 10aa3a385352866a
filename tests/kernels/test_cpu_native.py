"""The C++ operations against float64 NumPy, within bounds that follow from how they add up."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels import native
from kernels.cache_attention import Partial, cache_attention
from kernels.cache_attention.cpu_native import MOST_QUERIES
from kernels.matmul import cpu_native, matmul
from kernels.native.product import MOST_ROWS as MOST_ROWS_OF
from kernels.normed_gate import normed_gate
from kernels.normed_matmul import normed_matmul
from kernels.select import KernelError
from tests.kernels import native_results
from tests.kernels.native_results import NATIVE


@pytest.fixture(autouse=True, scope="module")
def _native() -> None:
    if problem := native.problem():
        pytest.skip(f"no native kernels: {problem}")


F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
DTYPES = [F32, BF16]
EPS = 1e-5
MOST_ROWS = MOST_ROWS_OF["float32"]
SEGMENT = 512  # slots a thread takes at a time
# Around the 8 rows and 16 lanes that are worked on together, one of either, and a size that models have.
SIZES = [1, 7, 8, 9, 15, 16, 17, 33, 576]


def gamma(roundings: int) -> float:
    """The relative error of a term that goes through so many float32 roundings (Higham, 2002, section 3.1)."""
    return roundings * 2**-24 / (1 - roundings * 2**-24)


def sum_error(terms: int) -> float:
    """Of a dot product, relative to the sum of the absolute products.

    Products are added in 16 lanes: a term goes through its own rounding, terms / 16 additions of its lane, one that
    joins two sets of lanes and four that join the lanes; up to 15 terms at the end are added one by one.
    """
    return gamma(1 + terms // 16 + 5 + 15)


def unit(dtype: Any) -> float:
    """Half a unit in the last place, relative: the final rounding to ``dtype``."""
    return 2**-8 if dtype == BF16 else 2**-24


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


def wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def close(found: jax.Array, expected: np.ndarray, bound: np.ndarray) -> None:
    assert found.shape == expected.shape
    error = np.abs(wide(found) - expected)
    worst = np.unravel_index(np.argmax(error - bound), error.shape) if error.size else ()
    assert (error <= bound).all(), f"{worst}: {found[worst]} is not {expected[worst]} within {bound[worst]}"


@functools.partial(jax.jit, static_argnames="out_dtype")
def product(x: jax.Array, weight: jax.Array, out_dtype: Any) -> jax.Array:
    return matmul(x, weight, out_dtype=out_dtype, **NATIVE)


def check_product(rows: int, inner: int, outer: int, x_dtype: Any, w_dtype: Any, out_dtype: Any) -> None:
    rng = np.random.default_rng(rows * 1000 + inner)
    x, weight = random(rng, (rows, inner), x_dtype), random(rng, (outer, inner), w_dtype)
    out = product(x, weight, out_dtype)
    assert out.dtype == out_dtype
    expected, size = wide(x) @ wide(weight).T, np.abs(wide(x)) @ np.abs(wide(weight)).T
    close(out, expected, sum_error(inner) * size + unit(out_dtype) * (np.abs(expected) + sum_error(inner) * size))


@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
@pytest.mark.parametrize("w_dtype", DTYPES, ids=str)
def test_products_of_every_row_count(rows: int, w_dtype: Any) -> None:
    """83 outputs are blocks of 8 in several pieces, and 3 rows left over."""
    check_product(rows, 49, 83, DTYPES[rows % 2], w_dtype, F32)


DTYPE = st.sampled_from(DTYPES)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, MOST_ROWS), st.sampled_from(SIZES), st.sampled_from(SIZES), DTYPE, DTYPE, DTYPE)
def test_products_of_odd_sizes(rows: int, inner: int, outer: int, x_dtype: Any, w_dtype: Any, out_dtype: Any) -> None:
    check_product(rows, inner, outer, x_dtype, w_dtype, out_dtype)


def test_a_product_in_many_pieces() -> None:
    check_product(1, 2051, 515, F32, BF16, F32)


@pytest.mark.parametrize(("rows", "inner", "outer"), [(2, 0, 3), (2, 5, 0), (0, 5, 3)])
def test_empty_products(rows: int, inner: int, outer: int) -> None:
    out = cpu_native.matmul(jnp.ones((rows, inner)), jnp.ones((outer, inner)), F32)
    np.testing.assert_array_equal(out, np.zeros((rows, outer)))


def test_other_result_dtypes_are_rounded_from_float32() -> None:
    x, weight = np.full((1, 3), 1.5, np.float32), np.ones((2, 3), np.float32)
    out = product(x, weight, jnp.float16)
    assert out.dtype == jnp.float16
    np.testing.assert_array_equal(out, [[4.5, 4.5]])


def test_results_too_large_and_not_numbers() -> None:
    """They stay in their row and column, as in NumPy; bfloat16 rounds to infinity, and NaN stays NaN."""
    x, weight = np.ones((2, 33), np.float32), np.ones((17, 33), np.float32)
    x[1, 3], weight[2, 32], weight[4, 0], weight[5, 7] = np.nan, np.inf, -np.inf, 3.4e38
    with np.errstate(invalid="ignore"):
        expected = (x @ weight.T).astype(BF16)
    assert np.isinf(wide(expected)).sum() == 3
    np.testing.assert_array_equal(wide(product(x, weight, BF16)), wide(expected))


def normed(x: jax.Array, scale: jax.Array) -> np.ndarray:
    return wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + EPS) * wide(scale)


def normed_error(terms: int) -> float:
    """As ``sum_error`` of terms that were normed before.

    The sum of squares adds in 64 lanes and up to 63 terms one by one; its root halves that error. The mean, eps, the
    root, its inverse and the two products add seven roundings.
    """
    return sum_error(terms) + gamma((1 + terms // 64 + 6 + 63) // 2 + 7)


@functools.partial(jax.jit, static_argnames="operation")
def of_normed(operation: Any, x: jax.Array, scale: jax.Array, weight: jax.Array) -> jax.Array:
    return operation(x, scale, EPS, weight, **NATIVE)


NORMED = given(st.integers(1, MOST_ROWS), st.sampled_from(SIZES), st.sampled_from(SIZES), DTYPE, DTYPE, DTYPE)


@settings(max_examples=40, deadline=None)
@NORMED
def test_normed_products(rows: int, inner: int, outer: int, x_dtype: Any, s_dtype: Any, w_dtype: Any) -> None:
    rng = np.random.default_rng(inner)
    x, scale = 3 * random(rng, (rows, inner), x_dtype), random(rng, (inner,), s_dtype)
    weight = random(rng, (outer, inner), w_dtype)
    out = of_normed(normed_matmul, x, scale, weight)
    assert out.dtype == x_dtype
    expected, size = normed(x, scale) @ wide(weight).T, np.abs(normed(x, scale)) @ np.abs(wide(weight)).T
    error = normed_error(inner) * size
    close(out, expected, error + unit(x_dtype) * (np.abs(expected) + error))


@settings(max_examples=40, deadline=None)
@NORMED
def test_normed_gates(rows: int, inner: int, outer: int, x_dtype: Any, s_dtype: Any, w_dtype: Any) -> None:
    """|silu'| is at most 1.1; the exponential, a sum, a division and two products are good for ten roundings."""
    rng = np.random.default_rng(outer)
    x, scale = random(rng, (rows, inner), x_dtype), 3 * random(rng, (inner,), s_dtype)
    weight = random(rng, (2, outer, inner), w_dtype)
    out = of_normed(normed_gate, x, scale, weight.reshape(-1, inner))
    assert out.dtype == x_dtype
    (gate, up), (gate_error, up_error) = (
        (a @ b.swapaxes(1, 2)) * factor
        for a, b, factor in [
            (normed(x, scale), wide(weight), 1.0),
            (np.abs(normed(x, scale)), np.abs(wide(weight)), normed_error(inner)),
        ]
    )
    silu = gate / (1 + np.exp(-gate))
    error = 1.1 * gate_error * (np.abs(up) + up_error) + np.abs(silu) * up_error + gamma(10) * np.abs(silu * up)
    # Below e^-87 the exponential is 0.
    close(out, silu * up, error + unit(x_dtype) * (np.abs(silu * up) + error) + 1e-34)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_of_any_size(dtype: Any) -> None:
    """One column normed to exactly 1, so that the weights are the gates: 88, in pieces of a whole vector each
    and 8 left over."""
    gates = [0.0, -0.0, 1e-30, 20, 86, 87, 88, 100, 1e30, np.inf, np.nan]
    gates = np.array([sign * gate for gate in gates for sign in (1, -1)] * 4, np.float32)
    weight = jnp.asarray(np.concatenate([gates, np.full_like(gates, 3.0)])[:, None], dtype)
    found, expected = (
        normed_gate(jnp.ones((1, 1), dtype), jnp.ones(1, dtype), 0.0, weight, platform="cpu", implementation=name)
        for name in ("cpu_native", "reference")
    )
    assert np.isnan(wide(found)).sum() == 12  # of NaN and -inf, as jax.nn.silu has it
    np.testing.assert_allclose(wide(found), wide(expected), rtol=2 * unit(dtype) + 1e-6, atol=1e-34)


@pytest.mark.parametrize("operation", [normed_matmul, normed_gate])
def test_a_row_that_is_not_a_number_stays_alone(operation: Any) -> None:
    rng = np.random.default_rng(3)
    x, scale, weight = (np.array(random(rng, shape, F32)) for shape in [(3, 40), (40,), (24, 40)])
    clean = np.asarray(of_normed(operation, x, scale, weight))
    x[1, 39] = np.nan
    out = np.asarray(of_normed(operation, x, scale, weight))
    assert np.isnan(out[1]).all()
    np.testing.assert_array_equal(out[[0, 2]], clean[[0, 2]])


def test_a_norm_of_zeros_is_zeros() -> None:
    out = of_normed(normed_matmul, np.zeros((2, 17), np.float32), np.ones(17, np.float32), np.ones((3, 17), np.float32))
    np.testing.assert_array_equal(out, np.zeros((2, 3)))


@functools.partial(jax.jit, static_argnames="stride")
def attention(q: Any, keys: Any, values: Any, positions: Any, stride: int, offset: Any) -> Partial:
    return cache_attention(q, keys, values, layer=1, positions=positions, stride=stride, offset=offset, **NATIVE)


@pytest.mark.parametrize("dtype", [F32, BF16, jnp.dtype(jnp.uint16)], ids=str)
@pytest.mark.parametrize(
    ("B", "T", "K", "G", "H", "S", "stride", "offset"),
    [
        (3, 1, 2, 4, 64, 1100, 1, 0),
        (3, 1, 1, 8, 128, 1537, 1, 0),
        (2, MOST_QUERIES, 1, 3, 5, 520, 1, 0),
        (1, MOST_QUERIES, 2, 8, 80, 70, 3, 1),
        (3, 3, 1, 1, 96, 1030, 4, 3),
        (3, 2, 1, 5, 256, 600, 1, 0),
    ],
)
def test_attention_over_several_segments(
    B: int, T: int, K: int, G: int, H: int, S: int, stride: int, offset: int, dtype: Any
) -> None:
    """Rows from a full cache to one slot. A weight is off by twice its score's error and the exponential's; a sum over
    slots adds a rounding for each slot of a segment, and a few for each block of 64 and each segment that joins."""
    rng = np.random.default_rng(H)
    numbers = F32 if dtype == F32 else BF16
    q, keys, values = random(rng, (B, T, K, G, H), F32), *(random(rng, (2, B, K, S, H), numbers) for _ in range(2))
    lasts = np.array([S * stride - 1, T - 1, S * stride // 2 + 1])[:B]
    positions = (lasts[:, None] + np.arange(1 - T, 1)).astype(np.int32)
    stored = [x.view(dtype) if dtype != F32 else x for x in (keys, values)]
    found = attention(q, *stored, positions, stride, offset)

    k, v = wide(keys)[1], wide(values)[1]
    scores = np.einsum("btkgh,bksh->btkgs", wide(q), k) / np.sqrt(H)
    sizes = np.einsum("btkgh,bksh->btkgs", np.abs(wide(q)), np.abs(k)) / np.sqrt(H)
    seen = np.broadcast_to(np.arange(S) * stride + offset <= positions[:, :, None, None, None], scores.shape)
    top = np.where(seen, scores, -np.inf).max(-1)
    any_seen = seen.any(-1)
    weights = np.where(seen, np.exp(scores - np.where(any_seen, top, 0)[..., None]), 0)
    total = weights.sum(-1)
    weights /= np.where(any_seen, total, 1)[..., None]
    score_error = (np.where(seen, sizes, 0).max(-1)) * (sum_error(H) + gamma(2))
    error = 2 * score_error + gamma(min(S, SEGMENT) + 80 + 8 * -(-S // SEGMENT))
    expected, size = np.einsum("btkgs,bksh->btkgh", weights, v), np.einsum("btkgs,bksh->btkgh", weights, np.abs(v))
    close(found.finish(), expected, 2 * error[..., None] * size)
    close(jnp.where(any_seen, found.max, 0), np.where(any_seen, top, 0), score_error)
    close(found.sum * np.exp(np.where(any_seen, found.max - top, 0)), total, error * total + unit(F32) * total)
    assert (np.asarray(found.out)[~any_seen] == 0).all()


@pytest.mark.parametrize(("position", "offset", "slots"), [(2**31 - 1, 0, 5), (2**31 - 1, -(2**31), 5), (-3, 0, 0)])
def test_positions_far_outside_the_cache(position: int, offset: int, slots: int) -> None:
    q, cache = jnp.zeros((1, 1, 1, 1, 4)), jnp.ones((2, 1, 1, 5, 4))
    found = attention(q, cache, cache, np.array([[position]], np.int32), 1, np.int32(offset))
    assert found.sum.item() == slots
    np.testing.assert_array_equal(found.out, np.full((1, 1, 1, 1, 4), slots))


def test_attention_to_what_is_not_a_number() -> None:
    """A query that sees a NaN or infinite key or value gets NaN, as in the reference; one before it does not."""
    for poison in (np.nan, np.inf):
        for poisoned in range(2):
            caches = [np.ones((2, 1, 1, 20, 5), np.float32) for _ in range(2)]
            caches[poisoned][1, 0, 0, 12, 2] = poison
            q = jnp.ones((1, 1, 1, 2, 5))
            after, before = (
                np.asarray(attention(q, *caches, np.array([[at]], np.int32), 1, 0).finish()) for at in (12, 11)
            )
            np.testing.assert_allclose(before, 1.0, rtol=1e-6)
            where = np.arange(5) == 2 if poisoned else np.full(5, True)
            assert not np.isfinite(after[..., where]).any()
            np.testing.assert_allclose(after[..., ~where], 1.0, rtol=1e-6)


def child(*arguments: str, **environment: str) -> Any:
    """What ``native_results`` prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.native_results", *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_repeated_calls_and_any_number_of_threads_give_the_same_bits() -> None:
    first = native_results.digests()
    assert all(native_results.digests() == first for _ in range(5))
    assert child(NPROC="1") == first


def test_memory_that_cannot_be_had_is_an_error() -> None:
    """A C++ exception, which would end a process that let it through."""
    assert child("--no-memory") == "RESOURCE_EXHAUSTED: shardstream: out of memory"


def test_eight_devices_at_once() -> None:
    """More callers than cores, each with its own operands, on one pool of threads: whoever helps whom, the values of
    each device are its own."""
    devices, M, F = 8, 3, 83
    mesh = Mesh(np.array(jax.devices()[:devices]), "d")
    rng = np.random.default_rng(5)
    x, scale = random(rng, (M, 65), F32), random(rng, (65,), F32)
    weights = random(rng, (devices, 2 * F, 65), BF16)
    q, caches = random(rng, (1, 1, 2, 3, 16), F32), random(rng, (devices, 2, 1, 2, 700, 16), F32)
    where = {"layer": 1, "positions": jnp.array([[690]], jnp.int32), "stride": 1, "offset": 0}

    def one(weight: jax.Array, cache: jax.Array) -> tuple[jax.Array, ...]:
        return (
            matmul(x, weight, **NATIVE),
            normed_gate(x, scale, EPS, weight, **NATIVE),
            cache_attention(q, cache, cache, **where, **NATIVE).out,
        )

    def device(weight: jax.Array, cache: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(out[None] for out in one(weight[0], cache[0]))

    everywhere = jax.jit(jax.shard_map(device, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))
    runs = [everywhere(weights, caches) for _ in range(10)]  # all under way together
    alone = [jax.jit(one)(weights[i], caches[i]) for i in range(devices)]
    expected = [np.stack(parts) for parts in zip(*alone, strict=True)]
    np.testing.assert_allclose(expected[0][3], wide(x) @ wide(weights[3]).T, atol=1e-4)
    for run in runs:
        for found, one_by_one in zip(run, expected, strict=True):
            np.testing.assert_array_equal(found, one_by_one)


def shape(*sides: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sides, dtype)


INT32 = np.dtype(np.int32)
X, SCALE, W, OUT = shape(2, 5), shape(5), shape(4, 5), shape(2, 4)
Q, CACHE, ONE, POSITIONS = shape(1, 2, 1, 3, 8), shape(2, 1, 1, 9, 8), shape(dtype=INT32), shape(1, 2, dtype=INT32)
PARTIAL = (Q, shape(1, 2, 1, 3), shape(1, 2, 1, 3))
WIDE = {"arrays": np.int32(1), "group": np.int32(0)}
PRODUCT, GATE = ("shardstream_matmul", WIDE), ("shardstream_normed_gate", {"eps": np.float32(EPS), **WIDE})
ATTENTION = ("shardstream_cache_attention", {"stride": np.int32(1)})
LAYER_2 = np.int32(2)


@pytest.mark.parametrize(
    ("target", "operands", "results", "reason"),
    [
        (PRODUCT, (X, shape(4, 6)), OUT, "x and w differ in their last axis"),
        (PRODUCT, (shape(5), W), OUT, "x, w and out must have two axes"),
        (PRODUCT, (X, shape(5)), OUT, "w must have two axes"),
        (PRODUCT, (X, W), shape(4, 2), "out must have a row for each of x and a column for each of w"),
        (PRODUCT, (shape(2, 5, dtype=INT32), W), OUT, "x and out must be float32 or bfloat16"),
        (PRODUCT, (X, shape(4, 5, dtype=np.dtype(np.uint16))), OUT, "w must be float32 or bfloat16"),
        (PRODUCT, (X, W), shape(2, 4, dtype=np.dtype(np.float16)), "must be float32 or bfloat16"),
        (PRODUCT, (X,), OUT, "a weight is 1 to 3 arrays"),
        (PRODUCT, (X, W, OUT, OUT), OUT, "and one more may be added"),
        (PRODUCT, (X, W, shape(4, 2)), OUT, "what is added must be float32 or bfloat16, and like out"),
        (PRODUCT, (X, W, shape(2, 4, dtype=INT32)), OUT, "what is added must be float32 or bfloat16, and like out"),
        (GATE, (X, SCALE, W, shape(2, 2)), shape(2, 2), "nothing can be added to a gate"),
        (GATE, (X, SCALE, shape(3, 5)), shape(2, 1), "w must have two axes, the first even"),
        (GATE, (X, shape(4), W), shape(2, 2), "the norm's scale must be float32 or bfloat16, one for each column"),
        (("shardstream_normed_matmul", GATE[1]), (X, shape(1, 5), W), OUT, "the norm's scale must be"),
        (("shardstream_normed_matmul", {**WIDE, "eps": 1}), (X, SCALE, W), OUT, "expected F32 but got"),
        (ATTENTION, (Q, CACHE, shape(2, 1, 1, 8, 8), ONE, POSITIONS, ONE), PARTIAL, r"both be \[L, B, K, S, H\]"),
        (
            ATTENTION,
            (Q, *2 * [shape(2, 1, 1, 9, 7)], ONE, POSITIONS, ONE),
            PARTIAL,
            "differ in rows, heads or head size",
        ),
        (
            ATTENTION,
            (Q, CACHE, shape(2, 1, 1, 9, 8, dtype=BF16), ONE, POSITIONS, ONE),
            PARTIAL,
            "keys and values must both",
        ),
        (
            ATTENTION,
            (shape(1, 2, 1, 3, 8, dtype=INT32), CACHE, CACHE, ONE, POSITIONS, ONE),
            PARTIAL,
            "q must be float32",
        ),
        (
            ATTENTION,
            (Q, CACHE, CACHE, ONE, shape(1, 3, dtype=INT32), ONE),
            PARTIAL,
            "positions one for each new position",
        ),
        (ATTENTION, (Q, CACHE, CACHE, ONE, shape(1, 2), ONE), PARTIAL, "expected S32 but got F32"),
        (ATTENTION, (Q, CACHE, CACHE, ONE, POSITIONS, ONE), (Q, Q, Q), "out must be like q|Wrong"),
        (ATTENTION, (Q, CACHE, CACHE, LAYER_2, POSITIONS, ONE), PARTIAL, "layer 2 of a cache of 2"),
        (ATTENTION, (Q, CACHE, CACHE, np.int32(-1), POSITIONS, ONE), PARTIAL, "layer -1 of a cache of 2"),
        (ATTENTION, (Q, *2 * [shape(0, 1, 1, 9, 8)], ONE, POSITIONS, ONE), PARTIAL, "layer 0 of a cache of 0"),
        ((ATTENTION[0], {"stride": np.int32(0)}), (Q, CACHE, CACHE, ONE, POSITIONS, ONE), PARTIAL, "stride at least 1"),
    ],
)
def test_wrong_operands_are_an_error_that_says_which(
    target: tuple[str, dict[str, Any]], operands: tuple[Any, ...], results: Any, reason: str
) -> None:
    made = [jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x for x in operands]
    name, attributes = target
    with pytest.raises(jax.errors.JaxRuntimeError, match=reason):
        jax.block_until_ready(jax.jit(lambda *x: jax.ffi.ffi_call(name, results)(*x, **attributes))(*made))


def run_attention(queries: int = 1, dtype: Any = F32, **how: Any) -> Partial:
    q, cache = jnp.zeros((1, queries, 1, 1, 4), dtype), jnp.zeros((1, 1, 1, 8, 4), how.pop("cache", dtype))
    where = {"layer": 0, "positions": jnp.zeros((1, queries), jnp.int32), "stride": 1, "offset": 0}
    return cache_attention(q, cache, cache, **where, **{**NATIVE, **how})


def run_product(rows: int = 1, dtype: Any = F32, **how: Any) -> jax.Array:
    return matmul(jnp.zeros((rows, 5)), jnp.zeros((3, 5), dtype), **{**NATIVE, **how})


def run_normed(scale: Any = F32, **how: Any) -> jax.Array:
    return normed_matmul(jnp.zeros((1, 5)), jnp.zeros(5, scale), EPS, jnp.zeros((3, 5)), **{**NATIVE, **how})


REFUSED = [
    (
        run_product,
        {"rows": MOST_ROWS + 1},
        "matmul: implementation 'cpu_native' takes 1 to 16 rows of a weight in float32, not 17",
    ),
    (run_product, {"rows": 0}, "takes 1 to 16 rows of a weight in float32, not 0"),
    (run_product, {"dtype": jnp.int8}, "takes float32 and bfloat16, not int8"),
    (run_normed, {"scale": jnp.float16}, "normed_matmul: .* takes float32 and bfloat16, not float16"),
    (run_attention, {"queries": MOST_QUERIES + 1}, "cache_attention: .* takes 1 to 16 new positions, not 17"),
    (run_attention, {"dtype": jnp.float16}, "takes queries in float32 and bfloat16, not float16"),
    (run_attention, {"cache": jnp.int8}, "takes keys and values both in float32, bfloat16 or uint16, not int8"),
]


@pytest.mark.parametrize(("call", "how", "reason"), REFUSED)
def test_what_is_not_taken_is_refused_by_name_and_left_to_xla_by_default(call: Any, how: Any, reason: str) -> None:
    with pytest.raises(KernelError, match=reason):
        call(**how)
    # The product after a norm that XLA computes is a product of its own, which native takes.
    native = "shardstream_normed" if call is run_normed else "ffi_call"
    assert native not in str(jax.make_jaxpr(lambda: call(implementation=None, **how))())


@pytest.mark.parametrize("call", [run_product, run_normed, run_attention])
def test_the_default_is_native_on_cpu_only(call: Any) -> None:
    assert "ffi_call" in str(jax.make_jaxpr(lambda: call(implementation=None))())
    assert "ffi_call" not in str(jax.make_jaxpr(lambda: call(implementation=None, platform="tpu"))())
    with pytest.raises(KernelError, match="implementation 'cpu_native' runs on CPU, not gpu"):
        call(platform="gpu")
