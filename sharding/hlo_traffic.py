"""What an optimised program reads from memory and writes to it: which argument, how many bytes, and what it copies.

A device's memory here is its main memory (HBM): what the TPU compiler places in on-chip memory is read once, where it
is fetched. Arguments are followed through loops, tuples, fetches and updates in place to whatever reads them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sharding.hlo_program import (
    NO_WORK,
    Computation,
    Instruction,
    Program,
    Step,
    inner_of,
    parameters_of,
    root_of,
)
from sharding.hlo_types import on_chip, parts, type_bytes, type_elements

_FETCHES = frozenset({"copy-start", "copy-done", "slice-start", "slice-done", "async-start", "async-done", "call-done"})
_VIEWS = frozenset({"bitcast", "reshape", "convert", "copy", "transpose", "bitcast-convert"})
"""Inside a fusion these move no memory of their own: only what is read of their result is read of their operand."""

_UPDATES = frozenset({"dynamic-update-slice", "scatter"})
_KERNEL_UPDATES = re.compile(r'"tpu_custom_call".* output_to_operand_aliasing=\{\{\}: \((\d+), \{\}\)\}')
"""A kernel whose only result is one of its operands, changed in part."""

_MOVES = frozenset(
    {
        "copy",
        "copy-start",
        "transpose",
        "reshape",
        "pad",
        "concatenate",
        "slice",
        "slice-start",
        "dynamic-slice",
        "reverse",
    }
)
_PRODUCTS = frozenset({"dot", "convolution", "reduce", "custom-call"})


@dataclass
class Access:
    """One instruction that runs, and what one run of it moves.

    reads: bytes of each argument, "" for values that the program made itself.
    written: bytes of the buffers it fills, those it updates in place counted by the update.
    in_place: the argument that it updates, or None.
    uses: every argument among its operands, those fetched to on-chip memory before included.
    """

    step: Step
    opcode: str
    opcodes: frozenset[str]
    reads: dict[str, int] = field(default_factory=dict)
    written: int = 0
    in_place: str | None = None
    uses: set[str] = field(default_factory=set)

    @property
    def is_fetch(self) -> bool:
        """Whether it only brings data to on-chip memory."""
        return self.written == 0 and self.opcode in _FETCHES

    @property
    def is_write_back(self) -> bool:
        """Whether it brings back to main memory what the compiler kept on chip meanwhile: a write, and no copy."""
        return self.opcode == "copy-start" and self.written > 0 and not sum(self.reads.values())

    @property
    def is_product(self) -> bool:
        """Whether it multiplies and adds up: a product with a weight, or attention."""
        return bool(self.opcodes & _PRODUCTS)

    def copies(self, least: int) -> bool:
        """Whether it moves, transposes or converts at least so many bytes into a buffer of their own."""
        if self.in_place is not None or self.written < least or self.is_write_back:
            return False
        from_argument = max((size for name, size in self.reads.items() if name), default=0) >= least
        looks_up = "gather" in self.opcodes  # rows of a table
        return self.opcode in _MOVES or (from_argument and not self.is_product and not looks_up)


def accesses(program: Program, trips: Callable[[Instruction], int] = lambda loop: 1) -> list[Access]:
    """What every instruction that runs reads and writes. ``trips`` as for ``Program.runs``."""
    origins: dict[tuple[str, str], object] = {}
    entry = program.computations[program.entry]
    _follow(program, program.entry, [entry[name].op_name for name in parameters_of(entry)], origins)
    return list(_accesses(program, trips, origins))


def _accesses(
    program: Program, trips: Callable[[Instruction], int], origins: dict[tuple[str, str], object]
) -> Iterator[Access]:
    for step in program.runs(trips):
        one, own = step.instruction, program.computations[step.computation]
        if one.opcode in NO_WORK or one.opcode.endswith("-done") or inner_of(one):
            continue
        access = Access(step, program.producer(one), frozenset(program.opcodes(one)))
        for place, name in enumerate(one.operands):
            operand = own[name]
            origin = origins.get((step.computation, name))
            label = origin if isinstance(origin, str) else ""
            if label:
                access.uses.add(label)
            if operand.type.startswith("(") or on_chip(operand.type):
                continue
            size = _read_bytes(program, one, place, operand.type)
            access.reads[label] = access.reads.get(label, 0) + size
        updated = _updated(program, one)
        if updated is not None:
            origin = origins.get((step.computation, one.operands[updated]))
            access.in_place = origin if isinstance(origin, str) else ""
            access.written = _update_bytes(program, one)
        else:
            access.written = _hbm_bytes(one)
        yield access


def _follow(program: Program, name: str, arguments: list[object], origins: dict[tuple[str, str], object]) -> object:
    """Fill in where every value of a computation comes from; returns that of its root."""
    own = program.computations[name]
    given = dict(zip(parameters_of(own), arguments, strict=True))
    known: dict[str, object] = {}
    root: object = None
    for one in own.values():
        first = known.get(one.operands[0]) if one.operands else None
        value: object = None
        if one.opcode == "parameter":
            value = given[one.name]
        elif one.opcode == "tuple":
            value = [known.get(operand) for operand in one.operands]
        elif one.opcode == "get-tuple-element":
            value = first[one.number] if isinstance(first, list) and one.number < len(first) else first
        elif one.opcode in ("bitcast", "opt-barrier") or one.opcode in _FETCHES:
            value = first
        elif one.opcode == "while":
            _follow(program, one.called["body"][0], [first], origins)
            value = first
        elif inner := inner_of(one):
            passed = [[known.get(operand)] for operand in one.operands[1:]] if one.opcode == "conditional" else None
            for place, each in enumerate(inner):
                value = _follow(
                    program, each, passed[place] if passed else [known.get(name) for name in one.operands], origins
                )
        elif one.opcode == "custom-call" and "ConcatBitcast" in one.rest:  # slices of one array, fetched side by side
            value = first
        elif (updated := _updated(program, one)) is not None:
            value = known.get(one.operands[updated])
        known[one.name] = origins[name, one.name] = value
        root = value if one.root else root
    return root


def _updated(program: Program, one: Instruction) -> int | None:
    """Which operand an instruction updates in place."""
    if one.opcode in _UPDATES:
        return 0
    if one.opcode == "custom-call":
        kernel = _KERNEL_UPDATES.search(one.rest)
        return int(kernel[1]) if kernel else None
    inner = program.fused(one)
    if inner is None:
        return None
    root = root_of(inner)
    while root.opcode in _VIEWS:
        root = inner[root.operands[0]]
    within = _updated(program, root)
    if within is None:
        return None
    held = inner[root.operands[within]]
    while held.opcode in _VIEWS:
        held = inner[held.operands[0]]
    return held.number if held.opcode == "parameter" else None


def _update_bytes(program: Program, one: Instruction) -> int:
    """Bytes that an update in place writes."""
    if one.opcode == "fusion":
        inner = program.fused(one)
        assert inner is not None
        root = root_of(inner)
        while root.opcode in _VIEWS:
            root = inner[root.operands[0]]
        if root.opcode == "fusion":
            return _update_bytes(program, root)
        update = inner[root.operands[2 if root.opcode == "scatter" else 1]]
        return type_bytes(update.type)
    return 0  # its update is an operand, counted as read


def _read_bytes(program: Program, one: Instruction, place: int, type_text: str) -> int:
    """Bytes that an instruction reads of its operand number ``place``."""
    whole, size = type_elements(type_text), type_bytes(type_text)
    touched = _touched_by(program, one, place, whole)
    return size if touched >= whole else math.ceil(size * touched / max(whole, 1))


def _touched_by(program: Program, one: Instruction, place: int, whole: int) -> int:
    """Elements of an operand that an instruction reads."""
    if one.opcode in ("dynamic-slice", "slice", "gather", "slice-start") and place == 0:
        result = parts(one.type)[1] if one.opcode == "slice-start" else one.type  # a start: (source, result, ...)
        return min(whole, type_elements(result))
    if one.opcode in (*_UPDATES, "custom-call") and place == _updated(program, one):
        return 0
    inner = program.fused(one)
    if inner is None:
        return whole
    return _touched(program, inner, parameters_of(inner)[place], whole)


def _touched(program: Program, own: Computation, name: str, whole: int) -> int:
    total = 0
    for one in own.values():
        for place, operand in enumerate(one.operands):
            if operand != name or total >= whole:
                continue
            if one.opcode in _VIEWS:
                total += whole if one.root else _touched(program, own, one.name, whole)
            else:
                total += _touched_by(program, one, place, whole)
    return min(total, whole)


def _hbm_bytes(one: Instruction) -> int:
    """Bytes of a result that lie in main memory."""
    filled = parts(one.type)
    if one.opcode == "copy-start":  # (result, source, ...)
        filled = filled[:1]
    elif one.opcode.endswith("-start") and len(filled) > 1:  # (source, result, ...)
        filled = filled[1:2]
    return sum(type_bytes(part) for part in filled if not on_chip(part))
