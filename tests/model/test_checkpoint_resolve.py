"""What `--model` takes: each kind of checkpoint, the hub's cache, and names that lead nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest

from model.checkpoint import hub, resolve
from model.checkpoint.errors import CheckpointError
from model.checkpoint.orbax import save_params
from model.checkpoint.resolve import open_model
from model.config import ConfigError
from model.tokenizer import TokenizerError
from sharding.layout import Layout
from sharding.mesh import make_mesh
from tests.model.checkpoint_files import random_tensors, small_config, write_gguf, write_hf
from tests.model.tokenizer_files import save_folder

CONFIG = small_config(vocab_size=300)
TENSORS = random_tensors(CONFIG)
LAYOUT_TP = 2


def layout() -> Layout:
    return Layout(make_mesh(LAYOUT_TP, CONFIG.num_kv_heads))


def hf_folder(path: Path) -> Path:
    write_hf(path, CONFIG, TENSORS, shards=2)
    save_folder(path)
    (path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    (path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    return path


def check(name: str, kind: str, path: Path) -> resolve.ResolvedModel:
    """The model opens as `kind`, and its weights are the ones that were written."""
    model = open_model(name)
    assert (model.name, model.kind, model.path) == (name, kind, path)
    params = model.load_params(layout(), "f32", progress=False)
    np.testing.assert_array_equal(np.asarray(params["embed", "weight"]), TENSORS["model.embed_tokens.weight"])
    scanned = model.load_params(layout(), "bf16", "scan", progress=False)
    assert scanned["layers", "mlp_norm", "weight"].shape == (2, 32)
    return model


def test_hugging_face_folder(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m")
    model = check(str(folder), "huggingface", folder)
    # The ends of text that generation_config.json adds are in the config.
    assert set(model.config.eos_token_ids) == {2, 7}
    assert model.load_tokenizer().encode("Hi")
    assert model.generation_files() == {"generation_config.json": b'{"eos_token_id": [7, 2]}'}


def test_relative_and_home_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    check("org/name", "huggingface", Path("org/name"))  # a folder comes before a hub id
    check("~/org/name", "huggingface", tmp_path / "org" / "name")


def test_gguf_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS)
    model = check(str(file), "gguf", file)
    assert (model.config.hidden_size, model.config.eos_token_ids) == (32, (2,))
    assert model.generation_files() == {}
    with pytest.raises(TokenizerError):
        model.load_tokenizer()


def test_gguf_rope_scaling_reaches_the_config(tmp_path: Path) -> None:
    """llama3 scaling at head size 64 and theta 500000, as a converter writes it: Llama 3.2's factors."""
    config = small_config(num_heads=2, num_kv_heads=1, head_dim=64, rope_theta=500000.0)
    wavelengths = 2 * np.pi * 500000.0 ** (np.arange(0, 64, 2) / 64)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 32 + smooth)).astype(np.float32)
    tensors = {**random_tensors(config), "rope_freqs.weight": factors}
    model = open_model(str(write_gguf(tmp_path / "m.gguf", config, tensors)))
    assert (model.config.rope_scaling.kind, model.config.rope_scaling.factor) == ("llama3", 32.0)
    model.load_params(Layout(make_mesh(1, 1)), "f32", progress=False)


def test_demo(demo_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "fetch_demo", lambda: demo_gguf)
    model = open_model("demo")
    assert (model.name, model.kind, model.path) == ("demo", "gguf", demo_gguf)
    assert model.config.parameter_count() == 134_515_008
    assert model.load_tokenizer().has_chat_template


def test_orbax_folder(tmp_path: Path) -> None:
    source = open_model(str(hf_folder(tmp_path / "hf")))
    params = source.load_params(layout(), "f32", progress=False)
    folder = save_params(
        tmp_path / "orbax",
        params,
        source.config,
        layout(),
        tokenizer=source.load_tokenizer(),
        files=source.generation_files(),
    )
    model = check(str(folder), "orbax", folder)
    assert model.config == source.config
    assert model.source is None
    assert model.load_tokenizer().stop_token_ids == source.load_tokenizer().stop_token_ids
    assert model.generation_files() == source.generation_files()


