"""Which checkpoint tensor fills which part of which parameter: the one table between the two namings.

Every tensor enters its parameter by a plain reshape, at an offset. Shape letters as in `model.config`, with
G = N / K query heads to a KV head. For KV head k, the rows of `qkv` are its G query heads, its key, its
value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from model.config import LlamaConfig

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Part:
    """One tensor's place in a parameter.

    The tensor, reshaped to `shape` (as many axes as the parameter has), stands at `offset`. Its rows are the
    first `row_axes` of those axes and its columns the others; a vector has rows only. `name` is the Hugging
    Face name without the leading "model.".
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    row_axes: int

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape the checkpoint must give this tensor: [rows, columns], or [rows] for a vector."""
        rows = math.prod(self.shape[: self.row_axes])
        if self.row_axes == len(self.shape):
            return (rows,)
        return (rows, math.prod(self.shape[self.row_axes :]))


def parameter_parts(config: LlamaConfig) -> dict[Path, tuple[Part, ...]]:
    """The parts of every parameter, by its path in an unrolled `model.llama.Llama`."""
    vocabulary = (config.vocab_size, config.hidden_size)
    table: dict[Path, tuple[Part, ...]] = {("embed", "weight"): (_whole("embed_tokens.weight", vocabulary, 1),)}
    one_layer = _layer_parts(config)
    for i in range(config.num_layers):
        for path, parts in one_layer.items():
            table["layers", i, *path] = tuple(replace(part, name=f"layers.{i}.{part.name}") for part in parts)
    table["norm", "weight"] = (_whole("norm.weight", (config.hidden_size,), 1),)
    if not config.tie_word_embeddings:
        table["head", "weight"] = (_whole("lm_head.weight", vocabulary, 1),)
    return table


def _layer_parts(config: LlamaConfig) -> dict[tuple[str, ...], tuple[Part, ...]]:
    """Parts of one layer's parameters; names are relative to the layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    kv_heads, head = config.num_kv_heads, config.head_dim
    queries = config.group_size * head  # rows of one KV head's query heads

    def qkv(kind: str, *columns: int) -> tuple[Part, ...]:
        zeros = (0,) * len(columns)
        return (
            Part(f"self_attn.q_proj.{kind}", (kv_heads, queries, *columns), (0, 0, *zeros), 2),
            Part(f"self_attn.k_proj.{kind}", (kv_heads, head, *columns), (0, queries, *zeros), 2),
            Part(f"self_attn.v_proj.{kind}", (kv_heads, head, *columns), (0, queries + head, *zeros), 2),
        )

    def gate_up(kind: str, *columns: int) -> tuple[Part, ...]:
        zeros = (0,) * len(columns)
        return (
            Part(f"mlp.gate_proj.{kind}", (1, inner, *columns), (0, 0, *zeros), 2),
            Part(f"mlp.up_proj.{kind}", (1, inner, *columns), (1, 0, *zeros), 2),
        )

    table = {
        ("attention_norm", "weight"): (_whole("input_layernorm.weight", (hidden,), 1),),
        ("attention", "qkv", "weight"): qkv("weight", hidden),
        ("attention", "out", "weight"): (_whole("self_attn.o_proj.weight", (hidden, kv_heads, queries), 1),),
        ("mlp_norm", "weight"): (_whole("post_attention_layernorm.weight", (hidden,), 1),),
        ("mlp", "gate_up", "weight"): gate_up("weight", hidden),
        ("mlp", "down", "weight"): (_whole("mlp.down_proj.weight", (hidden, inner), 1),),
    }
    if config.attention_bias:
        table["attention", "qkv", "bias"] = qkv("bias")
        table["attention", "out", "bias"] = (_whole("self_attn.o_proj.bias", (hidden,), 1),)
    if config.mlp_bias:
        table["mlp", "gate_up", "bias"] = gate_up("bias")
        table["mlp", "down", "bias"] = (_whole("mlp.down_proj.bias", (hidden,), 1),)
    return table


def _whole(name: str, shape: tuple[int, ...], row_axes: int) -> Part:
    return Part(name, shape, (0,) * len(shape), row_axes)
