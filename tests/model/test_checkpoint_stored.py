"""Weights kept as a GGUF file stores them: the very numbers of its blocks, on any number of devices."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from kernels.quantized import unpack
from model.checkpoint.gguf import GgufSource
from model.checkpoint.load import load_params
from model.checkpoint.stored import stored_quantization
from model.quantize import Quantization, QuantizationError, WeightFormat
from model.widen import widened
from sharding.layout import Layout
from sharding.mesh import make_mesh
from tests.model import ggml_blocks
from tests.model.checkpoint_files import expected_parameters, interleave, random_tensors, small_config, write_gguf

# Rows of 256 values, of which Q4_K has whole blocks.
CONFIG = small_config(
    vocab_size=40, hidden_size=256, intermediate_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64
)
Tensors = dict[str, np.ndarray]


def matrices() -> list[str]:
    return [name for name, value in random_tensors(CONFIG).items() if value.ndim == 2]


@functools.cache
def made(kind: str, rows: int, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    raw = ggml_blocks.random_blocks(kind, rows, columns, seed)
    return raw, ggml_blocks.decode(kind, raw)


@functools.cache
def blocks(kind: str) -> tuple[Tensors, Tensors]:
    """Random bytes of every matrix as the file orders them, and values of every tensor in float64."""
    raw, values = {}, random_tensors(CONFIG)
    for name in matrices():
        rows, columns = values[name].shape
        seed = len(name.split(".layers.")[-1][2:])  # the layers are alike: decoding one by one takes long
        raw[name], decoded = made(kind, rows, columns, seed)
        heads = CONFIG.num_heads if "q_proj" in name else CONFIG.num_kv_heads if "k_proj" in name else 0
        if heads:
            order = interleave(np.arange(rows), heads)
            values[name] = np.empty_like(decoded)
            values[name][order] = decoded
        else:
            values[name] = decoded
    return raw, values


def write(path: Path, kind: str) -> GgufSource:
    raw, _ = blocks(kind)
    return GgufSource(write_gguf(path, CONFIG, random_tensors(CONFIG), Kind[kind], raw=raw))


def layout(tp: int) -> Layout:
    return Layout(make_mesh(tp, CONFIG.num_kv_heads))


@pytest.mark.parametrize(
    ("kind", "format", "steps"),
    [("Q8_0", "int8-g32", 0), ("Q4_0", "int4-g32-symmetric", 0), ("Q4_1", "int4-g32", 1), ("Q4_K", "int4-g32", 1)],
)
def test_blocks_are_kept(kind: str, format: str, steps: int, tmp_path: Path) -> None:
    """Exact where a block has nothing but a float16 scale. Elsewhere a scale and an offset are rounded to float16: by
    2^-11 of themselves, here at most 6.3 * 16 + 6.3."""
    source = write(tmp_path / "model.gguf", kind)
    quantization = stored_quantization(source, CONFIG)
    assert {quantization.of(name).name for name in ("embed", "head", "layers.1.mlp.down")} == {format}  # type: ignore[union-attr]
    expected = expected_parameters(CONFIG, blocks(kind)[1])
    largest = 107 if kind == "Q4_K" else 1
    tolerance = 2 * steps * largest * 2**-11
    for tp in (1, 2, 3, 4) if kind == "Q4_K" else (1, 4):
        kept = load_params(source, CONFIG, layout(tp), "f32", progress=False, quantization=quantization)
        found = widened(kept, CONFIG, layout(tp), quantization)
        for path, value in expected.items():
            part = np.asarray(found[path])[tuple(map(slice, value.shape))]
            np.testing.assert_allclose(part, value, rtol=1e-6, atol=tolerance, err_msg=str(path))


def test_small_numbers_are_the_file_s(tmp_path: Path) -> None:
    """Not one is rounded again, whatever its block's scale: the bytes of a row, block by block."""
    source = write(tmp_path / "model.gguf", "Q4_1")
    quantization = stored_quantization(source, CONFIG)
    kept = load_params(source, CONFIG, layout(1), "f32", progress=False, quantization=quantization)
    raw = blocks("Q4_1")[0]["model.layers.0.mlp.down_proj.weight"].reshape(CONFIG.hidden_size, -1, 20)
    np.testing.assert_array_equal(
        np.asarray(kept["layers", 0, "mlp", "down", "weight"]).reshape(*raw.shape[:2], 16), raw[..., 4:]
    )
    scales = np.asarray(kept["layers", 0, "mlp", "down", "scales"])
    np.testing.assert_array_equal(scales, np.ascontiguousarray(raw[..., :2]).view(np.float16)[..., 0])
    np.testing.assert_array_equal(unpack(jnp.asarray(raw[0, 0, 4:]))[:16], (raw[0, 0, 4:] & 15).astype(int) - 8)


