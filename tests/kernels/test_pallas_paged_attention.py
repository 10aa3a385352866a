"""Pallas attention over pages, interpreted on the CPU, against float64 NumPy and the definition."""

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

from kernels.cache_attention import Partial, pallas_gpu
from kernels.cache_attention.partial import merge
from kernels.cache_attention.scaled import FP8, LIMITS, Scales, quantize
from kernels.paged_attention import IMPLEMENTATIONS, paged_attention, pallas_tpu
from kernels.select import KernelError
from tests.kernels.numpy_attention import numpy_attention

NAMES = ("pallas_tpu", "pallas_gpu")
L, LAYER, TABLE = 2, 1, 7
# float32 sums of a few dozen products; with bf16 queries the softmax weights are rounded to 8 bits before they meet
# the values.
TIGHT, BF16 = 3e-6, 2e-2


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Iterator[None]:
    """A few pages a block, so that a few dozen slots are several; the GPU splits a sequence over programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pallas_tpu, "MOST_PAGES", 2)
        patch.setattr(pallas_tpu, "LANES", 32)
        patch.setattr(pallas_gpu, "MOST_SLOTS", 16)
        patch.setattr(pallas_gpu, "MOST_ROWS", 16)
        patch.setattr(pallas_gpu, "PROGRAMS", 12)
        yield


@functools.partial(jax.jit, static_argnames=("stride", "implementation"))
def run(
    q: Any,
    keys: Any,
    values: Any,
    tables: Any,
    positions: Any,
    stride: int,
    offset: Any,
    implementation: str,
    scales: Any,
) -> Partial:
    where = {"layer": LAYER, "positions": positions, "stride": stride, "offset": offset, "scales": scales}
    return paged_attention(q, keys, values, tables, **where, platform="cpu", implementation=implementation)


class Case:
    """Queries against sequences in pages. Whatever no sequence wrote is NaN: slots past an end, pages of nobody, the
    entries of tables past a last page, the other layer; in integers their scales are."""

    def __init__(
        self, shape: tuple[int, ...], stored: Any, positions: Any, stride: int = 1, offset: int = 0, seed: int = 0
    ):
        B, T, K, G, H, S = shape
        rng = np.random.default_rng(seed)
        self.positions, self.stride, self.offset = np.asarray(positions, np.int32), stride, offset
        stored = jnp.dtype(stored)
        bf16 = stored == jnp.bfloat16
        self.q = jnp.asarray(rng.standard_normal((B, T, K, G, H)), jnp.bfloat16 if bf16 else jnp.float32)
        last = self.positions.max(axis=1)
        at = np.arange(TABLE * S) * stride + offset
        filled = at <= last[:, None]  # [B, TABLE * S]
        used = np.array([-(-row.sum() // S) for row in filled])
        pages = B * TABLE + 1  # one at least is nobody's, and what tables hold past the end
        order = rng.permutation(pages)
        self.tables = np.full((B, TABLE), order[-1], np.int32)
        begin = np.cumsum(used) - used
        for b in range(B):
            self.tables[b, : used[b]] = order[begin[b] : begin[b] + used[b]]
        held, wide, scales = [], [], []
        for _ in range(2):
            x = jnp.asarray(rng.standard_normal((B, K, TABLE * S, H)), jnp.float32)
            if stored in LIMITS:
                x, scale = quantize(x, stored)
                paged = self._paged(np.asarray(scale), filled, pages, S, np.nan)
                scales.append(np.moveaxis(paged, 2, 1).reshape(L, 1, K, pages * S))
                wide.append(np.asarray(x, np.float64) * np.asarray(scale)[..., None])
            else:
                x = x.astype(stored)
                wide.append(np.asarray(x, np.float64))
            unwritten = -1 if stored == jnp.int8 else np.nan
            kept = self._paged(np.asarray(x, np.float32), filled, pages, S, unwritten)
            held.append(jnp.asarray(kept).astype(stored))
        self.keys, self.values = held
        self.scales = Scales(*map(jnp.asarray, scales)) if scales else None
        self.expected = numpy_attention(np.asarray(self.q, np.float64), *wide, self.positions, stride, offset)
        self.tolerance = BF16 if bf16 else TIGHT

    def _paged(self, x: np.ndarray, filled: np.ndarray, pages: int, S: int, unwritten: float) -> np.ndarray:
        """x [B, K, TABLE * S, ...] -> [L, pages, K, S, ...] as float32."""
        out = np.full((L, pages, x.shape[1], S, *x.shape[3:]), unwritten, np.float32)
        for b, slot in np.argwhere(filled):
            out[LAYER, self.tables[b, slot // S], :, slot % S] = x[b, :, slot]
        return out

    def run(self, implementation: str) -> Partial:
        operands = (self.q, self.keys, self.values, self.tables, self.positions)
        return run(*operands, self.stride, self.offset, implementation, self.scales)

    def check(self, implementation: str) -> None:
        found = self.run(implementation)
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


def test_both_are_offered() -> None:
    assert [name for name in IMPLEMENTATIONS if name.startswith("pallas_")] == list(NAMES)


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize(
    ("shape", "stored", "stride"),
    [
        ((3, 1, 2, 3, 64, 8), jnp.float32, 1),  # rows of one token
        ((3, 4, 1, 2, 80, 8), jnp.int8, 2),  # tiles of a prompt, on one of two members
        ((2, 1, 2, 2, 96, 16), FP8, 1),
        ((2, 3, 1, 1, 128, 6), jnp.bfloat16, 3),  # a page size that is no power of two
    ],
)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_length(implementation: str, shape: Any, stored: Any, stride: int, data: st.DataObject) -> None:
    """Sequences of none, one and many positions, at the edges of pages and of blocks of pages and full; padding at the
    end of a tile, and tiles of nothing else."""
    B, T, S = shape[0], shape[1], shape[5]
    offset = data.draw(st.integers(0, stride - 1))
    most = TABLE * S * stride
    edges = [0, 1, S * stride, 2 * S * stride, 6 * S * stride, most]
    near = st.builds(lambda edge, more: min(max(edge + more, 0), most), st.sampled_from(edges), st.integers(-1, 1))
    lengths = data.draw(st.lists(st.one_of(near, st.integers(0, most)), min_size=B, max_size=B))
    positions = np.full((B, T), -1, np.int32)
    for b, length in enumerate(lengths):
        count = min(T, length)
        positions[b, :count] = np.arange(length - count, length)
    case = Case(shape, stored, positions, stride, offset, seed=data.draw(st.integers(0, 99)))
    case.check(implementation)


@pytest.mark.parametrize("implementation", NAMES)
def test_members_merge_to_the_whole(implementation: str) -> None:
    """Each member of a cache split by position holds every second, and together they are the definition's."""
    shape, positions = (2, 1, 1, 2, 16, 8), [[37], [0]]
    whole = Case(shape, jnp.float32, positions)
    want = whole.run("reference").finish()
    parts = []
    for member in range(2):
        # Positions member, member + 2, ... of each page of 8: the member's pages are of 4.
        keys, values = (x[..., member::2, :] for x in (whole.keys, whole.values))
        parts.append(run(whole.q, keys, values, whole.tables, whole.positions, 2, member, implementation, None))
    merged = merge(Partial(*(jnp.stack(x) for x in zip(*parts, strict=True))))
    np.testing.assert_allclose(merged.finish(), want, atol=TIGHT)


