"""The parameters a Llama has, known without making any of them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model.checkpoint.errors import CheckpointError
from model.checkpoint.table import Path
from model.config import LlamaConfig
from model.llama import LayersForm, Llama
from model.quantize import WIDE, Quantization
from sharding.layout import LogicalAxis

DTYPES: dict[str, np.dtype] = {"f32": np.dtype(jnp.float32), "bf16": np.dtype(jnp.bfloat16)}


@dataclass(frozen=True)
class Leaf:
    """A parameter's own (unpadded) shape, its logical axes and its dtype."""

    shape: tuple[int, ...]
    axes: tuple[LogicalAxis, ...]
    dtype: np.dtype


def abstract_leaves(
    config: LlamaConfig,
    layers: LayersForm,
    dtype: Any = np.float32,
    quantization: Quantization = WIDE,
    platform: str = "cpu",
) -> dict[Path, Leaf]:
    """Every parameter of a Llama with `layers` in that form, by path, in the model's order.

    dtype: of those that are not quantised. platform: of the devices that will hold them, which decides how 4-bit
    numbers are stored. Raises QuantizationError for a rule that matches nothing, or rows that a group does not divide.
    """
    model = Llama(config, np.dtype(dtype), platform=platform, layers=layers, quantization=quantization)
    found = {}
    for path, variable in nnx.to_flat_state(nnx.split(model)[1]):
        value = variable.get_value()
        found[cast(Path, path)] = Leaf(
            tuple(value.shape), tuple(variable.get_metadata()["axes"]), np.dtype(value.dtype)
        )
    quantization.check([name for path in found if (name := matrix_name(path))])
    return found


def matrix_name(path: Path) -> str | None:
    """What quantisation rules call a weight, such as "layers.0.mlp.down"; None for what is never quantised."""
    module, name = ".".join(map(str, path[:-1])), path[-1]
    return None if name != "weight" or module.endswith("norm") else module


def bind(model: Llama, params: Mapping[Path, jax.Array]) -> Llama:
    """A model like the abstract `model` that computes with `params`, which must be exactly its parameters."""
    graph, state = nnx.split(model)
    paths, variables = zip(*nnx.to_flat_state(state), strict=True)
    if set(paths) != set(params):
        odd = sorted(".".join(map(str, path)) for path in set(paths) ^ set(params))
        raise CheckpointError(f"these are not the parameters of this model; they differ in {', '.join(odd[:10])}")
    filled = [variable.replace(params[path]) for path, variable in zip(paths, variables, strict=True)]
    return nnx.merge(graph, nnx.from_flat_state(zip(paths, filled, strict=True)))


def check_dtype(dtype: Any) -> np.dtype:
    """float32 or bfloat16 as a numpy dtype, from that or from "f32" or "bf16"; CheckpointError otherwise."""
    found = DTYPES.get(dtype) if isinstance(dtype, str) else None
    if found is None:
        with contextlib.suppress(TypeError):
            found = np.dtype(dtype)
    if found is None or found not in DTYPES.values():
        raise CheckpointError(f"weights cannot be kept as {dtype!r}; supported: {', '.join(DTYPES)}")
    return found
