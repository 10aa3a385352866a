"""A Llama forward pass the plain way, in float64 numpy, from tensors under their Hugging Face names.

Written from the papers and the checkpoint format, one loop over heads and no cache, so that it shares nothing with the
model it checks. Rope angles are rounded to float32, as every Llama implementation does (at position 1000 that moves an
angle by up to 3e-5, which these models were trained with); all else is float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from model.config import LlamaConfig


def reference_logits(
    config: LlamaConfig, tensors: Mapping[str, np.ndarray], tokens: Sequence[int], dtype: type = np.float64
) -> np.ndarray:
    """Logits after every token, [T, V]."""
    weights = {name: value.astype(dtype) for name, value in tensors.items()}
    cos, sin = _rope(config, len(tokens))
    x = weights["model.embed_tokens.weight"][list(tokens)]
    for layer in range(config.num_layers):
        own = {
            name.removeprefix(f"model.layers.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        x = x + _attention(config, own, _norm(config, x, own["input_layernorm.weight"]), cos, sin)
        x = x + _mlp(own, _norm(config, x, own["post_attention_layernorm.weight"]))
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return _norm(config, x, weights["model.norm.weight"]) @ weights[head].T


def _norm(config: LlamaConfig, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config.rms_norm_eps) * weight


def _linear(own: Mapping[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    return x @ own[f"{name}.weight"].T + own.get(f"{name}.bias", 0.0)


def _attention(
    config: LlamaConfig, own: Mapping[str, np.ndarray], x: np.ndarray, cos: np.ndarray, sin: np.ndarray
) -> np.ndarray:
    H = config.head_dim
    q, k, v = (_linear(own, f"self_attn.{one}_proj", x) for one in "qkv")
    future = np.triu(np.ones((len(x), len(x)), bool), 1)
    mixed = np.empty((len(x), config.num_heads * H), x.dtype)
    for head in range(config.num_heads):
        shared = head // config.group_size
        mine, theirs = slice(head * H, (head + 1) * H), slice(shared * H, (shared + 1) * H)
        scores = _turn(q[:, mine], cos, sin) @ _turn(k[:, theirs], cos, sin).T / math.sqrt(H)
        scores[future] = -np.inf
        chance = np.exp(scores - scores.max(axis=1, keepdims=True))
        mixed[:, mine] = chance / chance.sum(axis=1, keepdims=True) @ v[:, theirs]
    return _linear(own, "self_attn.o_proj", mixed)


def _mlp(own: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    gate = _linear(own, "mlp.gate_proj", x)
    return _linear(own, "mlp.down_proj", gate / (1 + np.exp(-gate)) * _linear(own, "mlp.up_proj", x))


def _turn(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Each pair (i, i + H/2) as a complex number, times a unit complex number."""
    half = x.shape[1] // 2
    turned = (x[:, :half] + 1j * x[:, half:]) * (cos + 1j * sin)
    return np.concatenate([turned.real, turned.imag], axis=1)


def _rope(config: LlamaConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    frequencies = np.array([_frequency(config, pair) for pair in range(config.head_dim // 2)], np.float32)
    angles = (np.arange(length, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
    return np.cos(angles), np.sin(angles)


def _frequency(config: LlamaConfig, pair: int) -> float:
    wavelength = 2 * math.pi * config.rope_theta ** (2 * pair / config.head_dim)
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        wavelength *= scaling.factor
    if scaling.kind == "llama3":
        original = scaling.original_max_position_embeddings
        assert original is not None
        longest, shortest = original / scaling.low_freq_factor, original / scaling.high_freq_factor
        if wavelength > longest:
            wavelength *= scaling.factor
        elif wavelength > shortest:
            smooth = (original / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            wavelength /= (1 - smooth) / scaling.factor + smooth
    return 2 * math.pi / wavelength
