"""Orbax checkpoints: any mesh to any mesh, and saves that fail or are interrupted."""

from __future__ import annotations

import gc
import json
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.checkpoint import orbax, orbax_folder
from model.checkpoint.errors import CheckpointError
from model.checkpoint.load import load_params
from model.checkpoint.orbax import restore_params, save_params
from model.checkpoint.orbax_folder import MARKER_FILE, check_destination, is_interrupted, is_orbax, read_info
from model.checkpoint.parameters import abstract_leaves
from model.checkpoint.safetensors import SafetensorsSource
from model.config import ConfigError, LlamaConfig
from model.tokenizer import Tokenizer
from sharding.layout import Layout
from sharding.mesh import make_mesh
from tests.model.checkpoint_files import random_tensors, small_config, write_hf
from tests.model.tokenizer_files import save_folder

# A read of a damaged array leaves coroutines in cycles; what Python says when it collects them belongs to these tests.
pytestmark = pytest.mark.filterwarnings("error", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True, scope="module")
def _leave_nothing_to_collect() -> Iterator[None]:
    yield
    gc.collect()


CONFIG = small_config(attention_bias=True, mlp_bias=True, eos_token_ids=(2, 5))


def layout(tp: int, data: int = 1, config: LlamaConfig = CONFIG) -> Layout:
    return Layout(make_mesh(tp, config.num_kv_heads, data=data))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SafetensorsSource:
    return SafetensorsSource(write_hf(tmp_path_factory.mktemp("hf"), CONFIG, random_tensors(CONFIG)))


def loaded(source: SafetensorsSource, tp: int, dtype: Any = "f32", layers: Any = "unrolled", data: int = 1) -> Any:
    return load_params(source, CONFIG, layout(tp, data), dtype, layers, progress=False)


def check_equal(found: Any, expected: Any) -> None:
    """The same parameters, in the same order, on the same devices, to the bit."""
    assert list(found) == list(expected)
    for path, value in expected.items():
        assert found[path].shape == value.shape, path
        assert found[path].dtype == value.dtype
        assert found[path].sharding == value.sharding
        np.testing.assert_array_equal(np.asarray(found[path]), np.asarray(value), err_msg=str(path))


@pytest.mark.parametrize("saved_tp", [1, 2, 5])
def test_any_mesh_to_any_mesh(source: SafetensorsSource, tmp_path: Path, saved_tp: int) -> None:
    """Padding differs at 1, 3, 4, 5 and 8: the arrays must be those a load at that degree gives."""
    save_params(tmp_path / "c", loaded(source, saved_tp), CONFIG, layout(saved_tp))
    for tp in (1, 2, 3, 4, 5, 8):
        check_equal(restore_params(tmp_path / "c", layout(tp), progress=False), loaded(source, tp))


@pytest.mark.parametrize("saved", ["unrolled", "scan"])
def test_either_layer_form_to_either(source: SafetensorsSource, tmp_path: Path, saved: Any) -> None:
    save_params(tmp_path / "c", loaded(source, 2, layers=saved), CONFIG, layout(2))
    for layers in ("unrolled", "scan"):
        for tp in (2, 4):
            expected = loaded(source, tp, layers=layers)
            check_equal(restore_params(tmp_path / "c", layout(tp), layers=layers, progress=False), expected)


@pytest.mark.parametrize("saved", ["f32", "bf16"])
def test_dtype_is_kept_or_cast(source: SafetensorsSource, tmp_path: Path, saved: str) -> None:
    save_params(tmp_path / "c", loaded(source, 2, saved), CONFIG, layout(2))
    check_equal(restore_params(tmp_path / "c", layout(2), progress=False), loaded(source, 2, saved))
    assert read_info(tmp_path / "c").dtype == (jnp.float32 if saved == "f32" else jnp.bfloat16)
    narrow = restore_params(tmp_path / "c", layout(2), "bf16", progress=False)
    check_equal(narrow, loaded(source, 2, "bf16"))
    if saved == "bf16":
        wide = restore_params(tmp_path / "c", layout(2), jnp.float32, progress=False)
        check_equal({path: value.astype(jnp.bfloat16) for path, value in wide.items()}, narrow)


