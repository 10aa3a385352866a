"""`python -m scripts.convert_checkpoint` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.checkpoint.orbax_folder import read_info
from model.checkpoint.resolve import open_model
from model.config import LlamaConfig
from scripts import convert_checkpoint
from sharding.layout import Layout
from sharding.mesh import make_mesh
from tests.model.checkpoint_files import BF16, random_tensors, small_config, write_gguf, write_hf
from tests.model.tokenizer_files import save_folder

CONFIG = small_config(vocab_size=300, attention_bias=True)
TENSORS = random_tensors(CONFIG)


def hf_folder(path: Path, dtype: np.dtype | None = None) -> Path:
    write_hf(path, CONFIG, TENSORS, dtype=dtype)
    save_folder(path)
    (path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    return path


def embedding(path: Path) -> jax.Array:
    model = open_model(str(path))
    params = model.load_params(Layout(make_mesh(1, CONFIG.num_kv_heads)), None, progress=False)
    return params["embed", "weight"]


def test_over_several_devices(tmp_path: Path) -> None:
    """A fresh process, where --cpu-devices must come before JAX looks for devices."""
    source = hf_folder(tmp_path / "hf")
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "scripts.convert_checkpoint",
        str(source),
        str(tmp_path / "out"),
    ]
    command += ["--dtype", "bf16", "--tp", "4", "--cpu-devices", "4"]
    root = Path(convert_checkpoint.__file__).parents[1]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert f"{source} -> {tmp_path / 'out'}: {CONFIG.parameter_count():,} parameters in bfloat16" in result.stdout
    assert "tp=4 as 1 kv_head x 4 kv_seq" in result.stdout
    info = read_info(tmp_path / "out")
    assert (info.tp, info.dtype, info.config) == (4, jnp.bfloat16, CONFIG)
    expected = TENSORS["model.embed_tokens.weight"].astype(BF16)
    np.testing.assert_array_equal(np.asarray(embedding(tmp_path / "out")), expected)
    assert open_model(str(tmp_path / "out")).load_tokenizer().encode("Hi")


@pytest.mark.parametrize(
    ("stored", "option", "written"),
    [(BF16, [], jnp.bfloat16), (None, [], jnp.float32), (BF16, ["--dtype", "f32"], jnp.float32)],
)
def test_dtype_loses_nothing_unless_asked(
    tmp_path: Path, stored: np.dtype | None, option: list[str], written: object
) -> None:
    source = hf_folder(tmp_path / "hf", stored)
    assert convert_checkpoint.main([str(source), str(tmp_path / "out"), *option]) == 0
    found = embedding(tmp_path / "out")
    assert found.dtype == written
    expected = TENSORS["model.embed_tokens.weight"]
    np.testing.assert_array_equal(np.asarray(found), expected if stored is None else expected.astype(stored))


def test_orbax_to_orbax_keeps_the_dtype(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", BF16)
    assert convert_checkpoint.main([str(source), str(tmp_path / "a")]) == 0
    assert convert_checkpoint.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    first, second = read_info(tmp_path / "a"), read_info(tmp_path / "b")
    assert (second.config, second.dtype) == (first.config, jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(embedding(tmp_path / "b")), np.asarray(embedding(tmp_path / "a")))


def test_model_without_a_tokenizer_is_converted_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS)
    assert convert_checkpoint.main([str(source), str(tmp_path / "out")]) == 0
    assert "warning: converting the weights without a tokenizer: " in capsys.readouterr().err
    info = read_info(tmp_path / "out")
    assert isinstance(info.config, LlamaConfig)
    assert info.dtype == jnp.float32


def test_errors_are_one_line_and_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = hf_folder(tmp_path / "hf")
    target = tmp_path / "out"

    def error(*args: str) -> str:
        assert convert_checkpoint.main(args) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        return captured.err

    assert "there is no file or folder" in error(str(tmp_path / "gone"), str(target))
    assert "is a preset" in error("tinyllama-1.1b", str(target))
    assert "tp=99" in error(str(source), str(target), "--tp", "99")
    file = source / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert "model.safetensors is damaged" in error(str(source), str(target))
    assert not target.exists()
    file.write_bytes(content)
    (source / "config.json").write_text(json.dumps({**CONFIG.to_hf(), "model_type": "gpt2"}))
    assert "gpt2" in error(str(source), str(target))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_existing_destination(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = hf_folder(tmp_path / "hf")
    target = tmp_path / "out"
    assert convert_checkpoint.main([str(source), str(target)]) == 0
    assert convert_checkpoint.main([str(source), str(target), "--dtype", "bf16"]) == 1
    assert "exists: choose another path" in capsys.readouterr().err
    assert read_info(target).dtype == jnp.float32
    assert convert_checkpoint.main([str(source), str(target), "--dtype", "bf16", "--overwrite"]) == 0
    assert read_info(target).dtype == jnp.bfloat16
    # A model folder is never replaced, not even its own.
    assert convert_checkpoint.main([str(target), str(source), "--overwrite"]) == 1
    assert (source / "model.safetensors").exists()


@pytest.mark.parametrize(
    "args",
    [[], ["a"], ["a", "b", "--dtype", "f16"], ["a", "b", "--tp", "two"], ["a", "b", "--tp", "0"], ["a", "b", "--x"]],
)
def test_usage(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        convert_checkpoint.main(args)
    assert stop.value.code == 2
    assert "usage: python -m scripts.convert_checkpoint" in capsys.readouterr().err
