"""The KV cache: split by position it holds what a plain one holds, and no write can ever be clamped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from decode import cache as cache_module
from decode.cache import (
    AXES,
    UNROLLED_ROWS,
    CacheOverflowError,
    KVCache,
    bucket,
    cache_shape,
    capacity,
    check_fits,
    chunk_size,
    make_cache,
    storage_dtype,
)
from decode.decoder import Decoder
from kernels.cache_attention.partial import Partial, from_storage, merge
from sharding.layout import Layout
from sharding.mesh import KV_HEAD, KV_SEQ, make_mesh
from tests.kernels.numpy_attention import numpy_attention
from tests.model.checkpoint_files import small_config

K, G, H, P = 2, 3, 4, 24  # P: positions that the caches of these tests hold
HEADS = PartitionSpec(None, None, KV_HEAD)


class Plain:
    """A cache that is one NumPy array by position, for one layer."""

    def __init__(self, batch: int):
        self.keys, self.values = (np.zeros((batch, K, P, H), np.float32) for _ in range(2))

    def write(self, k: np.ndarray, v: np.ndarray, positions: np.ndarray) -> None:
        for row, own in enumerate(positions):
            for t, position in enumerate(own):
                self.keys[row, :, position], self.values[row, :, position] = k[row, t], v[row, t]


class Split:
    """The cache under test on a mesh, with its own write and attend as compiled programs."""

    def __init__(self, tp: int, batch: int, dtype: Any, *, stacked: bool):
        self.layout = Layout(make_mesh(tp, K))
        config = small_config(num_layers=2, num_heads=K * G, num_kv_heads=K, head_dim=H, hidden_size=K * G * H)
        shape = cache_shape(config, batch, P, self.layout, stacked=stacked)
        shape = (*shape[:3], P, H)  # smaller than any bucket
        arrays = [
            [
                jax.device_put(np.zeros(shape, storage_dtype(jnp.dtype(dtype), "cpu")), self.layout.sharding(AXES))
                for _ in range(1 if stacked else 2)
            ]
            for _ in range(2)
        ]
        self.cache = KVCache(*arrays)
        self.specs = jax.tree.map(lambda _: self.layout.spec(AXES), self.cache)

    def _map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        mapped = jax.shard_map(function, mesh=self.layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return jax.jit(mapped)

    @functools.cached_property
    def _write(self) -> Callable[..., Any]:
        def write(cache: KVCache, k: jax.Array, v: jax.Array, positions: jax.Array) -> KVCache:
            return cache.write(1, k, v, positions, platform="cpu")

        return self._map(write, (self.specs, HEADS, HEADS, PartitionSpec()), self.specs)

    @functools.cached_property
    def _attend(self) -> Callable[..., Any]:
        def attend(cache: KVCache, q: jax.Array, positions: jax.Array) -> Partial:
            return jax.tree.map(lambda x: x[None], cache.attend(1, q, positions, platform="cpu"))

        members = PartitionSpec(KV_SEQ, None, None, KV_HEAD)
        return self._map(attend, (self.specs, HEADS, PartitionSpec()), Partial(members, members, members))

    def write(self, k: np.ndarray, v: np.ndarray, positions: np.ndarray) -> None:
        self.cache = self._write(self.cache, k, v, positions)

    def attend(self, q: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return np.asarray(merge(self._attend(self.cache, q, positions)).finish())

    def by_position(self, arrays: list[jax.Array], layer: int) -> np.ndarray:
        """What is held for a layer, float32 [B, K, P, H]."""
        whole = arrays[0][layer] if len(arrays) == 1 else arrays[layer][0]
        held = np.asarray(from_storage(whole).astype(jnp.float32))
        members = self.layout.kv_seq
        # Slots are split over members in whole blocks: [B, K, members, slots, H] -> position slot * members + member.
        blocks = held.reshape(*held.shape[:2], members, P // members, H)
        return blocks.swapaxes(2, 3).reshape(held.shape)


@pytest.mark.parametrize(
    ("tp", "batch", "dtype", "stacked"),
    [
        (1, 3, jnp.bfloat16, False),
        (1, UNROLLED_ROWS + 1, jnp.float32, True),
        (2, 3, jnp.float32, False),
        (4, 3, jnp.float32, True),  # kv_seq = 2
        (4, UNROLLED_ROWS + 1, jnp.bfloat16, False),
        (6, 3, jnp.bfloat16, False),  # kv_seq = 3
        (6, UNROLLED_ROWS + 1, jnp.float32, False),
        (8, 3, jnp.float32, False),  # kv_seq = 4
    ],
)
def test_write_and_attend_equal_a_plain_cache(tp: int, batch: int, dtype: Any, stacked: bool) -> None:
    """Two prefill pieces, then rows that grow from different lengths, overwriting the padding of the pieces."""
    rng = np.random.default_rng(tp)
    plain, split = Plain(batch), Split(tp, batch, dtype, stacked=stacked)

    def numbers(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(dtype).astype(np.float32)

    pieces = [np.broadcast_to(np.arange(start, start + 12, dtype=np.int32), (batch, 12)) for start in (0, 12)]
    lengths = np.array([19, 5, 0, 1, 2, 3, 4, 6, 12][:batch], np.int32)
    for positions in pieces + [(lengths + step)[:, None] for step in range(5)]:
        k, v = (numbers(batch, positions.shape[1], K, H) for _ in range(2))
        plain.write(k, v, positions)
        split.write(k, v, positions)
        q = numbers(batch, positions.shape[1], K, G, H)
        expected, _ = numpy_attention(q, plain.keys, plain.values, positions)
        np.testing.assert_allclose(split.attend(q, positions), expected, rtol=2e-6, atol=2e-6)
    for arrays, own in ((split.cache.keys, plain.keys), (split.cache.values, plain.values)):
        np.testing.assert_array_equal(split.by_position(arrays, layer=1), own)
        assert not split.by_position(arrays, layer=0).any()  # the other layer is untouched


def test_a_write_is_functional() -> None:
    split = Split(1, 1, jnp.float32, stacked=False)
    before = split.cache
    one = np.ones((1, 1, K, H), np.float32)
    split.write(one, one, np.zeros((1, 1), np.int32))
    assert not np.asarray(before.keys[1]).any()
    assert np.asarray(split.cache.keys[1]).any()


# --- sizes ---

KV_SEQS, LENGTHS = st.integers(1, 96), st.integers(1, 5000)


@given(length=LENGTHS, kv_seq=KV_SEQS)
def test_a_bucket_holds_its_piece_and_splits_evenly(length: int, kv_seq: int) -> None:
    chunk = chunk_size(kv_seq)
    assert chunk % kv_seq == 0
    assert 0 <= chunk - cache_module.PREFILL_CHUNK < kv_seq
    size = bucket(length, kv_seq)
    assert size % kv_seq == 0
    assert min(length, chunk) <= size <= chunk
    assert size < max(2 * length, 17) + kv_seq


@given(kv_seq=KV_SEQS)
def test_few_sizes_are_ever_compiled(kv_seq: int) -> None:
    sizes = {bucket(length, kv_seq) for length in range(1, chunk_size(kv_seq) + 1)}
    assert len(sizes) <= 7  # 16, 32, 64, 128, 256, 512 and a chunk


@given(max_len=LENGTHS, kv_seq=KV_SEQS, data=st.data())
def test_every_piece_of_every_prompt_fits(max_len: int, kv_seq: int, data: st.DataObject) -> None:
    """XLA would clamp a write past the end, which overwrites the newest entries: there is none."""
    length = data.draw(st.integers(1, max_len))
    room = capacity(max_len, kv_seq)
    assert room >= max_len
    assert room % kv_seq == 0
    pieces = Decoder._pieces(SimpleNamespace(layout=SimpleNamespace(kv_seq=kv_seq)), length)
    reached = 0
    for start, size in pieces:
        assert start == reached  # no gap
        assert start % kv_seq == size % kv_seq == 0
        assert start + size <= room
        reached = start + min(size, chunk_size(kv_seq))
    assert reached >= length


@given(max_len=LENGTHS, kv_seq=KV_SEQS)
def test_room_is_not_wasted(max_len: int, kv_seq: int) -> None:
    assert capacity(max_len, kv_seq) < max(2 * max_len, 16) + chunk_size(kv_seq) - 16 + kv_seq
    assert capacity(max_len, kv_seq) <= capacity(max_len + 1, kv_seq)


# --- refusals ---


def test_a_prompt_without_room_for_a_token() -> None:
    config = small_config(max_position_embeddings=64)
    check_fits(config, [1, 31, 5], 32)
    with pytest.raises(CacheOverflowError, match=r"prompt 2 of 2 has 32 tokens.*max_len 32.*allows 64"):
        check_fits(config, [31, 32], 32)
    with pytest.raises(CacheOverflowError, match=r"the prompt has 1 token,.*max_len 0"):
        check_fits(config, [1], 0)


def test_more_room_than_the_model_was_made_for() -> None:
    config = small_config(max_position_embeddings=64)
    check_fits(config, [1], 64)
    with pytest.raises(CacheOverflowError, match=r"max_len 65 is more than the 64 positions.*--max-len 64"):
        check_fits(config, [1], 65)


# --- making one ---


@pytest.mark.parametrize(("tp", "stacked"), [(1, False), (4, True), (6, False)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_new_cache_is_zero_and_placed(tp: int, stacked: bool, dtype: Any) -> None:
    layout = Layout(make_mesh(tp, K))
    config = small_config(num_heads=K * G, num_kv_heads=K, head_dim=H)
    made = make_cache(config, 2, 40, layout, jnp.dtype(dtype), stacked=stacked)
    shape = ((2 if stacked else 1), 2, K, capacity(40, layout.kv_seq), H)
    for arrays in (made.keys, made.values):
        assert [x.shape for x in arrays] == [shape] * (1 if stacked else 2)
        for x in arrays:
            # On CPU bf16 is kept as its bits.
            assert x.dtype == (jnp.uint16 if dtype == jnp.bfloat16 else jnp.float32)
            assert x.sharding.is_equivalent_to(layout.sharding(AXES), x.ndim)
            assert not np.asarray(x).any()
    pointers = [s.data.unsafe_buffer_pointer() for x in made.keys + made.values for s in x.addressable_shards]
    assert len(set(pointers)) == len(pointers)  # each is donated on its own


def test_storage_is_plain_off_the_cpu() -> None:
    assert storage_dtype(jnp.dtype(jnp.bfloat16), "tpu") == jnp.bfloat16
    assert storage_dtype(jnp.dtype(jnp.bfloat16), "gpu") == jnp.bfloat16
    assert storage_dtype(jnp.dtype(jnp.float32), "cpu") == jnp.float32


def test_a_second_cache_compiles_nothing(caplog: pytest.LogCaptureFixture) -> None:
    layout = Layout(make_mesh(2, K))
    config = small_config(num_kv_heads=K)
    make_cache(config, 1, 40, layout, jnp.dtype(jnp.float32), stacked=False)
    with jax.log_compiles():
        make_cache(config, 1, 41, layout, jnp.dtype(jnp.float32), stacked=False)
        assert not caplog.records
        make_cache(config, 5, 41, layout, jnp.dtype(jnp.float32), stacked=False)
        assert caplog.records  # the log does tell