def test_interrupted_orbax_folder(tmp_path: Path) -> None:
    for name in ("c.incomplete-01234567", "renamed"):
        (tmp_path / name / "params").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG.to_hf()))
        with pytest.raises(CheckpointError, match="left by a save that was interrupted: save it again"):
            open_model(str(tmp_path / name))


def test_presets_are_no_checkpoints() -> None:
    for name in ("llama-3-8b", "Llama-3-8B"):
        with pytest.raises(CheckpointError, match=r"is a preset: .*without weights. --model takes 'demo', a Hugging"):
            open_model(name)


@pytest.mark.parametrize(
    "name",
    ["nothing", "./org/name", "../x", "~/gone", "/gone/model", "a/b/c", "org/model.gguf", "m.gguf", ""],
)
def test_names_that_lead_nowhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "fetch_from_hub", lambda _: pytest.fail("the hub was asked"))
    with pytest.raises(CheckpointError, match=r"there is no file or folder '.*' here\. --model takes 'demo'"):
        open_model(name)


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"it has no config\.json\. --model takes"):
        open_model(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"It holds a\.gguf: pass one of these files"):
        open_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ConfigError, match="gpt2"):
        open_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        open_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor"):
        open_model(str(tmp_path))
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"generation_config\.json holds a JSON list"):
        open_model(str(tmp_path))


def test_files_that_are_no_models(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m")
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        with pytest.raises(CheckpointError, match=r"is one file of a model: pass its folder"):
            open_model(str(folder / name))
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        open_model(str(folder / "config.json"))


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub_cache(root: Path, name: str = "org/name") -> Path:
    """The hub client's own cache, holding one model."""
    storage = root / f"models--{name.replace('/', '--')}"
    hf_folder(storage / "snapshots" / COMMIT)
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text(COMMIT)
    return storage


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and a client that is told not to use the network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_hub_id_in_the_cache(offline: Path) -> None:
    storage = hub_cache(offline)
    check("org/name", "huggingface", storage / "snapshots" / COMMIT)


def test_hub_id_not_in_the_cache(offline: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        open_model("org/name")
    for part in (
        "there is no file or folder 'org/name' here",
        "could not be fetched from the Hugging Face hub",
        "not in the local cache",
        "pass its folder or .gguf file",
    ):
        assert part in str(error.value)


def test_hub_model_of_another_kind_is_refused_before_its_weights(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hub_cache(offline) / "snapshots" / COMMIT
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    asked: list[Any] = []
    original = hub.snapshot_download

    def download(name: str, **kwargs: Any) -> str:
        asked.append(kwargs)
        return original(name, **kwargs)

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(ConfigError, match="gpt2"):
        open_model("org/name")
    assert asked == [{"allow_patterns": ["config.json"]}]


def test_hub_snapshot_without_its_weights(offline: Path) -> None:
    folder = hub_cache(offline) / "snapshots" / COMMIT
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        open_model("org/name")


class FakeResponse:
    """As much of an HTTP response as the hub's errors look at."""

    headers: dict[str, str] = {}  # noqa: RUF012
    status_code = 403
    request = None


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (huggingface_hub.errors.GatedRepoError, "its licence must be accepted"),
        (huggingface_hub.errors.RepositoryNotFoundError, "the hub has no such model, or it is private"),
        (huggingface_hub.errors.HfHubHTTPError, "the download failed"),
    ],
)
def test_hub_refusals(monkeypatch: pytest.MonkeyPatch, error: Any, message: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error("403 Client Error\nmore lines", response=FakeResponse())

    monkeypatch.setattr("model.checkpoint.hub.snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=rf"{message}.*\(403 Client Error\)"):
        open_model("org/name")


def test_hub_environment_is_honoured(tmp_path: Path) -> None:
    """HF_HOME and HF_HUB_OFFLINE, which the hub's client reads when it is imported."""
    hub_cache(tmp_path / "home" / "hub")
    code = "from model.checkpoint.resolve import open_model; print(open_model('org/name').path)"
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    root = Path(resolve.__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip().endswith(COMMIT)
