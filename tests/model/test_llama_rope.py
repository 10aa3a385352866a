"""Rotary embedding: frequencies and tables against transformers' own at true sizes, and what a rotation must keep."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.config import LlamaConfig
from model.rope import inverse_frequencies, rope_tables, rotate
from tests.golden.cases import ROPE, ROPE_CASES, ROPE_POSITIONS

GOLDEN = json.loads(ROPE.read_text())


def config_of(name: str) -> LlamaConfig:
    return LlamaConfig.from_hf({"model_type": "llama"} | ROPE_CASES[name])


def golden(name: str, kind: str) -> np.ndarray:
    return np.array(GOLDEN["cases"][name][kind], np.float32)


def test_the_golden_file_is_of_these_cases() -> None:
    assert GOLDEN["positions"] == list(ROPE_POSITIONS)
    stored = {name: case["rope_parameters"] for name, case in GOLDEN["cases"].items()}
    assert stored == {name: case["rope_parameters"] for name, case in ROPE_CASES.items()}


@pytest.mark.parametrize("name", sorted(ROPE_CASES))
def test_frequencies_equal_those_of_transformers(name: str) -> None:
    """transformers raises theta to a power in float32 and we in float64: a few units in the last place apart."""
    ours = inverse_frequencies(config_of(name))
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, golden(name, "inv_freq"), rtol=4e-7, atol=0)


@pytest.mark.parametrize("name", sorted(ROPE_CASES))
def test_tables_equal_those_of_transformers_at_true_positions(name: str) -> None:
    """With transformers' own frequencies, cos and sin agree to float32's last bits at every position, 131,071 included.

    With ours, the angle differs by position * (difference of the frequencies), and by the rounding of that product.
    """
    positions = jnp.array([ROPE_POSITIONS], jnp.int32)
    theirs = golden(name, "inv_freq")
    for ours, kind in zip(jax.jit(rope_tables)(theirs, positions), ("cos", "sin"), strict=True):
        np.testing.assert_allclose(ours[0], golden(name, kind), rtol=0, atol=5e-7)

    frequencies = inverse_frequencies(config_of(name))
    apart = np.abs(frequencies.astype(np.float64) - theirs) * np.array(ROPE_POSITIONS)[:, None]
    rounding = np.spacing((np.array(ROPE_POSITIONS)[:, None] * frequencies).astype(np.float32))
    for ours, kind in zip(jax.jit(rope_tables)(frequencies, positions), ("cos", "sin"), strict=True):
        assert (np.abs(np.asarray(ours[0]) - golden(name, kind)) <= apart + rounding + 5e-7).all()


def test_llama3_keeps_short_wavelengths_stretches_long_ones_and_blends_between() -> None:
    """Llama 3.1 8B: 8192 / 4 and 8192 / 1 positions bound the blend, and factor is 8."""
    config = config_of("llama-3.1-8b")
    plain = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    wavelength = 2 * np.pi / plain
    ratio = inverse_frequencies(config) / plain
    np.testing.assert_allclose(ratio[wavelength < 2048], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[wavelength > 8192], 1 / 8, rtol=1e-6)
    between = ratio[(wavelength > 2048) & (wavelength < 8192)]
    assert len(between) > 2
    assert ((between > 1 / 8) & (between < 1)).all()
    assert (np.diff(between) < 0).all()


def test_tables_stay_float32_and_exact_far_out() -> None:
    """At position 131,071 a float32 angle still gives cos and sin to the last bits, jitted as the model runs them."""
    frequencies = inverse_frequencies(config_of("llama-3.1-8b"))
    cos, sin = jax.jit(rope_tables)(frequencies, jnp.array([[131_071]], jnp.int32))
    assert cos.dtype == sin.dtype == jnp.float32
    angle = (np.float32(131_071) * frequencies).astype(np.float64)
    np.testing.assert_allclose(cos[0, 0], np.cos(angle), rtol=0, atol=2e-7)
    np.testing.assert_allclose(sin[0, 0], np.sin(angle), rtol=0, atol=2e-7)


@pytest.mark.parametrize("extra", [(), (3,), (2, 3)])
def test_rotation_depends_on_the_distance_alone(extra: tuple[int, ...]) -> None:
    """q at p and k at s give the same product as q at p + 50 and k at s + 50; position 0 changes nothing."""
    frequencies = inverse_frequencies(config_of("smollm2-135m"))
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, *extra, 64)).astype(np.float32)

    def turned(x: np.ndarray, position: int) -> np.ndarray:
        return np.asarray(rotate(jnp.asarray(x), *rope_tables(frequencies, jnp.array([[position]]))))

    near = (turned(q, 9) * turned(k, 4)).sum(-1)
    far = (turned(q, 59) * turned(k, 54)).sum(-1)
    np.testing.assert_allclose(near, far, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(turned(q, 0), q)
    assert np.abs(turned(q, 9) - q).max() > 0.1


def test_rotation_keeps_the_dtype_and_works_in_float32() -> None:
    frequencies = inverse_frequencies(config_of("smollm2-135m"))
    tables: Any = rope_tables(frequencies, jnp.array([[8000]]))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 1, 64)), jnp.bfloat16)
    out = rotate(x, *tables)
    assert out.dtype == jnp.bfloat16
    # The only rounding is that of the result, half a unit of bfloat16's 8 bits.
    np.testing.assert_allclose(out.astype(jnp.float32), rotate(x.astype(jnp.float32), *tables), rtol=2**-8, atol=1e-6)
