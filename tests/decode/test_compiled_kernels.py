"""The decode step with our kernels in it, compiled for machines that are not here: they stand where they should, the
cache is written and read in place, and no collective is left beside the sums that are kernels."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from decode.cache import abstract_cache
from decode.decoder import Decoder
from decode.step import Programs
from model.quantize import Quantization, WeightFormat
from sharding.collectives import Collectives
from sharding.layout import Layout
from tests.kernels.compiled import machine
from tests.model.checkpoint_files import small_config

pytestmark = pytest.mark.optimized

LAYERS, BATCH, CONTEXT = 1, 4, 16383
CONFIG = small_config(
    hidden_size=512,
    intermediate_size=1024,
    num_layers=LAYERS,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=1024,
    max_position_embeddings=16384,
)
CALLS = {"tpu": "tpu_custom_call", "gpu": "__gpu$xla.gpu.triton|mosaic_gpu_v2"}


def step(name: str, cache_dtype: str, collective: Any, quantization: str) -> tuple[Any, Layout, Any]:
    layout = Layout(machine(name).mesh(8, CONFIG.num_kv_heads))
    form = {
        "collectives": Collectives(collective),
        "quantization": Quantization.layers(WeightFormat.parse(quantization)),
    }
    programs = Programs(CONFIG, jnp.bfloat16, layout, "unrolled", **form)
    shapes = dict(zip(programs.paths, programs.abstract_params(), strict=True))
    decoder = Decoder(CONFIG, shapes, layout, jnp.bfloat16, cache_dtype=cache_dtype, **form)
    with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh):  # tells kernels which chip they are for
        found = decoder.decode_program(BATCH, CONTEXT)
    return found, layout, abstract_cache(CONFIG, BATCH, CONTEXT, layout, jnp.dtype(cache_dtype), stacked=False)


@pytest.mark.parametrize(
    ("name", "cache_dtype", "collective", "quantization", "kernels"),
    [
        # Attention and four grouped products a layer, two sums a layer and the embedding's.
        ("v5e:2x4", "int8", "one_shot_dma", "int4", LAYERS * (1 + 4 + 2) + 1),
        ("h100x8", "bfloat16", "multimem", "int4", LAYERS * (1 + 4 + 2) + 1),
    ],
)
def test_a_step_of_kernels(name: str, cache_dtype: str, collective: Any, quantization: str, kernels: int) -> None:
    found, layout, cache = step(name, cache_dtype, collective, quantization)
    text = found.as_text()
    platform = layout.platform
    assert len(re.findall(rf'custom_call_target="({CALLS[platform].replace("$", chr(92) + "$")})"', text)) == kernels
    assert not re.search(r" (all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(", text)
    held = sum(
        leaf.dtype.itemsize * int(jnp.prod(jnp.array(leaf.sharding.shard_shape(leaf.shape))))
        for leaf in jax.tree.leaves(cache)
    )
    memory = found.memory_analysis()
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < held