def test_data_replicas(source: SafetensorsSource, tmp_path: Path) -> None:
    save_params(tmp_path / "c", loaded(source, 2, data=2), CONFIG, layout(2, 2))
    check_equal(restore_params(tmp_path / "c", layout(1, 4), progress=False), loaded(source, 1, data=4))


def test_no_device_is_handed_more_than_its_slice(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(vocab_size=4096, hidden_size=256, tie_word_embeddings=True)
    folder = write_hf(tmp_path_factory.mktemp("big"), config, random_tensors(config))
    params = load_params(SafetensorsSource(folder), config, layout(1, config=config), "f32", progress=False)
    save_params(tmp_path / "c", params, config, layout(1, config=config))
    placed: list[int] = []
    original = jax.device_put

    def recorded(value: Any, *args: Any, **kwargs: Any) -> Any:
        placed.append(value.nbytes)
        return original(value, *args, **kwargs)

    monkeypatch.setattr(jax, "device_put", recorded)
    for tp in (2, 4):
        placed.clear()
        where = layout(tp, config=config)
        restored = restore_params(tmp_path / "c", where, progress=False)
        leaves = abstract_leaves(config, "unrolled").values()
        slices = [4 * int(np.prod(where.local_shape(leaf.shape, leaf.axes))) for leaf in leaves]
        assert max(placed) == max(slices) == 4096 * 256 * 4 // tp
        for path, leaf in abstract_leaves(config, "unrolled").items():
            if any(leaf.axes):
                assert all(s.data.nbytes * tp == restored[path].nbytes for s in restored[path].addressable_shards)


def test_progress_reaches_the_end(source: SafetensorsSource, tmp_path: Path) -> None:
    save_params(tmp_path / "c", loaded(source, 2), CONFIG, layout(2))
    calls: list[tuple[int, int]] = []
    restore_params(tmp_path / "c", layout(4), progress=lambda *both: calls.append(both))
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)
    assert len(calls) > 1
    assert calls[-1][0] == calls[-1][1]


def test_files_beside_the_arrays(source: SafetensorsSource, tmp_path: Path) -> None:
    save_folder(tmp_path / "tokenizer")
    tokenizer = Tokenizer.from_folder(tmp_path / "tokenizer")
    generation = b'{"eos_token_id": [2, 5], "temperature": 0.6}'
    where = save_params(
        tmp_path / "c",
        loaded(source, 2),
        CONFIG,
        layout(2),
        tokenizer=tokenizer,
        files={"generation_config.json": generation},
    )
    assert where == tmp_path / "c"
    assert is_orbax(where)
    info = read_info(where)
    assert (info.config, info.tp, info.path) == (CONFIG, 2, where)
    assert json.loads((where / MARKER_FILE).read_text()) == {"format_version": 1, "dtype": "float32", "tp": 2}
    # Others can read the config too.
    assert LlamaConfig.from_hf(json.loads((where / "config.json").read_text())) == CONFIG
    assert (where / "generation_config.json").read_bytes() == generation
    assert Tokenizer.from_folder(where).encode("Hello, world") == tokenizer.encode("Hello, world")


