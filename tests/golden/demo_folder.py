"""The demo model as a Hugging Face folder, made with the `gguf` package alone: nothing of this repository reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.golden.cases import write_weights

_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def write_demo(folder: Path, file: Path) -> dict[str, Any]:
    """Writes the dequantised weights, and returns the arguments of transformers' LlamaConfig that go with them."""
    reader = gguf.GGUFReader(file)

    def field(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    weights = {}
    for tensor in reader.tensors:
        value = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        name = tensor.name
        if ".attn_q." in name or ".attn_k." in name:
            value = _rotate_half_order(value, heads if ".attn_q." in name else kv_heads)
        if name.startswith("blk."):
            _, layer, module, kind = name.split(".")
            weights[f"model.layers.{layer}.{_MODULES[module]}.{kind}"] = value
        else:
            weights[_OUTER[name]] = value
    write_weights(folder, weights)
    return {
        "vocab_size": weights["model.embed_tokens.weight"].shape[0],
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": field("context_length"),
        # A float32 in the file; 1e-05 is what it stands for.
        "rms_norm_eps": float(str(np.float32(field("attention.layer_norm_rms_epsilon")))),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(field("rope.freq_base"))},
        "tie_word_embeddings": "output.weight" not in {tensor.name for tensor in reader.tensors},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }


def _rotate_half_order(value: np.ndarray, heads: int) -> np.ndarray:
    """GGUF's rows alternate between the halves of a head that Hugging Face's rope turns together; undo that."""
    pairs = value.reshape(heads, -1, 2, *value.shape[1:])
    return pairs.swapaxes(1, 2).reshape(value.shape)
