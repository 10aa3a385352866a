"""Rounding: how far a value may move in each format, and the same numbers on any number of devices."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels import quantized
from kernels.quantized import QuantizedWeight
from model import quantize as host
from model.checkpoint.load import load_params
from model.checkpoint.safetensors import SafetensorsSource
from model.config import LlamaConfig
from model.quantize import Quantization, QuantizationError, WeightFormat, quantize
from model.widen import widened
from sharding.layout import Layout
from sharding.mesh import make_mesh
from tests.model.checkpoint_files import expected_parameters, random_tensors, small_config, write_hf

PLATFORMS = ("cpu", "tpu")


def matrix(columns: int = 576, rows: int = 24) -> np.ndarray:
    """Rows of very different sizes; the first is zero, the second all one sign, the third all alike."""
    rng = np.random.default_rng(7)
    found = rng.standard_normal((rows, columns)) * np.exp(rng.uniform(-3, 3, (rows, 1)))
    found[0], found[1], found[2] = 0, np.abs(found[1]), 0.3
    return found.astype(np.float32)


def wide(block: np.ndarray, format: WeightFormat, platform: str) -> np.ndarray:
    made = quantize(block, format, platform)
    arrays = (None if each is None else jnp.asarray(each) for each in (made.values, made.scales, made.offsets))
    values, scales, offsets = arrays
    assert values is not None
    assert scales is not None
    assert values.dtype == format.values_dtype(platform)
    assert scales.dtype == format.scales_dtype(platform)
    return np.asarray(QuantizedWeight(values, scales, offsets, format.group).wide())


def groups_of(block: np.ndarray, group: int) -> list[slice]:
    return [slice(at, min(at + group, block.shape[-1])) for at in range(0, block.shape[-1], group)]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_int8_row(platform: str) -> None:
    """Half a step of 1 / 127 of the row's largest; the scale is float32."""
    block = matrix()
    bound = np.abs(block).max(axis=1, keepdims=True) / 127 / 2
    assert (np.abs(wide(block, WeightFormat("int8"), platform) - block) <= bound * 1.0001).all()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_fp8_row(platform: str) -> None:
    """e4m3 has 3 bits behind the point: 2^-4 of each value, and half of its least step (2^-9 of 448) near zero."""
    block = matrix()
    scale = np.abs(block).max(axis=1, keepdims=True) / 448
    bound = np.maximum(np.abs(block) * 2**-4, scale * 2**-10)
    assert (np.abs(wide(block, WeightFormat("fp8"), platform) - block) <= bound * 1.0001).all()


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", ["int8-g32", "int8-g128", "int4-g32-symmetric", "int4-g128-symmetric"])
def test_symmetric_groups(name: str, platform: str) -> None:
    """Half a step. Of int4 a step is 1/8 of the largest, which is -8, and +8 does not exist: a whole step there.
    A scale that is rounded by e of itself moves the largest value by up to 127 or 8 times e."""
    block, format = matrix(), WeightFormat.parse(name)
    assert format.group is not None
    rounded = 2.0**-11 if platform == "cpu" else 2.0**-8
    steps, most = (127, 0.5) if format.kind == "int8" else (8, 1.0)
    found = wide(block, format, platform)
    for columns in groups_of(block, format.group):
        own = block[:, columns]
        step = np.abs(own).max(axis=1, keepdims=True) / steps
        assert (np.abs(found[:, columns] - own) <= step * (most + steps * rounded) + 1e-7).all()


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", ["int4", "int4-g64", "int4-g128"])
def test_int4_with_offsets(name: str, platform: str) -> None:
    """Half a step, of which 15 lie between a group's least and its most, zero among them where groups are larger than
    32: at most 2/15 of the largest magnitude. Scales and offsets are rounded by 2^-11 or 2^-8 of themselves, offsets of
    up to 16 steps."""
    block, format = matrix(), WeightFormat.parse(name)
    assert format.offsets
    assert format.group is not None
    rounded = 2.0**-11 if platform == "cpu" else 2.0**-8
    found = wide(block, format, platform)
    for columns in groups_of(block, format.group):
        own = block[:, columns]
        largest = np.abs(own).max(axis=1, keepdims=True)
        assert (np.abs(found[:, columns] - own) <= largest / 15 + 6 * rounded * largest + 1e-7).all()


def test_int4_keeps_what_has_16_even_levels() -> None:
    """A group of 16 levels at any distance from zero, as other 4-bit formats have, comes back: only its offset is
    rounded, by 2^-11 of itself."""
    rng = np.random.default_rng(3)
    least, step = rng.uniform(-9, 0, (40, 1)), rng.uniform(0.5, 1, (40, 1)).astype(np.float16).astype(np.float64)
    codes = rng.integers(0, 16, (40, 32))
    codes[:, :2] = 0, 15
    block = (least + step * codes).astype(np.float32)
    found = wide(block, WeightFormat("int4", 32, offsets=True), "cpu")
    np.testing.assert_allclose(found, block, atol=9 * 2**-11, rtol=0)


@pytest.mark.parametrize("name", ["int8-g128", "int4-g128", "int4-g128-symmetric"])
def test_a_short_last_group_is_a_group_of_its_own(name: str) -> None:
    """576 values in groups of 128: the last 64 come back as they do alone, whatever is before them."""
    block, format = matrix(), WeightFormat.parse(name)
    np.testing.assert_array_equal(wide(block, format, "cpu")[:, 512:], wide(block[:, 512:], format, "cpu"))


