"""The engine's step, decodes and a prompt together, compiled for machines that are not here."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from decode.batching.packing import Packing
from decode.batching.paged_cache import TILE, abstract_pages
from decode.batching.program import step
from decode.decoder import Decoder
from decode.speculation.proposer import MOST_PROPOSALS
from decode.step import SEEN, Programs
from model.presets import preset
from sharding.hlo import collective_of
from sharding.hlo_program import Program
from sharding.hlo_types import type_elements
from sharding.layout import Layout
from tests.aot.test_decode_step import machine

pytestmark = [pytest.mark.xdist_group("aot"), pytest.mark.optimized]  # one worker compiles

L, SLOTS, PAGES, PAGE, TABLE = 2, 64, 16384, 16, 512
CALLS = {"tpu": "tpu_custom_call", "gpu": "__gpu$xla.gpu.triton"}


def engine(model: str, name: str, cache_dtype: str) -> tuple[Programs, Decoder]:
    """A model over eight devices, without weights."""
    config = replace(preset(model), num_layers=L)
    layout = Layout(machine(name).mesh(8, config.num_kv_heads))
    programs = Programs(config, jnp.bfloat16, layout, "unrolled", cache_dtype=cache_dtype)
    shapes: Any = dict(zip(programs.paths, programs.abstract_params(), strict=True))
    return programs, Decoder(config, shapes, layout, jnp.bfloat16, layers="unrolled", cache_dtype=cache_dtype)


def compiled(name: str, cache_dtype: str) -> tuple[Any, Any, str]:
    """llama-3.1-8b, 16 decodes and four tiles of prompts: the program, its cache, its platform."""
    programs, decoder = engine("llama-3.1-8b", name, cache_dtype)
    config, layout = decoder.config, decoder.layout
    cache = abstract_pages(decoder, PAGES, PAGE)
    shape = Packing(16, 4 * TILE, TABLE)

    def array(size: tuple[int, ...], dtype: Any, axes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, dtype, sharding=layout.sharding(axes))

    V = layout.padded_shape((config.vocab_size,), ("vocab",))[0]
    slots = array((SLOTS,), jnp.int32, (None,)), array((SLOTS, V), bool, SEEN), array((SLOTS, V), jnp.float32, SEEN)
    proposals = array((SLOTS, MOST_PROPOSALS), jnp.int32, (None, None))
    vector = array((shape.size,), jnp.int32, (None,))
    with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh):  # tells kernels which chip they are for
        return (
            step(programs, shape).lower(programs.abstract_params(), cache, *slots, proposals, vector).compile(),
            cache,
            layout.platform,
        )


@pytest.mark.parametrize(("name", "cache_dtype"), [("v6e:2x4", "int8"), ("h100x8", "bfloat16")])
def test_a_step_is_as_designed(name: str, cache_dtype: str) -> None:
    """Two all-reduces a layer, kernels for rows and for tiles, and the cache, scales too, read and written in place."""
    found, cache, platform = compiled(name, cache_dtype)
    runs = list(Program.parse(found.as_text()).runs())
    sums: Counter[str] = Counter()
    for one in runs:
        made, scope = collective_of(one.instruction), one.instruction.op_name
        if made and "/cond/" not in scope:  # the sampler's, which takes what rows ask for
            sums[made.kind, next(part for part in ("embed", "attention", "mlp", "") if part in scope)] += one.times
    assert {at: n for at, n in sums.items() if at[0] == "all-reduce"} == {
        ("all-reduce", "embed"): 1,
        ("all-reduce", "attention"): L,
        ("all-reduce", "mlp"): L,
    }
    assert found.as_text().count(f'custom_call_target="{CALLS[platform]}"') == 2 * L

    leaves = [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(cache)]
    assert found.memory_analysis().alias_size_in_bytes >= sum(math.prod(s) * dtype.itemsize for s, dtype in leaves)
    assert found.memory_analysis().temp_size_in_bytes < 32 << 20
    sizes = {math.prod(shape) for shape, _ in leaves}
    copies = [
        one.instruction.type
        for one in runs
        if one.instruction.opcode in ("copy", "transpose", "copy-start") and "S(1)" not in one.instruction.type
        if type_elements(one.instruction.type) in sizes
    ]
    assert copies == []


@pytest.mark.parametrize(("name", "size"), [("v6e:2x4", 128), ("h100x8", 64)])
def test_on_tpu_heads_fill_whole_registers(name: str, size: int) -> None:
    """llama-3.2-1b has heads of 64, and XLA:TPU would keep its pages in a layout that no kernel takes."""
    _, decoder = engine("llama-3.2-1b", name, "int8")
    cache = abstract_pages(decoder, 10, PAGE)
    assert {leaf.shape for leaf in cache.keys + cache.values} == {(2, 10, 8, PAGE, size)}
    assert {leaf.shape for leaf in cache.key_scales + cache.value_scales} == {(2, 1, 8, 10 * PAGE)}
