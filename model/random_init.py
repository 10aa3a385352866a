"""Random weights for measuring a shape whose checkpoint is not at hand, each device making its own slice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model.checkpoint.host_memory import HostMemory
from model.checkpoint.parameters import Leaf, abstract_leaves
from model.checkpoint.table import Path
from model.config import LlamaConfig
from model.llama import LayersForm
from model.quantize import WIDE, Quantization
from sharding.layout import Layout


def random_params(
    config: LlamaConfig,
    layout: Layout,
    dtype: Any,
    *,
    layers: LayersForm = "unrolled",
    seed: int = 0,
    quantization: Quantization = WIDE,
) -> dict[tuple[str | int, ...], jax.Array]:
    """Parameters by path, as a loader would place them: uniform noise of standard deviation
    1 / sqrt(size of the last axis), and norms of ones. A quantised weight has any numbers, and scales that make them
    noise of about that size.

    Values come from an integer hash of each element's index, which is as fast as memory; they are for timing, where
    the values matter only in that they are finite. Padding is noise too, and bounded like the rest.
    """
    params = {}
    leaves = abstract_leaves(config, layers, dtype, quantization, layout.platform)
    memory = None
    if layout.platform == "cpu":  # in large pages, as a loader would place them
        shards = [
            math.prod(layout.local_shape(leaf.shape, leaf.axes)) * leaf.dtype.itemsize
            for leaf in leaves.values()
            for _ in layout.sharding(leaf.axes).addressable_devices
        ]
        memory = HostMemory(sum(shards), len(shards))
    for index, (path, leaf) in enumerate(leaves.items()):
        shape = layout.padded_shape(leaf.shape, leaf.axes)
        scale = None if "norm" in str(path[-2]) else leaf.shape[-1] ** -0.5
        if path[-1] in ("scales", "offsets"):
            scale = _scale_of((*path[:-1], "weight"), leaves)
        make = jax.jit(
            _filled if path[-1] == "scales" else _noise,
            static_argnums=(0, 1, 2),
            out_shardings=layout.sharding(leaf.axes),
        )
        array = make(shape, leaf.dtype, scale, np.uint32(seed * 1_000_003 + index))
        if memory is not None:
            kept = [jax.device_put(memory.keep(np.asarray(one.data)), one.device) for one in array.addressable_shards]
            array = jax.make_array_from_single_device_arrays(shape, array.sharding, kept, dtype=array.dtype)
        params[path] = array
    return params


def _scale_of(path: Path, leaves: Mapping[Path, Leaf]) -> float:
    """A scale at which uniform codes of the weight have standard deviation 1 / sqrt(columns)."""
    leaf = leaves[path]
    packed = leaf.dtype == np.uint8
    largest = {"int8": 127, "float8_e4m3fn": 1}.get(leaf.dtype.name, 8)
    return float((leaf.shape[-1] * (2 if packed else 1)) ** -0.5 * 3**0.5 / largest)


def _filled(shape: tuple[int, ...], dtype: jnp.dtype, scale: float, salt: jax.Array) -> jax.Array:
    return jnp.full(shape, scale, dtype)


def _noise(shape: tuple[int, ...], dtype: jnp.dtype, scale: float | None, salt: jax.Array) -> jax.Array:
    if scale is None:
        return jnp.ones(shape, dtype)
    bits = salt * jnp.uint32(0x9E3779B9)
    for axis in range(len(shape)):
        # The finaliser of MurmurHash3 (Appleby) after each index, so that near rows have nothing in common.
        bits = bits ^ jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
        bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
        bits = bits ^ (bits >> 16)
    if jnp.issubdtype(dtype, jnp.integer):
        narrow = jax.lax.bitcast_convert_type((bits >> 24).astype(jnp.uint8), jnp.int8)
        return (narrow >> 4).astype(dtype) if dtype == jnp.int4 else jax.lax.bitcast_convert_type(narrow, dtype)
    uniform = (bits >> 8).astype(jnp.float32) * 2**-24
    if dtype == jnp.float8_e4m3fn:
        scale = 3**-0.5
    return ((uniform - 0.5) * (scale * 12**0.5)).astype(dtype)
