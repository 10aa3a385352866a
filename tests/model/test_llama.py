"""The module before it has weights: which parameters there are, their shapes, axes and number."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from model.config import LlamaConfig
from model.llama import LayersForm, Llama
from model.presets import PRESETS
from tests.model.checkpoint_files import small_config

Leaves = dict[tuple[str | int, ...], tuple[tuple[int, ...], tuple[str | None, ...], jnp.dtype]]


def leaves(config: LlamaConfig, layers: LayersForm = "unrolled", dtype: jnp.dtype = jnp.float32) -> Leaves:
    state = nnx.split(Llama(config, jnp.dtype(dtype), platform="cpu", layers=layers))[1]
    found = {}
    for path, variable in nnx.to_flat_state(state):
        value = variable.get_value()
        assert isinstance(value, jax.ShapeDtypeStruct), f"{path} is an array: the module must be abstract"
        found[path] = (value.shape, variable.get_metadata()["axes"], value.dtype)
    return found


# K = 3, G = 2, H = 8, D = 32, F = 45, V = 37.
LAYER = {
    ("attention_norm", "weight"): ((32,), (None,)),
    ("attention", "qkv", "weight"): ((3, 32, 32), ("kv_heads", "head_rows", None)),
    ("attention", "qkv", "bias"): ((3, 32), ("kv_heads", "head_rows")),
    ("attention", "out", "weight"): ((32, 3, 16), (None, "kv_heads", "head_columns")),
    ("attention", "out", "bias"): ((32,), (None,)),
    ("mlp_norm", "weight"): ((32,), (None,)),
    ("mlp", "gate_up", "weight"): ((2, 45, 32), (None, "ff", None)),
    ("mlp", "gate_up", "bias"): ((2, 45), (None, "ff")),
    ("mlp", "down", "weight"): ((32, 45), (None, "ff")),
    ("mlp", "down", "bias"): ((32,), (None,)),
}
OUTER = {
    ("embed", "weight"): ((37, 32), ("vocab", None)),
    ("norm", "weight"): ((32,), (None,)),
    ("head", "weight"): ((37, 32), ("vocab", None)),
}


def test_unrolled_parameters() -> None:
    config = small_config(attention_bias=True, mlp_bias=True)
    expected = OUTER | {("layers", i, *path): form for i in range(2) for path, form in LAYER.items()}
    assert leaves(config) == {path: (*form, jnp.float32) for path, form in expected.items()}


def test_scanned_parameters_gain_a_leading_axis() -> None:
    config = small_config(attention_bias=True, mlp_bias=True)
    expected = OUTER | {("layers", *path): ((2, *shape), ("layers", *axes)) for path, (shape, axes) in LAYER.items()}
    assert leaves(config, "scan") == {path: (*form, jnp.float32) for path, form in expected.items()}


@pytest.mark.parametrize("layers", ["unrolled", "scan"])
def test_what_a_config_does_not_have_is_no_parameter(layers: LayersForm) -> None:
    paths = leaves(small_config(tie_word_embeddings=True), layers)
    assert ("head", "weight") not in paths
    assert not [path for path in paths if path[-1] == "bias"]


def test_only_attention_or_only_mlp_has_biases() -> None:
    attention = {path[2:] for path in leaves(small_config(attention_bias=True)) if path[-1] == "bias"}
    assert attention == {("attention", "qkv", "bias"), ("attention", "out", "bias")}
    mlp = {path[2:] for path in leaves(small_config(mlp_bias=True)) if path[-1] == "bias"}
    assert mlp == {("mlp", "gate_up", "bias"), ("mlp", "down", "bias")}


def test_every_parameter_has_the_dtype_asked_for() -> None:
    config = small_config(attention_bias=True, mlp_bias=True)
    assert {dtype for _, _, dtype in leaves(config, dtype=jnp.bfloat16).values()} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_have_their_parameter_count(name: str) -> None:
    """Even 405 billion parameters: nothing is allocated. Scanned and unrolled hold the same."""
    config = PRESETS[name]
    for layers in ("unrolled", "scan"):
        found = leaves(config, layers)
        assert sum(math.prod(shape) for shape, _, _ in found.values()) == config.parameter_count()
