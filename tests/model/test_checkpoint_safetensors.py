"""Safetensors folders: one file or shards, lazy slices, and checkpoints that are incomplete or damaged."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from model.checkpoint.errors import CheckpointError
from model.checkpoint.safetensors import INDEX_FILE, SINGLE_FILE, SafetensorsSource
from tests.model.checkpoint_files import BF16, random_tensors, small_config, write_hf

CONFIG = small_config(attention_bias=True)


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("dtype", [np.dtype("f4"), np.dtype("f2"), BF16, np.dtype("f8")])
def test_values_and_windows(tmp_path: Path, shards: int, dtype: np.dtype) -> None:
    tensors = random_tensors(CONFIG)
    source = SafetensorsSource(write_hf(tmp_path, CONFIG, tensors, shards=shards, dtype=dtype))
    assert {name: info.shape for name, info in source.tensors.items()} == {n: v.shape for n, v in tensors.items()}
    assert len({info.file for info in source.tensors.values()}) == shards
    for name, value in tensors.items():
        stored = value.astype(dtype)
        whole = source.read(name, slice(0, value.shape[0]))
        assert whole.dtype == dtype
        np.testing.assert_array_equal(whole, stored)
        np.testing.assert_array_equal(source.read(name, slice(2, 7)), stored[2:7])
        if value.ndim == 2:
            np.testing.assert_array_equal(source.read(name, slice(2, 7), slice(3, 11)), stored[2:7, 3:11])


def test_one_file_by_its_own_path(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    source = SafetensorsSource(write_hf(tmp_path, CONFIG, tensors) / SINGLE_FILE)
    assert set(source.tensors) == set(tensors)


def test_only_the_window_is_read(tmp_path: Path) -> None:
    save_file({"big": np.ones((4096, 1024), np.float32)}, tmp_path / SINGLE_FILE)
    tracemalloc.start()
    try:
        source = SafetensorsSource(tmp_path)
        source.read("big", slice(0, 4096), slice(8, 16))
        source.read("big", slice(100, 132))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20  # the tensor has 16 MiB, each window 128 KiB


def test_the_index_wins_over_a_single_file(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    write_hf(tmp_path, CONFIG, {name: value + 1 for name, value in tensors.items()})
    source = SafetensorsSource(write_hf(tmp_path, CONFIG, tensors, shards=2))
    name = "model.norm.weight"
    np.testing.assert_array_equal(source.read(name, slice(0, 32)), tensors[name])


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1, -1000])
def test_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    file = write_hf(tmp_path, CONFIG, random_tensors(CONFIG)) / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged .* download it again"):
        SafetensorsSource(tmp_path)


def test_truncated_shard_is_named(tmp_path: Path) -> None:
    write_hf(tmp_path, CONFIG, random_tensors(CONFIG), shards=3)
    file = tmp_path / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors is damaged"):
        SafetensorsSource(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_hf(tmp_path, CONFIG, random_tensors(CONFIG), shards=3)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors is missing"):
        SafetensorsSource(tmp_path)


def edit_index(folder: Path, changes: dict[str, str]) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"].update(changes)
    (folder / INDEX_FILE).write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.9.nothing"])
def test_index_that_names_a_tensor_the_shard_lacks(tmp_path: Path, name: str) -> None:
    write_hf(tmp_path, CONFIG, random_tensors(CONFIG), shards=2)
    index = json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"]
    other = "model-00001-of-00002.safetensors"
    if index.get(name) == other:
        other = "model-00002-of-00002.safetensors"
    edit_index(tmp_path, {name: other})
    with pytest.raises(CheckpointError, match=f"index.json lists tensors .*'{name}' in {other}"):
        SafetensorsSource(tmp_path)


def test_many_wrong_index_entries_are_counted(tmp_path: Path) -> None:
    write_hf(tmp_path, CONFIG, random_tensors(CONFIG), shards=2)
    edit_index(tmp_path, {f"extra.{i}": "model-00001-of-00002.safetensors" for i in range(13)})
    with pytest.raises(CheckpointError, match=r"'extra.9' in .* and 3 more"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "null"],
)
def test_index_that_is_none(tmp_path: Path, content: str) -> None:
    write_hf(tmp_path, CONFIG, random_tensors(CONFIG), shards=2)
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        SafetensorsSource(tmp_path)


def test_shard_outside_the_folder_is_refused(tmp_path: Path) -> None:
    write_hf(tmp_path / "m", CONFIG, random_tensors(CONFIG), shards=2)
    edit_index(tmp_path / "m", {"model.norm.weight": "../other.safetensors"})
    with pytest.raises(CheckpointError, match="a shard must be a file beside its index"):
        SafetensorsSource(tmp_path / "m")


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    write_hf(tmp_path, CONFIG, random_tensors(CONFIG), shards=2)
    first = tmp_path / "model-00001-of-00002.safetensors"
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match="is in both"):
        SafetensorsSource(tmp_path)


def test_type_that_is_no_plain_float(tmp_path: Path) -> None:
    save_file({"model.layers.0.mlp.up_proj.qweight": np.ones((4, 4), np.int32)}, tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=r"up_proj.qweight' is stored as I32, .*supported: F64, F32, F16, BF16"):
        SafetensorsSource(tmp_path)


def test_folder_without_safetensors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"it holds pytorch_model\.bin.*save the model as safetensors"):
        SafetensorsSource(tmp_path)
    with pytest.raises(CheckpointError, match="gone does not exist"):
        SafetensorsSource(tmp_path / "gone")


def test_file_that_vanishes_after_opening_still_reads(tmp_path: Path) -> None:
    """The mapping holds the file: what was opened stays readable."""
    tensors = random_tensors(CONFIG)
    source = SafetensorsSource(write_hf(tmp_path, CONFIG, tensors))
    (tmp_path / SINGLE_FILE).unlink()
    name = "model.norm.weight"
    np.testing.assert_array_equal(source.read(name, slice(0, 32)), tensors[name])
