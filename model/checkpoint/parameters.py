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

DTYPES: dict[str, np.dtype] = {"f32": np.dtype(jnp.float32), "bf16": np.dtype(jnp.bfloat16)}


@dataclass(frozen=True)
class Leaf:
    """A parameter's own (unpadded) shape and its logical axes."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


def abstract_leaves(config: LlamaConfig, layers: LayersForm) -> dict[Path, Leaf]:
    """Every parameter of a Llama with `layers` in that form, by path, in the model's order."""
    model = Llama(config, jnp.dtype(jnp.float32), platform="cpu", layers=layers)
    return {
        cast(Path, path): Leaf(tuple(variable.get_value().shape), tuple(variable.get_metadata()["axes"]))
        for path, variable in nnx.to_flat_state(nnx.split(model)[1])
    }


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
