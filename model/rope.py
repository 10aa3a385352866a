"""Rotary position embeddings (Su et al., 2021), in the rotate-half form of Hugging Face checkpoints.

Angles are float32 whatever the model's dtype: at position 100,000 a bf16 angle is off by whole turns.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from model.config import LlamaConfig, RopeScaling


def inverse_frequencies(config: LlamaConfig) -> np.ndarray:
    """Radians a position for each pair of dimensions, float32 [H / 2], with the config's scaling applied.

    ``linear`` divides every frequency by ``factor``. ``llama3`` (Llama 3.1's scheme) divides only those whose
    wavelength exceeds ``original_max_position_embeddings / low_freq_factor``, keeps those shorter than
    ``original_max_position_embeddings / high_freq_factor``, and blends in between.
    """
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequency = config.rope_theta**-exponent
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        frequency = frequency / scaling.factor
    elif scaling.kind == "llama3":
        frequency = _llama3(frequency, scaling)
    return frequency.astype(np.float32)


def _llama3(frequency: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    assert scaling.original_max_position_embeddings is not None, "checked by LlamaConfig"
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * frequency + (1 - keep) * frequency / scaling.factor


def rope_tables(inverse_frequency: np.ndarray, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [B, T, H / 2], at int32 positions [B, T]. Computed once a pass, used by every layer."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequency
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x [B, T, ..., H] by tables [B, T, H / 2]; dimension i turns with dimension i + H / 2. x's dtype."""
    between = (1,) * (x.ndim - 3)
    cos = cos.reshape(*cos.shape[:2], *between, cos.shape[-1])
    sin = sin.reshape(*sin.shape[:2], *between, sin.shape[-1])
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
