"""Pallas attention through the compilers of TPU and GPU: every head size and dtype, and the tables for every preset."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kernels.cache_attention import cache_attention, pallas_gpu, pallas_tpu
from kernels.cache_attention.scaled import FP8, LIMITS, Scales
from kernels.cache_write import cache_write
from model.presets import PRESETS
from sharding.mesh import factorise
from tests.kernels.compiled import compile_for

pytestmark = pytest.mark.optimized

PLATFORMS = {"v5e": "tpu", "v6e": "tpu", "h100": "gpu"}

TARGETS = {"tpu": "tpu_custom_call", "gpu": "__gpu$xla.gpu.triton"}


def compiled(name: str, shape: tuple[int, ...], stored: Any) -> Any:
    """B, T, K, G, H, S; the layer, the place of the member and the positions are arguments."""
    B, T, K, G, H, S = shape

    def attend(q: Any, keys: Any, values: Any, positions: Any, layer: Any, offset: Any, scales: Any) -> Any:
        where = {"layer": layer, "positions": positions, "stride": 2, "offset": offset, "scales": scales}
        return cache_attention(q, keys, values, **where, platform=PLATFORMS[name])

    def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    kind = jnp.float32 if stored == jnp.float32 else jnp.bfloat16
    held = array(2, B, K, S, H, dtype=stored)
    scale = array(2, B, K, S, dtype=jnp.float32)
    scales = Scales(scale, scale) if jnp.dtype(stored) in LIMITS else None
    q = array(B, T, K, G, H, dtype=kind)
    return compile_for(name, attend, q, held, held, array(B, T), array(), array(), scales)


@pytest.mark.parametrize("name", PLATFORMS)
@pytest.mark.parametrize(
    ("shape", "stored"),
    [
        ((2, 1, 8, 4, 64, 2048), jnp.bfloat16),
        ((2, 1, 8, 4, 80, 2048), jnp.int8),
        ((2, 1, 8, 4, 96, 2048), FP8),
        ((2, 1, 8, 4, 256, 2048), jnp.bfloat16),
        ((3, 5, 1, 8, 128, 600), jnp.int8),
        ((1, 512, 2, 4, 128, 4096), jnp.bfloat16),
    ],
)
def test_it_compiles_and_reads_the_cache_in_place(name: str, shape: tuple[int, ...], stored: Any) -> None:
    """One kernel, and no copy of the cache, whatever the size of a head: what it allocates is small results, or less
    than a layer of keys."""
    found = compiled(name, shape, stored)
    text = found.as_text()
    assert text.count(f'custom_call_target="{TARGETS[PLATFORMS[name]]}"') == 1
    B, T, K, G, H, S = shape
    results = B * T * K * G * (H + 2) * 4
    layer_bytes = B * K * S * H * jnp.dtype(stored).itemsize
    assert found.memory_analysis().temp_size_in_bytes <= max(64 * results, layer_bytes)
    assert f"[{B},{K},{S},{H}]" not in text  # a layer of the cache, taken out of it


@pytest.mark.parametrize("name", ["v5e", "v6e"])
@pytest.mark.parametrize(("stored", "H"), [(jnp.bfloat16, 64), (FP8, 80)])
def test_short_heads_are_written_where_they_lie(name: str, stored: Any, H: int) -> None:
    """Many rows at once: in place, in one call."""
    cache, new = (jax.ShapeDtypeStruct(shape, stored) for shape in ((2, 16, 4, 2048, H), (16, 4, H)))

    def write(cache: Any, new: Any, slots: Any) -> Any:
        return cache_write(cache, new, slots, layer=1, platform="tpu")

    found = compile_for(name, write, cache, new, jax.ShapeDtypeStruct((16,), jnp.int32), donate=(0,))
    assert found.as_text().count('custom_call_target="tpu_custom_call"') == 1
    assert found.memory_analysis().temp_size_in_bytes == 0
    assert found.memory_analysis().alias_size_in_bytes == cache.size * cache.dtype.itemsize


CASES = [
    (name, tp, rows, context, cache_bytes)
    for name in PRESETS
    for tp in (1, 2, 4, 8, 16, 32)
    for rows in (1, 4, 512)
    for context in (512, 131072)
    for cache_bytes in (1, 2, 4)
]


@pytest.mark.parametrize("batch", [1, 64])
def test_the_tables_never_overflow_for_any_preset(batch: int) -> None:
    for name, tp, T, S, cache_bytes in CASES:
        config = PRESETS[name]
        kv_head, kv_seq = factorise(tp, config.num_kv_heads)
        K, R, H = config.num_kv_heads // kv_head, T * config.group_size, config.head_dim
        sizes = (K, R, S // kv_seq, H, cache_bytes, max(2, cache_bytes))
        on_tpu = pallas_tpu.choose(*sizes, scaled=cache_bytes == 1)
        assert on_tpu is not None, (name, tp, T, S, cache_bytes)
        used = on_tpu.vmem_bytes(K, H, cache_bytes, max(2, cache_bytes), scaled=cache_bytes == 1)
        assert used <= pallas_tpu.VMEM_BYTES
        on_gpu = pallas_gpu.choose(batch, *sizes)
        assert on_gpu is not None, (name, tp, T, S, cache_bytes)
        assert on_gpu.shared_bytes(H, cache_bytes, max(2, cache_bytes)) <= pallas_gpu.SHARED_BYTES
        assert K % on_tpu.heads == 0


@pytest.mark.parametrize(
    ("name", "shape", "stored"),
    [
        ("v5e", (1, 512, 32, 1, 128, 4096), jnp.float32),  # llama-2-7b on one device, the widest of all
        ("v5e", (1, 1, 32, 1, 128, 4096), jnp.float32),
        ("v6e", (1, 512, 8, 16, 128, 4096), jnp.int8),  # llama-3.1-405b
        ("h100", (1, 512, 8, 16, 256, 4096), jnp.bfloat16),
    ],
)
def test_the_estimate_of_memory_holds_at_the_extremes(name: str, shape: tuple[int, ...], stored: Any) -> None:
    """The compiler refuses a kernel whose blocks do not fit."""
    compiled(name, shape, stored)
