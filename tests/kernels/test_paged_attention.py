"""Attention over pages: every implementation against the NumPy definition, over layouts, dtypes and paddings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import native
from kernels.cache_attention.scaled import Scales, quantize
from kernels.paged_attention import paged_attention, paged_extend
from kernels.paged_attention.cpu_native import paged_write
from kernels.select import KernelError

LAYERS, PAGES, K, G, H = 2, 11, 2, 3, 20
IMPLEMENTATIONS = ("reference", "xla", "cpu_native")


def expected(q, k, v, positions):
    """float64 softmax attention of q [T, K, G, H] over whole sequences k, v [positions, K, H]."""
    out = np.zeros(q.shape)
    for t, position in enumerate(positions):
        if position < 0:
            continue
        for head in range(q.shape[1]):
            scores = q[t, head].astype(np.float64) @ k[: position + 1, head].T.astype(np.float64) / H**0.5
            weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weight /= weight.sum(axis=-1, keepdims=True)
            out[t, head] = weight @ v[: position + 1, head]
    return out


def paged(sequences, page_size, stride, offset, tables, unwritten=np.nan):
    """Sequences [positions, K, H] as one member's pages [LAYERS, PAGES, K, S, H] of layer 1; the rest unwritten."""
    cache = np.full((LAYERS, PAGES, K, page_size // stride, H), unwritten, np.float32)
    for sequence, table in zip(sequences, tables, strict=True):
        for position, entry in enumerate(sequence):
            page, inside = divmod(position, page_size)
            if inside % stride == offset:
                cache[1, table[page], :, inside // stride] = entry
    return cache


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("page_size", "stride", "T"), [(4, 1, 1), (4, 2, 3), (6, 3, 2), (80, 1, 1), (6, 1, 16)])
def test_equals_the_definition_whatever_the_pages(implementation, page_size, stride, T):
    if implementation == "cpu_native" and native.problem():
        pytest.skip(native.problem())
    rng = np.random.default_rng(page_size * 10 + stride)
    lengths = [1, 2 * page_size, 2 * page_size + 1]
    order = rng.permutation(PAGES)
    tables = np.zeros((4, 4), np.int32)
    tables[:3, :3] = order[:9].reshape(3, 3)
    keys, values = ([rng.standard_normal((n, K, H)).astype(np.float32) for n in lengths] for _ in range(2))
    q = rng.standard_normal((4, T, K, G, H)).astype(np.float32)
    positions = np.full((4, T), -1, np.int32)  # the fourth tile is padding
    for row, length in enumerate(lengths):
        count = min(T, length)
        positions[row, :count] = np.arange(length - count, length)
    want = np.stack([expected(q[b], keys[b], values[b], positions[b]) for b in range(3)])

    parts = []
    for offset in range(stride):
        run = jax.jit(paged_attention, static_argnames=("stride", "platform", "implementation"))
        own = [paged(s, page_size, stride, offset, tables[:3]) for s in (keys, values)]
        parts.append(
            run(
                q,
                *own,
                tables,
                layer=jnp.int32(1),
                positions=positions,
                stride=stride,
                offset=jnp.int32(offset),
                platform="cpu",
                implementation=implementation,
            )
        )
    top = np.max([p.max for p in parts], axis=0)
    weight = [np.exp(np.asarray(p.max) - top) for p in parts]
    total = sum(w * np.asarray(p.sum) for w, p in zip(weight, parts, strict=True))
    out = sum(w[..., None] * np.asarray(p.out) for w, p in zip(weight, parts, strict=True))
    got = out[:3] / np.maximum(total[:3], 1e-30)[..., None]
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    assert np.all(np.asarray(parts[0].sum)[3] == 0)
    assert np.all(np.asarray(parts[0].out)[3] == 0)


@pytest.mark.parametrize("implementation", ["xla", "cpu_native"])
@pytest.mark.parametrize("stored", ["bfloat16", "uint16"])
def test_narrow_caches(implementation, stored):
    if implementation == "cpu_native" and native.problem():
        pytest.skip(native.problem())
    rng = np.random.default_rng(0)
    bf16 = [jnp.asarray(rng.standard_normal((1, 5, K, 4, H)), jnp.bfloat16) for _ in range(2)]
    caches = bf16 if stored == "bfloat16" else [jax.lax.bitcast_convert_type(x, jnp.uint16) for x in bf16]
    tables = np.array([[3, 1, 4], [2, 0, 0]], np.int32)
    positions = np.array([[9], [2]], np.int32)
    q = rng.standard_normal((2, 1, K, G, H)).astype(np.float32)
    where = {"layer": 0, "positions": jnp.asarray(positions), "stride": 1, "offset": 0, "platform": "cpu"}
    got = paged_attention(q, *caches, jnp.asarray(tables), **where, implementation=implementation).finish()
    wide = [np.asarray(x, np.float32) for x in bf16]
    for row, length in enumerate((10, 3)):
        k, v = (x[0][tables[row]].swapaxes(1, 2).reshape(-1, K, H)[:length] for x in wide)
        np.testing.assert_allclose(got[row], expected(q[row], k, v, [length - 1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("implementation", ["xla", "reference", "cpu_native"])
def test_scaled_caches(implementation, kind):
    """Exact on what is stored; a slot never written may hold any number and any scale."""
    if implementation == "cpu_native" and native.problem():
        pytest.skip(native.problem())
    rng = np.random.default_rng(3)
    stored, scales = zip(
        *(quantize(jnp.asarray(rng.standard_normal((1, 5, K, 4, H)), jnp.float32), jnp.dtype(kind)) for _ in range(2)),
        strict=True,
    )
    wide = [np.asarray(x, np.float32) * np.asarray(s)[..., None] for x, s in zip(stored, scales, strict=True)]
    tables = np.array([[3, 1, 4], [2, 0, 0]], np.int32)
    unwritten = [s.at[0, 4, :, 2:].set(np.nan).at[0, 2, :, 3:].set(np.nan) for s in scales]
    positions = np.array([[9], [2]], np.int32)
    q = rng.standard_normal((2, 1, K, G, H)).astype(np.float32)
    where = {"layer": 0, "positions": jnp.asarray(positions), "stride": 1, "offset": 0, "platform": "cpu"}
    kept = scales if implementation == "reference" else unwritten
    if kind != "int8":  # as a cache on CPU keeps it
        stored = [x.view(jnp.uint8) for x in stored]
    own = Scales(*(jnp.moveaxis(x, 2, 1).reshape(1, 1, K, -1) for x in kept))  # page after page
    got = paged_attention(q, *stored, jnp.asarray(tables), **where, implementation=implementation, scales=own).finish()
    for row, length in enumerate((10, 3)):
        k, v = (x[0][tables[row]].swapaxes(1, 2).reshape(-1, K, H)[:length] for x in wide)
        np.testing.assert_allclose(got[row], expected(q[row], k, v, [length - 1]), rtol=1e-4, atol=1e-5)


def test_a_long_context_is_split_and_merged_alike_in_any_company():
    """The bits of a row do not depend on the rows beside it, long or short."""
    if native.problem():
        pytest.skip(native.problem())
    rng = np.random.default_rng(1)
    cache = [rng.standard_normal((1, 90, 1, 16, 32)).astype(np.float32) for _ in range(2)]
    tables = np.zeros((3, 80), np.int32)
    tables[0] = np.arange(80)
    tables[1, :2], tables[2, :2] = [81, 82], [83, 84]
    q = rng.standard_normal((3, 1, 1, 2, 32)).astype(np.float32)

    def run(rows, positions):
        where = {"layer": 0, "stride": 1, "offset": 0, "platform": "cpu", "implementation": "cpu_native"}
        places = jnp.asarray(positions, jnp.int32)[:, None]
        return np.asarray(paged_attention(q[rows], *cache, tables[rows], positions=places, **where).finish())

    both = run([0, 1], [1278, 20])
    assert np.array_equal(both[1], run([1, 2], [20, 7])[0])
    assert np.array_equal(both[0], run([0], [1278])[0])
    flat = [c[0][tables[0]].swapaxes(1, 2).reshape(-1, 1, 32)[:1279].astype(np.float64) for c in cache]
    scores = np.einsum("gh,sh->gs", q[0, 0, 0].astype(np.float64), flat[0][:, 0]) / 32**0.5
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    want = (weight / weight.sum(-1, keepdims=True)) @ flat[1][:, 0]
    np.testing.assert_allclose(both[0, 0, 0], want, rtol=1e-4, atol=1e-6)


def test_writing_leaves_padding_and_the_rest_alone():
    if native.problem():
        pytest.skip(native.problem())
    rng = np.random.default_rng(2)
    cache = rng.standard_normal((2, 3, K, 4, H)).astype(np.float32)
    new = rng.standard_normal((4, K, H)).astype(np.float32)
    marks = rng.integers(-9, 9, (2, 3, K, 4)).astype(np.int8)  # one number a position, as scales are
    pages, slots = np.array([2, 3, 0, -1], np.int32), np.array([1, 0, 3, 0], np.int32)
    want = cache.copy()
    want[1, 2, :, 1], want[1, 0, :, 3] = new[0], new[2]
    run = jax.jit(paged_write, donate_argnums=0)
    np.testing.assert_array_equal(run(jnp.array(cache), new, pages, slots, jnp.int32(1)), want)
    want = marks.copy()
    want[0, 2, :, 1], want[0, 0, :, 3] = 7, 9
    values = np.array([[7] * K, [8] * K, [9] * K, [6] * K], np.int8)
    np.testing.assert_array_equal(run(jnp.array(marks), values, pages, slots, jnp.int32(0)), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_call_turns_stores_and_attends(dtype):
    """Rows and a tile, padding in both, against the rotation, the writes and the attention one by one."""
    if native.problem():
        pytest.skip(native.problem())
    rng = np.random.default_rng(4)
    rows, tile, page = 3, 4, 4
    tables = np.array([[5, 2, 0], [0, 0, 0], [7, 0, 0], [1, 3, 6]], np.int32)  # the second row is padding
    positions = np.array([9, -1, 2, 6, 7, 8, -1], np.int32)
    stored = jnp.uint16 if dtype == "bfloat16" else jnp.float32
    cache = [jnp.asarray(rng.standard_normal((2, 8, K, page, H)), dtype) for _ in range(2)]
    cache = [jax.lax.bitcast_convert_type(x, stored) if dtype == "bfloat16" else x for x in cache]
    heads = jnp.asarray(rng.standard_normal((1, 7, K, G + 2, H)), dtype)
    angles = rng.uniform(0, 6, (1, 7, H // 2)).astype(np.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)

    x = heads[..., :-1, :].astype(jnp.float32)
    first, second = jnp.split(x, 2, axis=-1)
    c, s = cos[:, :, None, None], sin[:, :, None, None]
    turned = jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1).astype(dtype)
    table = np.array([0, 1, 2, 3, 3, 3, 3])
    pages = np.where(positions < 0, 8, tables[table, np.maximum(positions, 0) // page])
    want_cache = []
    for before, new in zip(cache, (turned[0, :, :, -1], heads[0, :, :, -1]), strict=True):
        entry = jax.lax.bitcast_convert_type(new, stored) if dtype == "bfloat16" else new
        want_cache.append(before.at[1, pages, :, np.maximum(positions, 0) % page].set(entry, mode="drop"))
    where = {"layer": 1, "stride": 1, "offset": 0, "platform": "cpu", "implementation": "reference"}
    q = turned[0, :, :, :-1]
    parts = [
        paged_attention(q[:3, None], *want_cache, tables[:3], positions=positions[:3, None], **where).finish()[:, 0],
        paged_attention(q[None, 3:], *want_cache, tables[3:], positions=positions[None, 3:], **where).finish()[0],
    ]
    run = jax.jit(paged_extend, static_argnames=("rows", "tile"), donate_argnums=(3, 4))
    out, *after, scales = run(
        heads, cos, sin, *map(jnp.array, cache), tables, layer=jnp.int32(1), positions=positions, rows=rows, tile=tile
    )
    assert scales is None
    for got, want in zip(after, want_cache, strict=True):
        np.testing.assert_allclose(
            *(np.asarray(v.view(jnp.bfloat16) if dtype == "bfloat16" else v, np.float32) for v in (got, want)),
            rtol=1e-2 if dtype == "bfloat16" else 1e-6,
            atol=1e-6,
        )
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
    want = np.asarray(jnp.concatenate(parts), np.float32)
    np.testing.assert_allclose(np.asarray(out[0], np.float32), want, rtol=tolerance, atol=tolerance)
    assert np.all(np.asarray(out[0, [1, 6]], np.float32) == 0)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_one_call_with_scales(kind):
    """The bytes and scales that quantising stores (turns are of right angles, which round nothing), and attention."""
    if native.problem():
        pytest.skip(native.problem())
    rng = np.random.default_rng(6)
    rows, tile, page, pages = 2, 3, 4, 8
    tables = np.array([[5, 2, 0], [0, 0, 0], [1, 3, 6]], np.int32)  # the second row is padding
    positions = np.array([6, -1, 7, 8, -1], np.int32)
    numbers, storage = jnp.dtype(kind), jnp.int8 if kind == "int8" else jnp.uint8
    cache = [jnp.asarray(rng.integers(0, 0x70, (2, pages, K, page, H)), storage) for _ in "kv"]
    scales = Scales(*(jnp.asarray(rng.uniform(0.001, 0.01, (2, 1, K, pages * page)), jnp.float32) for _ in "kv"))
    heads = jnp.asarray(rng.standard_normal((1, 5, K, G + 2, H)), jnp.float32)
    quarter = rng.integers(0, 2, (1, 5, H // 2)).astype(np.float32)
    cos, sin = quarter, 1 - quarter

    first, second = jnp.split(heads[..., :-1, :], 2, axis=-1)
    c, s = cos[:, :, None, None], sin[:, :, None, None]
    turned = jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1)
    held = np.maximum(positions, 0)
    at = np.where(positions < 0, pages, tables[[0, 1, 2, 2, 2], held // page])
    store = jax.jit(lambda x: quantize(x, numbers))
    want_cache, want_scales = [], []
    for before, scale, new in zip(cache, scales, (turned[0, :, :, -1], heads[0, :, :, -1]), strict=True):
        entry, own = store(new)
        entry = entry.view(storage)
        want_cache.append(before.at[1, at, :, held % page].set(entry, mode="drop"))
        where = (1, np.where(positions < 0, 1, 0), slice(None), at * page + held % page)
        want_scales.append(scale.at[where].set(own, mode="drop"))
    run = jax.jit(paged_extend, static_argnames=("rows", "tile", "layer"))
    how = {"layer": 1, "positions": positions, "rows": rows, "tile": tile, "scales": scales}
    out, *after, new_scales = run(heads, cos, sin, *cache, tables, **how)
    for got, want in zip((*after, *new_scales), (*want_cache, *want_scales), strict=True):
        np.testing.assert_array_equal(got, want)
    where = {"layer": 1, "stride": 1, "offset": 0, "platform": "cpu", "implementation": "reference"}
    where["scales"] = Scales(*want_scales)
    q = turned[0, :, :, :-1]
    parts = [
        paged_attention(q[:2, None], *want_cache, tables[:2], positions=positions[:2, None], **where).finish()[:, 0],
        paged_attention(q[None, 2:], *want_cache, tables[2:], positions=positions[None, 2:], **where).finish()[0],
    ]
    np.testing.assert_allclose(out[0], jnp.concatenate(parts), rtol=2e-5, atol=2e-5)


def test_a_page_that_is_not_there_is_an_error_and_not_a_crash():
    if native.problem():
        pytest.skip(native.problem())
    q, cache = np.zeros((1, 1, 1, 1, 16), np.float32), np.zeros((1, 2, 1, 4, 16), np.float32)
    where = {"layer": 0, "stride": 1, "offset": 0, "platform": "cpu", "implementation": "cpu_native"}
    with pytest.raises(jax.errors.JaxRuntimeError, match="page 2 of 2"):
        paged_attention(q, cache, cache, np.array([[2]], np.int32), positions=np.zeros((1, 1), np.int32), **where)


def test_what_it_does_not_take_is_refused():
    q, cache = jnp.zeros((1, 17, 1, 1, 16)), jnp.zeros((1, 2, 1, 4, 16))
    where = {"layer": 0, "stride": 1, "offset": 0, "platform": "cpu", "positions": jnp.zeros((1, 17), jnp.int32)}
    with pytest.raises(KernelError):
        paged_attention(q, cache, cache, jnp.zeros((1, 1), jnp.int32), **where, implementation="cpu_native")