def test_a_cache_of_longer_heads_than_the_queries() -> None:
    """Padded with zeros, as a TPU's is."""
    case = Case((2, 2, 1, 3, 20, 8), jnp.float32, [[18, 19], [2, -1]])
    case.keys, case.values = (jnp.pad(x, [(0, 0)] * 4 + [(0, 12)]) for x in (case.keys, case.values))
    case.check("xla")


@pytest.mark.parametrize("implementation", NAMES)
def test_storage_of_bits(implementation: str) -> None:
    """uint16 that holds bf16, as a cache on CPU keeps it."""
    case = Case((1, 1, 1, 2, 64, 8), jnp.bfloat16, [[18]])
    case.keys, case.values = case.keys.view(jnp.uint16), case.values.view(jnp.uint16)
    case.check(implementation)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_grid_takes_every_page_once_and_no_other(data: st.DataObject) -> None:
    """In order; a step that has no further page takes none that is not its sequence's or in VMEM already."""
    B, P, S, N = 4, 7, 4, 3
    used = np.array(data.draw(st.lists(st.integers(0, P), min_size=B, max_size=B)))
    tables = np.arange(B * P, dtype=np.int32).reshape(B, P)
    last = np.where(used > 0, used * S - 1 - data.draw(st.integers(0, S - 1)), -1).astype(np.int32)
    order = _in_order(tables, last, S, N)
    seen: dict[int, list[int]] = {b: [] for b in range(B)}
    for w in range(int(order.steps)):
        b = int(order.sequence[w])
        s = w - int(order.begin[b])
        pages = np.asarray(order.tables[b, s])
        count = min(N, max(used[b] - s * N, 0))
        seen[b] += pages[:count].tolist()
        assert s < max(1, int(order.needed[b]))
        earlier = np.asarray(order.tables[b, s - 1]) if s else np.full(N, tables[b, 0])
        assert (pages[count:] == earlier[count:]).all()
    assert seen == {b: tables[b, : used[b]].tolist() for b in range(B)}


