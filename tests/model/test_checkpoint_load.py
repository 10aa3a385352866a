"""Loading onto meshes: values at every tensor-parallel degree, and the memory it takes."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from model.checkpoint import load
from model.checkpoint.errors import CheckpointError
from model.checkpoint.gguf import GgufSource
from model.checkpoint.load import load_params
from model.checkpoint.parameters import abstract_leaves, bind
from model.checkpoint.progress import LoadProgress
from model.checkpoint.safetensors import SafetensorsSource
from model.checkpoint.source import TensorSource
from model.config import LlamaConfig
from model.llama import Llama
from sharding.layout import Layout
from sharding.mesh import make_mesh
from tests.model.checkpoint_files import (
    BF16,
    expected_parameters,
    package_reader,
    random_tensors,
    small_config,
    write_gguf,
    write_hf,
)

Params = dict[tuple[str | int, ...], jax.Array]


def layout(config: LlamaConfig, tp: int, data: int = 1) -> Layout:
    return Layout(make_mesh(tp, config.num_kv_heads, data=data))


def check_values(params: Params, expected: dict[Any, np.ndarray], config: LlamaConfig, layers: str) -> None:
    """Every logical value is the expected one, every padding value zero, and nothing is missing."""
    for path, value in expected.items():
        if layers == "scan" and path[0] == "layers":
            found = np.asarray(params[("layers", *path[2:])])[path[1]]
        else:
            found = np.asarray(params[path])
        padded = np.zeros(found.shape, found.dtype)
        padded[tuple(map(slice, value.shape))] = value.astype(found.dtype)
        np.testing.assert_array_equal(found, padded, err_msg=str(path))
    per_layer = sum(path[0] == "layers" for path in expected) // config.num_layers
    layer_leaves = per_layer if layers == "scan" else per_layer * config.num_layers
    assert len(params) == layer_leaves + sum(path[0] != "layers" for path in expected)


@pytest.fixture(scope="module")
def biased(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[LlamaConfig, dict[Any, np.ndarray], list[TensorSource]]:
    config = small_config(attention_bias=True, mlp_bias=True)
    tensors = random_tensors(config)
    folder = tmp_path_factory.mktemp("biased")
    sources: list[TensorSource] = [
        SafetensorsSource(write_hf(folder / "one", config, tensors)),
        SafetensorsSource(write_hf(folder / "shards", config, tensors, shards=3)),
        GgufSource(write_gguf(folder / "m.gguf", config, tensors)),
    ]
    return config, expected_parameters(config, tensors), sources


@pytest.mark.parametrize("layers", ["unrolled", "scan"])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5, 6, 8])
def test_values_at_every_degree(biased: Any, tp: int, layers: Any) -> None:
    config, expected, sources = biased
    for source in sources:
        params = load_params(source, config, layout(config, tp), "f32", layers, progress=False)
        check_values(params, expected, config, layers)


@pytest.mark.parametrize("layers", ["unrolled", "scan"])
def test_shardings_are_the_layout(biased: Any, layers: Any) -> None:
    config, _, sources = biased
    for tp in (2, 5):
        where = layout(config, tp)
        params = load_params(sources[0], config, where, "bf16", layers, progress=False)
        leaves = abstract_leaves(config, layers)
        assert list(params) == list(leaves)
        for path, leaf in leaves.items():
            assert params[path].sharding == where.sharding(leaf.axes)
            assert params[path].shape == where.padded_shape(leaf.shape, leaf.axes)
            assert params[path].dtype == jnp.bfloat16
            for shard in params[path].addressable_shards:
                assert shard.data.shape == where.local_shape(leaf.shape, leaf.axes)


def test_data_replicas_share_one_read(biased: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config, expected, sources = biased
    counted: list[Any] = []
    original = load.WeightReader.read

    def read(*args: Any) -> np.ndarray:
        counted.append(args[1:3])
        return original(*args)

    monkeypatch.setattr(load.WeightReader, "read", read)
    params = load_params(sources[0], config, layout(config, 2, data=4), "f32", progress=False)
    check_values(params, expected, config, "unrolled")
    assert len(params["embed", "weight"].addressable_shards) == 8
    assert len(counted) == len({str(one) for one in counted})
    assert sum(path == ("embed", "weight") for path, _ in counted) == 2
    assert sum(path == ("norm", "weight") for path, _ in counted) == 1


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q5_1])
def test_quantised_matrices_by_slices(tmp_path: Path, kind: Kind) -> None:
    """A device's columns rarely begin on a block of 32: they must still be the whole matrix's columns."""
    config = small_config(hidden_size=96, intermediate_size=160, num_heads=4, num_kv_heads=2, head_dim=24)
    tensors = random_tensors(config)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", config, tensors, kind))
    rounded = {
        name: quants.dequantize(quants.quantize(value, kind), kind) if value.ndim == 2 else value
        for name, value in tensors.items()
    }
    expected = expected_parameters(config, rounded)
    for tp in (1, 3, 4, 8):
        check_values(
            load_params(source, config, layout(config, tp), "f32", progress=False),
            expected,
            config,
            "unrolled",
        )


def test_bf16_files_and_targets(tmp_path: Path) -> None:
    config = small_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    source = SafetensorsSource(write_hf(tmp_path, config, tensors, dtype=BF16))
    rounded = expected_parameters(config, {name: value.astype(BF16) for name, value in tensors.items()})
    for dtype in ("f32", "bf16", jnp.float32, np.dtype(BF16)):
        check_values(load_params(source, config, layout(config, 2), dtype, progress=False), rounded, config, "unrolled")


@pytest.mark.parametrize("dtype", ["f16", "float64", jnp.int8, "banana", None])
def test_other_dtypes_are_refused(biased: Any, dtype: Any) -> None:
    config, _, sources = biased
    with pytest.raises(CheckpointError, match=r"weights cannot be kept as .*supported: f32, bf16"):
        load_params(sources[0], config, layout(config, 1), dtype)


def test_bind_gives_a_model_with_these_arrays(biased: Any) -> None:
    config, _, sources = biased
    for layers in ("unrolled", "scan"):
        params = load_params(sources[0], config, layout(config, 2), "f32", layers, progress=False)
        abstract = Llama(config, jnp.dtype(jnp.float32), platform="cpu", layers=layers)
        model = bind(abstract, params)
        assert model.embed.weight[...] is params["embed", "weight"]
        with pytest.raises(CheckpointError, match=r"they differ in norm\.weight"):
            bind(abstract, {path: value for path, value in params.items() if path != ("norm", "weight")})


def test_nothing_is_read_when_the_model_is_another(biased: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, sources = biased
    monkeypatch.setattr(SafetensorsSource, "read", lambda *a: pytest.fail("data was read"))
    with pytest.raises(CheckpointError, match="present but not part of the model"):
        load_params(sources[0], small_config(), layout(small_config(), 1), "f32")


# One parameter of 16 MiB in float32 (the embedding) and a few of 3 MiB and less.
BIG = small_config(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=768,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    tie_word_embeddings=True,
)
LARGEST = 8192 * 512 * 4


@pytest.fixture(scope="module")
def big_sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TensorSource]:
    folder = tmp_path_factory.mktemp("big")
    tensors = random_tensors(BIG)
    return {
        "safetensors": SafetensorsSource(write_hf(folder / "hf", BIG, tensors, dtype=BF16)),
        "gguf": GgufSource(write_gguf(folder / "m.gguf", BIG, tensors, Kind.Q8_0)),
    }


@pytest.fixture
def placed_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes in bytes of every array handed to a device."""
    sizes: list[int] = []
    original = jax.device_put

    def recorded(value: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(value.nbytes)
        return original(value, *args, **kwargs)

    monkeypatch.setattr(jax, "device_put", recorded)
    return sizes


@pytest.mark.parametrize("layers", ["unrolled", "scan"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_memory(big_sources: dict[str, TensorSource], placed_sizes: list[int], kind: str, tp: int, layers: Any) -> None:
    """Host memory stays under twice the largest tensor, and no device sees more than its own slice.

    CPU devices take a block over as their own memory, so what tracemalloc sees is what was placed so far and
    the temporaries of the block in hand; the first is subtracted. A stack of layers lives in memory of XLA,
    which tracemalloc does not see, and the blocks that went into it are gone.
    """
    where = layout(BIG, tp)
    beyond: list[int] = []
    state = {"placed": 0}

    def step(done: int, total: int) -> None:
        beyond.append(tracemalloc.get_traced_memory()[1] - start - state["placed"])
        # What is alive on a single device: blocks. None is a whole matrix, let alone the model.
        new = [array for array in jax.live_arrays() if id(array) not in older]
        alive = max(array.nbytes for array in new if len(array.sharding.device_set) == 1)
        assert tp == 1 or alive <= LARGEST // tp
        state["placed"] = min(done, LARGEST) if layers == "scan" else done  # the embedding comes first
        tracemalloc.reset_peak()

    leaves = abstract_leaves(BIG, "unrolled")
    slices = {path: 4 * int(np.prod(where.local_shape(leaf.shape, leaf.axes))) for path, leaf in leaves.items()}
    largest_slice = max(slices.values())
    gc.collect()
    others = jax.live_arrays()  # kept by other tests; held here so that no new array takes the id of one
    older = {id(array) for array in others}
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        params = load_params(big_sources[kind], BIG, where, "f32", layers, step)
    finally:
        tracemalloc.stop()
    # The block in hand, and temporaries that do not grow with the tensor.
    assert largest_slice < max(beyond) < largest_slice + (9 << 20)
    assert max(beyond) < 2 * LARGEST
    assert max(placed_sizes) == largest_slice
    for path, leaf in abstract_leaves(BIG, layers).items():
        if any(axis not in (None, "layers") for axis in leaf.axes):
            for shard in params[path].addressable_shards:
                assert shard.data.nbytes * tp == params[path].nbytes


@pytest.mark.parametrize(("tp", "data"), [(1, 1), (3, 1), (2, 4)])
def test_progress_reports_every_byte(biased: Any, tp: int, data: int) -> None:
    """Each distinct block counts once, so together they are the padded parameters."""
    config, _, sources = biased
    where = layout(config, tp, data)
    calls: list[tuple[int, int]] = []
    load_params(sources[0], config, where, "bf16", progress=lambda *both: calls.append(both))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    leaves = abstract_leaves(config, "unrolled").values()
    expected = sum(2 * int(np.prod(where.padded_shape(leaf.shape, leaf.axes))) for leaf in leaves)
    assert calls[-1] == (expected, expected)


class Terminal:
    def __init__(self, is_terminal: bool) -> None:
        self.is_terminal = is_terminal
        self.text = ""

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(
    ("terminal", "option", "seconds", "shown"),
    [(True, True, 2.0, True), (True, True, 0.5, False), (True, False, 2.0, False), (False, True, 2.0, False)],
)
def test_bar_is_for_long_loads_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: bool,
    option: bool,
    seconds: float,
    shown: bool,
) -> None:
    stream = Terminal(terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    clock = iter([0.0] + [seconds] * 1000)
    monkeypatch.setattr("model.checkpoint.progress.time.perf_counter", lambda: next(clock))
    with LoadProgress("loading a model", 100, option) as bar:
        bar.advance(40)
        bar.advance(60)
    assert ("loading a model" in stream.text) is shown
    assert capsys.readouterr().out == ""


@pytest.mark.xdist_group("package_reader")
def test_demo_model_loads(demo_gguf: Path) -> None:
    """The real file: a few values of each kind of parameter against the package's own dequantiser."""
    source = GgufSource(demo_gguf)
    config = LlamaConfig.from_gguf(source.metadata, tensor_names=source.stored_names)
    params = load_params(source, config, layout(config, 2), "bf16", progress=False)
    by_name = {tensor.name: tensor for tensor in package_reader(demo_gguf).tensors}

    def rows(name: str, count: int) -> np.ndarray:
        tensor = by_name[name]
        return quants.dequantize(np.asarray(tensor.data)[:count], tensor.tensor_type).astype(BF16)

    np.testing.assert_array_equal(np.asarray(params["embed", "weight"])[:100], rows("token_embd.weight", 100))
    gate_up = np.asarray(params["layers", 29, "mlp", "gate_up", "weight"])
    np.testing.assert_array_equal(gate_up[0, :50], rows("blk.29.ffn_gate.weight", 50))
    np.testing.assert_array_equal(gate_up[1, :50], rows("blk.29.ffn_up.weight", 50))
    # The first query head: its even stored rows are the first half, its odd ones the second.
    stored = rows("blk.7.attn_q.weight", 64)
    qkv = np.asarray(params["layers", 7, "attention", "qkv", "weight"])
    np.testing.assert_array_equal(qkv[0, :32], stored[0::2])
    np.testing.assert_array_equal(qkv[0, 32:64], stored[1::2])
    # KV head 0 has 3 query heads, then its key, then its value.
    np.testing.assert_array_equal(qkv[0, 192:224], rows("blk.7.attn_k.weight", 64)[0::2])
    np.testing.assert_array_equal(qkv[0, 256:320], rows("blk.7.attn_v.weight", 64))
