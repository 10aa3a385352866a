"""GGUF tensors: every supported type by rows and columns, the rope order undone, and files that are
refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from model.checkpoint.errors import CheckpointError
from model.checkpoint.gguf import SUPPORTED_TYPES, GgufSource, hugging_face_name
from tests.model.checkpoint_files import (
    BF16,
    gguf_name,
    package_reader,
    random_tensors,
    small_config,
    tensor_shapes,
    write_gguf,
)
from tests.model.ggml_blocks import BLOCKS, decode, random_blocks

# Wide enough for two blocks of 256 in a row.
WIDE = small_config(hidden_size=512, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=128, num_layers=1)
EMBED, DOWN, OUT = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
)


def test_the_types_are_those_promised() -> None:
    assert set(SUPPORTED_TYPES) == {"F32", "F16", "BF16", *BLOCKS}


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_quantised_values(tmp_path: Path, kind: str) -> None:
    """Every bit pattern of a block decodes as its definition says, to the rounding of float32."""
    tensors = random_tensors(WIDE)
    raw = {
        name: random_blocks(kind, value.shape[0], value.shape[1], seed=i)
        for i, (name, value) in enumerate(tensors.items())
        if value.ndim == 2
    }
    source = GgufSource(write_gguf(tmp_path / "m.gguf", WIDE, tensors, Kind[kind], raw=raw))
    assert source.tensors[DOWN].dtype == kind
    for name in (EMBED, DOWN):
        expected = decode(kind, raw[name])
        scale = np.abs(expected).max()
        rows = expected.shape[0]
        whole = source.read(name, slice(0, rows))
        assert whole.dtype == np.float32
        np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-6 * scale)
        # Any window is the same window of the whole, bit for bit.
        for window in (
            (slice(3, 9), slice(0, 512)),
            (slice(0, rows), slice(100, 301)),
            (slice(5, 6), slice(511, 512)),
        ):
            np.testing.assert_array_equal(source.read(name, *window), whole[window])


@pytest.mark.parametrize(("kind", "dtype"), [("F32", np.dtype("f4")), ("F16", np.dtype("f2")), ("BF16", BF16)])
def test_plain_values(tmp_path: Path, kind: str, dtype: np.dtype) -> None:
    config = small_config()
    tensors = random_tensors(config)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", config, tensors, Kind[kind]))
    for name, value in tensors.items():
        stored = value.astype(dtype) if value.ndim == 2 else value
        found = source.read(name, slice(0, value.shape[0]))
        assert found.dtype == stored.dtype
        np.testing.assert_array_equal(found, stored)
        if value.ndim == 2:
            window = (slice(1, 7), slice(3, 8))
            np.testing.assert_array_equal(source.read(name, *window), stored[window])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_quantised_by_the_package(tmp_path: Path, kind: str) -> None:
    """What the package quantised is what it dequantises to, q and k in their Hugging Face order."""
    tensors = random_tensors(WIDE)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", WIDE, tensors, Kind[kind]))
    for name, value in tensors.items():
        if value.ndim == 2:
            # Rows are quantised one by one, so their order does not change their values.
            expected = gguf.quants.dequantize(gguf.quants.quantize(value, Kind[kind]), Kind[kind])
            np.testing.assert_array_equal(source.read(name, slice(0, value.shape[0])), expected)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 3), (6, 1), (4, 4), (9, 3)])
@pytest.mark.parametrize("bias", [False, True])
def test_rope_order_is_undone_by_any_rows(tmp_path: Path, heads: int, kv_heads: int, bias: bool) -> None:
    config = small_config(num_heads=heads, num_kv_heads=kv_heads, attention_bias=bias, num_layers=1)
    tensors = random_tensors(config)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", config, tensors))
    for name, value in tensors.items():
        if ".q_proj." in name or ".k_proj." in name:
            size = value.shape[0]
            for start in range(size):
                for stop in range(start, size + 1, 3):
                    np.testing.assert_array_equal(source.read(name, slice(start, stop)), value[start:stop])


def test_the_order_matters() -> None:
    """The fixture's reordering is a real one: without undoing it the values above would differ."""
    from tests.model.checkpoint_files import interleave

    rows = np.arange(16)
    assert interleave(rows, 2).tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]


def test_kv_heads_default_to_query_heads(tmp_path: Path) -> None:
    config = small_config(num_kv_heads=6, num_layers=1)
    tensors = random_tensors(config)
    path = write_gguf(tmp_path / "m.gguf", config, tensors)
    # The key is renamed in place, to one of the same length that nobody reads.
    path.write_bytes(path.read_bytes().replace(b"llama.attention.head_count_kv", b"llama.attention.head_count_xx"))
    source = GgufSource(path)
    assert "llama.attention.head_count_kv" not in source.metadata
    name = "model.layers.0.self_attn.k_proj.weight"
    np.testing.assert_array_equal(source.read(name, slice(0, 48)), tensors[name])