_in_order = jax.jit(
    lambda tables, last, S, N: pallas_tpu.in_order(tables, last, S, N, 1, jnp.int32(0)), static_argnums=(2, 3)
)


# --- what is not taken ---


def refusal(implementation: str, platform: str = "cpu", **changed: Any) -> str:
    """What an implementation asked for by name says of these operands."""
    sizes = {"B": 1, "T": 1, "G": 1, "H": 32, "S": 16, "pages": 9, "P": 4, "stored": jnp.float32} | changed
    q = jnp.zeros((sizes["B"], sizes["T"], 1, sizes["G"], sizes["H"]))
    cache = jax.ShapeDtypeStruct((1, sizes["pages"], 1, sizes["S"], sizes["H"]), sizes["stored"])
    scale = jax.ShapeDtypeStruct((1, 1, 1, sizes["pages"] * sizes["S"]), jnp.float32)
    scales = Scales(scale, scale) if jnp.dtype(sizes["stored"]) in LIMITS else None  # type: ignore[arg-type]
    where: dict[str, Any] = {"layer": 0, "positions": jnp.zeros((sizes["B"], sizes["T"]), jnp.int32)}
    where |= {"stride": 1, "offset": 0, "platform": platform, "implementation": implementation}

    def call(keys: Any, tables: Any, scales: Any) -> Partial:
        return paged_attention(q, keys, keys, tables, **where, scales=scales)

    with pytest.raises(KernelError) as refused:
        jax.eval_shape(call, cache, jax.ShapeDtypeStruct((sizes["B"], sizes["P"]), jnp.int32), scales)
    return str(refused.value)


def test_what_is_not_taken_is_refused_by_name() -> None:
    assert "'pallas_tpu' does not run on gpu" in refusal("pallas_tpu", "gpu")
    assert "'pallas_gpu' takes heads of a multiple of 16, not 20" in refusal("pallas_gpu", H=20)
    assert "fits in VMEM" in refusal("pallas_tpu", T=600)
    assert "tables in scalar memory" in refusal("pallas_tpu", B=64, P=8192)
    assert "not 9 pages of 6" in refusal("pallas_tpu", S=6, stored=jnp.int8)
