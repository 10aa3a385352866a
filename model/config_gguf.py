"""Reads GGUF metadata of architecture `llama` into LlamaConfig's fields.

Key names and their meaning are those of the GGUF specification. It documents three defaults, honoured here:
`head_count_kv` (= head_count), `key_length` and `value_length` (= embedding_length / head_count). Theta
(`rope.freq_base`) is not guessed. GGUF stores floats in 32 bits, so 1e-5 comes back as 9.999999747378752e-06;
such a value is read as the shortest decimal that rounds to the same 32 bits.
"""

import math
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from model.config_fields import (
    ConfigError,
    RopeScaling,
    check_integer,
    check_number,
    merge_token_ids,
    read_token_id,
    require,
)

WHERE = "the GGUF metadata"
ARCHITECTURE = "llama"
ROPE_FREQS = "rope_freqs.weight"
EOS_KEYS = tuple(f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom"))

# Keys by which a file of architecture llama computes something else, and the values that change nothing.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "llama.expert_count": (0,),
    "llama.attention.sliding_window": (0,),
    "llama.attention.causal": (True,),
    "llama.attention.scale": (0,),
    "llama.use_parallel_residual": (False,),
    "llama.logit_scale": (0, 1),
    "llama.embedding_scale": (0, 1),
    "llama.residual_scale": (0, 1),
    "llama.rope.scaling.attn_factor": (0, 1),
}

# The llama3 scalings in public use all have these bounds; Llama 3.1 and 3.2 differ in their factor alone.
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0
_LLAMA3_KNOWN = ((8.0, 8192), (32.0, 8192))  # (factor, original_max_position_embeddings)
_LLAMA3_TOLERANCE = 1e-3  # relative; the tensor is 32-bit, so a true match is far closer

_ATTENTION_BIASES = ("attn_q", "attn_k", "attn_v", "attn_output")
_MLP_BIASES = ("ffn_gate", "ffn_up", "ffn_down")