@pytest.mark.parametrize("name", ["config.json", "params", MARKER_FILE, "../x", "a/b", ""])
def test_files_that_would_do_harm(source: SafetensorsSource, tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be kept in a checkpoint"):
        save_params(tmp_path / "c", loaded(source, 1), CONFIG, layout(1), files={name: b""})
    assert list(tmp_path.iterdir()) == []


class Interrupted(BaseException):
    """Like KeyboardInterrupt: no handler of ordinary errors sees it."""


@pytest.mark.parametrize("point", ["begin", "arrays", "small files", "move"])
@pytest.mark.parametrize("replaces", [False, True])
def test_interrupted_save_leaves_nothing_new(
    source: SafetensorsSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, replaces: bool
) -> None:
    """Wherever it stops, the destination is what it was before, and nothing else can be loaded."""
    where = tmp_path / "c"
    if replaces:
        save_params(where, loaded(source, 1, "bf16"), CONFIG, layout(1))

    def stop(*_: Any, **__: Any) -> None:
        raise Interrupted

    module, name = {
        "begin": (orbax, "_write_arrays"),
        "arrays": (orbax.ocp.PyTreeCheckpointHandler, "finalize"),
        "small files": (orbax_folder.os, "fsync"),
        "move": (orbax_folder, "_move_into_place"),
    }[point]
    with monkeypatch.context() as patch:
        patch.setattr(module, name, stop)
        with pytest.raises(Interrupted):
            save_params(where, loaded(source, 2), CONFIG, layout(2), overwrite=replaces)
    if replaces:
        check_equal(restore_params(where, layout(1), progress=False), loaded(source, 1, "bf16"))
    assert [path.name for path in tmp_path.iterdir()] == (["c"] if replaces else [])
    save_params(where, loaded(source, 2), CONFIG, layout(2), overwrite=replaces)
    check_equal(restore_params(where, layout(2), progress=False), loaded(source, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_what_a_killed_save_leaves_is_no_checkpoint(
    source: SafetensorsSource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A killed process cleans nothing up: its folder must not load, and the next save must name it."""
    where = tmp_path / "c"

    def stop(*_: Any, **__: Any) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(orbax_folder.os, "fsync", stop)
        patch.setattr(orbax_folder.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Interrupted):
            save_params(where, loaded(source, 1), CONFIG, layout(1))
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("c.incomplete-")
    assert is_interrupted(left)
    with pytest.raises(CheckpointError, match="is not a finished Orbax checkpoint"):
        restore_params(left, layout(1))
    with caplog.at_level(logging.WARNING, "model.checkpoint"):
        save_params(where, loaded(source, 1), CONFIG, layout(1))
    assert f"left by interrupted saves, and safe to delete: {left}" in caplog.text
    assert is_orbax(where)
    assert not is_interrupted(where)


def test_failed_array_write_is_reported(
    source: SafetensorsSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

    monkeypatch.setattr(orbax.ocp.Checkpointer, "save", full)
    with pytest.raises(CheckpointError, match=r"cannot write the arrays of .*No space left"):
        save_params(tmp_path / "c", loaded(source, 1), CONFIG, layout(1))
    assert list(tmp_path.iterdir()) == []


def test_destination_that_cannot_be_made(source: SafetensorsSource, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"cannot write .*file/c: .*file is a file; choose another path"):
        save_params(tmp_path / "file" / "c", loaded(source, 1), CONFIG, layout(1))


def test_destinations(source: SafetensorsSource, tmp_path: Path) -> None:
    params = loaded(source, 1)
    deep = save_params(tmp_path / "new" / "deep" / "c", params, CONFIG, layout(1))
    with pytest.raises(CheckpointError, match="exists: choose another path, or ask to overwrite"):
        save_params(deep, params, CONFIG, layout(1))
    save_params(deep, loaded(source, 1, "bf16"), CONFIG, layout(1), overwrite=True)
    assert read_info(deep).dtype == jnp.bfloat16
    assert [path.name for path in deep.parent.iterdir()] == ["c"]
    (tmp_path / "empty").mkdir()
    assert is_orbax(save_params(tmp_path / "empty", params, CONFIG, layout(1)))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    (tmp_path / "file").write_text("x")
    for name in ("home", "file"):
        for overwrite in (False, True):
            with pytest.raises(CheckpointError, match="is not an Orbax checkpoint of this program"):
                save_params(tmp_path / name, params, CONFIG, layout(1), overwrite=overwrite)
    assert (tmp_path / "home" / "letter.txt").read_text() == "dear"


def test_destination_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert check_destination("c") == tmp_path / "c"
    assert check_destination("~/c") == tmp_path / "home" / "c"


@pytest.fixture(scope="module")
def pristine(source: SafetensorsSource, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_params(tmp_path_factory.mktemp("pristine") / "c", loaded(source, 2), CONFIG, layout(2))


@pytest.fixture
def saved(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "c"))


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 3}, "format_version is 3; this program reads versions 1 and 2"),
        ({"format_version": None}, "format_version is None"),
        ({"tp": 0}, "tp is 0; it must be a positive integer"),
        ({"tp": "2"}, "tp is '2'"),
        ({"dtype": "int8"}, "weights cannot be kept as 'int8'"),
        ({"dtype": None}, "weights cannot be kept as None"),
    ],
)
def test_bad_marker(saved: Path, changes: dict[str, Any], message: str) -> None:
    edit(saved / MARKER_FILE, **changes)
    with pytest.raises(CheckpointError, match=message):
        restore_params(saved, layout(2))


@pytest.mark.parametrize("name", [MARKER_FILE, "config.json"])
@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_bad_json(saved: Path, name: str, content: str) -> None:
    (saved / name).write_text(content)
    with pytest.raises(CheckpointError, match=name):
        restore_params(saved, layout(2))


def test_bad_config(saved: Path) -> None:
    edit(saved / "config.json", model_type="mamba")
    with pytest.raises(ConfigError, match="mamba"):
        restore_params(saved, layout(2))


def test_missing_files(saved: Path) -> None:
    (saved / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        restore_params(saved, layout(2))
    (saved / MARKER_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"has no shardstream\.json"):
        restore_params(saved, layout(2))
    with pytest.raises(CheckpointError, match=r"has no shardstream\.json"):
        restore_params(saved.with_name("gone"), layout(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, r"layers\.2\.attention\.out\.bias \[32\] is missing"),
        ({"num_hidden_layers": 1}, r"layers\.1\.attention\.out\.bias \[32\] is not part of the model"),
        ({"mlp_bias": False}, r"layers\.0\.mlp\.down\.bias \[32\] is not part of the model"),
        ({"tie_word_embeddings": True}, r"head\.weight \[38, 32\] is not part of the model"),
        ({"vocab_size": 30}, r"embed\.weight is \[38, 32\] instead of \[30, 32\] \(saved at tp=2\)"),
        ({"vocab_size": 39}, r"embed\.weight is \[38, 32\] instead of \[39, 32\]"),
        ({"intermediate_size": 44}, r"mlp\.down\.weight is \[32, 46\] instead of \[32, 44\]"),
    ],
)
def test_config_of_another_model(saved: Path, changes: dict[str, Any], message: str) -> None:
    edit(saved / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        restore_params(saved, layout(2))


def test_arrays_gone(saved: Path) -> None:
    shutil.rmtree(saved / "params")
    with pytest.raises(CheckpointError, match="c is damaged, its arrays cannot be listed"):
        restore_params(saved, layout(2))


def test_a_full_device_is_not_blamed_on_the_checkpoint(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    monkeypatch.setattr(orbax.ocp.Checkpointer, "restore", full)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
        restore_params(saved, layout(2), progress=False)


@pytest.mark.parametrize("how", ["delete", "truncate"])
def test_damaged_data(source: SafetensorsSource, saved: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each data file in turn: a clear error or, where nothing refers to the file, the right values."""
    # Orbax abandons its other reads when one fails, and their callbacks then find the event loop closed.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    expected = loaded(source, 2)
    errors = 0
    for file in sorted((saved / "params").rglob("d/*")):
        content = file.read_bytes()
        if how == "delete":
            file.unlink()
        else:
            file.write_bytes(content[: len(content) // 2])
        try:
            check_equal(restore_params(saved, layout(2), progress=False), expected)
        except CheckpointError as error:
            errors += "is damaged" in str(error)
        file.write_bytes(content)
    assert errors >= 2
    check_equal(restore_params(saved, layout(2), progress=False), expected)
