"""Quantised parameters turned back into those of the wide model: for evaluation, where one program serves them all."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kernels.quantized import QuantizedWeight
from model.checkpoint.parameters import abstract_leaves, matrix_name
from model.checkpoint.table import Path
from model.config import LlamaConfig
from model.quantize import Quantization
from sharding.layout import Layout


def widened(
    params: Mapping[Path, jax.Array], config: LlamaConfig, layout: Layout, quantization: Quantization
) -> dict[Path, jax.Array]:
    """The parameters of an unrolled model that is not quantised, its matrices float32 where ``params`` has them in
    fewer bits: the very numbers that products with those use, at the size that they save."""
    wide = {}
    for path, leaf in abstract_leaves(config, "unrolled").items():
        module = matrix_name(path)
        format = quantization.of(module) if module else None
        if format is None:
            wide[path] = params[path]
            continue
        stored = QuantizedWeight(
            params[path], params[*path[:-1], "scales"], params.get((*path[:-1], "offsets")), format.group
        )
        # Quantised dimensions may be padded to whole groups.
        wide[path] = _widen(stored, layout.padded_shape(leaf.shape, leaf.axes), layout.sharding(leaf.axes))
    return wide


@functools.partial(jax.jit, static_argnums=(1, 2))
def _widen(stored: QuantizedWeight, shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> jax.Array:
    whole: jax.Array = stored.wide()
    return jax.lax.with_sharding_constraint(jnp.asarray(whole[tuple(map(slice, shape))]), sharding)
