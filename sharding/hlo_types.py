"""Types as HLO text writes them, with layouts, tiles and memory spaces: ``bf16[8,128]{1,0:T(8,128)(2,1)S(1)}``."""

from __future__ import annotations

import math
import re

# "f32[8,16]"; the digits of the name are its bits (f8e4m3fn: 8), and "pred" takes a byte.
_SHAPE = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_ON_CHIP = re.compile(r"S\([1-9]\d*\)")


def type_bytes(type_text: str) -> int:
    """Bytes of an HLO type, a shape or a tuple of them: ``(f32[8,16]{1,0}, pred[])`` takes 513."""
    return sum(-(-_size(dims) * int(bits or 8) // 8) for bits, dims in _SHAPE.findall(type_text))


def type_elements(type_text: str) -> int:
    """Numbers in an HLO type."""
    return sum(_size(dims) for _, dims in _SHAPE.findall(type_text))


def on_chip(type_text: str) -> bool:
    """Whether the TPU compiler placed it in a memory of the core, and not in HBM."""
    return _ON_CHIP.search(type_text) is not None


def leading_type(text: str) -> str:
    """The type that ``text`` begins with: up to the space or comma after it, outside any bracket."""
    depth = 0
    for at, letter in enumerate(text):
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter in " ," and depth == 0:
            return text[:at]
    return text


def parts(type_text: str) -> list[str]:
    """The element types of a tuple type, or the type alone."""
    if not type_text.startswith("("):
        return [type_text]
    rest, found = type_text[1:-1], []
    while rest:
        element = leading_type(rest)
        found.append(element)
        rest = rest[len(element) :].lstrip(", ")
    return found


def _size(dims: str) -> int:
    return math.prod(int(size) for size in dims.split(",") if size)
