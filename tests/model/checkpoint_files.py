"""Small checkpoints for the tests, and what their parameters must be, worked out the plain way."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from model.config import LlamaConfig

BF16 = np.dtype(ml_dtypes.bfloat16)


def small_config(**changes: Any) -> LlamaConfig:
    """Two layers, 6 query and 3 KV heads of 8; most tensor-parallel degrees have something to pad."""
    values: dict[str, Any] = {
        "vocab_size": 37,
        "hidden_size": 32,
        "intermediate_size": 45,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 3,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_ids": (2,),
    }
    return LlamaConfig(**{**values, **changes})


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a Hugging Face checkpoint of this model holds."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        matrices = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for module, shape in matrices.items():
            shapes[f"{layer}.{module}.weight"] = shape
            if config.attention_bias if "attn" in module else config.mlp_bias:
                shapes[f"{layer}.{module}.bias"] = shape[:1]
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def random_tensors(config: LlamaConfig, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in tensor_shapes(config).items()}


def expected_parameters(config: LlamaConfig, tensors: dict[str, np.ndarray]) -> dict[tuple[str | int, ...], np.ndarray]:
    """Every parameter of the unrolled model, unpadded, assembled head by head."""
    kv_heads, head, group = config.num_kv_heads, config.head_dim, config.group_size

    def qkv(layer: str, kind: str) -> np.ndarray:
        q, k, v = (tensors[f"{layer}.self_attn.{one}_proj.{kind}"] for one in "qkv")
        rows = []
        for at in range(kv_heads):
            own = [q[head * n : head * (n + 1)] for n in range(at * group, (at + 1) * group)]
            rows.append(np.concatenate([*own, k[head * at : head * (at + 1)], v[head * at : head * (at + 1)]]))
        return np.stack(rows)

    result: dict[tuple[str | int, ...], np.ndarray] = {
        ("embed", "weight"): tensors["model.embed_tokens.weight"],
        ("norm", "weight"): tensors["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        result["head", "weight"] = tensors["lm_head.weight"]
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        out = tensors[f"{layer}.self_attn.o_proj.weight"]
        own = {
            ("attention_norm", "weight"): tensors[f"{layer}.input_layernorm.weight"],
            ("mlp_norm", "weight"): tensors[f"{layer}.post_attention_layernorm.weight"],
            ("attention", "qkv", "weight"): qkv(layer, "weight"),
            ("attention", "out", "weight"): np.stack(np.split(out, kv_heads, axis=1), axis=1),
            ("mlp", "down", "weight"): tensors[f"{layer}.mlp.down_proj.weight"],
            ("mlp", "gate_up", "weight"): np.stack([tensors[f"{layer}.mlp.{x}_proj.weight"] for x in ("gate", "up")]),
        }
        if config.attention_bias:
            own["attention", "qkv", "bias"] = qkv(layer, "bias")
            own["attention", "out", "bias"] = tensors[f"{layer}.self_attn.o_proj.bias"]
        if config.mlp_bias:
            own["mlp", "gate_up", "bias"] = np.stack([tensors[f"{layer}.mlp.{x}_proj.bias"] for x in ("gate", "up")])
            own["mlp", "down", "bias"] = tensors[f"{layer}.mlp.down_proj.bias"]
        result.update({("layers", i, *path): value for path, value in own.items()})
    return result


def write_hf(
    folder: Path,
    config: LlamaConfig,
    tensors: dict[str, np.ndarray],
    *,
    shards: int = 1,
    dtype: np.dtype | None = None,
) -> Path:
    """A Hugging Face folder: one file, or an index and several shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    stored = {name: value if dtype is None else value.astype(dtype) for name, value in tensors.items()}
    if shards == 1:
        save_file(stored, folder / "model.safetensors")
        return folder
    names = sorted(stored)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        own = names[shard::shards]
        save_file({name: stored[name] for name in own}, folder / file)
        weight_map.update(dict.fromkeys(own, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        module, kind = rest.rsplit(".", 1)
        return f"blk.{layer}.{GGUF_NAMES[module]}.{kind}"
    return {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }.get(name, name)


def interleave(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows as GGUF orders them for interleaved rope, one row at a time."""
    size = value.shape[0] // heads
    order = [head * size + half * (size // 2) + j for head in range(heads) for j in range(size // 2) for half in (0, 1)]
    return value[order]


def write_gguf(
    path: Path,
    config: LlamaConfig,
    tensors: dict[str, np.ndarray],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    raw: dict[str, np.ndarray] | None = None,
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
    metadata: dict[str, Any] | None = None,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """A GGUF file whose matrices are stored as `kind`; tensors in `raw` are stored as these bytes instead. `kinds` has
    the types of tensors that differ from the others.

    `metadata` adds string, integer, boolean, float and list entries.
    """
    writer = gguf.GGUFWriter(path, "llama", endianess=endianess)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        str: writer.add_string,
        float: writer.add_float32,
    }
    for key, value in (metadata or {}).items():
        add.get(type(value), writer.add_array)(key, value)
    usual = kind
    for name, value in tensors.items():
        kind = (kinds or {}).get(name, usual)
        stored_name = gguf_name(name)
        if raw and name in raw:
            writer.add_tensor(stored_name, raw[name], raw_dtype=kind)
            continue
        for module, heads in ((".q_proj.", config.num_heads), (".k_proj.", config.num_kv_heads)):
            if module in name:
                value = interleave(value, heads)
        if value.ndim == 1:
            writer.add_tensor(stored_name, value)
        else:
            writer.add_tensor(stored_name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@functools.cache
def package_reader(path: Path) -> gguf.GGUFReader:
    """The `gguf` package's own view of a file; it takes seconds on a real vocabulary, so it is kept."""
    return gguf.GGUFReader(path)