def test_host_packing_is_the_kernels() -> None:
    codes = np.random.default_rng(0).integers(-8, 8, (5, 96)).astype(np.int8)
    packed = host.pack(codes)
    np.testing.assert_array_equal(packed, quantized.pack(jnp.asarray(codes)))
    np.testing.assert_array_equal(host.unpack(packed), codes)
    np.testing.assert_array_equal(quantized.unpack(jnp.asarray(packed)), codes)
    low, high = int(codes[0, 3]) + 8, int(codes[0, 19]) + 8
    assert packed[0, 3] == low + 16 * high


CONFIG = small_config(
    vocab_size=40, hidden_size=96, intermediate_size=288, num_layers=1, num_heads=6, num_kv_heads=3, head_dim=32
)


@functools.cache
def source(folder: Path) -> SafetensorsSource:
    return SafetensorsSource(write_hf(folder, CONFIG, random_tensors(CONFIG)))


@pytest.mark.parametrize("name", ["int8", "fp8", "int8-g64", "int4", "int4-g64-symmetric", "int4-g128"])
def test_any_number_of_devices(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same number at each place of each matrix on 1, 2, 3 and 4 devices: 288 columns, of which 128 do not divide,
    and 3 KV heads over 4. Padding is zero. On one device it is what rounding the whole matrix gives."""
    folder = tmp_path_factory.getbasetemp() / "quantize-source"
    format = WeightFormat.parse(name)
    quantization = Quantization.layers(format, ["embed=int8", "head=int4-g32"])
    one = widened(*load(folder, quantization, 1))
    expected = expected_parameters(CONFIG, random_tensors(CONFIG))
    down = expected["layers", 0, "mlp", "down", "weight"]
    np.testing.assert_array_equal(one["layers", 0, "mlp", "down", "weight"], wide(down, format, "cpu"))
    for tp in (2, 3, 4):
        found = widened(*load(folder, quantization, tp))
        for path, value in expected.items():
            own = tuple(map(slice, value.shape))
            whole = np.array(found[path])
            np.testing.assert_array_equal(whole[own], np.asarray(one[path])[own], err_msg=f"{path} tp={tp}")
            whole[own] = 0
            assert not whole.any(), f"{path} tp={tp}"


def load(
    folder: Path, quantization: Quantization, tp: int
) -> tuple[dict[tuple[str | int, ...], jax.Array], LlamaConfig, Layout, Quantization]:
    layout = Layout(make_mesh(tp, CONFIG.num_kv_heads))
    params = load_params(source(folder), CONFIG, layout, "f32", progress=False, quantization=quantization)
    return params, CONFIG, layout, quantization


def test_names() -> None:
    for name in ("int8", "int4-g32", "fp8", "int8-g64", "int4-g128-symmetric", "int8-g128-offsets"):
        assert WeightFormat.parse(name).name == name
    assert WeightFormat.parse("int4") == WeightFormat("int4", 32, offsets=True) == WeightFormat.of("int4")
    assert WeightFormat.of("int4", 128) == WeightFormat.parse("int4-g128")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int3", "unknown quantisation 'int3'; known: int8, int4, fp8"),
        ("int4-g48", "a group of 48 is not a multiple of 32"),
        ("int4-g0", "a group of 0"),
        ("fp8-g32", "one scale a row"),
        ("int8-offsets", "offsets go with a group"),
        ("", "unknown quantisation ''"),
    ],
)
def test_formats_that_do_not_exist(name: str, message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        WeightFormat.parse(name)


def test_a_group_that_does_not_divide(tmp_path: Path) -> None:
    config = small_config(hidden_size=48, head_dim=8)
    folder = write_hf(tmp_path, config, random_tensors(config))
    quantization = Quantization.layers(WeightFormat.parse("int4"))
    with pytest.raises(QuantizationError, match=r"layers.0.attention.qkv: a group of 32 does not divide rows of 48"):
        load_params(SafetensorsSource(folder), config, Layout(make_mesh(1, 3)), "f32", quantization=quantization)


def test_rules_that_match_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "quantize-source"
    with pytest.raises(QuantizationError, match=r"no matrix is called 'layers\.7\.\*'"):
        load(folder, Quantization.layers(WeightFormat("int8"), ["layers.7.*=none"]), 1)
    with pytest.raises(QuantizationError, match="rule 'head' is not PATTERN=FORMAT"):
        Quantization.layers(WeightFormat("int8"), ["head"])


def test_rules_decide_in_order() -> None:
    quantization = Quantization.layers(WeightFormat("int8"), ["layers.0.*=none", "*.down=int4-g64", "head=fp8"])
    names = {
        name: None if (format := quantization.of(name)) is None else format.name
        for name in ("layers.0.mlp.gate_up", "layers.0.mlp.down", "layers.3.attention.qkv", "head", "embed")
    }
    assert list(names.values()) == [None, "int4-g64", "int8", "fp8", None]


def test_largest_fp8_value() -> None:
    """448, not the 480 that some formats of the name reach: nothing becomes NaN."""
    block = np.array([[448.0, -448.0, 1.0, 0.0] * 8], np.float32)
    made = quantize(block, WeightFormat("fp8"), "cpu")
    assert made.values.dtype == ml_dtypes.float8_e4m3fn
    assert np.isfinite(made.values.astype(np.float32)).all()
