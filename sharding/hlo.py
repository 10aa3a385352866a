"""What a compiled program really does: its collectives, counted in the optimised HLO text."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

KINDS = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}

# An instruction: "%name = TYPE opcode(". TYPE is one shape or a tuple of them; "-start" is an asynchronous form's first
# half, and its "-done" half is not counted again.
_COLLECTIVE = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(")
_SHAPE = re.compile(r"\b([a-z]+\d+|pred)\[([\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """One collective instruction: its kind and the bytes of its result on one device."""

    kind: str
    result_bytes: int


def collectives(hlo_text: str) -> list[Collective]:
    """Every collective instruction of an optimised program. One inside a loop body appears once, as in the text."""
    found = []
    for line in hlo_text.splitlines():
        match = _COLLECTIVE.search(line)
        if match:
            found.append(Collective(match[2], sum(_shape_bytes(*shape) for shape in _SHAPE.findall(match[1]))))
    return found


def count_collectives(hlo_text: str) -> dict[str, int]:
    """How many collectives of each kind the program text holds; kinds with none are left out."""
    return dict(sorted(Counter(one.kind for one in collectives(hlo_text)).items()))


def _shape_bytes(dtype: str, dims: str) -> int:
    total = _BYTES.get(dtype, 1)
    for size in dims.split(","):
        total *= int(size) if size else 1
    return total
