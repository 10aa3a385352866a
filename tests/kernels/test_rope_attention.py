"""rope_attention in one native call against its definition, and what XLA makes of its operands."""

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
from kernels.cache_attention import Scales
from kernels.cache_attention.scaled import LIMITS
from kernels.rope_attention import rope_attention, taken
from kernels.select import KernelError


@pytest.fixture(autouse=True, scope="module")
def _native() -> None:
    if problem := native.problem():
        pytest.skip(f"no native kernels: {problem}")


F32, BF16, BITS = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.uint16)
LAYERS = 2


@functools.partial(jax.jit, static_argnames="how")
def run(heads: Any, cos: Any, sin: Any, keys: Any, values: Any, layer: Any, positions: Any, how: str) -> Any:
    where = {"layer": layer, "positions": positions}
    *found, scales = rope_attention(heads, cos, sin, keys, values, **where, platform="cpu", implementation=how)
    assert scales is None
    return found


def operands(B: int, T: int, K: int, G: int, H: int, S: int, dtype: Any, cache: Any) -> list[Any]:
    rng = np.random.default_rng(B * 100 + S)
    heads = jnp.asarray(rng.standard_normal((B, T, K, G + 2, H)), dtype)
    stored = [jnp.asarray(rng.standard_normal((LAYERS, B, K, S, H)), BF16 if cache == BITS else cache) for _ in "kv"]
    starts = np.array([S - T, 0, S // 2])[:B]
    positions = (np.clip(starts, 0, S - T)[:, None] + np.arange(T)).astype(np.int32)
    angles = positions[..., None] * (0.01 ** np.arange(H // 2)).astype(np.float32)
    return [
        heads,
        np.cos(angles),
        np.sin(angles),
        *(x.view(BITS) if cache == BITS else x for x in stored),
        np.int32(1),
        positions,
    ]


def numbers(x: Any) -> np.ndarray:
    return np.asarray(x.view(BF16) if x.dtype == BITS else x).astype(np.float64)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([1, 2, 16]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([2, 6, 16, 64, 96]),
    st.sampled_from([16, 17, 65, 600]),
    st.sampled_from([F32, BF16]),
    st.sampled_from([F32, BF16, BITS]),
)
def test_one_call_is_the_definition(B: int, T: int, K: int, G: int, H: int, S: int, dtype: Any, cache: Any) -> None:
    """Keys are rounded to heads' dtype and the cache's, and may fall to either side; queries stay in float32, where
    the definition rounds them, so a score is off by what bfloat16 rounds of a few."""
    made = operands(B, T, K, G, H, S, dtype, cache)
    found, expected = run(*made, how="cpu_native"), run(*made, how="reference")
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    narrow = BF16 in (dtype, cache) or cache == BITS
    for new, old in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(numbers(new), numbers(old), rtol=2**-7 if narrow else 1e-6, atol=1e-6)
    np.testing.assert_allclose(
        numbers(found[0]), numbers(expected[0]), rtol=0.02 if narrow else 1e-5, atol=0.05 if narrow else 1e-5
    )


@functools.partial(jax.jit, static_argnames="how")
def run_scaled(heads: Any, cos: Any, sin: Any, keys: Any, values: Any, positions: Any, scales: Any, how: str) -> Any:
    where = {"layer": 1, "positions": positions, "scales": scales}
    return rope_attention(heads, cos, sin, keys, values, **where, platform="cpu", implementation=how)


@pytest.mark.parametrize("stored", sorted(LIMITS, key=str))
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_scaled_caches(stored: Any, dtype: Any) -> None:
    """The same bytes and scales as the definition stores, zeros, small numbers, denormals, infinity and NaN among
    them; and attention to them. Turns are of whole right angles, so that they round nothing."""
    B, T, K, G, H, S = 3, 3, 2, 2, 40, 70
    rng = np.random.default_rng(5)
    heads = rng.standard_normal((B, T, K, G + 2, H))
    heads[1, :, :, G:] *= np.exp(rng.uniform(-20, 1, (T, K, 2, 1)))
    heads[1, 0, 0, G + 1], heads[1, 1, 0, G + 1] = 0, 1e-39
    heads[2, 0, 0, G, 3], heads[2, 0, 1, G + 1, 7] = np.nan, np.inf
    quarters = rng.integers(0, 2, (B, T, H // 2)).astype(np.float32)
    size = jnp.uint8 if stored != jnp.int8 else jnp.int8
    kept = [jnp.asarray(rng.integers(0, 0x70, (LAYERS, B, K, S, H)), size) for _ in "kv"]
    scales = Scales(*(jnp.asarray(rng.uniform(0.001, 0.01, (LAYERS, B, K, S)), jnp.float32) for _ in "kv"))
    positions = np.array([[66, 67, 68], [0, 1, 2], [68, 69, 70]], np.int32)  # the last is past the end
    made = (jnp.asarray(heads, dtype), quarters, 1 - quarters, *kept, positions, scales)
    (out, *held), (expected, *want) = (run_scaled(*made, how=how) for how in ("cpu_native", "reference"))
    for found, known in zip(jax.tree.leaves(held), jax.tree.leaves(want), strict=True):
        assert found.dtype == known.dtype
        np.testing.assert_array_equal(found, known)
    # Scores are tens: queries are rounded to bfloat16 by the definition alone.
    tolerance = 2e-5 if dtype == F32 else 0.05
    np.testing.assert_allclose(numbers(out), numbers(expected), rtol=tolerance, atol=tolerance)


def test_only_the_new_slots_of_one_layer_change_and_past_the_end_nothing_does() -> None:
    heads, cos, sin, keys, values, layer, positions = operands(2, 1, 2, 3, 16, 9, F32, F32)
    positions = np.array([[4], [9]], np.int32)
    out, new_keys, new_values = run(heads, cos, sin, keys, values, layer, positions, how="cpu_native")
    for new, old in ((new_keys, keys), (new_values, values)):
        changed = (np.asarray(new) != np.asarray(old)).any(-1)
        assert np.argwhere(changed).tolist() == [[1, 0, 0, 4], [1, 0, 1, 4]]
    np.testing.assert_array_equal(np.asarray(new_values)[1, 0, :, 4], heads[0, 0, :, -1])
    assert np.isfinite(out).all()


def test_the_cache_is_written_where_it_lies() -> None:
    """In a loop that carries the cache, as decode has it: no copy of its size in the compiled program."""
    heads, cos, sin, keys, values, layer, positions = operands(1, 1, 2, 3, 16, 500, F32, BITS)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def steps(keys: jax.Array, values: jax.Array, count: jax.Array) -> Any:
        def step(i: jax.Array, carry: Any) -> Any:
            keys, values, heads = carry
            out, keys, values = run(heads, cos, sin, keys, values, layer, positions + i - 400, how="cpu_native")
            return keys, values, heads.at[:, :, :, :-2].add(out)

        return jax.lax.fori_loop(0, count, step, (keys, values, heads))

    text = steps.lower(keys, values, 3).compile().as_text()
    assert "shardstream_rope_attention" in text
    shape = f"u16[{','.join(map(str, keys.shape))}]"
    assert not [line for line in text.splitlines() if shape in line.split("=")[-1][:80] and " copy(" in line]
    before = keys.unsafe_buffer_pointer()
    assert steps(keys, values, 3)[0].unsafe_buffer_pointer() == before


def test_not_a_number_stays_in_its_row() -> None:
    made = operands(2, 1, 1, 2, 16, 20, F32, F32)
    clean = np.asarray(run(*made, how="cpu_native")[0])
    made[0] = made[0].at[0, 0, 0, -2, 3].set(np.nan)  # a key
    found = np.asarray(run(*made, how="cpu_native")[0])
    assert np.isnan(found[0]).all()
    np.testing.assert_array_equal(found[1], clean[1])


def test_where_it_is_taken() -> None:
    heads, _, _, keys, values, _, _ = operands(1, 2, 1, 2, 16, 20, F32, F32)
    assert taken(heads, keys, values, platform="cpu")
    assert taken(heads, keys, values, platform="cpu", implementation="cpu_native")
    assert not taken(heads, keys, values, platform="cpu", implementation="xla")
    assert not taken(heads, keys, values, platform="tpu")
    assert not taken(jnp.zeros((1, 17, 1, 4, 16)), keys, values, platform="cpu")
    assert not taken(heads[..., :15], keys[..., :15], values[..., :15], platform="cpu")
    assert not taken(heads, keys.astype(jnp.int8), values.astype(jnp.int8), platform="cpu")
    assert taken(heads, keys.astype(jnp.int8), values.astype(jnp.int8), platform="cpu", scaled=True)
    assert not taken(heads, keys, values, platform="cpu", scaled=True)
    with pytest.raises(KernelError, match="rope_attention has no implementation 'xla'"):
        rope_attention(heads, 0, 0, keys, values, layer=0, positions=0, platform="cpu", implementation="xla")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({0: jnp.zeros((1, 2, 1, 4, 15))}, r"heads must be \[B, T, K, G \+ 2, H\]"),
        ({0: jnp.zeros((1, 1, 2, 4, 16), jnp.float16)}, "heads and out must both be float32 or bfloat16"),
        ({1: jnp.zeros((1, 1, 7))}, r"cos and sin must be \[B, T, H / 2\]"),
        ({3: jnp.zeros((2, 1, 2, 9, 16), BF16)}, "keys and values must both be float32, bfloat16 or uint16"),
        ({3: jnp.zeros((2, 1, 2, 8, 16))}, r"keys and values must both be \[L, B, K, S, H\]"),
        ({5: np.int32(2)}, "layer 2 of a cache of 2"),
        ({6: np.zeros((1, 2), np.int32)}, "positions one for each new position"),
    ],
)
def test_wrong_operands_are_an_error_that_says_which(change: dict[int, Any], reason: str) -> None:
    made = operands(1, 1, 2, 2, 16, 9, F32, F32)
    for index, value in change.items():
        made[index] = value
    heads, keys, values = made[0], made[3], made[4]
    shapes = [jax.ShapeDtypeStruct((1, 1, 2, heads.shape[3] - 2, 16), heads.dtype)]
    shapes += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values)]
    call = jax.ffi.ffi_call("shardstream_rope_attention", shapes, input_output_aliases={3: 1, 4: 2})
    with pytest.raises(jax.errors.JaxRuntimeError, match=reason):
        jax.block_until_ready(jax.jit(lambda *x: call(*x))(*made))
