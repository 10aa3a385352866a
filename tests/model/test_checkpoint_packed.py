"""Packed Hugging Face checkpoints: the values of every layout, on any number of devices, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.checkpoint.errors import CheckpointError
from model.checkpoint.load import load_params
from model.checkpoint.packed import open_packed
from model.checkpoint.resolve import open_model
from model.checkpoint.stored import stored_quantization
from model.quantize import WeightFormat
from model.widen import widened
from sharding.layout import Layout
from sharding.mesh import make_mesh
from tests.model import packed_checkpoints
from tests.model.checkpoint_files import expected_parameters
from tests.model.packed_checkpoints import CONFIG, Tensors, awq, compressed, gptq, write

Made = tuple[dict[str, Any], Tensors, Tensors]
CASES: dict[str, tuple[Callable[[], Made], str]] = {
    "awq": (lambda: awq(128), "int4-g128"),
    "awq group 32": (lambda: awq(32), "int4-g32"),
    "gptq": (lambda: gptq(128, symmetric=True), "int4-g128-symmetric"),
    "gptq zeros": (lambda: gptq(128, symmetric=False), "int4-g128"),
    "gptq_v2 zeros": (lambda: gptq(128, symmetric=False, checkpoint_format="gptq_v2"), "int4-g128"),
    "int8": (lambda: compressed("int-quantized", 8, "channel"), "int8"),
    "int8 tensor": (lambda: compressed("naive-quantized", 8, "tensor"), "int8"),
    "fp8": (lambda: compressed("float-quantized", 8, "channel"), "fp8"),
    "fp8 tensor": (lambda: compressed("float-quantized", 8, "tensor"), "fp8"),
    "packed int4": (lambda: compressed("pack-quantized", 4, "group"), "int4-g128-symmetric"),
    "packed int4 zeros": (lambda: compressed("pack-quantized", 4, "group", symmetric=False), "int4-g128"),
    "packed int8": (lambda: compressed("pack-quantized", 8, "channel"), "int8"),
    "packed int8 groups": (lambda: compressed("pack-quantized", 8, "group"), "int8-g128"),
}


@functools.cache
def made(case: str) -> Made:
    return CASES[case][0]()


@pytest.mark.parametrize("case", CASES)
def test_values(case: str, tmp_path: Path) -> None:
    """What is stored and what is made wide are the values worked out in float64, on 1, 3 and 4 devices.

    A wide value is float32. A stored one is too, but for an offset: that is rounded to float16, by up to 2^-11 of what
    it is (8 steps of a group at most).
    """
    config, stored, values = made(case)
    model = open_model(str(write(tmp_path, config, stored)))
    assert model.source is not None
    quantization = stored_quantization(model.source, CONFIG)
    name = CASES[case][1]
    assert quantization.of("layers.0.mlp.down") is not None
    assert quantization.of("layers.1.mlp.gate_up").name == name  # type: ignore[union-attr]
    # Two query heads have 64 columns, over which a group of 128 may not reach.
    assert quantization.of("layers.0.attention.out").name == name.replace("128", "64")  # type: ignore[union-attr]
    assert quantization.of("embed") is None
    expected = expected_parameters(CONFIG, values)
    for tp in (1, 3, 4):
        layout = Layout(make_mesh(tp, CONFIG.num_kv_heads))
        kept = load_params(model.source, CONFIG, layout, "f32", progress=False, quantization=quantization)
        assert kept["layers", 0, "mlp", "down", "weight"].dtype.itemsize == 1
        offsets = quantization.of("layers.0.mlp.down").offsets  # type: ignore[union-attr]
        check(widened(kept, CONFIG, layout, quantization), expected, 8 * 0.1 * 2**-11 if offsets else 1e-5)
    wide = load_params(model.source, CONFIG, Layout(make_mesh(2, CONFIG.num_kv_heads)), "f32", progress=False)
    check(wide, expected, 1e-5)


def check(found: Any, expected: dict[Any, np.ndarray], tolerance: float) -> None:
    for path, value in expected.items():
        part = np.asarray(found[path])[tuple(map(slice, value.shape))]
        np.testing.assert_allclose(part, value, rtol=1e-6, atol=tolerance, err_msg=str(path))


def change(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**config, **changes}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'.*supported: awq, gptq"),
        ({"quant_method": "fp8"}, "quant_method 'fp8'"),
        ({}, "quant_method None"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version 'gemv'.*'gemm'"),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "bits 8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 48}, "group_size 48.*multiples of 32"),
        ({"quant_method": "awq", "bits": 4, "group_size": -1}, "group_size -1"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True}, "desc_act True"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128, "sym": True}, "bits 3"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "checkpoint_format": "marlin"},
            "checkpoint_format 'marlin'",
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "format": "marlin"}, "format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "pack_dtype": "int16"}, "pack_dtype"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "format": "gemv"}, "format 'gemv'.*'gemm'"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128, "pack_dtype": "int64"},
            "AWQ.*pack_dtype 'int64'.*int32",
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False}, "AWQ.*zero_point False"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24'"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "0 config_groups"),
        (
            {"quant_method": "compressed-tensors", "format": "int-quantized", "transform_config": {"config_groups": 1}},
            "transform_config",
        ),
    ],
)
def test_refused_by_name(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    if not config:
        config = {"bits": 4}
    with pytest.raises(CheckpointError, match=message):
        open_model(str(write(tmp_path, config, {"a": np.zeros(1, np.float32)})))


def test_wrong_sizes_are_named(tmp_path: Path) -> None:
    config, stored, _ = made("gptq")
    name = "model.layers.1.mlp.up_proj"
    for part, cut, message in (
        ("qweight", np.s_[:-1], r"mlp.up_proj.weight \[256, 120\] instead of \[256, 128\]"),
        ("scales", np.s_[:, :-1], r"up_proj.scales' is \[1, 255\] instead of \[1, 256\]"),
        ("qzeros", np.s_[:, :-2], r"up_proj.qzeros' is \[1, 30\] instead of \[1, 32\]"),
    ):
        changed = {**stored, f"{name}.{part}": np.ascontiguousarray(stored[f"{name}.{part}"][cut])}
        if part == "qweight":
            changed.pop(f"{name}.g_idx")
        folder = str(write(tmp_path / part, config, changed))
        with pytest.raises(CheckpointError, match=message):
            stored_quantization(open_model(folder).source, CONFIG)  # type: ignore[arg-type]
    missing = {key: value for key, value in stored.items() if key != f"{name}.qzeros"}
    with pytest.raises(CheckpointError, match=r"no model.layers.1.mlp.up_proj.qzeros"):
        open_model(str(write(tmp_path / "missing", config, missing)))
    plain = {key: value for key, value in stored.items() if ".layers." not in key}
    with pytest.raises(CheckpointError, match=r"no tensor is called \*\.qweight"):
        open_model(str(write(tmp_path / "plain", config, plain)))


@pytest.mark.parametrize("part", ["g_idx", "qzeros"])
def test_data_that_contradict_the_config(part: str, tmp_path: Path) -> None:
    """Columns out of order, and zero points where the config says that there are none, are found on reading."""
    config, stored, _ = made("gptq")
    changed = stored[f"model.layers.0.mlp.down_proj.{part}"].copy()
    changed.flat[0] += 1
    model = open_model(str(write(tmp_path, config, {**stored, f"model.layers.0.mlp.down_proj.{part}": changed})))
    with pytest.raises(CheckpointError, match="out of order" if part == "g_idx" else "zero points other than 8"):
        load_params(model.source, CONFIG, Layout(make_mesh(1, 2)), "f32", progress=False)  # type: ignore[arg-type]


def test_zero_points_less_one_borrow_from_the_next(tmp_path: Path) -> None:
    """Zero points 0, 5, 0, 0, 15, 1, 2, 3 in format "gptq", the first in the lowest bits: 0x321F0050 - 0x11111111."""
    config, stored, _ = made("gptq zeros")
    name = "model.layers.0.mlp.down_proj"
    stored = {key: value for key, value in stored.items() if key.startswith(name)}
    qzeros = stored[f"{name}.qzeros"].copy()
    qzeros.view(np.uint32)[0, 0] = 0x210DEF3F
    source = open_packed(write(tmp_path, config, {**stored, f"{name}.qzeros": qzeros}), config)
    got = source.read_stored(f"{name}.weight", slice(0, 8), slice(0, 128), WeightFormat.parse("int4-g128"))
    assert got.offsets is not None
    assert (8 - got.offsets / got.scales)[:, 0].tolist() == pytest.approx([0, 5, 0, 0, 15, 1, 2, 3])


def test_the_format_by_its_newer_name(tmp_path: Path) -> None:
    """ "format" says what "checkpoint_format" does; groups that were fixed first are in order whatever came after."""
    config, stored, values = made("gptq_v2 zeros")
    config = {key: value for key, value in config.items() if key != "checkpoint_format"}
    config |= {"format": "gptq_v2", "desc_act": True, "static_groups": True}
    name = "model.layers.0.mlp.down_proj.weight"
    wide = open_packed(write(tmp_path, config, stored), config).read(name, slice(0, 128))
    np.testing.assert_allclose(wide, values[name], rtol=1e-6, atol=1e-5)


def test_words_of_the_writer() -> None:
    """The test's own packing on one word, by hand."""
    numbers = np.arange(8)[None]
    assert packed_checkpoints.words(numbers, packed_checkpoints.PLAIN_ORDER).view(np.uint32)[0, 0] == 0x76543210
    assert packed_checkpoints.words(numbers, packed_checkpoints.AWQ_ORDER).view(np.uint32)[0, 0] == 0x75316420
