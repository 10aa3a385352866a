"""The quantisation that a checkpoint comes with: the format of each matrix in which nothing is rounded again."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from typing import TypeVar

from kernels.quantized import BLOCK
from model.checkpoint.parameters import matrix_name
from model.checkpoint.source import QuantizedSource, TensorSource
from model.checkpoint.table import Part
from model.checkpoint.weights import WeightReader
from model.config import LlamaConfig
from model.quantize import Kind, Quantization, QuantizationError, WeightFormat

_log = logging.getLogger(__name__)
_LAYER = re.compile(r"layers\.\d+\.(.+)")
V = TypeVar("V", "WeightFormat | None", str)


def stored_quantization(source: TensorSource, config: LlamaConfig) -> Quantization:
    """Rules that keep every matrix as the checkpoint stores it, the embedding and the head included.

    What a matrix is made of (q, k and v are one, and so are gate and up) must be in one format. Where the checkpoint
    has several there, the matrix takes the one with the most bits, 16 and more included, and the other parts are
    rounded into it. Types that have no format here (GGUF's Q5 and Q6 ones) are rounded to int8 in groups of 32. Both
    are logged.

    Raises:
        QuantizationError: the checkpoint keeps nothing in few bits.
        CheckpointError: it does not hold this model.
    """
    formats: dict[str, WeightFormat | None] = {}
    rounded: dict[str, str] = {}
    if isinstance(source, QuantizedSource):
        reader = WeightReader(source, config)
        for path in reader.paths:
            module = matrix_name(path)
            if module is None:
                continue
            parts = reader.parts(path)
            format = _joint(source, parts)
            formats[module] = format
            types = " and ".join(sorted({source.tensors[part.name].dtype for part in parts}))
            if format is None and any(source.kept_format(part.name) for part in parts):
                rounded[module] = f"{types} to the dtype of what is not quantised"
            elif format is not None and not reader.all_stored(path, format):
                rounded[module] = f"{types} to {format.name}"
    if not any(formats.values()):
        raise QuantizationError(
            f"{source.path} keeps no matrix in fewer than 16 bits, so there is nothing to keep as it is stored; "
            "name a format such as int8 or int4"
        )
    for module, change in _by_pattern(rounded, config.num_layers).items():
        _log.info("%s: %s goes from %s", source.path.name, module, change)
    return Quantization(tuple(_by_pattern(formats, config.num_layers).items()))


def _joint(source: QuantizedSource, parts: Sequence[Part]) -> WeightFormat | None:
    """The format of a matrix made of these parts."""
    kept = [source.kept_format(part.name) for part in parts]
    formats = [format for format in kept if format is not None]
    if len(formats) < len(kept):
        return None
    widest: tuple[Kind, ...] = ("int8", "fp8", "int4")
    kind = next(kind for kind in widest if any(format.kind == kind for format in formats))
    alike = [format for format in formats if format.kind == kind]
    groups = [format.group for format in alike if format.group is not None]
    if not groups:
        return alike[0]
    # A group must not reach over the end of the axis that it runs along, where a file's groups go on.
    last = parts[0].shape[-1]
    group = math.gcd(*groups) if parts[0].row_axes + 1 == len(parts[0].shape) else math.gcd(*groups, last)
    if group % BLOCK:
        return WeightFormat("int8", BLOCK)
    return WeightFormat(kind, group, any(format.offsets for format in alike))


def _by_pattern(values: dict[str, V], layers: int) -> dict[str, V]:
    """As patterns: one for what all layers have alike, and one for each layer where they differ."""
    of_layers: dict[str, list[V]] = {}
    for module, value in values.items():
        if match := _LAYER.fullmatch(module):
            of_layers.setdefault(match[1], []).append(value)
    found: dict[str, V] = {}
    for module, value in values.items():
        match = _LAYER.fullmatch(module)
        alike = match is not None and len(of_layers[match[1]]) == layers and len(set(of_layers[match[1]])) == 1
        # Where layers are stacked their modules have no number.
        found[f"layers.*{match[1]}" if match and alike else module] = value
    return found
