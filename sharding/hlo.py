"""What a compiled program really does: its collectives, counted in the optimised HLO text."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

KINDS = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)

_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?[\w.\-]+ = ")
# "-start" is the first half of an asynchronous form; its "-done" half is not counted again.
_COLLECTIVE = re.compile(rf" ({'|'.join(KINDS)})(-start)?\(")
# "f32[8,16]"; the digits of the name are its bits (f8e4m3fn: 8), and "pred" takes a byte.
_SHAPE = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """One collective instruction: its kind and the bytes of its result on one device."""

    kind: str
    result_bytes: int


def collectives(hlo_text: str) -> list[Collective]:
    """Every collective instruction of an optimised program. One inside a loop body appears once."""
    found = []
    for line in hlo_text.splitlines():
        head = _INSTRUCTION.match(line)
        if not head:
            continue
        type_text = _leading_type(line[head.end() :])
        match = _COLLECTIVE.match(line, head.end() + len(type_text))
        if not match:
            continue
        kind, start = match.groups()
        if start and kind != "all-reduce":
            # These start with a tuple of operands, results and perhaps more.
            type_text = _elements(type_text)[1]
        found.append(Collective(kind, type_bytes(type_text)))
    return found


def count_collectives(hlo_text: str) -> dict[str, int]:
    """How many collectives of each kind the program text holds; kinds with none are left out."""
    return dict(sorted(Counter(one.kind for one in collectives(hlo_text)).items()))


def type_bytes(type_text: str) -> int:
    """Bytes of an HLO type, a shape or a tuple of them: ``(f32[8,16]{1,0}, pred[])`` takes 513."""
    total = 0
    for bits, dims in _SHAPE.findall(type_text):
        elements = 1
        for size in dims.split(","):
            elements *= int(size) if size else 1
        total += -(-elements * int(bits or 8) // 8)
    return total


def _leading_type(text: str) -> str:
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


def _elements(tuple_text: str) -> list[str]:
    """The element types of a tuple type."""
    rest, found = tuple_text[1:-1], []
    while rest:
        element = _leading_type(rest)
        found.append(element)
        rest = rest[len(element) :].lstrip(", ")
    return found
