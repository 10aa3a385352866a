"""The small random models of the golden files: their configs, and weights and tokens that a rule makes from names.

Weights come from the raw 64-bit output of PCG64, which numpy keeps the same in every version, and from exact float32
arithmetic; so any machine with numpy makes the same bits, and a golden file needs no weights, only their checksum.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

FOLDER = Path(__file__).parent
RANDOM_MODELS = FOLDER / "random_models.json"
DEMO = FOLDER / "demo.json"
ROPE = FOLDER / "rope.json"


@dataclass(frozen=True)
class Case:
    """One random model. `config` holds arguments of transformers' LlamaConfig, `length` tokens are its text."""

    name: str
    config: Mapping[str, Any]
    length: int = 40
    new_tokens: int = 20


def _config(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    } | changes


def _llama3_rope(factor: float) -> dict[str, Any]:
    # 64 positions put one wavelength into each of the rule's three branches at head sizes 16 and 64.
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("llama-2", _config()),
        Case(
            "llama-3",
            _config(
                vocab_size=512,
                num_attention_heads=8,
                num_key_value_heads=2,
                intermediate_size=224,
                rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
                eos_token_id=[2, 9],
            ),
        ),
        # Both go past the 64 positions that their rope says they were first made for.
        Case(
            "llama-3.1",
            _config(num_key_value_heads=2, rope_parameters=_llama3_rope(8.0)),
            length=150,
        ),
        Case(
            "llama-3.2",
            _config(
                vocab_size=600,
                hidden_size=256,
                intermediate_size=384,
                num_key_value_heads=2,
                head_dim=64,
                rope_parameters=_llama3_rope(32.0),
                tie_word_embeddings=True,
            ),
            length=90,
        ),
        # eps is large enough to be seen in the logits.
        Case(
            "biases",
            _config(
                num_attention_heads=6,
                num_key_value_heads=3,
                hidden_size=48,
                attention_bias=True,
                mlp_bias=True,
                rms_norm_eps=0.01,
            ),
        ),
        # Nothing here divides anything: 3 KV heads, F = 77, V = 101, and 6 heads of 16 on 42 hidden.
        Case(
            "wide-heads",
            _config(
                vocab_size=101,
                hidden_size=42,
                intermediate_size=77,
                num_hidden_layers=3,
                num_attention_heads=6,
                num_key_value_heads=3,
                head_dim=16,
                tie_word_embeddings=True,
            ),
        ),
        Case(
            "linear-rope",
            _config(
                num_key_value_heads=1,
                rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            ),
            length=70,
        ),
    )
}

ROPE_CASES: dict[str, dict[str, Any]] = {
    # Llama 3.1 8B and 3.2 1B at their true sizes, and the three plain forms.
    "llama-3.1-8b": _config(
        hidden_size=4096,
        num_attention_heads=32,
        max_position_embeddings=131072,
        rope_parameters=_llama3_rope(8.0) | {"original_max_position_embeddings": 8192},
    ),
    "llama-3.2-1b": _config(
        hidden_size=2048,
        num_attention_heads=32,
        max_position_embeddings=131072,
        rope_parameters=_llama3_rope(32.0) | {"original_max_position_embeddings": 8192},
    ),
    "llama-2-7b": _config(hidden_size=4096, num_attention_heads=32, max_position_embeddings=4096),
    "smollm2-135m": _config(
        hidden_size=576,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    ),
    "linear": _config(
        hidden_size=4096,
        num_attention_heads=32,
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    ),
}
ROPE_POSITIONS = (1, 8191, 8192, 100_000, 131_071)


def tokens(case: Case) -> list[int]:
    """The case's text: ids spread over the whole vocabulary."""
    raw = np.random.PCG64(_seed(case.name, "tokens")).random_raw(case.length)
    return [int(value) for value in raw % np.uint64(case.config["vocab_size"])]


def tensors(case: Case) -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint by its Hugging Face name, float32."""
    return {name: _tensor(case, name, shape) for name, shape in _shapes(case.config).items()}


def checksum(weights: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over names and little-endian values, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(weights[name], "<f4").tobytes())
    return digest.hexdigest()


def write_weights(folder: Path, weights: Mapping[str, np.ndarray]) -> Path:
    """`model.safetensors` as transformers writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: np.ascontiguousarray(value) for name, value in weights.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_case(folder: Path, case: Case, config: Mapping[str, Any]) -> Path:
    """A Hugging Face folder of the case, with this `config.json`."""
    write_weights(folder, tensors(case))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    N, K = config["num_attention_heads"], config["num_key_value_heads"]
    H = config.get("head_dim") or D // N
    modules = {
        "self_attn.q_proj": (N * H, D),
        "self_attn.k_proj": (K * H, D),
        "self_attn.v_proj": (K * H, D),
        "self_attn.o_proj": (D, N * H),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for module, shape in modules.items():
            shapes[f"{prefix}{module}.weight"] = shape
            if config.get("attention_bias" if "attn" in module else "mlp_bias"):
                shapes[f"{prefix}{module}.bias"] = shape[:1]
        shapes[f"{prefix}input_layernorm.weight"] = shapes[f"{prefix}post_attention_layernorm.weight"] = (D,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)
    return shapes


def _tensor(case: Case, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Uniform values, scaled so that activations keep their size and attention is far from uniform."""
    count = int(np.prod(shape))
    raw = np.random.PCG64(_seed(case.name, name)).random_raw(count)
    # The top 24 bits are a float32 in [-1, 1) exactly.
    unit = ((raw >> np.uint64(40)).astype(np.int64) - 2**23).astype(np.float32) * np.float32(2**-23)
    if name.endswith("norm.weight"):
        values = np.float32(1) + np.float32(0.5) * unit
    elif name.endswith(".bias"):
        values = np.float32(0.5) * unit
    else:
        gain = 3.0 if "q_proj" in name or "k_proj" in name else 1.7
        values = np.float32(gain * shape[-1] ** -0.5) * unit
    return values.reshape(shape)


def _seed(case: str, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{case}/{name}".encode()).digest()[:16], "little")
