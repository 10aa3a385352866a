"""Reads a parsed Hugging Face Llama `config.json` into LlamaConfig's fields.

Both ways of stating rope are read: the old (`rope_theta` beside `rope_scaling`) and the new
(`rope_parameters`, which holds theta too). Keys that change what a model computes are either honoured or
refused by name. Absent keys are refused, save those for which Hugging Face documents a default that every
version has shared: `num_key_value_heads` (= attention heads), `head_dim` (= hidden / heads), `hidden_act`
(silu), `tie_word_embeddings`, `attention_bias`, `mlp_bias` (false), and `rope_scaling` (none). Token ids
that a config does not state are taken as absent, not as Hugging Face's 1 and 2. `pretraining_tp` is accepted
at any value: it only reordered sums during training, and Hugging Face has stopped acting on it.
"""

from collections.abc import Mapping
from typing import Any

from model.config_fields import (
    ROPE_FIELDS,
    ConfigError,
    RopeScaling,
    check_flag,
    check_integer,
    check_number,
    merge_token_ids,
    read_token_id,
    require,
)

WHERE = "config.json"
MODEL_TYPE = "llama"
ARCHITECTURE = "LlamaForCausalLM"

# Keys by which a model that calls itself a Llama computes something else, and the values that change nothing.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None, {}),
    "sliding_window": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "num_local_experts": (None, 0),
    "num_experts": (None, 0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "use_qk_norm": (None, False),
    "is_encoder_decoder": (None, False),
}


