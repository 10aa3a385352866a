"""GGUF checkpoints of architecture `llama`, presented under Hugging Face tensor names and row order.

GGUF stores q and k for interleaved rope: inside each head, its rows 2j and 2j + 1 are the rows j and j + H/2
of Hugging Face's rotate-half order. Reads undo that, with the head count of q or of k.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from model.checkpoint import ggml_blocks
from model.checkpoint.errors import CheckpointError
from model.checkpoint.gguf_header import GgufHeader, GgufTensor, read_header
from model.checkpoint.source import TensorInfo
from model.quantize import Quantized, WeightFormat

_PLAIN: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
SUPPORTED_TYPES = (*_PLAIN, *_QUANTISED)
_ROUNDED_TO = WeightFormat("int8", 32)

ROPE_FREQS = "rope_freqs.weight"
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufSource:
    """Tensors of one memory-mapped GGUF file, dequantised by the row."""

    def __init__(self, path: Path | str) -> None:
        """Reads the header and checks every tensor's type and extent.

        Raises CheckpointError for a damaged or truncated file, one part of a split file, another architecture
        than `llama`, or a tensor of an unsupported type.
        """
        self._header = read_header(path)
        self._heads = _rotated_heads(self._header)
        self._stored: dict[str, GgufTensor] = {}
        self._tensors: dict[str, TensorInfo] = {}
        for tensor in self._header.tensors:
            dtype = _check_tensor(self._header, tensor)
            if tensor.name == ROPE_FREQS:
                continue
            name = hugging_face_name(tensor.name)
            self._stored[name] = tensor
            self._tensors[name] = TensorInfo(tensor.shape, dtype, self._header.path)

    @property
    def path(self) -> Path:
        return self._header.path

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata as plain Python values."""
        return self._header.metadata

    @property
    def stored_names(self) -> tuple[str, ...]:
        """The names the file itself uses, `rope_freqs.weight` included."""
        return tuple(tensor.name for tensor in self._header.tensors)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def rope_freqs(self) -> list[float] | None:
        """The rope divisors in `rope_freqs.weight`, or None. They are configuration and not a weight."""
        for tensor in self._header.tensors:
            if tensor.name == ROPE_FREQS:
                kind = GGMLQuantizationType(tensor.type_number)
                return _decode(_raw_rows(self._header, tensor, kind), kind).reshape(-1).tolist()
        return None

    def read(self, name: str, rows: slice, cols: slice | None = None) -> np.ndarray:
        tensor = self._stored[name]
        kind = GGMLQuantizationType(tensor.type_number)
        raw = _raw_rows(self._header, tensor, kind)
        head_size = self._head_size(tensor)
        if len(tensor.shape) == 1:
            vector = _decode(raw, kind)[0]
            return vector[_interleaved(rows, head_size)] if head_size else vector[rows]
        # A fancy index copies just these rows, still in their stored form.
        raw = raw[_interleaved(rows, head_size)] if head_size else raw[rows]
        if cols is None or (cols.start, cols.stop) == (0, tensor.shape[1]):
            return _decode(raw, kind)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        first, last = cols.start // block, -(-cols.stop // block)
        decoded = _decode(raw[:, first * block_bytes : last * block_bytes], kind)
        return decoded[:, cols.start - first * block : cols.stop - first * block]

    def stored_format(self, name: str) -> WeightFormat | None:
        """The format that a matrix's blocks map onto; None for plain floats and for types that have no such format."""
        tensor = self._stored[name]
        return ggml_blocks.FORMATS.get(self._tensors[name].dtype) if len(tensor.shape) == 2 else None

    def read_stored(self, name: str, rows: slice, cols: slice, format: WeightFormat) -> Quantized:
        """See `model.checkpoint.source.QuantizedSource`: blocks, taken apart and not decoded."""
        tensor = self._stored[name]
        kind = GGMLQuantizationType(tensor.type_number)
        raw = _raw_rows(self._header, tensor, kind)
        head_size = self._head_size(tensor)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        first, last = cols.start // block, -(-cols.stop // block)
        own = slice(first * block_bytes, last * block_bytes)
        raw = raw[_interleaved(rows, head_size), own] if head_size else raw[rows, own]
        return ggml_blocks.take_apart(kind.name, raw, slice(cols.start - first * block, cols.stop - first * block))

    def kept_format(self, name: str) -> WeightFormat | None:
        """As `stored_format`; 5-bit and 6-bit types, which have no such format, become 8-bit ones."""
        info = self._tensors[name]
        rounded = _ROUNDED_TO if len(info.shape) == 2 and info.dtype not in _PLAIN else None
        return self.stored_format(name) or rounded

    def _head_size(self, tensor: GgufTensor) -> int:
        """Rows of one head when the rows of this tensor are permuted inside each head, else 0."""
        match = _LAYER_NAME.fullmatch(tensor.name)
        heads = self._heads.get(match.group(2)) if match else None
        if heads is None:
            return 0
        if tensor.shape[0] % (2 * heads):
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name!r} has {tensor.shape[0]} rows, which {heads} heads of an "
                "even size cannot share"
            )
        return tensor.shape[0] // heads


