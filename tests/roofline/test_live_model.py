"""The arithmetic against the arrays that a running model really holds, on every device."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from decode.cache import capacity, make_cache
from model.config import LlamaConfig
from model.random_init import random_params
from roofline.footprint import kv_bytes_per_device, weight_bytes_per_device
from sharding.layout import Layout
from sharding.mesh import make_mesh
from tests.model.checkpoint_files import small_config

# K = 3 with an untied head and every bias, and K = 2 tied: at most degrees something does not divide and is padded.
BIASED = small_config(attention_bias=True, mlp_bias=True)
TIED = small_config(num_heads=6, num_kv_heads=2, vocab_size=101, intermediate_size=46, tie_word_embeddings=True)
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
PARTS = {"attention_norm": "norm", "mlp_norm": "norm"}


def held(arrays: dict[str, list[jax.Array]]) -> dict[jax.Device, Counter[str]]:
    """Bytes of each part on each device."""
    found: dict[jax.Device, Counter[str]] = {}
    for part, values in arrays.items():
        for value in values:
            for shard in value.addressable_shards:
                found.setdefault(shard.device, Counter())[part] += shard.data.nbytes
    return found


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("config", "dtype"), [(BIASED, "f32"), (TIED, "bf16")])
def test_weights_of_every_device(config: LlamaConfig, dtype: str, tp: int) -> None:
    layout = Layout(make_mesh(tp, config.num_kv_heads))
    by_part: dict[str, list[jax.Array]] = {}
    for path, value in random_params(config, layout, DTYPES[dtype]).items():
        module = str(path[-2])
        part = "bias" if path[-1] == "bias" else PARTS.get(module, module)
        by_part.setdefault(part, []).append(value)
    found = held(by_part)
    assert len(found) == tp
    for device in found:
        assert found[device] == weight_bytes_per_device(config, dtype, tp)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("dtype", "batch", "max_len"), [("f32", 1, 20), ("bf16", 3, 600)])
def test_cache_of_every_device(dtype: str, batch: int, max_len: int, tp: int) -> None:
    layout = Layout(make_mesh(tp, TIED.num_kv_heads))
    cache = make_cache(TIED, batch, max_len, layout, jnp.dtype(DTYPES[dtype]), stacked=False)
    found = held({"kv": [*cache.keys, *cache.values]})
    assert len(found) == tp
    positions = capacity(max_len, layout.kv_seq)
    for device in found:
        assert found[device]["kv"] == kv_bytes_per_device(TIED, positions, dtype, tp, batch)
