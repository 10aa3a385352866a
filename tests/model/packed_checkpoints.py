"""Small packed Hugging Face checkpoints, written number by number from the published layouts, and their values.

Shares nothing with the readers: words are put together with Python integers, and values worked out in float64.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from model.config import LlamaConfig
from tests.model.checkpoint_files import random_tensors, small_config

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PLAIN_ORDER = tuple(range(8))
Tensors = dict[str, np.ndarray]

CONFIG = small_config(
    vocab_size=40, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32
)
"""q heads of one KV head have 64 columns: fewer than a group of 128."""


def words(numbers: np.ndarray, order: tuple[int, ...], bits: int = 4) -> np.ndarray:
    """Numbers [rows, n] -> int32 [rows, n * bits / 32]: bits `bits * i` and up of a word are its number `order[i]`."""
    count = 32 // bits
    out = np.zeros((numbers.shape[0], numbers.shape[1] // count), np.uint32)
    for word in range(out.shape[1]):
        for i, at in enumerate(order[:count]):
            out[:, word] |= numbers[:, word * count + at].astype(np.uint32) << np.uint32(bits * i)
    return out.view(np.int32)


def matrices(config: LlamaConfig) -> list[str]:
    return [name for name in random_tensors(config) if "_proj.weight" in name]


def awq(group: int, seed: int = 0) -> tuple[dict[str, Any], Tensors, Tensors]:
    """quantization_config, stored tensors, and every plain tensor's values."""
    rng = np.random.default_rng(seed)
    values = random_tensors(CONFIG)
    stored: Tensors = {}
    for name in matrices(CONFIG):
        rows, columns = values[name].shape
        q, zeros, scales = _random(rng, rows, columns, group)
        base = name.removesuffix(".weight")
        stored[f"{base}.qweight"] = words(q.T, AWQ_ORDER)
        stored[f"{base}.qzeros"] = words(zeros.T, AWQ_ORDER)
        stored[f"{base}.scales"] = np.ascontiguousarray(scales.T)
        values[name] = _values(q, zeros, scales, group)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return config, _with_plain(stored, values), values


def gptq(
    group: int, symmetric: bool, checkpoint_format: str = "gptq", seed: int = 0
) -> tuple[dict[str, Any], Tensors, Tensors]:
    """As `awq`."""
    rng = np.random.default_rng(seed)
    values = random_tensors(CONFIG)
    stored: Tensors = {}
    for name in matrices(CONFIG):
        rows, columns = values[name].shape
        q, zeros, scales = _random(rng, rows, columns, group)
        if symmetric:
            zeros[:] = 8
        base = name.removesuffix(".weight")
        stored[f"{base}.qweight"] = np.ascontiguousarray(words(q, PLAIN_ORDER).T)
        packed = words(zeros.T, PLAIN_ORDER)
        if checkpoint_format == "gptq":  # as GPTQModel does it: a zero point of 0 borrows from the next
            packed = ((packed.view(np.uint32).astype(np.int64) - 0x11111111) % 2**32).astype(np.uint32).view(np.int32)
        stored[f"{base}.qzeros"] = packed
        stored[f"{base}.scales"] = np.ascontiguousarray(scales.T)
        stored[f"{base}.g_idx"] = np.array([i // group for i in range(columns)], np.int32)
        values[name] = _values(q, zeros, scales, group)
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "desc_act": False,
        "sym": symmetric,
        "checkpoint_format": checkpoint_format,
    }
    return config, _with_plain(stored, values), values


def compressed(form: str, bits: int, strategy: str, symmetric: bool = True) -> tuple[dict[str, Any], Tensors, Tensors]:
    """As `awq`; groups have 128 values."""
    rng = np.random.default_rng(1)
    values = random_tensors(CONFIG)
    stored: Tensors = {}
    for name in matrices(CONFIG):
        rows, columns = values[name].shape
        base = name.removesuffix(".weight")
        group = 128 if strategy == "group" else columns
        scales = rng.uniform(0.01, 0.1, (rows, -(-columns // group))).astype(ml_dtypes.bfloat16)
        if strategy == "tensor":
            scales[:] = scales[0, 0]
        stored[f"{base}.weight_scale"] = scales[0] if strategy == "tensor" else scales
        if form == "float-quantized":
            q = rng.standard_normal((rows, columns)).astype(ml_dtypes.float8_e4m3fn)
            stored[f"{base}.weight"] = q
            values[name] = q.astype(np.float64) * np.repeat(scales.astype(np.float64), group, axis=1)
            continue
        half = 2 ** (bits - 1)
        q = rng.integers(-half, half, (rows, columns))
        zeros = np.zeros(scales.shape, int) if symmetric else rng.integers(-half, half, scales.shape)
        if form == "pack-quantized":
            stored[f"{base}.weight_packed"] = words(q + half, PLAIN_ORDER, bits)
            stored[f"{base}.weight_shape"] = np.array([rows, columns], np.int64)
            if not symmetric:
                stored[f"{base}.weight_zero_point"] = np.ascontiguousarray(words((zeros + half).T, PLAIN_ORDER, bits).T)
        else:
            stored[f"{base}.weight"] = q.astype(np.int8)
        values[name] = _values(q, zeros, scales, group)
    weights = {"num_bits": bits, "type": "float" if form == "float-quantized" else "int", "symmetric": symmetric}
    weights |= {"strategy": strategy, "group_size": 128 if strategy == "group" else None, "dynamic": False}
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    return config, _with_plain(stored, values), values


def write(folder: Path, quantization: dict[str, Any], stored: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG.to_hf(), "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")
    return folder


def _random(rng: np.random.Generator, rows: int, columns: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shape = rows, columns // group
    q, zeros = rng.integers(0, 16, (rows, columns)), rng.integers(0, 16, shape)
    return q, zeros, rng.uniform(0.01, 0.1, shape).astype(np.float16)


def _values(q: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group: int) -> np.ndarray:
    wide = (np.repeat(each.astype(np.float64), group, axis=1) for each in (zeros, scales))
    shift, scale = wide
    return (q - shift) * scale


def _with_plain(stored: Tensors, values: Tensors) -> Tensors:
    return {**stored, **{name: value for name, value in values.items() if "_proj." not in name}}
