"""Presets: parameter counts published for the models, and the values their public files state."""

import pytest

from model.config import ConfigError, LlamaConfig, RopeScaling
from model.presets import PRESETS, preset


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("tinyllama-1.1b", 1_100_048_384),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_parameter_count(name: str, count: int) -> None:
    assert preset(name).parameter_count() == count


def test_every_preset_is_counted_above() -> None:
    assert len(PRESETS) == 10


@pytest.mark.parametrize("name", PRESETS)
def test_round_trip(name: str) -> None:
    assert LlamaConfig.from_hf(preset(name).to_hf()) == preset(name)


def test_llama_3_2_1b_as_its_config_states() -> None:
    published = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    }
    assert LlamaConfig.from_hf(published) == preset("llama-3.2-1b")


@pytest.mark.parametrize(
    ("name", "theta", "scaling", "positions", "tied"),
    [
        ("llama-2-7b", 10000.0, RopeScaling(), 4096, False),
        ("llama-3-70b", 500000.0, RopeScaling(), 8192, False),
        ("llama-3.1-405b", 500000.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192), 131072, False),
        ("llama-3.2-3b", 500000.0, RopeScaling("llama3", 32.0, 1.0, 4.0, 8192), 131072, True),
        ("tinyllama-1.1b", 10000.0, RopeScaling(), 2048, False),
        ("smollm2-135m", 100000.0, RopeScaling(), 8192, True),
    ],
)
def test_rope_length_and_tying(name: str, theta: float, scaling: RopeScaling, positions: int, tied: bool) -> None:
    config = preset(name)
    found = (
        config.rope_theta,
        config.rope_scaling,
        config.max_position_embeddings,
        config.tie_word_embeddings,
    )
    assert found == (theta, scaling, positions, tied)
    assert config.rms_norm_eps == 1e-5


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"no preset 'llama-4'; known: llama-2-7b, .*smollm2-135m"):
        preset("llama-4")


def test_presets_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        PRESETS["mine"] = preset("llama-2-7b")  # type: ignore[index]