def read_gguf(
    metadata: Mapping[str, Any],
    tensor_names: Collection[str],
    rope_freqs: Sequence[float] | None,
    rope_theta: float | None,
) -> dict[str, Any]:
    """LlamaConfig's fields; arguments as in `LlamaConfig.from_gguf`. Raises ConfigError."""
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ConfigError(f"general.architecture is {architecture!r}; supported: {ARCHITECTURE!r}")
    for key, neutral in _NEUTRAL_VALUES.items():
        if key in metadata and metadata[key] not in neutral:
            raise ConfigError(f"{key} is {metadata[key]!r}, which is not supported; a plain Llama does not set it")
    hidden_size = _read_integer(metadata, "llama.embedding_length")
    num_heads = _read_integer(metadata, "llama.attention.head_count")
    head_dim = _read_head_dim(metadata, hidden_size, num_heads)
    theta = _read_theta(metadata, rope_theta)
    return {
        "vocab_size": _read_vocab_size(metadata),
        "hidden_size": hidden_size,
        "intermediate_size": _read_integer(metadata, "llama.feed_forward_length"),
        "num_layers": _read_integer(metadata, "llama.block_count"),
        "num_heads": num_heads,
        "num_kv_heads": _read_integer(metadata, "llama.attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": _read_float(metadata, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _read_scaling(metadata, tensor_names, rope_freqs, theta, head_dim),
        "max_position_embeddings": _read_integer(metadata, "llama.context_length"),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "attention_bias": _has_biases(tensor_names, _ATTENTION_BIASES),
        "mlp_bias": _has_biases(tensor_names, _MLP_BIASES),
        "bos_token_id": read_token_id("tokenizer.ggml.bos_token_id", metadata.get("tokenizer.ggml.bos_token_id")),
        "eos_token_ids": merge_token_ids(*((key, metadata.get(key)) for key in EOS_KEYS)),
        "pad_token_id": read_token_id(
            "tokenizer.ggml.padding_token_id", metadata.get("tokenizer.ggml.padding_token_id")
        ),
    }


def shortest_float(value: float) -> float:
    """The shortest decimal that rounds to the same 32-bit float as `value`; `value` if it is not 32-bit."""
    try:
        bits = struct.pack("<f", value)
    except OverflowError:
        return value
    if struct.unpack("<f", bits)[0] != value:
        return value
    decimals = (float(f"{value:.{digits}g}") for digits in range(1, 10))  # 9 digits always suffice
    return next(decimal for decimal in decimals if struct.pack("<f", decimal) == bits)


def llama3_rope_divisors(scaling: RopeScaling, theta: float, head_dim: int) -> list[float]:
    """What llama3 scaling divides each of the head_dim / 2 rotary frequencies by.

    Llama 3.1's rule, with `turns = original_max_position_embeddings / wavelength`: a frequency of more than
    `high_freq_factor` turns is kept, one of fewer than `low_freq_factor` is divided by `factor`, and between
    them the two frequencies are mixed linearly in `turns`.
    """
    assert scaling.original_max_position_embeddings is not None
    divisors = []
    for index in range(head_dim // 2):
        turns = scaling.original_max_position_embeddings / _wavelength(index, theta, head_dim)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        divisors.append(1 / (kept + (1 - kept) / scaling.factor))
    return divisors


def _read_integer(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = metadata.get(key, default) if default is not None else require(metadata, key, WHERE)
    if isinstance(value, list | tuple):
        # Some converters write one number per layer; a plain Llama has the same in all of them.
        if len(set(value)) != 1:
            raise ConfigError(f"{key} differs between layers ({sorted(set(value))}), which is not supported")
        value = value[0]
    return check_integer(key, value)


def _read_float(metadata: Mapping[str, Any], key: str) -> float:
    return shortest_float(check_number(key, require(metadata, key, WHERE)))


def _read_vocab_size(metadata: Mapping[str, Any]) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    stated = metadata.get("llama.vocab_size")
    if stated is None:
        if tokens is None:
            raise ConfigError(f"{WHERE} states neither llama.vocab_size nor tokenizer.ggml.tokens; add one")
        return check_integer("the length of tokenizer.ggml.tokens", len(tokens))
    size = check_integer("llama.vocab_size", stated)
    if tokens is not None and len(tokens) > size:
        raise ConfigError(
            f"tokenizer.ggml.tokens lists {len(tokens)} tokens but llama.vocab_size is {size}: "
            "the tokenizer could produce ids that the model does not have"
        )
    return size


def _read_head_dim(metadata: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    keys = ("llama.attention.key_length", "llama.attention.value_length", "llama.rope.dimension_count")
    key_length, value_length, rotated = (metadata.get(key) for key in keys)
    if key_length is None:
        if hidden_size % num_heads:
            raise ConfigError(
                f"{keys[0]} is not stated and llama.embedding_length {hidden_size} is not a multiple of "
                f"llama.attention.head_count {num_heads}; state {keys[0]}"
            )
        key_length = hidden_size // num_heads
    head_dim = check_integer(keys[0], key_length)
    for key, value, why in ((keys[1], value_length, "key"), (keys[2], rotated, "head")):
        if value is not None and value != head_dim:
            raise ConfigError(
                f"{key} is {value!r} but the {why} length is {head_dim}; only equal lengths are supported"
            )
    return head_dim


def _read_theta(metadata: Mapping[str, Any], rope_theta: float | None) -> float:
    key = "llama.rope.freq_base"
    stated = metadata.get(key)
    if stated is None and rope_theta is None:
        raise ConfigError(
            f"{WHERE} states no rope theta: looked for {key}. It is not guessed, because a wrong theta "
            "gives fluent but worse text. Convert the model again with a converter that writes the key, or "
            "pass rope_theta: Llama 1 and 2 use 10000.0, Llama 3 uses 500000.0"
        )
    if stated is None:
        return check_number("rope_theta", rope_theta)
    theta = shortest_float(check_number(key, stated))
    if rope_theta is not None and rope_theta != theta:
        raise ConfigError(f"rope_theta was given as {rope_theta} but {key} is {theta}; drop one of them")
    return theta


def _read_scaling(
    metadata: Mapping[str, Any],
    tensor_names: Collection[str],
    rope_freqs: Sequence[float] | None,
    theta: float,
    head_dim: int,
) -> RopeScaling:
    if rope_freqs is None and ROPE_FREQS in tensor_names:
        raise ConfigError(f"the file has a tensor {ROPE_FREQS}, which scales rope; pass its values as rope_freqs")
    scaling = _read_linear(metadata)
    if rope_freqs is None:
        return scaling
    recovered = _recover_llama3(rope_freqs, theta, head_dim)
    if scaling.kind != "default" and recovered.kind != "default":
        raise ConfigError(
            f"rope is scaled twice: by the tensor {ROPE_FREQS} and by llama.rope.scaling, linearly by {scaling.factor}"
        )
    return recovered if scaling.kind == "default" else scaling


def _read_linear(metadata: Mapping[str, Any]) -> RopeScaling:
    """Scaling as metadata states it; a factor without a type is linear, as in llama.cpp."""
    kind = metadata.get("llama.rope.scaling.type")
    if kind not in (None, "none", "linear"):
        raise ConfigError(
            f"llama.rope.scaling.type is {kind!r}; supported: 'none', 'linear', "
            f"and llama3 through the tensor {ROPE_FREQS}"
        )
    keys = ("llama.rope.scaling.factor", "llama.rope.scale_linear")  # the second is the older name
    factors = {key: metadata[key] for key in keys if metadata.get(key) not in (None, 0)}
    if len(set(factors.values())) > 1:
        raise ConfigError(f"keys disagree: {'; '.join(f'{key} is {value}' for key, value in factors.items())}")
    if not factors:
        if kind == "linear":
            raise ConfigError(f"llama.rope.scaling.type is 'linear' but {keys[0]} is not stated; add it")
        return RopeScaling()
    key, value = next(iter(factors.items()))
    factor = shortest_float(check_number(key, value))
    if kind == "none" and factor != 1:
        raise ConfigError(f"llama.rope.scaling.type is 'none' but {key} is {factor}; state one or the other")
    if kind != "linear" and factor == 1:
        return RopeScaling()
    return RopeScaling(kind="linear", factor=factor)


def _recover_llama3(rope_freqs: Sequence[float], theta: float, head_dim: int) -> RopeScaling:
    """A llama3 scaling whose divisors are `rope_freqs`; ConfigError when none reproduces every one.

    Several may when there are few frequencies; they then turn every position alike.
    """
    divisors = [check_number(f"{ROPE_FREQS}[{index}]", float(value)) for index, value in enumerate(rope_freqs)]
    if len(divisors) != head_dim // 2:
        raise ConfigError(f"{ROPE_FREQS} has {len(divisors)} values; head size {head_dim} needs {head_dim // 2}")
    if min(divisors) == max(divisors) == 1:
        return RopeScaling()
    for factor, original in (*_LLAMA3_KNOWN, *_fit_llama3(divisors, theta, head_dim)):
        scaling = RopeScaling(
            kind="llama3",
            factor=factor,
            low_freq_factor=_LLAMA3_LOW,
            high_freq_factor=_LLAMA3_HIGH,
            original_max_position_embeddings=original,
        )
        pairs = zip(divisors, llama3_rope_divisors(scaling, theta, head_dim), strict=True)
        if all(math.isclose(found, expected, rel_tol=_LLAMA3_TOLERANCE) for found, expected in pairs):
            return scaling
    raise ConfigError(
        f"{ROPE_FREQS} (values {min(divisors):g} to {max(divisors):g}) is not a llama3 scaling with "
        f"low_freq_factor {_LLAMA3_LOW:g} and high_freq_factor {_LLAMA3_HIGH:g}, as Llama 3.1 and 3.2 have; "
        "other scalings by tensor are not supported"
    )


def _fit_llama3(divisors: Sequence[float], theta: float, head_dim: int) -> Iterator[tuple[float, int]]:
    """(factor, original_max_position_embeddings) candidates that explain one divisor each.

    The longest wavelength is divided by the whole factor; any divisor strictly between 1 and the factor then
    says how many turns its wavelength makes in the original length.
    """
    factor = shortest_float(max(divisors))
    for index, divisor in enumerate(divisors):
        if 1 < divisor < factor:
            kept = (1 / divisor - 1 / factor) / (1 - 1 / factor)
            turns = _LLAMA3_LOW + kept * (_LLAMA3_HIGH - _LLAMA3_LOW)
            yield factor, max(1, round(turns * _wavelength(index, theta, head_dim)))


def _wavelength(index: int, theta: float, head_dim: int) -> float:
    """Positions in one full turn of rotary frequency `index`."""
    return 2 * math.pi * theta ** (2 * index / head_dim)


def _has_biases(tensor_names: Collection[str], modules: Sequence[str]) -> bool:
    names = [f"blk.0.{module}.bias" for module in modules]
    present = [name for name in names if name in tensor_names]
    if present and len(present) < len(names):
        missing = [name for name in names if name not in present]
        raise ConfigError(
            f"the file has {', '.join(present)} but not {', '.join(missing)}; "
            "biases are supported on all of these projections or on none"
        )
    return bool(present)
