"""LlamaConfig: every number that fixes what a Llama decoder computes. Plain Python, no jax.

Shape letters: D hidden_size, N num_heads, K num_kv_heads, H head_dim, F intermediate_size, V vocab_size,
L num_layers.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from model.config_fields import ROPE_FIELDS, ConfigError, RopeScaling, check_flag, check_integer, check_number
from model.config_gguf import read_gguf
from model.config_hf import ARCHITECTURE, MODEL_TYPE, read_hf

__all__ = ["ConfigError", "LlamaConfig", "RopeScaling"]


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """A Llama decoder's shape and constants. Immutable and hashable, so it can be a static jit argument.

    rms_norm_eps: added to the mean square inside RMSNorm.
    rope_theta: base of the rotary wavelengths.
    max_position_embeddings: the longest context, in tokens, that the model states.
    tie_word_embeddings: the LM head is the embedding matrix.
    attention_bias: biases on q, k, v and output projections. mlp_bias: on gate, up and down.
    eos_token_ids: every token that ends a generation, in the order the model's files mention them.

    Raises ConfigError when a value is out of range or contradicts another.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            check_integer(name, getattr(self, name))
        check_number("rms_norm_eps", self.rms_norm_eps)
        check_number("rope_theta", self.rope_theta)
        for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
            check_flag(name, getattr(self, name))
        if not isinstance(self.rope_scaling, RopeScaling):
            raise ConfigError(f"rope_scaling is {self.rope_scaling!r}; it must be a RopeScaling")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}: "
                "each KV head must serve the same number of query heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; rotary embedding turns pairs, so it must be even")
        self._check_token_ids()

    def _check_token_ids(self) -> None:
        if not isinstance(self.eos_token_ids, tuple):
            raise ConfigError(f"eos_token_ids is {self.eos_token_ids!r}; it must be a tuple of token ids")
        if len(set(self.eos_token_ids)) != len(self.eos_token_ids):
            raise ConfigError(f"eos_token_ids {self.eos_token_ids} names a token twice")
        named = [("bos_token_id", self.bos_token_id), ("pad_token_id", self.pad_token_id)]
        named += [("eos_token_ids", token_id) for token_id in self.eos_token_ids]
        for name, token_id in named:
            # None is only meaningful for bos and pad, where it says that the model has no such token.
            if token_id is None and name != "eos_token_ids":
                continue
            if check_integer(name, token_id, minimum=0) >= self.vocab_size:
                raise ConfigError(
                    f"{name} {token_id} is outside the vocabulary of {self.vocab_size} tokens "
                    f"(0 to {self.vocab_size - 1})"
                )

    @property
    def group_size(self) -> int:
        """G = N / K: query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def parameter_count(self) -> int:
        """Weights of the whole model, biases included; a tied embedding counts once."""
        queries = self.num_heads * self.head_dim
        keys = self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * keys)
        if self.attention_bias:
            attention += queries + 2 * keys + self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.mlp_bias:
            mlp += 2 * self.intermediate_size + self.hidden_size
        norms = 2 * self.hidden_size
        vocabulary_matrices = 1 if self.tie_word_embeddings else 2
        return (
            self.num_layers * (attention + mlp + norms)
            + vocabulary_matrices * self.vocab_size * self.hidden_size
            + self.hidden_size
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> "LlamaConfig":
        """Read a parsed Hugging Face `config.json` and, for its end-of-text ids, `generation_config.json`.

        Raises ConfigError for anything missing, contradictory or not a plain Llama; see `model.config_hf`.
        """
        return cls(**read_hf(config, generation_config or {}))

    def to_hf(self) -> dict[str, Any]:
        """A `config.json` mapping that Hugging Face reads and `from_hf` turns back into an equal config.

        Rope is in the old form, which old and new versions of transformers both read.
        """
        scaling = self.rope_scaling
        rope_scaling = {"rope_type": scaling.kind}
        rope_scaling |= {name: getattr(scaling, name) for name in ROPE_FIELDS[scaling.kind]}
        eos = list(self.eos_token_ids)
        return {
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if scaling.kind == "default" else rope_scaling,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
            "pad_token_id": self.pad_token_id,
        }

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        *,
        tensor_names: Collection[str],
        rope_freqs: Sequence[float] | None = None,
        rope_theta: float | None = None,
    ) -> "LlamaConfig":
        """Read GGUF metadata (key -> decoded Python value) and the names of the file's tensors.

        rope_freqs: values of the `rope_freqs.weight` tensor, where GGUF keeps Llama 3.1's rope scaling;
            needed exactly when `tensor_names` lists it.
        rope_theta: states theta for a file that does not; refused where it contradicts one that does.

        Raises ConfigError for anything missing, contradictory or not a plain Llama; see `model.config_gguf`.
        """
        return cls(**read_gguf(metadata, tensor_names, rope_freqs, rope_theta))
