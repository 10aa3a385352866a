"""Pallas attention, interpreted on the CPU, against float64 NumPy: the kernels that TPU and GPU run."""

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

from kernels.cache_attention import IMPLEMENTATIONS, Partial, cache_attention, pallas_gpu, pallas_tpu, reference
from kernels.cache_attention.partial import from_storage, merge
from kernels.cache_attention.rows import blocks_needed
from kernels.cache_attention.scaled import FP8, LIMITS, Scales, quantize
from kernels.cache_write import cache_write
from kernels.select import KernelError, select
from tests.kernels.numpy_attention import numpy_attention

NAMES = ("pallas_tpu", "pallas_gpu")
BLOCK = 16
L, LAYER = 2, 1
# float32 sums of a few dozen products; with bf16 queries the softmax weights are rounded to 8 bits before they meet
# the values.
TIGHT, BF16 = 3e-6, 2e-2


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Iterator[None]:
    """Blocks of 16 slots and 16 queries, so that a few dozen are several; the GPU splits a row over programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pallas_tpu, "MOST_SLOTS", BLOCK)
        patch.setattr(pallas_tpu, "MOST_ROWS", 24)
        patch.setattr(pallas_gpu, "MOST_SLOTS", BLOCK)
        patch.setattr(pallas_gpu, "MOST_ROWS", 16)
        patch.setattr(pallas_gpu, "PROGRAMS", 12)
        yield


@functools.partial(jax.jit, static_argnames=("stride", "implementation"))
def run(
    q: Any, keys: Any, values: Any, positions: Any, stride: int, offset: Any, implementation: str, scales: Any = None
) -> Partial:
    where = {"layer": LAYER, "positions": positions, "stride": stride, "offset": offset, "scales": scales}
    return cache_attention(q, keys, values, **where, platform="cpu", implementation=implementation)


class Case:
    """Queries against a cache as it is stored, NaN wherever nothing was written, and what must come out."""

    def __init__(
        self, shape: tuple[int, ...], stored: Any, positions: Any, stride: int = 1, offset: int = 0, seed: int = 0
    ):
        B, T, K, G, H, S = shape
        rng = np.random.default_rng(seed)
        self.positions, self.stride, self.offset = np.asarray(positions, np.int32), stride, offset
        bf16 = stored == jnp.bfloat16
        self.q = jnp.asarray(rng.standard_normal((B, T, K, G, H)), jnp.bfloat16 if bf16 else jnp.float32)
        past = np.arange(S) * stride + offset > self.positions.max(axis=1)[:, None]  # [B, S]
        held, wide, scales = [], [], []
        for _ in range(2):
            x = jnp.asarray(rng.standard_normal((B, K, S, H)), jnp.float32)
            if stored in LIMITS:
                x, scale = quantize(x, stored)
                scales.append(_in_layer(np.where(past[:, None], np.nan, scale)))
                wide.append(np.asarray(x, np.float64) * np.asarray(scale)[..., None])
            else:
                x = x.astype(stored)
                wide.append(np.asarray(x, np.float64))
            if stored != jnp.int8:
                x = jnp.where(past[:, None, :, None], jnp.nan, x.astype(jnp.float32)).astype(stored)
            held.append(_in_layer(x))
        self.keys, self.values = held
        self.scales = Scales(*scales) if scales else None
        q = np.asarray(self.q, np.float64)
        self.expected = numpy_attention(q, *wide, self.positions, stride, offset)
        self.tolerance = BF16 if bf16 else TIGHT

    def check(self, implementation: str) -> Partial:
        found = run(
            self.q, self.keys, self.values, self.positions, self.stride, self.offset, implementation, self.scales
        )
        out, log_sum = self.expected
        assert found.out.dtype == found.max.dtype == found.sum.dtype == jnp.float32
        np.testing.assert_allclose(found.finish(), out, atol=self.tolerance, rtol=self.tolerance)
        seen = np.isfinite(log_sum)
        total = np.asarray(found.sum, np.float64)
        known = np.asarray(found.max)[seen] + np.log(total[seen])
        np.testing.assert_allclose(known, log_sum[seen], atol=TIGHT, rtol=TIGHT)
        assert (total[~seen] == 0).all()
        assert (np.asarray(found.out)[~seen] == 0).all()
        assert np.isfinite(np.asarray(found.max)).all()
        return found


def _in_layer(x: Any) -> jax.Array:
    """x as layer ``LAYER`` of a stack whose other layer is NaN (or, in integers, -1)."""
    x = jnp.asarray(x)
    other = jnp.full_like(x, -1) if x.dtype == jnp.int8 else jnp.full_like(x.astype(jnp.float32), jnp.nan)
    return jnp.stack([other.astype(x.dtype), x])


def test_both_are_offered() -> None:
    assert [name for name in IMPLEMENTATIONS if name.startswith("pallas_")] == list(NAMES)


S = 3 * BLOCK + 5
LONG = 6 * BLOCK + 5
"""Slots of which so many lie along the lanes on TPU, where heads are shorter than a register."""
EDGES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK]


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize(
    ("shape", "stored", "stride"),
    [
        ((3, 1, 2, 3, 64, S), jnp.float32, 1),
        ((2, 1, 1, 8, 80, LONG), jnp.int8, 3),
        ((2, 3, 2, 2, 96, LONG), FP8, 1),  # several new positions a row
        ((1, 1, 2, 1, 128, S), jnp.bfloat16, 2),
    ],
)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_length(implementation: str, shape: Any, stored: Any, stride: int, data: st.DataObject) -> None:
    """Rows of different lengths, at block edges and between, on one member of a cache split by position."""
    B, T, *_, S = shape
    offset = data.draw(st.integers(0, stride - 1))
    edges = st.sampled_from([*EDGES, S - 1])
    near = st.builds(lambda slot, more: slot * stride + more, edges, st.integers(0, stride - 1))
    lasts = data.draw(st.lists(st.one_of(st.integers(0, S * stride - 1), near), min_size=B, max_size=B))
    positions = np.maximum(np.array(lasts)[:, None] - np.arange(T)[::-1], 0)
    Case(shape, jnp.dtype(stored), positions, stride, offset, seed=data.draw(st.integers(0, 99))).check(implementation)


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize(("stored", "start"), [(jnp.float32, 0), (jnp.int8, 33)])
def test_prefill_is_causal(implementation: str, stored: Any, start: int) -> None:
    """Many queries in several blocks, the last of them not whole."""
    positions = np.broadcast_to(np.arange(start, start + 19), (2, 19))
    Case((2, 19, 2, 3, 64, S if start else LONG), jnp.dtype(stored), positions).check(implementation)


@pytest.mark.parametrize("implementation", NAMES)
def test_nothing_seen_is_nothing(implementation: str) -> None:
    Case((2, 1, 2, 2, 16, 20), jnp.dtype(jnp.float32), [[2], [0]], stride=4, offset=3).check(implementation)


@pytest.mark.parametrize("implementation", NAMES)
def test_members_merge_to_the_whole(implementation: str) -> None:
    """Position p in slot p // members of member p % members, as the cache keeps it."""
    members = 3
    whole = Case((2, 1, 2, 3, 64, 48), jnp.dtype(jnp.float32), [[41], [1]])
    where = (whole.positions, members)
    parts = [
        run(whole.q, whole.keys[..., m::members, :], whole.values[..., m::members, :], *where, m, implementation)
        for m in range(members)
    ]
    merged = merge(Partial(*(jnp.stack(x) for x in zip(*parts, strict=True))))
    np.testing.assert_allclose(merged.finish(), whole.expected[0], atol=TIGHT)


