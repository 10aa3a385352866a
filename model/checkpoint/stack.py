"""Gathers parameters into the form the model keeps its layers in, and takes them apart again.

Checkpoints hold one set of parameters per layer. For layers="scan" each is written into its row of a stacked
array as soon as it is on its devices, and let go, so that neither the host nor a device ever holds a second
copy of more than one layer's parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from model.checkpoint.parameters import abstract_leaves
from model.checkpoint.table import Path
from model.config import LlamaConfig
from model.llama import LayersForm
from model.quantize import WIDE, Quantization
from sharding.layout import Layout


class Collector:
    """Takes per-layer parameters in any order and holds them as `layers` asks."""

    def __init__(
        self, config: LlamaConfig, layout: Layout, layers: LayersForm, quantization: Quantization = WIDE
    ) -> None:
        self._leaves = abstract_leaves(config, layers, quantization=quantization, platform=layout.platform)
        self._layout = layout
        self._params: dict[Path, jax.Array] = {}

    def add(self, path: Path, value: jax.Array) -> None:
        """`path` and `value` are those of the unrolled model; `value` is padded and sharded already."""
        if path in self._leaves:
            self._params[path] = value
            return
        layer, target = path[1], ("layers", *path[2:])
        if target not in self._params:
            leaf = self._leaves[target]
            self._params[target] = jnp.zeros(
                self._layout.padded_shape(leaf.shape, leaf.axes),
                value.dtype,
                device=self._layout.sharding(leaf.axes),
            )
        # Waiting keeps at most one parameter that is not in its row yet.
        self._params[target] = jax.block_until_ready(_set_row(self._params[target], value, layer))

    def result(self) -> dict[Path, jax.Array]:
        """Everything, in the model's order, once every parameter was added."""
        return {path: self._params[path] for path in self._leaves}


def unstack(params: Mapping[Path, jax.Array], config: LlamaConfig) -> dict[Path, jax.Array]:
    """Parameters of the unrolled model, whichever way `params` keep their layers."""
    result: dict[Path, jax.Array] = {}
    for path, value in params.items():
        if path[0] == "layers" and not isinstance(path[1], int):
            result.update({("layers", i, *path[1:]): value[i] for i in range(config.num_layers)})
        else:
            result[path] = value
    return result


@functools.partial(jax.jit, donate_argnums=0)
def _set_row(stacked: jax.Array, value: jax.Array, row: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stacked, value, row, 0)