def test_names(tmp_path: Path) -> None:
    config = small_config(attention_bias=True, mlp_bias=True)
    for name in tensor_shapes(config):
        assert hugging_face_name(gguf_name(name)) == name
    # What a plain Llama does not have keeps its name, and is refused by whoever counts tensors.
    for name in (
        "blk.0.ffn_gate_inp.weight",
        "blk.0.attn_qkv.weight",
        "blk.0.attn_q.scale",
        "foo",
        "blk.x.attn_q.weight",
    ):
        assert hugging_face_name(name) == name


def test_rope_freqs_are_configuration(tmp_path: Path) -> None:
    config = small_config()
    freqs = np.linspace(1, 8, 4, dtype=np.float32)
    tensors = {**random_tensors(config), "rope_freqs.weight": freqs}
    source = GgufSource(write_gguf(tmp_path / "m.gguf", config, tensors))
    assert source.rope_freqs() == freqs.tolist()
    assert set(source.tensors) == set(tensor_shapes(config))
    assert "rope_freqs.weight" in source.stored_names
    assert GgufSource(write_gguf(tmp_path / "n.gguf", config, random_tensors(config))).rope_freqs() is None


@pytest.mark.xdist_group("package_reader")
def test_demo_model(demo_gguf: Path) -> None:
    """Shapes of the real file, and one of its matrices whole against the package's own path."""
    source = GgufSource(demo_gguf)
    assert len(source.tensors) == 1 + 30 * 9 + 1
    assert source.tensors[EMBED].shape == (49152, 576)
    assert (source.tensors[EMBED].dtype, source.tensors[DOWN].dtype) == ("Q8_0", "Q4_1")
    tensor = next(t for t in package_reader(demo_gguf).tensors if t.name == "blk.0.ffn_down.weight")
    expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    np.testing.assert_array_equal(source.read(DOWN, slice(0, 576)), expected)


def test_truncated_data(tmp_path: Path) -> None:
    config = small_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config))
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    with pytest.raises(CheckpointError, match=r"m\.gguf is truncated: tensor 'output.weight' ends at byte .* Download"):
        GgufSource(path)


def test_unsupported_type_is_named(tmp_path: Path) -> None:
    config = small_config(hidden_size=256)
    tensors = random_tensors(config)
    name = "model.layers.1.mlp.up_proj.weight"
    path = write_gguf(tmp_path / "m.gguf", config, {name: tensors[name]}, Kind.TQ1_0)
    with pytest.raises(
        CheckpointError, match=r"'blk.1.ffn_up.weight' is stored as TQ1_0, .*supported: F32, F16, BF16, Q8_0"
    ):
        GgufSource(path)


def test_unknown_type_number(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(1)
    writer.add_tensor("output_norm.weight", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = bytearray(path.read_bytes())
    at = content.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    content[at : at + 4] = (200).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"'output_norm\.weight' is stored as type number 200"):
        GgufSource(path)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            b"\x05\x00\x00\x00\x00\x00\x00\x00llama",
            b"\x05\x00\x00\x00\x00\x00\x00\x00qwen2",
            "general.architecture is 'qwen2'; supported: 'llama'",
        ),
        (
            b"llama.attention.head_count\x04",
            b"llama.attention.head_couny\x04",
            "llama.attention.head_count is None",
        ),
    ],
)
def test_metadata_that_cannot_be_used(tmp_path: Path, before: bytes, after: bytes, message: str) -> None:
    config = small_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config))
    content = path.read_bytes()
    assert before in content
    path.write_bytes(content.replace(before, after))
    with pytest.raises(CheckpointError, match=message):
        GgufSource(path)


def test_part_of_a_split_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", small_config(), {}, metadata={"split.count": 3, "split.no": 0})
    with pytest.raises(CheckpointError, match="one part of a model split into 3 files; merge them"):
        GgufSource(path)


def test_row_that_blocks_do_not_fill(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", WIDE, {DOWN: random_tensors(WIDE)[DOWN]}, Kind.Q8_0)
    content = bytearray(path.read_bytes())
    at = content.index(b"blk.0.ffn_down.weight") + len(b"blk.0.ffn_down.weight") + 4
    content[at : at + 8] = (500).to_bytes(8, "little")
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="rows of 500 values, which Q8_0 blocks of 32 do not fill"):
        GgufSource(path)


def test_rows_that_heads_cannot_share(tmp_path: Path) -> None:
    config = small_config(num_layers=1)
    tensors = random_tensors(config)
    name = "model.layers.0.self_attn.v_proj.weight"
    odd = {name: np.zeros((23, 32), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", config, {**tensors, **odd})
    # v is not reordered, so its odd shape passes here; as k it cannot be read.
    content = path.read_bytes().replace(b"attn_k.weight", b"attn_w.weight").replace(b"attn_v.weight", b"attn_k.weight")
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"'blk.0.attn_k.weight' has 23 rows, which 3 heads of an even size"):
        GgufSource(path).read("model.layers.0.self_attn.k_proj.weight", slice(0, 1))
