"""How many bytes a stored number takes, scales of quantised formats included."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from roofline.errors import RooflineError


@dataclass(frozen=True)
class DType:
    """A storage format.

    `bits` is the payload of one number. `scale_bits` is the width of one scale (0: unquantised).
    `group` is how many consecutive numbers of the contraction axis share a scale; None with a scale
    means one scale for the whole row (per output channel).
    """

    name: str
    bits: int
    scale_bits: int = 0
    group: int | None = None

    @property
    def quantised(self) -> bool:
        """True when the payload needs scales, so that vectors (norms, biases) stay unquantised."""
        return self.scale_bits > 0

    @property
    def bytes_per_number(self) -> float:
        """Payload bytes of one number, scales not counted."""
        return self.bits / 8

    def matrix_bytes(self, out: Sequence[int], contraction: Sequence[int]) -> int:
        """Bytes of a matrix of shape [*out, *contraction], its scales included.

        Payload: `out x in x bits / 8`, rounded up to whole bytes. Scales: one for each output row and
        each started group of the contraction.
        """
        rows, columns = prod(out), prod(contraction)
        payload = ceil(rows * columns * self.bits / 8)
        if not self.quantised:
            return payload
        groups = 1 if self.group is None else ceil(columns / self.group)
        return payload + rows * groups * self.scale_bits // 8


F32 = DType("f32", 32)
BF16 = DType("bf16", 16)
_PLAIN = {
    "f32": F32,
    "bf16": BF16,
    "f16": DType("f16", 16),
    "fp8": DType("fp8", 8),
    # One 16-bit scale for each output row: weight-only int8 as it is usually done.
    "int8": DType("int8", 8, scale_bits=16),
    # One 16-bit scale for each 128 weights: the group size of AWQ and GPTQ checkpoints.
    "int4": DType("int4", 4, scale_bits=16, group=128),
}
_ALIASES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "fp16": "f16", "fp32": "f32"}
_GROUPED = re.compile(r"(int8|int4)-g(\d+)")


def parse_dtype(value: str | DType) -> DType:
    """Return the weight format called `value`.

    Names: f32, bf16, f16, fp8, int8 (a scale a row), int4 (a scale for each 128 weights), and
    int8-gN or int4-gN for a scale for each N weights. A DType is returned as it is.
    Raises RooflineError for any other name.
    """
    if isinstance(value, DType):
        return value
    name = _ALIASES.get(value.lower(), value.lower())
    if name in _PLAIN:
        return _PLAIN[name]
    if (match := _GROUPED.fullmatch(name)) and int(match[2]) > 0:
        return DType(name, _PLAIN[match[1]].bits, scale_bits=16, group=int(match[2]))
    raise RooflineError(
        f"unknown dtype {value!r}: use one of {', '.join(_PLAIN)}, or int8-gN, int4-gN (a scale each N)"
    )


def parse_kv_dtype(value: str | DType) -> DType:
    """Return the cache format called `value`: f32, bf16, f16, fp8 or int8.

    Scales of an int8 cache are not counted: `bytes = numbers x bytes per number` is the formula that
    the rest of the package states for the cache. Raises RooflineError for a name that is no cache format.
    """
    dtype = parse_dtype(value)
    if dtype.name not in ("f32", "bf16", "f16", "fp8", "int8"):
        raise RooflineError(f"unknown cache dtype {dtype.name!r}: use one of f32, bf16, f16, fp8, int8")
    return DType(dtype.name, dtype.bits)