def test_a_format_that_the_file_has_is_copied(tmp_path: Path) -> None:
    """int4 of a Q4_0 file, with offsets or without, takes its blocks; rounding them again would move some."""
    source = write(tmp_path / "model.gguf", "Q4_0")
    raw = blocks("Q4_0")[0]["model.layers.1.mlp.down_proj.weight"].reshape(CONFIG.hidden_size, -1, 18)
    for name in ("int4-g32-symmetric", "int4-g32"):
        quantization = Quantization.layers(WeightFormat.parse(name))
        kept = load_params(source, CONFIG, layout(2), "f32", progress=False, quantization=quantization)
        found = np.asarray(kept["layers", 1, "mlp", "down", "weight"]).reshape(*raw.shape[:2], 16)
        np.testing.assert_array_equal(found, raw[..., 2:])
        if name == "int4-g32":
            assert not np.asarray(kept["layers", 1, "mlp", "down", "offsets"]).any()


def test_mixed_parts_take_the_most_bits(tmp_path: Path, caplog: Any) -> None:
    """v in 8 bits beside q and k in 4: all in 8, v as it is and the others within half a step of 1/127 of their
    largest. One in 16 bits keeps its whole matrix wide. What is rounded is told."""
    raw4, values = blocks("Q4_0")
    raw8, values8 = blocks("Q8_0")
    eight = [f"model.layers.{i}.self_attn.v_proj.weight" for i in range(2)]
    wide = "model.layers.1.mlp.up_proj.weight"
    kinds = {**dict.fromkeys(eight, Kind.Q8_0), wide: Kind.F32}
    raw = {**raw4, **{name: raw8[name] for name in eight}}
    del raw[wide]
    path = write_gguf(tmp_path / "model.gguf", CONFIG, random_tensors(CONFIG), Kind.Q4_0, raw=raw, kinds=kinds)
    with caplog.at_level(logging.INFO):
        quantization = stored_quantization(GgufSource(path), CONFIG)
    assert "layers.*attention.qkv goes from Q4_0 and Q8_0 to int8-g32" in caplog.text
    assert "layers.1.mlp.gate_up goes from F32 and Q4_0 to the dtype of what is not quantised" in caplog.text
    assert quantization.of("layers.0.attention.qkv") == WeightFormat("int8", 32)
    assert quantization.of("layers.1.mlp.gate_up") is None
    assert quantization.of("layers.0.mlp.gate_up") == WeightFormat("int4", 32)
    kept = load_params(GgufSource(path), CONFIG, layout(2), "f32", progress=False, quantization=quantization)
    found = np.asarray(widened(kept, CONFIG, layout(2), quantization)["layers", 0, "attention", "qkv", "weight"])
    mixed = {**values, **{name: values8[name] for name in eight}}
    expected = expected_parameters(CONFIG, mixed)["layers", 0, "attention", "qkv", "weight"]
    v = (CONFIG.group_size + 1) * CONFIG.head_dim
    np.testing.assert_array_equal(found[:, v : v + CONFIG.head_dim], expected[:, v:].astype(np.float32))
    np.testing.assert_allclose(found[:, :v], expected[:, :v], atol=0.6 * 0.8 / 127, rtol=0)


@pytest.mark.parametrize("kind", ["Q5_0", "Q6_K"])
def test_types_without_a_format_become_int8(kind: str, tmp_path: Path, caplog: Any) -> None:
    source = write(tmp_path / "model.gguf", kind)
    with caplog.at_level(logging.INFO):
        quantization = stored_quantization(source, CONFIG)
    assert quantization.of("head") == WeightFormat("int8", 32)
    assert f"head goes from {kind} to int8-g32" in caplog.text


def test_nothing_stored_in_few_bits(tmp_path: Path) -> None:
    source = GgufSource(write_gguf(tmp_path / "model.gguf", CONFIG, random_tensors(CONFIG), Kind.F16))
    with pytest.raises(QuantizationError, match="keeps no matrix in fewer than 16 bits"):
        stored_quantization(source, CONFIG)
