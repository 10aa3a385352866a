"""Random weights: placed as a loader would, finite and of sensible size, and the same on every mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decode.decoder import Decoder
from model.checkpoint.parameters import abstract_leaves
from model.random_init import random_params
from sharding.layout import Layout
from sharding.mesh import make_mesh
from tests.model.checkpoint_files import small_config

CONFIG = small_config(attention_bias=True, mlp_bias=True, hidden_size=64, vocab_size=101)


def layout(tp: int) -> Layout:
    return Layout(make_mesh(tp, CONFIG.num_kv_heads))


@pytest.mark.parametrize(("tp", "layers"), [(1, "unrolled"), (4, "unrolled"), (6, "scan")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_parameter_is_there_padded_and_sharded(tp: int, layers: Any, dtype: str) -> None:
    own = layout(tp)
    params = random_params(CONFIG, own, dtype, layers=layers)
    leaves = abstract_leaves(CONFIG, layers)
    assert set(params) == set(leaves)
    for path, leaf in leaves.items():
        assert params[path].shape == own.padded_shape(leaf.shape, leaf.axes)
        assert params[path].sharding == own.sharding(leaf.axes)
        assert params[path].dtype == dtype
        assert np.isfinite(np.asarray(params[path], np.float32)).all()


def test_values_do_not_depend_on_the_mesh_and_differ_by_seed_and_parameter() -> None:
    one, four = random_params(CONFIG, layout(1), "float32"), random_params(CONFIG, layout(4), "float32")
    other = random_params(CONFIG, layout(1), "float32", seed=1)
    for path, value in one.items():
        unpadded = tuple(slice(size) for size in value.shape)
        np.testing.assert_array_equal(np.asarray(value), np.asarray(four[path])[unpadded])
        assert ("norm" in str(path[-2])) == bool((np.asarray(value) == np.asarray(other[path])).all())
    first, second = (np.asarray(one["layers", layer, "mlp", "down", "weight"]) for layer in (0, 1))
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.1


def test_noise_is_uniform_with_the_stated_deviation() -> None:
    params = random_params(CONFIG, layout(1), "float32")
    gate_up = np.asarray(params["layers", 0, "mlp", "gate_up", "weight"], np.float64)
    size = gate_up.shape[-1]
    assert gate_up.std() == pytest.approx(size**-0.5, rel=0.03)
    assert abs(gate_up.mean()) < 0.03 * size**-0.5
    assert np.abs(gate_up).max() == pytest.approx((3 / size) ** 0.5, rel=0.01)
    rows = gate_up.reshape(-1, size)
    assert np.abs(np.corrcoef(rows)[np.triu_indices(len(rows), 1)]).max() < 0.7  # rows of 64 are not copies
    np.testing.assert_array_equal(np.asarray(params["norm", "weight"]), np.ones(CONFIG.hidden_size))


def test_a_model_of_noise_runs() -> None:
    own = layout(2)
    decoder = Decoder(CONFIG, random_params(CONFIG, own, jnp.float32), own, jnp.float32)
    logits = decoder.logits([[1, 2, 3]])
    assert np.isfinite(logits).all()
    assert logits.std() > 0.01
    assert jax.tree.all(jax.tree.map(lambda leaf: leaf.dtype == jnp.float32, decoder.params))
