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


_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(?:body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


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
        type_text = leading_type(line[head.end() :])
        match = _COLLECTIVE.match(line, head.end() + len(type_text))
        if not match:
            continue
        kind, start = match.groups()
        if start and kind != "all-reduce":
            # These start with a tuple of operands, results and perhaps more.
            type_text = elements(type_text)[1]
        found.append(Collective(kind, type_bytes(type_text)))
    return found


def count_collectives(hlo_text: str) -> dict[str, int]:
    """How many collectives of each kind one run of the program makes; kinds with none are left out.

    A loop whose trip count XLA knows (scanned layers) counts that often; one it does not know (the decode loop)
    counts once, so the result is of one decode step.
    """
    computations: dict[str, list[str]] = {}
    entry, name = "", ""
    for line in hlo_text.splitlines():
        if head := _COMPUTATION.match(line):
            name = head[2]
            entry = name if head[1] else entry
        elif name:
            computations.setdefault(name, []).append(line)
    found: Counter[str] = Counter()
    waiting = [(entry, 1)]
    while waiting:
        name, times = waiting.pop()
        lines = computations.get(name, [])
        for one in collectives("\n".join(lines)):
            found[one.kind] += times
        for line in lines:
            trips = _TRIPS.search(line)
            for called in _CALLED.findall(line):
                waiting.append((called, times * int(trips[1]) if trips else times))
    return dict(sorted(found.items()))


def type_bytes(type_text: str) -> int:
    """Bytes of an HLO type, a shape or a tuple of them: ``(f32[8,16]{1,0}, pred[])`` takes 513."""
    total = 0
    for bits, dims in _SHAPE.findall(type_text):
        elements = 1
        for size in dims.split(","):
            elements *= int(size) if size else 1
        total += -(-elements * int(bits or 8) // 8)
    return total


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


def elements(tuple_text: str) -> list[str]:
    """The element types of a tuple type."""
    rest, found = tuple_text[1:-1], []
    while rest:
        element = leading_type(rest)
        found.append(element)
        rest = rest[len(element) :].lstrip(", ")
    return found
