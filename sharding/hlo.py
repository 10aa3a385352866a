"""What a compiled program really does: its collectives, counted in the optimised HLO text."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from sharding.hlo_program import Instruction, Program
from sharding.hlo_types import leading_type, parts, type_bytes

__all__ = ["KINDS", "Collective", "collective_of", "collectives", "count_collectives", "type_bytes"]

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
_OPCODE = re.compile(rf"({'|'.join(KINDS)})(-start)?")


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
        opcode = line[head.end() + len(type_text) :].lstrip(" ").partition("(")[0]
        if one := _collective(opcode, type_text):
            found.append(one)
    return found


def collective_of(instruction: Instruction) -> Collective | None:
    """The collective that an instruction is or starts, or None."""
    return _collective(instruction.opcode, instruction.type)


def count_collectives(hlo_text: str) -> dict[str, int]:
    """How many collectives of each kind one run of the program makes; kinds with none are left out.

    A loop whose trip count XLA knows (scanned layers) counts that often; one it does not know (the decode loop)
    counts once, so the result is of one decode step.
    """
    found: Counter[str] = Counter()
    for step in Program.parse(hlo_text).runs():
        if one := collective_of(step.instruction):
            found[one.kind] += step.times
    return dict(sorted(found.items()))


def _collective(opcode: str, type_text: str) -> Collective | None:
    match = _OPCODE.fullmatch(opcode)
    if not match:
        return None
    kind, start = match.groups()
    if start and kind != "all-reduce":
        # These start with a tuple of operands, results and perhaps more.
        type_text = parts(type_text)[1]
    return Collective(kind, type_bytes(type_text))
