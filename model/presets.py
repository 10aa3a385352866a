"""Named configs of public Llama models, for arithmetic and for random weights without a download.

Where a family has base and instruct members, the ids that end a generation are those of the instruct one.
"""

from collections.abc import Mapping
from types import MappingProxyType

from model.config import ConfigError, LlamaConfig, RopeScaling


def _llama3(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, rope_factor: float | None
) -> LlamaConfig:
    """A member of the Llama 3 family: 8 KV heads each; `rope_factor` None is Llama 3.0, else 3.1 or 3.2.

    The two small members (3.2-1B and 3B) tie their embeddings, as their factor of 32 tells.
    """
    scaling = RopeScaling()
    if rope_factor is not None:
        scaling = RopeScaling(kind="llama3", factor=rope_factor, original_max_position_embeddings=8192)
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=hidden_size // num_heads,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=scaling,
        max_position_embeddings=8192 if rope_factor is None else 131072,
        tie_word_embeddings=rope_factor == 32.0,
        bos_token_id=128000,
        # <|end_of_text|>, then <|eom_id|> (3.1 on) and <|eot_id|>
        eos_token_ids=(128001, 128009) if rope_factor is None else (128001, 128008, 128009),
    )


PRESETS: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        "llama-2-7b": LlamaConfig(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=11008,
            num_layers=32,
            num_heads=32,
            num_kv_heads=32,
            head_dim=128,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_ids=(2,),
        ),
        "llama-3-8b": _llama3(4096, 14336, 32, 32, None),
        "llama-3-70b": _llama3(8192, 28672, 80, 64, None),
        "llama-3.1-8b": _llama3(4096, 14336, 32, 32, 8.0),
        "llama-3.1-70b": _llama3(8192, 28672, 80, 64, 8.0),
        "llama-3.1-405b": _llama3(16384, 53248, 126, 128, 8.0),
        "llama-3.2-1b": _llama3(2048, 8192, 16, 32, 32.0),
        "llama-3.2-3b": _llama3(3072, 8192, 28, 24, 32.0),
        "tinyllama-1.1b": LlamaConfig(
            vocab_size=32000,
            hidden_size=2048,
            intermediate_size=5632,
            num_layers=22,
            num_heads=32,
            num_kv_heads=4,
            head_dim=64,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_ids=(2,),
        ),
        "smollm2-135m": LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            rms_norm_eps=1e-5,
            rope_theta=100000.0,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_ids=(2,),
            pad_token_id=2,
        ),
    }
)


def preset(name: str) -> LlamaConfig:
    """The config called `name`; ConfigError listing the known names when there is none."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ConfigError(f"there is no preset {name!r}; known: {', '.join(PRESETS)}") from None