def read_hf(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """LlamaConfig's fields from a parsed `config.json` and `generation_config.json`; raises ConfigError."""
    _check_is_plain_llama(config)
    hidden_size = check_integer("hidden_size", require(config, "hidden_size", WHERE))
    num_heads = check_integer("num_attention_heads", require(config, "num_attention_heads", WHERE))
    theta, scaling = _read_rope(config)
    return {
        "vocab_size": check_integer("vocab_size", require(config, "vocab_size", WHERE)),
        "hidden_size": hidden_size,
        "intermediate_size": check_integer("intermediate_size", require(config, "intermediate_size", WHERE)),
        "num_layers": check_integer("num_hidden_layers", require(config, "num_hidden_layers", WHERE)),
        "num_heads": num_heads,
        "num_kv_heads": check_integer("num_key_value_heads", _get(config, "num_key_value_heads", num_heads)),
        "head_dim": _read_head_dim(config, hidden_size, num_heads),
        "rms_norm_eps": check_number("rms_norm_eps", require(config, "rms_norm_eps", WHERE)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": check_integer(
            "max_position_embeddings", require(config, "max_position_embeddings", WHERE)
        ),
        "tie_word_embeddings": check_flag("tie_word_embeddings", _get(config, "tie_word_embeddings", False)),
        "attention_bias": check_flag("attention_bias", _get(config, "attention_bias", False)),
        "mlp_bias": check_flag("mlp_bias", _get(config, "mlp_bias", False)),
        "bos_token_id": read_token_id("bos_token_id", config.get("bos_token_id")),
        "eos_token_ids": merge_token_ids(
            ("eos_token_id", config.get("eos_token_id")),
            ("eos_token_id of generation_config.json", generation_config.get("eos_token_id")),
        ),
        "pad_token_id": read_token_id("pad_token_id", config.get("pad_token_id")),
    }


def _get(mapping: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value under `key`, with null read as absent, as Hugging Face does."""
    value = mapping.get(key)
    return default if value is None else value


def _check_is_plain_llama(config: Mapping[str, Any]) -> None:
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if model_type is None and not architectures:
        raise ConfigError(f"{WHERE} states neither model_type nor architectures; expected model_type {MODEL_TYPE!r}")
    if model_type not in (None, MODEL_TYPE):
        raise ConfigError(f"model_type is {model_type!r}; supported: {MODEL_TYPE!r}")
    if architectures and list(architectures) != [ARCHITECTURE]:
        raise ConfigError(f"architectures is {architectures!r}; supported: [{ARCHITECTURE!r}]")
    activation = _get(config, "hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act is {activation!r}; supported: 'silu'")
    for key, neutral in _NEUTRAL_VALUES.items():
        if key in config and config[key] not in neutral:
            raise ConfigError(
                f"{key} is {_shorten(config[key])}, which is not supported; a plain Llama does not set it"
            )
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise ConfigError(f"layer_types names {', '.join(sorted(map(repr, kinds)))}; supported: 'full_attention'")
    custom = [value for key, value in (config.get("auto_map") or {}).items() if key.startswith("AutoModel")]
    if custom:
        raise ConfigError(
            f"auto_map points to custom model code ({', '.join(map(str, custom))}), which is never run here; "
            "if the weights are a plain Llama's, remove auto_map"
        )


def _shorten(value: Any, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def _read_head_dim(config: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    stated = config.get("head_dim")
    if stated is not None:
        return check_integer("head_dim", stated)
    if hidden_size % num_heads:
        raise ConfigError(
            f"head_dim is not stated and hidden_size {hidden_size} is not a multiple of num_attention_heads "
            f"{num_heads}; state head_dim"
        )
    return hidden_size // num_heads


def _read_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling]:
    """theta and scaling, from whichever forms the config uses; ConfigError where two of them disagree."""
    blocks: dict[str, Mapping[str, Any]] = {}
    for name in ("rope_parameters", "rope_scaling"):
        block = config.get(name)
        if block is not None and not isinstance(block, Mapping):
            raise ConfigError(f"{name} is {block!r}; it must be an object or null")
        if block:
            blocks[name] = block
    thetas = {"rope_theta": config.get("rope_theta")}
    thetas |= {f"{name}.rope_theta": block.get("rope_theta") for name, block in blocks.items()}
    theta = _agree({key: check_number(key, value) for key, value in thetas.items() if value is not None})
    if theta is None:
        raise ConfigError(
            f"{WHERE} states no rope theta: looked for rope_theta and rope_parameters.rope_theta. It is not "
            "guessed, because a wrong theta gives fluent but worse text. Add rope_theta to the file: Llama 1 "
            "and 2, whose files predate the key, use 10000.0; Llama 3 uses 500000.0"
        )
    outer_original = config.get("original_max_position_embeddings")
    scalings = {name: _read_scaling(name, block, outer_original) for name, block in blocks.items()}
    return theta, _agree(scalings) or RopeScaling()


def _agree(stated: Mapping[str, Any]) -> Any:
    """The one value that all the keys state, None when there are no keys; ConfigError if they differ."""
    if len(set(stated.values())) > 1:
        raise ConfigError(f"keys disagree: {'; '.join(f'{key} is {value}' for key, value in stated.items())}")
    return next(iter(stated.values()), None)


def _read_scaling(name: str, block: Mapping[str, Any], outer_original: Any) -> RopeScaling:
    kinds = {f"{name}.{key}": block.get(key) for key in ("rope_type", "type") if block.get(key) is not None}
    kind = _agree(kinds)
    if kind is None:
        # The new form always names its type when it scales; a block with theta alone scales nothing.
        kind = "default"
    if kind not in ROPE_FIELDS:
        raise ConfigError(f"{next(iter(kinds))} is {kind!r}; supported rope types: {', '.join(ROPE_FIELDS)}")
    fields = {key: value for key, value in block.items() if value is not None}
    for key in ("rope_type", "type", "rope_theta"):
        fields.pop(key, None)
    if kind == "llama3" and outer_original is not None:
        # Some configs keep this one beside the block instead of in it.
        fields["original_max_position_embeddings"] = _agree(
            {
                "original_max_position_embeddings": outer_original,
                f"{name}.original_max_position_embeddings": fields.get(
                    "original_max_position_embeddings", outer_original
                ),
            }
        )
    neutral = {"partial_rotary_factor": 1} | ({"factor": 1} if kind == "default" else {})
    fields = {key: value for key, value in fields.items() if key not in neutral or value != neutral[key]}
    expected = ROPE_FIELDS[kind]
    unknown = sorted(set(fields) - set(expected))
    if unknown:
        raise ConfigError(
            f"{name} sets {', '.join(f'{key} = {_shorten(fields[key])}' for key in unknown)}, "
            f"which rope type {kind!r} does not use; it uses: {', '.join(expected) or 'no further keys'}"
        )
    missing = [key for key in expected if key not in fields]
    if missing:
        raise ConfigError(f"{name} of rope type {kind!r} does not state {', '.join(missing)}; add them")
    values: dict[str, Any] = {}
    for key in expected:
        check = check_integer if key == "original_max_position_embeddings" else check_number
        values[key] = check(f"{name}.{key}", fields[key])
    return RopeScaling(kind=kind, **values)
