"""Pallas attention over pages through the compilers of TPU and GPU, and the tables for every preset."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from decode.batching.options import EngineOptions
from decode.batching.paged_cache import TILE
from decode.cache import capacity
from kernels.cache_attention import pallas_gpu
from kernels.cache_attention.scaled import FP8, LIMITS, Scales
from kernels.paged_attention import paged_attention, paged_write, pallas_tpu
from model.presets import PRESETS
from sharding.mesh import factorise
from tests.kernels.compiled import compile_for

pytestmark = pytest.mark.optimized

PLATFORMS = {"v5e": "tpu", "v6e": "tpu", "h100": "gpu"}
TARGETS = {"tpu": "tpu_custom_call", "gpu": "__gpu$xla.gpu.triton"}
PAGES, TABLE = 4096, 512


def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def compiled(name: str, shape: tuple[int, ...], stored: Any) -> Any:
    """B, T, K, G, H, S; the layer, the place of the member, the positions and the tables are arguments."""
    B, T, K, G, H, S = shape

    def attend(
        q: Any, keys: Any, values: Any, tables: Any, positions: Any, layer: Any, offset: Any, scales: Any
    ) -> Any:
        where = {"layer": layer, "positions": positions, "stride": 2, "offset": offset, "scales": scales}
        return paged_attention(q, keys, values, tables, **where, platform=PLATFORMS[name])

    kind = jnp.float32 if stored == jnp.float32 else jnp.bfloat16
    held = array(2, PAGES, K, S, H, dtype=stored)
    scale = array(2, 1, K, PAGES * S, dtype=jnp.float32)
    scales = Scales(scale, scale) if jnp.dtype(stored) in LIMITS else None
    q = array(B, T, K, G, H, dtype=kind)
    return compile_for(name, attend, q, held, held, array(B, TABLE), array(B, T), array(), array(), scales)


@pytest.mark.parametrize("name", PLATFORMS)
@pytest.mark.parametrize(
    ("shape", "stored", "in_place"),
    [
        ((64, 1, 8, 4, 128, 16), jnp.bfloat16, True),  # rows of one token
        ((16, TILE, 1, 8, 128, 8), jnp.int8, True),  # tiles of a prompt
        ((4, 1, 1, 4, 256, 32), FP8, True),
        ((4, 1, 1, 4, 80, 4), jnp.float32, False),
    ],
)
def test_it_compiles(name: str, shape: tuple[int, ...], stored: Any, in_place: bool) -> None:
    """One kernel, no page taken out of the cache, and no copy of it. (On TPU heads that fill no register's lanes are
    laid out in memory as no kernel takes them, and the compiler brings them into another layout.)"""
    found = compiled(name, shape, stored)
    text = found.as_text()
    assert text.count(f'custom_call_target="{TARGETS[PLATFORMS[name]]}"') == 1
    B, T, K, G, H, S = shape
    if in_place or PLATFORMS[name] == "gpu":
        parts = (
            max(1, pallas_gpu.PROGRAMS // (B * K)) * B * T * K * G * (H + 2) * 4
        )  # results of parts of a sequence, before they are merged
        assert found.memory_analysis().temp_size_in_bytes < PAGES * K * S * H * jnp.dtype(stored).itemsize // 4 + parts
        assert not re.search(rf"\[2,{PAGES},{K},{S},{H}\][^ ]* (copy|transpose)\(", text)


@pytest.mark.parametrize(
    ("name", "shape", "stored"),
    [
        ("v5e", (2, TILE, 32, 1, 128, 16), jnp.float32),  # llama-2-7b on one device, the widest of all
        ("v6e", (2, TILE, 8, 16, 128, 16), jnp.int8),  # llama-3.1-405b
    ],
)
def test_the_estimate_of_memory_holds_at_the_extremes(name: str, shape: tuple[int, ...], stored: Any) -> None:
    """The compiler refuses a kernel whose blocks do not fit."""
    compiled(name, shape, stored)


@pytest.mark.parametrize("name", PLATFORMS)
def test_new_positions_are_written_in_place(name: str) -> None:
    """By XLA's scatter, of several heads a device: no copy of the cache, in any layout."""
    K, S, H, N = 8, 16, 128, 80

    def write(cache: Any, new: Any, pages: Any, slots: Any) -> Any:
        return paged_write(cache, new, pages, slots, layer=0, platform=PLATFORMS[name])

    held = (array(1, PAGES, K, S, H, dtype=jnp.bfloat16), array(N, K, H, dtype=jnp.bfloat16), array(N), array(N))
    found = compile_for(name, write, *held, donate=(0,))
    memory = found.memory_analysis()
    assert memory.alias_size_in_bytes >= PAGES * K * S * H * 2
    assert memory.temp_size_in_bytes < 1 << 20


def test_the_tables_never_overflow_for_any_preset() -> None:
    """Decodes and tiles of prompts, at every degree, in pages of every size that an engine is given."""
    for name, config in PRESETS.items():
        for tp in (1, 2, 4, 8, 16, 32):
            kv_head, kv_seq = factorise(tp, config.num_kv_heads)
            K, H = config.num_kv_heads // kv_head, config.head_dim
            for page_size in (EngineOptions.page_size, 64, 512):
                S = capacity(page_size, kv_seq) // kv_seq
                for T in (1, TILE):
                    for cache_bytes in (1, 2, 4):
                        R, q_bytes = T * config.group_size, max(2, cache_bytes)
                        case = (name, tp, page_size, T, cache_bytes)
                        scaled = cache_bytes == 1
                        tile = pallas_tpu.choose(K, R, S, H, cache_bytes, q_bytes, scaled=scaled)
                        assert tile is not None, case
                        assert K % tile.heads == 0, case
                        assert (
                            tile.vmem_bytes(K, R, S, H, cache_bytes, q_bytes, scaled=scaled) <= pallas_tpu.VMEM_BYTES
                        ), case
                        on_gpu = pallas_gpu.choose(16, K, R, TABLE * S, H, cache_bytes, q_bytes)
                        assert on_gpu is not None, case
                        assert on_gpu.shared_bytes(H, cache_bytes, q_bytes) <= pallas_gpu.SHARED_BYTES, case
