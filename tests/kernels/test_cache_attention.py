"""Cache attention: every implementation against float64 NumPy, at block edges and for kv_seq members."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cache_attention import IMPLEMENTATIONS, Partial, cache_attention, xla
from kernels.cache_attention.partial import from_storage, merge
from kernels.cache_attention.scaled import FP8, LIMITS, Scales, quantize, widened
from kernels.select import KernelError
from tests.kernels.numpy_attention import numpy_attention

BLOCK = 8
L, LAYER = 2, 1
# f32 sums of at most a few dozen products. bf16 caches hold exact bf16 numbers, so only the arithmetic
# differs; on "tpu" and "gpu" the softmax weights are rounded to bf16 (8 bits) before they meet the values.
TIGHT, BF16 = 2e-6, 2e-2


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Iterator[None]:
    """Blocks of 8 slots, so that a few dozen slots are several blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "BLOCK", BLOCK)
        yield


@functools.partial(jax.jit, static_argnames=("stride", "platform", "implementation"))
def run(q: Any, keys: Any, values: Any, positions: Any, stride: int, offset: Any, **how: Any) -> Partial:
    return cache_attention(q, keys, values, layer=LAYER, positions=positions, stride=stride, offset=offset, **how)


def random_case(
    B: int, T: int, K: int, G: int, H: int, S: int, *, seed: int = 0, bf16: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, and keys and values [L, B, K, S, H]; float32, holding bf16 numbers where asked."""
    rng = np.random.default_rng(seed)
    shapes = [(B, T, K, G, H), (L, B, K, S, H), (L, B, K, S, H)]
    made = [rng.standard_normal(shape, np.float32) for shape in shapes]
    if bf16:
        made = [x.astype(jnp.bfloat16).astype(np.float32) for x in made]
    return made[0], made[1], made[2]


def check(found: Partial, expected: tuple[np.ndarray, np.ndarray], tolerance: float) -> None:
    out, log_sum = expected
    assert found.out.dtype == found.max.dtype == found.sum.dtype == jnp.float32
    np.testing.assert_allclose(found.finish(), out, atol=tolerance, rtol=tolerance)
    seen = np.isfinite(log_sum)
    total = np.asarray(found.sum, np.float64)
    np.testing.assert_allclose(
        np.asarray(found.max)[seen] + np.log(total[seen]), log_sum[seen], atol=tolerance, rtol=tolerance
    )
    assert (total[~seen] == 0).all()
    assert (np.asarray(found.out)[~seen] == 0).all()


HOW = [("reference", "cpu", TIGHT), ("xla", "cpu", TIGHT), ("cpu_native", "cpu", TIGHT), ("xla", "tpu", TIGHT)]
STORAGE = [
    ("reference", "cpu", TIGHT),
    ("xla", "cpu", TIGHT),
    ("cpu_native", "cpu", TIGHT),
    (None, "cpu", TIGHT),
    ("xla", "tpu", BF16),
]


PLAIN = [name for name in IMPLEMENTATIONS if not name.startswith("pallas_")]  # those have a file of their own


def test_every_implementation_is_tested() -> None:
    assert {how[0] for how in HOW} == set(PLAIN)


@pytest.mark.parametrize(("implementation", "platform", "tolerance"), HOW)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_decode_at_any_length(implementation: str | None, platform: str, tolerance: float, data: st.DataObject) -> None:
    """One new position a row, rows of different lengths, one member of a cache split by position."""
    shapes = [(1, 1, 1, 8, 1), (3, 2, 3, 24, 1), (2, 1, 4, 21, 3), (1, 3, 1, 5, 3)]
    B, K, G, S, stride = data.draw(st.sampled_from(shapes))
    offset = data.draw(st.integers(0, stride - 1))
    # Positions whose slot is at, before or past the edge of a block, and the first and last there are.
    edges = st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, S - 1])
    near = st.builds(lambda slot, more: slot * stride + more, edges, st.integers(0, stride - 1))
    lasts = st.one_of(st.integers(0, S * stride - 1), near.map(lambda p: min(p, S * stride - 1)))
    positions = np.array(data.draw(st.lists(lasts, min_size=B, max_size=B)), np.int32)[:, None]
    q, keys, values = random_case(B, 1, K, G, 4, S, seed=data.draw(st.integers(0, 99)))
    found = run(q, keys, values, positions, stride, offset, platform=platform, implementation=implementation)
    check(found, numpy_attention(q, keys[LAYER], values[LAYER], positions, stride, offset), tolerance)


@pytest.mark.parametrize(("implementation", "platform", "tolerance"), HOW)
@pytest.mark.parametrize(("start", "T"), [(0, 6), (6, 6), (9, 6), (18, 6)])
def test_prefill_is_causal(implementation: str | None, platform: str, tolerance: float, start: int, T: int) -> None:
    q, keys, values = random_case(2, T, 2, 3, 4, 24, seed=start)
    positions = np.broadcast_to(np.arange(start, start + T, dtype=np.int32), (2, T))
    found = run(q, keys, values, positions, 1, 0, platform=platform, implementation=implementation)
    check(found, numpy_attention(q, keys[LAYER], values[LAYER], positions), tolerance)


@pytest.mark.parametrize(("implementation", "platform", "tolerance"), STORAGE)
@pytest.mark.parametrize("storage", [jnp.uint16, jnp.bfloat16])
def test_bf16_caches(implementation: str | None, platform: str, tolerance: float, storage: Any) -> None:
    """uint16 holds the bits of bf16, and both give what the same numbers in float32 give."""
    q, keys, values = random_case(2, 1, 2, 3, 8, 24, bf16=True)
    positions = np.array([[19], [3]], np.int32)
    stored = [jnp.asarray(x, jnp.bfloat16).view(storage) for x in (keys, values)]
    found = run(
        jnp.asarray(q, jnp.bfloat16),
        *stored,
        positions,
        1,
        0,
        platform=platform,
        implementation=implementation,
    )
    check(found, numpy_attention(q, keys[LAYER], values[LAYER], positions), tolerance)


SCALED = [*HOW, ("xla", "tpu", BF16)]


@pytest.mark.parametrize(("implementation", "platform", "tolerance"), SCALED)
@pytest.mark.parametrize("stored", [jnp.dtype(jnp.int8), FP8])
def test_scaled_caches(implementation: str | None, platform: str, tolerance: float, stored: jnp.dtype) -> None:
    """What a scaled cache holds, multiplied out by hand, gives the same; scales past the end never leak."""
    q, keys, values = random_case(2, 2, 2, 3, 8, 24, bf16=tolerance == BF16)
    positions = np.array([[18, 19], [2, 3]], np.int32)
    (k, ks), (v, vs) = (quantize(jnp.asarray(x), stored) for x in (keys, values))
    dirty = [np.array(s) for s in (ks, vs)]
    for row, last in enumerate(positions[:, -1]):
        for scale in dirty:
            scale[:, row, :, last + 1 :] = np.nan
            scale[1 - LAYER] = np.nan
    if platform == "cpu" and stored == FP8:  # as a cache on CPU keeps it
        k, v = k.view(jnp.uint8), v.view(jnp.uint8)
    kind = jnp.bfloat16 if tolerance == BF16 else jnp.float32
    how = {"platform": platform, "implementation": implementation, "scales": Scales(*map(jnp.asarray, dirty))}
    found = run(jnp.asarray(q, kind), k, v, positions, 1, 0, **how)
    plain = (
        np.asarray(from_storage(x)[LAYER], np.float64) * np.asarray(s)[LAYER][..., None] for x, s in ((k, ks), (v, vs))
    )
    check(found, numpy_attention(q, *plain, positions), tolerance)


def test_the_native_kernel_refuses_scales_beside_wide_numbers() -> None:
    q, keys, values = random_case(1, 1, 1, 1, 4, 8)
    scales = Scales(*(jnp.asarray(x[..., 0]) for x in (keys, values)))
    with pytest.raises(KernelError, match="takes keys and values both in int8, fp8 or uint8, with scales, not float32"):
        run(
            q,
            keys,
            values,
            np.zeros((1, 1), np.int32),
            1,
            0,
            platform="cpu",
            implementation="cpu_native",
            scales=scales,
        )


@settings(max_examples=50, deadline=None)
@given(data=st.data(), stored=st.sampled_from(sorted(LIMITS, key=str)))
def test_quantising_loses_at_most_half_a_step(data: st.DataObject, stored: jnp.dtype) -> None:
    numbers = st.floats(-1e4, 1e4, width=32)
    row = data.draw(st.one_of(st.just([0.0] * 4), st.lists(numbers, min_size=4, max_size=4)))
    x = np.array(row, np.float32)
    q, scale = quantize(jnp.asarray(x), stored)
    back = np.asarray(q, np.float64) * np.asarray(scale)
    largest = np.abs(x).max()
    # int8: half of a 127th of the largest. fp8 has 3 bits of fraction: half of an eighth of each number, and half of
    # its smallest step, 2 ** -9 of 448ths.
    bound = largest / 254 if stored == jnp.int8 else np.maximum(np.abs(x) / 16, largest / 448 * 2.0**-10)
    assert (np.abs(back - x) <= bound * 1.00001 + 1e-35).all()


@pytest.mark.parametrize(("implementation", "platform", "tolerance"), HOW)
@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
def test_memory_past_a_rows_last_position_never_leaks(
    implementation: str | None, platform: str, tolerance: float, poison: float
) -> None:
    """Also where a longer row of the batch does read those slots of its own."""
    q, keys, values = random_case(3, 2, 2, 2, 4, 24)
    positions = np.array([[1, 2], [15, 16], [8, 9]], np.int32)
    dirty_keys, dirty_values = keys.copy(), values.copy()
    for row, last in enumerate(positions[:, -1]):
        for dirty in (dirty_keys, dirty_values):
            dirty[:, row, :, last + 1 :] = poison
            dirty[1 - LAYER] = poison
    found = run(q, dirty_keys, dirty_values, positions, 1, 0, platform=platform, implementation=implementation)
    check(found, numpy_attention(q, keys[LAYER], values[LAYER], positions), tolerance)


@pytest.mark.parametrize(("implementation", "platform", "tolerance"), HOW)
@pytest.mark.parametrize("S", [5, 24])
def test_a_query_that_sees_no_slot_of_this_member(
    implementation: str | None, platform: str, tolerance: float, S: int
) -> None:
    q, keys, values = random_case(2, 1, 1, 2, 4, S)
    keys[:], values[:, :, :, 1:] = np.nan, np.nan
    positions = np.array([[2], [0]], np.int32)
    found = run(q, keys, values, positions, 4, 3, platform=platform, implementation=implementation)
    check(found, (np.zeros(q.shape), np.full(q.shape[:-1], -np.inf)), tolerance)
    assert np.isfinite(np.asarray(found.max)).all()


@pytest.mark.parametrize("implementation", PLAIN)
@pytest.mark.parametrize("members", [3, 8])
def test_merged_members_equal_the_whole_cache(implementation: str, members: int) -> None:
    """Position p in slot p // members of member p % members, as the cache keeps it."""
    S = 24
    q, keys, values = random_case(2, 1, 2, 3, 4, S)
    positions = np.array([[17], [1]], np.int32)  # the second row leaves most members with nothing
    how = {"platform": "cpu", "implementation": implementation}
    parts = [
        run(q, keys[..., m::members, :], values[..., m::members, :], positions, members, m, **how)
        for m in range(members)
    ]
    whole = merge(Partial(*(jnp.stack(x) for x in zip(*parts, strict=True))))
    check(whole, numpy_attention(q, keys[LAYER], values[LAYER], positions), TIGHT)
    other_axis = merge(Partial(*(jnp.stack(x, axis=1) for x in zip(*parts, strict=True))), axis=1)
    jax.tree.map(np.testing.assert_array_equal, other_axis, whole)


def test_merging_nothing_with_nothing_is_nothing() -> None:
    q, keys, values = random_case(1, 1, 1, 2, 4, 5)
    part = run(q, keys, values, np.array([[0]], np.int32), 4, 3, platform="cpu", implementation="xla")
    both = merge(Partial(*(jnp.stack([x, x]) for x in part)))
    assert (np.asarray(both.finish()) == 0).all()
    assert (np.asarray(both.sum) == 0).all()


@pytest.mark.parametrize("implementation", PLAIN)
def test_large_scores_do_not_overflow(implementation: str) -> None:
    """Scores of thousands, whose exponentials are beyond any float."""
    q, keys, values = random_case(1, 1, 1, 2, 4, 24)
    q = 1000 * q
    positions = np.array([[20]], np.int32)
    found = run(q, keys, values, positions, 1, 0, platform="cpu", implementation=implementation)
    check(found, numpy_attention(q, keys[LAYER], values[LAYER], positions), 2e-4)  # f32 scores to 1e-4


@pytest.mark.parametrize("implementation", PLAIN)
def test_the_layer_may_be_traced(implementation: str) -> None:
    q, keys, values = random_case(1, 1, 1, 2, 4, 24)
    positions = np.array([[20]], np.int32)
    arrays = [jnp.asarray(x) for x in (q, keys, values)]

    @jax.jit
    def of_layer(layer: jax.Array) -> Partial:
        where = {"layer": layer, "positions": positions, "stride": 1, "offset": 0}
        return cache_attention(*arrays, **where, platform="cpu", implementation=implementation)

    for layer in range(L):
        check(of_layer(np.int32(layer)), numpy_attention(q, keys[layer], values[layer], positions), TIGHT)


@pytest.mark.xdist_group("operation by operation")  # which compiles each operation once
@pytest.mark.parametrize(
    ("lasts", "stride", "offset", "blocks"),
    [
        ([0, 0], 1, 0, 1),
        ([7, 0], 1, 0, 1),
        ([0, 8], 1, 0, 2),
        ([16, 3], 1, 0, 3),
        ([47, 3], 1, 0, 6),
        ([2, 0], 4, 3, 0),  # nothing here yet
        ([3, 0], 4, 3, 1),
        ([31, 0], 4, 3, 1),
        ([0, 34], 4, 3, 1),
        ([0, 35], 4, 3, 2),
        ([34, 0], 4, 2, 2),
    ],
)
def test_only_filled_blocks_are_read(
    monkeypatch: pytest.MonkeyPatch, lasts: list[int], stride: int, offset: int, blocks: int
) -> None:
    """The cost follows the longest row: run operation by operation, each read of a block is seen."""
    q, keys, values = random_case(len(lasts), 1, 1, 1, 4, 48)
    reads = []

    def counted(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        reads.append(x.shape)
        return widened(x, dtype)

    monkeypatch.setattr(xla, "widened", counted)
    with jax.disable_jit():
        xla.cache_attention(
            jnp.asarray(q),
            jnp.asarray(keys),
            jnp.asarray(values),
            layer=LAYER,
            positions=jnp.array(lasts, jnp.int32)[:, None],
            stride=stride,
            offset=offset,
            platform="cpu",
        )
    assert reads == 2 * blocks * [(len(lasts), 1, BLOCK, 4)]


def test_unknown_implementation() -> None:
    q, keys, values = random_case(1, 1, 1, 1, 4, 8)
    with pytest.raises(KernelError, match="cache_attention has no implementation 'cuda'; it has xla, pallas_tpu, pal"):
        run(q, keys, values, np.zeros((1, 1), np.int32), 1, 0, platform="cpu", implementation="cuda")
