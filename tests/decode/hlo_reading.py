"""What the compiled-program tests read in optimised HLO text, beyond its collectives."""

from __future__ import annotations

import re
from typing import NamedTuple

_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
_CALLED = re.compile(r"\bcalls=%?([\w.\-]+)")
_OPERAND = re.compile(r"%?([\w.\-]+)")
_ELEMENTS = re.compile(r"\b[a-z]+\d*\w*\[([\d,]*)\]")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")

NO_WORK = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "opt-barrier"}
"""Instructions that hand a buffer on without touching it."""


class Instruction(NamedTuple):
    """One instruction that fills a buffer of ``type``; for a fusion, ``opcode`` is what produces its result."""

    opcode: str
    type: str
    elements: int
    text: str


def buffers(hlo_text: str) -> list[Instruction]:
    """Every instruction that writes a buffer of its own: inside a fusion nothing does but its root."""
    computations: dict[str, list[re.Match[str]]] = {}
    for line in hlo_text.splitlines():
        if start := _COMPUTATION.match(line):
            own = computations.setdefault(start[1], [])
        elif found := _INSTRUCTION.match(line):
            own.append(found)
    fused = {
        called[1]
        for instructions in computations.values()
        for one in instructions
        if one[4] == "fusion" and (called := _CALLED.search(one[5]))
    }
    return [
        Instruction(_producer(one, computations), one[3], _elements(one[3]), one[0].strip())
        for name, instructions in computations.items()
        if name not in fused
        for one in instructions
        if one[4] not in NO_WORK
    ]


def _producer(one: re.Match[str], computations: dict[str, list[re.Match[str]]]) -> str:
    """The opcode behind an instruction's result, through fusions and reinterpretations."""
    called = _CALLED.search(one[5])
    if one[4] != "fusion" or not called:
        return one[4]
    inner = {found[2]: found for found in computations[called[1]]}
    root = next(found for found in inner.values() if found[1])
    while root[4] == "bitcast":
        root = inner[_OPERAND.match(root[5])[1]]  # type: ignore[index]
    return _producer(root, computations)


def _elements(type_text: str) -> int:
    total = 0
    for dims in _ELEMENTS.findall(type_text):
        size = 1
        for dim in dims.split(","):
            size *= int(dim) if dim else 1
        total += size
    return total


def aliases(hlo_text: str) -> dict[int, int]:
    """Which output of the program is written over which argument (both counted as flat leaves)."""
    header = hlo_text.split("\n", 1)[0]
    return {int(output or 0): int(argument) for output, argument in _ALIAS.findall(header)}


def loops(hlo_text: str, scope: str) -> list[bool]:
    """For each while loop whose operation name ends in ``scope``: whether its trip count is fixed."""
    found = []
    for line in hlo_text.splitlines():
        if " while(" in line and re.search(rf'op_name="[^"]*{re.escape(scope)}"', line):
            found.append("known_trip_count" in line)
    return found
