"""The GGUF header reader: against the reader of the `gguf` package, and on files that are damaged."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.checkpoint.errors import CheckpointError
from model.checkpoint.gguf_header import read_header, read_metadata
from tests.model.checkpoint_files import package_reader, random_tensors, small_config, write_gguf

EXTRA: dict[str, Any] = {
    "test.text": "Grüße ☃",
    "test.flag": True,
    "test.number": 7,
    "test.ratio": 0.25,
    "test.words": ["a", "", "ĠĊ"],
    "test.numbers": [3, 1, 2],
    "test.ratios": [0.5, -1.5],
    "test.flags": [True, False, True],
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config()
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return write_gguf(path, config, random_tensors(config), metadata=EXTRA)


def check_against_package(path: Path) -> None:
    """Metadata, and name, shape, type and offset of each tensor."""
    header, reader = read_header(path), package_reader(path)
    theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == theirs
    assert [(tensor.name, tensor.shape, tensor.type_number, tensor.offset) for tensor in header.tensors] == [
        (tensor.name, tuple(tensor.shape.tolist()[::-1]), tensor.tensor_type.value, tensor.data_offset)
        for tensor in reader.tensors
    ]


def test_equals_the_package(file: Path) -> None:
    check_against_package(file)
    assert {key: read_metadata(file)[key] for key in EXTRA} == EXTRA


@pytest.mark.xdist_group("package_reader")
def test_equals_the_package_on_the_demo_model(demo_gguf: Path) -> None:
    check_against_package(demo_gguf)


def test_alignment_of_the_file_is_honoured(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(256)
    values = np.arange(6, dtype=np.float32)
    writer.add_tensor("a", values)
    writer.add_tensor("b", values + 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(tmp_path / "a.gguf")
    assert [tensor.offset % 256 for tensor in header.tensors] == [0, 0]
    at = header.tensors[1].offset
    np.testing.assert_array_equal(header.data[at : at + 24].view("<f4"), values + 1)


scalars = st.one_of(
    st.integers(0, 2**32 - 1),
    st.booleans(),
    st.text(min_size=1, max_size=20),
    st.floats(width=32, allow_nan=False),
)
lists = st.one_of(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=9),
    st.lists(st.text(max_size=9), min_size=1, max_size=9),
    st.lists(st.booleans(), min_size=1, max_size=9),
)


@settings(max_examples=30, deadline=None)
@given(metadata=st.dictionaries(st.from_regex(r"[a-z]{1,9}\.[a-z]{1,9}", fullmatch=True), scalars | lists))
def test_any_metadata_comes_back(tmp_path_factory: pytest.TempPathFactory, metadata: dict[str, Any]) -> None:
    config = small_config()
    path = write_gguf(tmp_path_factory.mktemp("any") / "m.gguf", config, {}, metadata=metadata)
    found = read_metadata(path)
    assert {key: found[key] for key in metadata} == metadata


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_header_cut_anywhere_is_called_truncated(file: Path, data: st.DataObject) -> None:
    whole = file.read_bytes()
    header_size = min(tensor.offset for tensor in read_header(file).tensors) - 32
    cut = file.with_name("cut.gguf")
    cut.write_bytes(whole[: data.draw(st.integers(4, header_size))])
    with pytest.raises(CheckpointError, match=r"cut\.gguf is truncated"):
        read_header(cut)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_damaged_header_raises_nothing_else(file: Path, data: st.DataObject) -> None:
    damaged = bytearray(file.read_bytes())
    header_size = min(tensor.offset for tensor in read_header(file).tensors)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, header_size - 1))] = data.draw(st.integers(0, 255))
    path = file.with_name("damaged.gguf")
    path.write_bytes(damaged)
    with contextlib.suppress(CheckpointError):
        read_header(path)


def write_raw(path: Path, *parts: bytes) -> Path:
    path.write_bytes(b"".join(parts))
    return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


HEAD = b"GGUF" + struct.pack("<I", 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GGML" + bytes(40), "is not a GGUF file"),
        (b"PK\x03\x04" + bytes(40), "is not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "is GGUF version 1; supported versions: 2 and 3"),
        (b"GGUF" + struct.pack("<I", 4) + bytes(40), "is GGUF version 4"),
        (b"GGUF" + struct.pack("<I", 0) + bytes(40), "is GGUF version 0"),
        (HEAD + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<I", 99), "unknown value type 99"),
        (
            HEAD + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IIQ", 9, 13, 1),
            "unknown value type 13",
        ),
        (HEAD + struct.pack("<QQ", 0, 2) + 2 * (text("k") + struct.pack("<IB", 7, 1)), "'k' appears twice"),
        (HEAD + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2) + b"\xff\xfe" + bytes(9), "not valid UTF-8"),
        (
            HEAD + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9,
            "nests",
        ),
        (HEAD + struct.pack("<QQ", 2**60, 0) + bytes(100), "0 dimensions"),
        (HEAD + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IIQ", 9, 6, 2**61), "truncated"),
        (
            HEAD + struct.pack("<QQ", 0, 1) + text("general.alignment") + struct.pack("<II", 4, 24),
            "general.alignment is 24; it must be a power of two",
        ),
        (
            HEAD + struct.pack("<QQ", 2, 0) + 2 * (text("t") + struct.pack("<IQIQ", 1, 8, 0, 0)),
            "tensor 't' appears twice",
        ),
    ],
)
def test_bad_headers(tmp_path: Path, content: bytes, message: str) -> None:
    path = write_raw(tmp_path / "bad.gguf", content)
    with pytest.raises(CheckpointError, match=message) as error:
        read_header(path)
    assert str(path) in str(error.value)


def test_big_endian_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "be.gguf", small_config(), {}, endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(CheckpointError, match="big-endian"):
        read_header(path)


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot open .*gone\.gguf: No such file"):
        read_header(tmp_path / "gone.gguf")


def test_nested_arrays_keep_their_shape(tmp_path: Path) -> None:
    inner = struct.pack("<IQ", 0, 2)
    nested = struct.pack("<IIQ", 9, 9, 2) + inner + bytes([1, 2]) + inner + bytes([3, 4])
    path = write_raw(tmp_path / "n.gguf", HEAD + struct.pack("<QQ", 0, 1) + text("k") + nested)
    assert read_metadata(path) == {"k": [[1, 2], [3, 4]]}