def hugging_face_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a tensor no plain Llama has keeps its own name."""
    match = _LAYER_NAME.fullmatch(name)
    if match and match.group(2) in _LAYER_MODULES:
        layer, module, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER_MODULES[module]}.{kind}"
    return _GLOBAL_NAMES.get(name, name)


def _rotated_heads(header: GgufHeader) -> dict[str, int]:
    """How many heads the permuted tensors have, by GGUF module name."""
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{header.path}: general.architecture is {architecture!r}; supported: 'llama'")
    if (metadata.get("split.count") or 1) > 1:
        raise CheckpointError(
            f"{header.path} is one part of a model split into {metadata['split.count']} files; "
            "merge them first (llama-gguf-split --merge)"
        )
    queries = _head_count(header, "llama.attention.head_count", None)
    return {"attn_q": queries, "attn_k": _head_count(header, "llama.attention.head_count_kv", queries)}


def _head_count(header: GgufHeader, key: str, default: int | None) -> int:
    value = header.metadata.get(key, default)
    if isinstance(value, list) and len(set(value)) == 1:  # one number a layer, all the same
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{header.path}: {key} is {value!r}; it must be a positive integer")
    return value


def _check_tensor(header: GgufHeader, tensor: GgufTensor) -> str:
    """The name of the tensor's type, once type, row size and extent are known to be good."""
    try:
        kind = GGMLQuantizationType(tensor.type_number)
        dtype = kind.name
    except ValueError:
        dtype = f"type number {tensor.type_number}"
    if dtype not in SUPPORTED_TYPES:
        raise CheckpointError(
            f"{header.path}: tensor {tensor.name!r} is stored as {dtype}, which is not supported; "
            f"supported: {', '.join(SUPPORTED_TYPES)}"
        )
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if tensor.shape[-1] % block:
        raise CheckpointError(
            f"{header.path}: tensor {tensor.name!r} has rows of {tensor.shape[-1]} values, which {dtype} "
            f"blocks of {block} do not fill"
        )
    count = 1
    for size in tensor.shape:  # Python integers: a damaged header must not overflow
        count *= size
    end = tensor.offset + count // block * block_bytes
    if end > header.data.size:
        raise CheckpointError(
            f"{header.path} is truncated: tensor {tensor.name!r} ends at byte {end:,} and the file has "
            f"{header.data.size:,}. Download it again"
        )
    return dtype


def _raw_rows(header: GgufHeader, tensor: GgufTensor, kind: GGMLQuantizationType) -> np.ndarray:
    """The tensor as stored: a view [rows, bytes of a row] of the mapped file; a vector is one row."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    row_bytes = tensor.shape[-1] // block * block_bytes
    rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
    return header.data[tensor.offset : tensor.offset + rows * row_bytes].reshape(rows, row_bytes)


def _decode(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Values [rows, columns] of stored rows: a view where the type is a plain float, else new float32."""
    if kind.name in _PLAIN:
        return raw.view(_PLAIN[kind.name])
    if raw.size == 0:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        return np.zeros((raw.shape[0], raw.shape[1] // block_bytes * block), np.float32)
    # Blocks are independent, and the dequantisers work 16 rows at a time: as one long row they run 1.5 to 4
    # times faster than by rows of a few hundred values.
    return dequantize(np.ascontiguousarray(raw).reshape(1, -1), kind).reshape(raw.shape[0], -1)


def _interleaved(rows: slice, head_size: int) -> np.ndarray:
    """Stored row of each Hugging Face row in the slice: in a head, row s * H/2 + j is stored at 2j + s."""
    index = np.arange(rows.start, rows.stop)
    head, within = index // head_size, index % head_size
    half, pair = within // (head_size // 2), within % (head_size // 2)
    return head * head_size + 2 * pair + half