@pytest.mark.parametrize("implementation", NAMES)
def test_storage_of_bits(implementation: str) -> None:
    """uint16 that holds bf16, as a cache on CPU keeps it."""
    case = Case((1, 1, 1, 2, 64, 20), jnp.dtype(jnp.bfloat16), [[18]])
    case.keys, case.values = case.keys.view(jnp.uint16), case.values.view(jnp.uint16)
    assert from_storage(case.keys).dtype == jnp.bfloat16
    case.check(implementation)


def test_the_definition_agrees_with_numpy_on_scaled_caches() -> None:
    case = Case((2, 2, 2, 2, 16, 20), jnp.dtype(jnp.int8), [[18, 19], [2, 3]])
    where = {"layer": LAYER, "positions": case.positions, "stride": 1, "offset": 0, "scales": case.scales}
    found = jax.jit(lambda *arrays: reference.cache_attention(*arrays, **where))(case.q, case.keys, case.values)
    np.testing.assert_allclose(found.finish(), case.expected[0], atol=TIGHT)


@pytest.mark.parametrize(("stored", "S", "H"), [(jnp.bfloat16, 300, 64), (jnp.int8, 97, 80), (FP8, 130, 16)])
def test_a_write_into_short_heads(stored: Any, S: int, H: int) -> None:
    """As the scatter that defines it does, at any slot, or nowhere; what is beside it stays, NaN too."""
    B, K = 6, 2
    rng = np.random.default_rng(S)
    cache = jnp.asarray(rng.standard_normal((L, B, K, S, H)) * 99).astype(stored)
    if stored != jnp.int8:
        cache = cache.at[LAYER, :, :, 1].set(jnp.nan)
    new = jnp.asarray(rng.standard_normal((B, K, H)) * 99).astype(stored)
    slots = jnp.array([0, S - 1, S, S // 2, 1, 15], jnp.int32)  # the third writes nothing
    how: dict[str, Any] = {"layer": LAYER, "platform": "cpu"}
    expected, found = (cache_write(cache, new, slots, **how, implementation=name) for name in ("xla", "pallas_tpu"))
    assert found.dtype == cache.dtype
    np.testing.assert_array_equal(found.astype(jnp.float32), expected.astype(jnp.float32))
    assert bool(jnp.array_equal(expected[LAYER, 2], cache[LAYER, 2], equal_nan=stored != jnp.int8))
    assert bool(jnp.array_equal(expected[LAYER, 4, :, 1], new[4]))


@settings(deadline=None)
@given(last=st.integers(-1, 300), stride=st.integers(1, 5), slots=st.integers(1, 40), data=st.data())
def test_blocks_that_hold_something(last: int, stride: int, slots: int, data: st.DataObject) -> None:
    """No more are read than hold a position, and no fewer."""
    offset = data.draw(st.integers(0, stride - 1))
    filled = [slot for slot in range(301) if slot * stride + offset <= last]
    assert int(_blocks_needed(np.int32(last), stride, offset, slots)) == len({slot // slots for slot in filled})


_blocks_needed = jax.jit(blocks_needed)


# --- which one runs ---


def test_each_platform_has_its_own_by_default() -> None:
    takes = dict.fromkeys(NAMES, lambda: None)
    for platform, own in (("tpu", "pallas_tpu"), ("gpu", "pallas_gpu")):
        assert select("attention", None, platform, IMPLEMENTATIONS, lambda: "no", takes) == own
        refuses = dict.fromkeys(NAMES, lambda: "takes no such thing")
        assert select("attention", None, platform, IMPLEMENTATIONS, lambda: "no", refuses) == "xla"
        assert select("attention", None, platform, IMPLEMENTATIONS, lambda: "no") == "xla"
    assert select("attention", None, "cpu", IMPLEMENTATIONS, lambda: "no", takes) == "xla"


def test_what_a_platform_does_not_run_is_refused() -> None:
    case = Case((1, 1, 1, 1, 20, 20), jnp.dtype(jnp.float32), [[3]])
    where = {"layer": 0, "positions": case.positions, "stride": 1, "offset": 0}
    with pytest.raises(KernelError, match="'pallas_tpu' takes caches whose heads are shorter than a register"):
        cache_write(
            case.keys, case.keys[0, :, :, 0], case.positions[0], layer=0, platform="cpu", implementation="pallas_tpu"
        )
    with pytest.raises(KernelError, match="'pallas_tpu' does not run on gpu"):
        cache_attention(case.q, case.keys, case.values, **where, platform="gpu", implementation="pallas_tpu")
    with pytest.raises(KernelError, match=r"'pallas_gpu' takes heads of a multiple of 16.*not 20"):
        cache_attention(case.q, case.keys, case.values, **where, platform="cpu", implementation="pallas_gpu")
