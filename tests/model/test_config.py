"""LlamaConfig: what Hugging Face and GGUF files say is read; what cannot be honoured is refused by name."""

import json
import math
import struct
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import ConfigError, LlamaConfig, RopeScaling
from model.config_gguf import llama3_rope_divisors, shortest_float

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hf(**changes: Any) -> dict[str, Any]:
    """A complete old-form config.json; a change to ... removes the key."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config |= changes
    return {key: value for key, value in config.items() if value is not ...}


def gguf(**changes: Any) -> dict[str, Any]:
    """Complete GGUF metadata; keys of `changes` write `__` for the dot; a change to ... removes the key."""
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 2048,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 48,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": struct.unpack("<f", struct.pack("<f", 1e-5))[0],
        "llama.rope.freq_base": 500000.0,
        "llama.rope.dimension_count": 8,
        "llama.vocab_size": 100,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not ...}


def read_gguf(metadata: dict[str, Any], names: set[str] | None = None, **options: Any) -> LlamaConfig:
    return LlamaConfig.from_gguf(metadata, tensor_names={"output.weight"} | (names or set()), **options)


PLAIN = LlamaConfig(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_ids=(2,),
)


# Hugging Face


def test_old_form() -> None:
    assert LlamaConfig.from_hf(hf()) == PLAIN


def test_new_form_holds_theta_in_rope_parameters() -> None:
    config = hf(rope_theta=..., rope_scaling=..., rope_parameters={"rope_theta": 500000.0, "rope_type": "default"})
    assert LlamaConfig.from_hf(config) == PLAIN


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": LLAMA3_SCALING},
        {"rope_theta": ..., "rope_parameters": LLAMA3_SCALING | {"rope_theta": 500000.0}},
        {"rope_scaling": LLAMA3_SCALING, "rope_parameters": LLAMA3_SCALING | {"rope_theta": 500000}},
        {"rope_scaling": {**LLAMA3_SCALING, "type": "llama3"}},
        {
            "rope_scaling": {k: v for k, v in LLAMA3_SCALING.items() if not k.startswith("original")},
            "original_max_position_embeddings": 8192,
        },
    ],
    ids=["old", "new", "both", "two type keys", "original length beside"],
)
def test_llama3_scaling_in_every_form(changes: dict[str, Any]) -> None:
    expected = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert LlamaConfig.from_hf(hf(**changes)) == replace(PLAIN, rope_scaling=expected)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_linear_scaling(key: str) -> None:
    config = LlamaConfig.from_hf(hf(rope_scaling={key: "linear", "factor": 4}))
    assert config.rope_scaling == RopeScaling("linear", 4.0)


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}, {"type": "default", "factor": 1.0}])
def test_no_scaling(scaling: Any) -> None:
    assert LlamaConfig.from_hf(hf(rope_scaling=scaling)) == PLAIN


def test_documented_defaults() -> None:
    minimal = hf(num_key_value_heads=..., tie_word_embeddings=..., hidden_act=..., rope_scaling=...)
    config = LlamaConfig.from_hf(minimal)
    assert config == replace(PLAIN, num_kv_heads=4)
    assert config.head_dim == 8
    assert (config.attention_bias, config.mlp_bias) == (False, False)


def test_every_stated_value_is_read() -> None:
    config = LlamaConfig.from_hf(
        hf(
            head_dim=16,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            pad_token_id=7,
            rms_norm_eps=1e-6,
        )
    )
    assert config == replace(
        PLAIN,
        head_dim=16,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        pad_token_id=7,
        rms_norm_eps=1e-6,
    )


def test_null_head_dim_is_hidden_over_heads() -> None:
    assert LlamaConfig.from_hf(hf(head_dim=None)).head_dim == 8


def test_architecture_alone_identifies_a_llama() -> None:
    assert LlamaConfig.from_hf(hf(model_type=...)) == PLAIN
    assert LlamaConfig.from_hf(hf(architectures=...)) == PLAIN


def test_harmless_keys_are_accepted() -> None:
    config = hf(
        pretraining_tp=2,
        torch_dtype="bfloat16",
        use_cache=True,
        attention_dropout=0.1,
        sliding_window=None,
        quantization_config=None,
        layer_types=["full_attention", "full_attention"],
        auto_map={"AutoTokenizer": "custom.Tokenizer"},
        partial_rotary_factor=1.0,
    )
    assert LlamaConfig.from_hf(config) == PLAIN


@pytest.mark.parametrize(
    ("eos", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (None, None, ()),
        (..., {}, ()),
        (2, {"eos_token_id": [3, 2, 5]}, (2, 3, 5)),
        (None, {"eos_token_id": 4}, (4,)),
        ([2, 2], {"eos_token_id": None}, (2,)),
        (-1, {}, ()),
    ],
)
def test_eos_union(eos: Any, generation: Any, expected: tuple[int, ...]) -> None:
    assert LlamaConfig.from_hf(hf(eos_token_id=eos), generation).eos_token_ids == expected


def test_pad_of_minus_one_means_none() -> None:
    assert LlamaConfig.from_hf(hf(pad_token_id=-1)).pad_token_id is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'; supported: 'llama'"),
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM.*supported.*LlamaForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": ..., "architectures": ...}, "neither model_type nor architectures"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is .*awq"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types names 'sliding_attention'"),
        ({"auto_map": {"AutoModelForCausalLM": "clex.Clex"}}, "auto_map points to custom .*clex.Clex"),
        ({"rope_theta": ...}, "looked for rope_theta and rope_parameters.rope_theta.*Add rope_theta"),
        ({"rope_theta": None}, "no rope theta"),
        ({"rope_theta": "10000"}, "rope_theta is '10000'; it must be a finite number"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": math.nan}, "rope_theta is nan"),
        ({"rope_parameters": {"rope_theta": 10000.0}}, "disagree: rope_theta is 500000.0; rope_parameters"),
        (
            {"rope_scaling": LLAMA3_SCALING, "rope_parameters": {"rope_type": "linear", "factor": 8.0}},
            "keys disagree: rope_parameters is .*linear.*rope_scaling is .*llama3",
        ),
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, "keys disagree"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "'yarn'; supported rope types: default, linear, llama3",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling.type is 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' does not state factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5; it must be at least 1"),
        ({"rope_scaling": {"factor": 2.0}}, "factor = 2.0, which rope type 'default' does not use"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}}, "beta_fast = 32"),
        ({"rope_scaling": [8.0]}, "rope_scaling is .*must be an object"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "does not state low_freq_factor, high_freq_factor, original_max_position_embeddings",
        ),
        ({"rope_scaling": LLAMA3_SCALING | {"low_freq_factor": 4.0}}, "low_freq_factor 4.0 must be below"),
        (
            {"rope_scaling": LLAMA3_SCALING | {"original_max_position_embeddings": 8192.5}},
            "original_max_position_embeddings is 8192.5; it must be an integer",
        ),
        ({"rope_scaling": LLAMA3_SCALING, "original_max_position_embeddings": 4096}, "keys disagree"),
        ({"rms_norm_eps": ...}, "does not state rms_norm_eps"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
        ({"max_position_embeddings": ...}, "does not state max_position_embeddings"),
        ({"vocab_size": ...}, "does not state vocab_size"),
        ({"vocab_size": True}, "vocab_size is True; it must be an integer"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0; it must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be an integer of at least 1"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"hidden_size": 30, "head_dim": None}, "hidden_size 30 is not a multiple .* 4; state head_dim"),
        ({"head_dim": 7}, "head_dim is 7; .* even"),
        ({"attention_bias": 1}, "attention_bias is 1; it must be true or false"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": 100}, "eos_token_ids 100 is outside the vocabulary of 100 tokens"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"bos_token_id": [1]}, r"bos_token_id is \[1\]"),
        ({"pad_token_id": 100}, "pad_token_id 100 is outside"),
    ],
)
def test_refused_hf(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LlamaConfig.from_hf(hf(**changes))


@st.composite
def configs(draw: st.DrawFn) -> LlamaConfig:
    """Any valid config."""
    sizes = st.integers(1, 1 << 20)
    positive = st.floats(1e-12, 1e12)
    vocab_size = draw(st.integers(1, 1 << 20))
    token = st.integers(0, vocab_size - 1)
    kv_heads = draw(st.integers(1, 64))
    low, high = sorted(draw(st.lists(positive, min_size=2, max_size=2, unique=True)))
    factor = draw(st.floats(1, 1e6))
    scaling = draw(
        st.sampled_from(
            [
                RopeScaling(),
                RopeScaling("linear", factor),
                RopeScaling("llama3", factor, low, high, draw(sizes)),
            ]
        )
    )
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=draw(sizes),
        intermediate_size=draw(sizes),
        num_layers=draw(sizes),
        num_heads=kv_heads * draw(st.integers(1, 16)),
        num_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 512)),
        rms_norm_eps=draw(positive),
        rope_theta=draw(positive),
        rope_scaling=scaling,
        max_position_embeddings=draw(sizes),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        bos_token_id=draw(st.none() | token),
        eos_token_ids=tuple(draw(st.lists(token, max_size=4, unique=True))),
        pad_token_id=draw(st.none() | token),
    )


@given(configs())
@settings(max_examples=200, deadline=None)
def test_to_hf_round_trip_through_json(config: LlamaConfig) -> None:
    assert LlamaConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@given(configs())
@settings(max_examples=50, deadline=None)
def test_parameter_count_adds_up_the_tensors(config: LlamaConfig) -> None:
    d, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = [d, d, q * d, kv * d, kv * d, d * q, f * d, f * d, d * f]
    if config.attention_bias:
        layer += [q, kv, kv, d]
    if config.mlp_bias:
        layer += [f, f, d]
    outside = [v * d, d] if config.tie_word_embeddings else [v * d, d, v * d]
    assert config.parameter_count() == config.num_layers * sum(layer) + sum(outside)


def test_group_size() -> None:
    assert replace(PLAIN, num_heads=12, num_kv_heads=3).group_size == 4


def test_is_hashable_and_frozen() -> None:
    assert hash(PLAIN) == hash(LlamaConfig.from_hf(hf()))
    with pytest.raises(AttributeError):
        PLAIN.vocab_size = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token_ids": [2]}, r"eos_token_ids is \[2\]; it must be a tuple"),
        ({"eos_token_ids": (2, 2)}, "names a token twice"),
        ({"eos_token_ids": (None,)}, "eos_token_ids is None"),
        ({"rope_scaling": None}, "rope_scaling is None"),
        ({"num_heads": -4}, "num_heads is -4"),
    ],
)
def test_refused_fields(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(PLAIN, **changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "yarn"}, "rope type 'yarn' is not supported"),
        ({"kind": "default", "factor": 2.0}, "'default' has no scaling"),
        ({"kind": "linear", "factor": 2.0, "low_freq_factor": 2.0}, "belong to rope type 'llama3'"),
        ({"kind": "llama3", "factor": 2.0}, "original_max_position_embeddings is None"),
        ({"kind": "linear", "factor": math.inf}, "factor is inf"),
    ],
)
def test_refused_rope_scaling(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RopeScaling(**arguments)


def test_config_imports_without_jax() -> None:
    code = "import sys, model.config, model.presets; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# GGUF


def test_gguf() -> None:
    assert read_gguf(gguf()) == PLAIN


def test_gguf_documented_defaults() -> None:
    metadata = gguf(llama__attention__head_count_kv=..., llama__rope__dimension_count=..., llama__vocab_size=...)
    metadata["tokenizer.ggml.tokens"] = ["x"] * 100
    assert read_gguf(metadata) == replace(PLAIN, num_kv_heads=4)


def test_gguf_key_length_is_the_head_size() -> None:
    metadata = gguf(llama__attention__key_length=16, llama__attention__value_length=16, llama__rope__dimension_count=16)
    assert read_gguf(metadata) == replace(PLAIN, head_dim=16)


def test_gguf_per_layer_lists_of_one_value() -> None:
    metadata = gguf(llama__attention__head_count_kv=[2, 2], llama__feed_forward_length=[48, 48])
    assert read_gguf(metadata) == PLAIN


def test_gguf_ties_without_an_output_tensor() -> None:
    assert LlamaConfig.from_gguf(gguf(), tensor_names=set()) == replace(PLAIN, tie_word_embeddings=True)


def test_gguf_biases_are_seen_in_the_tensors() -> None:
    attention = {f"blk.0.{name}.bias" for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    mlp = {f"blk.0.{name}.bias" for name in ("ffn_gate", "ffn_up", "ffn_down")}
    assert read_gguf(gguf(), attention) == replace(PLAIN, attention_bias=True)
    assert read_gguf(gguf(), mlp) == replace(PLAIN, mlp_bias=True)


def test_gguf_ends_are_eos_eot_eom() -> None:
    metadata = gguf(
        tokenizer__ggml__eot_token_id=9, tokenizer__ggml__eom_token_id=2, tokenizer__ggml__padding_token_id=0
    )
    assert read_gguf(metadata) == replace(PLAIN, eos_token_ids=(2, 9), pad_token_id=0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"llama.rope.scaling.type": "none"}, RopeScaling()),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 1.0}, RopeScaling()),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"llama.rope.scaling.factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"llama.rope.scale_linear": 2.0}, RopeScaling("linear", 2.0)),
        ({"llama.rope.scale_linear": 1.0}, RopeScaling()),
    ],
)
def test_gguf_scaling_in_metadata(changes: dict[str, Any], expected: RopeScaling) -> None:
    assert read_gguf(gguf() | changes).rope_scaling == expected


def test_gguf_theta_can_be_given_for_a_file_without_it() -> None:
    assert read_gguf(gguf(llama__rope__freq_base=...), rope_theta=10000.0).rope_theta == 10000.0
    assert read_gguf(gguf(), rope_theta=500000.0) == PLAIN


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "qwen2"}, "general.architecture is 'qwen2'; supported: 'llama'"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"llama.attention.sliding_window": 4096}, "sliding_window is 4096"),
        ({"llama.rope.freq_base": None}, "no rope theta: looked for llama.rope.freq_base.*pass rope_theta"),
        (
            {"llama.attention.layer_norm_rms_epsilon": None},
            "does not state llama.attention.layer_norm_rms_eps",
        ),
        ({"llama.context_length": None}, "does not state llama.context_length"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count is 4 but the head length is 8"),
        ({"llama.attention.value_length": 4}, "value_length is 4 but the key length is 8"),
        ({"llama.embedding_length": 30}, "30 is not a multiple of llama.attention.head_count 4"),
        ({"llama.attention.head_count_kv": [2, 4]}, r"head_count_kv differs between layers \(\[2, 4\]\)"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}, "type is 'yarn'; supported"),
        ({"llama.rope.scaling.type": "linear"}, "'linear' but llama.rope.scaling.factor is not stated"),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0}, "'none' but .* is 2.0"),
        ({"llama.rope.scaling.factor": 2.0, "llama.rope.scale_linear": 4.0}, "keys disagree"),
        ({"tokenizer.ggml.tokens": ["x"] * 101}, "lists 101 tokens but llama.vocab_size is 100"),
        ({"llama.vocab_size": None}, "neither llama.vocab_size nor tokenizer.ggml.tokens"),
    ],
)
def test_refused_gguf(changes: dict[str, Any], message: str) -> None:
    metadata = {key: value for key, value in (gguf() | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        read_gguf(metadata)


def test_refused_gguf_tensors() -> None:
    with pytest.raises(ConfigError, match=r"blk.0.attn_q.bias but not blk.0.attn_k.bias"):
        read_gguf(gguf(), {"blk.0.attn_q.bias"})
    with pytest.raises(ConfigError, match="pass its values as rope_freqs"):
        read_gguf(gguf(), {"rope_freqs.weight"})
    with pytest.raises(ConfigError, match=r"rope_theta was given as 10000.0 but llama.rope.freq_base is 500000"):
        read_gguf(gguf(), rope_theta=10000.0)


def rope_divisors(factor: float, original: int, theta: float, head_dim: int) -> list[float]:
    """llama3 divisors as 32-bit floats, case by case, with Llama's low 1 and high 4."""
    divisors = []
    for index in range(head_dim // 2):
        frequency = 1 / theta ** (2 * index / head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength < original / 4:
            scaled = frequency
        elif wavelength > original / 1:
            scaled = frequency / factor
        else:
            smooth = (original / wavelength - 1) / (4 - 1)
            scaled = (1 - smooth) * frequency / factor + smooth * frequency
        divisors.append(struct.unpack("<f", struct.pack("<f", frequency / scaled))[0])
    return divisors


@pytest.mark.parametrize(
    ("factor", "original", "theta", "head_dim"),
    [
        (8.0, 8192, 5e5, 128),
        (32.0, 8192, 5e5, 64),
        (16.0, 8192, 5e5, 128),
        (4.0, 64, 1e4, 16),
        (8.0, 8192, 5e5, 8),
    ],
)
def test_llama3_scaling_is_recovered_from_the_tensor(factor: float, original: int, theta: float, head_dim: int) -> None:
    divisors = rope_divisors(factor, original, theta, head_dim)
    config = read_gguf(
        gguf(
            llama__rope__freq_base=theta,
            llama__rope__dimension_count=head_dim,
            llama__attention__key_length=head_dim,
        ),
        {"rope_freqs.weight"},
        rope_freqs=divisors,
    )
    assert config.rope_scaling == RopeScaling("llama3", factor, 1.0, 4.0, original)
    assert llama3_rope_divisors(config.rope_scaling, theta, head_dim) == pytest.approx(divisors, rel=1e-6)


def test_rope_tensor_of_ones_scales_nothing() -> None:
    assert read_gguf(gguf(), {"rope_freqs.weight"}, rope_freqs=[1.0] * 4) == PLAIN


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0] * 3, "has 3 values; head size 8 needs 4"),
        ([1.0, 5.0, 6.0, 9.0], r"values 1 to 9\) is not a llama3 scaling"),
        ([0.5, 0.5, 0.5, 0.5], "is not a llama3 scaling"),
        ([1.0, 1.0, math.nan, 8.0], r"rope_freqs.weight\[2\] is nan"),
    ],
)
def test_other_rope_tensors_are_refused(values: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_gguf(gguf(), {"rope_freqs.weight"}, rope_freqs=values)


def test_rope_scaled_twice_is_refused() -> None:
    metadata = gguf(llama__rope__scaling__factor=2.0)
    with pytest.raises(ConfigError, match="scaled twice"):
        read_gguf(metadata, {"rope_freqs.weight"}, rope_freqs=rope_divisors(8.0, 8192, 5e5, 8))


@pytest.mark.parametrize("value", [1e-5, 1e-6, 0.1, 500000.0, 10000.0, 1e30, 123456.7])
def test_shortest_float_undoes_32_bit_rounding(value: float) -> None:
    assert shortest_float(struct.unpack("<f", struct.pack("<f", value))[0]) == value


def test_shortest_float_keeps_what_is_not_32_bit() -> None:
    assert shortest_float(0.1) == 0.1
    assert shortest_float(1e300) == 1e300
    assert shortest_float(1 / 3) == 1 / 3
