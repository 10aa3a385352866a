"""Blocks of parameters out of a checkpoint: any window, any dtype, and checkpoints that are not the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.checkpoint import weights
from model.checkpoint.errors import CheckpointError
from model.checkpoint.safetensors import SafetensorsSource
from model.checkpoint.source import TensorInfo
from model.checkpoint.table import parameter_parts
from model.checkpoint.weights import WeightReader
from model.config import LlamaConfig
from model.presets import PRESETS
from tests.model.checkpoint_files import BF16, expected_parameters, random_tensors, small_config, write_hf

F32 = np.dtype(np.float32)


class MemorySource:
    """A checkpoint in memory that counts the values asked of it."""

    path = Path("memory")

    def __init__(self, values: dict[str, np.ndarray]) -> None:
        self.values = values
        self.tensors = {name: TensorInfo(value.shape, "F32", self.path) for name, value in values.items()}
        self.largest = self.total = 0

    def read(self, name: str, rows: slice, cols: slice | None = None) -> np.ndarray:
        value = self.values[name]
        assert 0 <= rows.start <= rows.stop <= value.shape[0]
        block = value[rows] if cols is None else value[rows, cols]
        if cols is not None:
            assert 0 <= cols.start <= cols.stop <= value.shape[1]
        self.largest = max(self.largest, block.size)
        self.total += block.size
        return block


def whole(reader: WeightReader, path: tuple[str | int, ...]) -> np.ndarray:
    shape = reader.shape(path)
    return reader.read(path, (slice(None),) * len(shape), shape, F32)


CONFIGS = {
    "plain": small_config(),
    "biases": small_config(attention_bias=True, mlp_bias=True),
    "tied": small_config(tie_word_embeddings=True),
    "one kv head": small_config(num_heads=4, num_kv_heads=1),
    "as many kv heads": small_config(num_heads=3, num_kv_heads=3),
    "wide heads": small_config(head_dim=20),
    "one layer": small_config(num_layers=1),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter(name: str) -> None:
    config = CONFIGS[name]
    tensors = random_tensors(config)
    expected = expected_parameters(config, tensors)
    reader = WeightReader(MemorySource(tensors), config)
    assert set(reader.paths) == set(expected)
    for path, value in expected.items():
        assert reader.shape(path) == value.shape
        np.testing.assert_array_equal(whole(reader, path), value)


BIASED = CONFIGS["biases"]
BIASED_TENSORS = random_tensors(BIASED)
BIASED_EXPECTED = expected_parameters(BIASED, BIASED_TENSORS)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_window_of_the_padded_parameter(data: st.DataObject) -> None:
    source = MemorySource(BIASED_TENSORS)
    reader = WeightReader(source, BIASED)
    path = data.draw(st.sampled_from(reader.paths))
    value = BIASED_EXPECTED[path]
    padded = np.zeros([size + data.draw(st.integers(0, 5)) for size in value.shape], np.float32)
    padded[tuple(map(slice, value.shape))] = value
    index = []
    for size in padded.shape:
        start, stop = sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))))
        index.append(data.draw(st.sampled_from([slice(start, stop), slice(None), slice(start, None)])))
    old, weights.CHUNK_VALUES = weights.CHUNK_VALUES, data.draw(st.sampled_from([1, 7, 64, 1 << 18]))
    try:
        block = reader.read(path, index, padded.shape, F32)
        np.testing.assert_array_equal(block, padded[tuple(index)])
        # Nothing was read that is not in the block, and no read was larger than a chunk or one row.
        inside = tuple(slice(side.start or 0, side.stop) for side in index)
        assert source.total == value[tuple(slice(s.start, s.stop) for s in inside)].size
        assert source.largest <= max(weights.CHUNK_VALUES, 48)
    finally:
        weights.CHUNK_VALUES = old


def test_dtype_and_alignment(tmp_path: Path) -> None:
    config = small_config()
    tensors = random_tensors(config)
    for stored in (F32, np.dtype(np.float16), BF16):
        source = SafetensorsSource(write_hf(tmp_path / stored.name, config, tensors, dtype=stored))
        reader = WeightReader(source, config)
        for target in (F32, BF16):
            block = reader.read(("embed", "weight"), (slice(None), slice(None)), (37, 32), target)
            assert block.dtype == target
            assert block.ctypes.data % 64 == 0
            assert block.flags.writeable  # its own memory, not a view of the file
            expected = tensors["model.embed_tokens.weight"].astype(stored).astype(F32).astype(target)
            np.testing.assert_array_equal(block, expected)


@pytest.mark.parametrize("prefixed", [True, False])
def test_names_with_and_without_model(prefixed: bool) -> None:
    config = small_config()
    tensors = random_tensors(config)
    named = tensors if prefixed else {name.removeprefix("model."): value for name, value in tensors.items()}
    reader = WeightReader(MemorySource(named), config)
    np.testing.assert_array_equal(whole(reader, ("norm", "weight")), tensors["model.norm.weight"])


def test_both_namings_at_once_are_refused() -> None:
    config = small_config()
    tensors = random_tensors(config)
    tensors["norm.weight"] = tensors["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"holds both 'model\.norm\.weight' and 'norm\.weight'"):
        WeightReader(MemorySource(tensors), config)


def test_buffers_that_a_model_computes_are_left_unread() -> None:
    config = small_config()
    tensors = random_tensors(config)
    for name in (
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "rotary_emb.inv_freq",
    ):
        extra = {**tensors, name: np.ones(4, np.float32)}
        WeightReader(MemorySource(extra), config)


def test_tied_config_with_a_saved_head_uses_the_embedding() -> None:
    config = small_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    reader = WeightReader(MemorySource({**tensors, "lm_head.weight": np.zeros((37, 32), np.float32)}), config)
    assert ("head", "weight") not in reader.paths


def fault(config: LlamaConfig, tensors: dict[str, np.ndarray]) -> str:
    source = MemorySource(tensors)
    with pytest.raises(CheckpointError) as error:
        WeightReader(source, config)
    assert source.total == 0
    return str(error.value)


def test_untied_config_without_a_head() -> None:
    tensors = random_tensors(small_config(tie_word_embeddings=True))
    message = fault(small_config(), tensors)
    assert "1 tensor needed but missing: lm_head.weight [37, 32]" in message
    assert "tie_word_embeddings" in message


@pytest.mark.parametrize("name", sorted(random_tensors(small_config(attention_bias=True, mlp_bias=True, num_layers=1))))
def test_any_missing_tensor_is_named(name: str) -> None:
    config = small_config(attention_bias=True, mlp_bias=True, num_layers=1)
    tensors = random_tensors(config)
    shape = tensors.pop(name).shape
    assert f"1 tensor needed but missing: {name.removeprefix('model.')} {list(shape)}" in fault(config, tensors)


def test_forgotten_biases_are_unused_tensors() -> None:
    tensors = random_tensors(small_config(attention_bias=True))
    message = fault(small_config(), tensors)
    assert "8 tensors present but not part of the model: model.layers.0.self_attn.q_proj.bias [48]" in message


def test_layer_too_many_and_layer_too_few() -> None:
    message = fault(small_config(num_layers=2), random_tensors(small_config(num_layers=3)))
    assert "9 tensors present but not part of the model: model.layers.2.self_attn.q_proj.weight [48, 32]" in message
    message = fault(small_config(num_layers=4), random_tensors(small_config(num_layers=2)))
    assert "18 tensors needed but missing: layers.2." in message
    assert "and 8 more" in message


def test_wrong_shapes_are_named_with_both_shapes() -> None:
    tensors = random_tensors(small_config())
    tensors["model.layers.1.mlp.down_proj.weight"] = np.ones((45, 32), np.float32)
    tensors["model.norm.weight"] = np.ones((32, 1), np.float32)
    message = fault(small_config(), tensors)
    assert "2 tensors of another shape: " in message
    assert "model.layers.1.mlp.down_proj.weight [45, 32] instead of [32, 45]" in message
    assert "model.norm.weight [32, 1] instead of [32]" in message


def test_all_kinds_of_fault_at_once() -> None:
    tensors = random_tensors(small_config())
    tensors.pop("model.norm.weight")
    tensors["adapter.weight"] = np.ones(3, np.float32)
    tensors["lm_head.weight"] = np.ones((36, 32), np.float32)
    message = fault(small_config(), tensors)
    for part in (
        "memory does not hold",
        "norm.weight [32]",
        "adapter.weight [3]",
        "lm_head.weight [36, 32] instead",
    ):
        assert part in message


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_covered_to_the_last_parameter(name: str) -> None:
    """Tensors of the table have as many values as the config counts, at the sizes nobody can load here."""
    config = PRESETS[name]
    parts = [part for parts in parameter_parts(config).values() for part in parts]
    assert sum(int(np.prod(part.tensor_shape, dtype=np.int64)) for part in parts) == config.parameter_count()
