"""An optimised program as a tree: its computations, their instructions, and how often each one runs.

Read from HLO text (``compiled.as_text()``), as the compilers for CPU, GPU and TPU print it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from sharding.hlo_types import leading_type

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%?([\w.\-]+)$")
_NAMED = re.compile(r"\b(calls|body|condition|to_apply|branch_computations|true_computation|false_computation)=")
_NAMES = re.compile(r"%?([\w.\-]+)")
_OP_NAME = re.compile(r'\bop_name="([^"]*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')

FORWARDS = frozenset({"get-tuple-element", "bitcast", "tuple", "opt-barrier", "while", "call", "conditional"})
"""Instructions that hand buffers on and touch none of them."""

NO_WORK = FORWARDS | {"parameter", "constant", "after-all", "partition-id", "replica-id", "iota"}
"""Instructions that read no array."""

_MOST_CYCLES = 1 << 40
"""The compiler writes a larger number where it has no estimate."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    type: of its result, with layout. operands: names in the same computation. rest: the text after them.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    @cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """The computations it names, by role: "body", "condition", "calls"..."""
        found = {}
        for match in _NAMED.finditer(self.rest):
            text = self.rest[match.end() :]
            text = text[1 : text.index("}")] if text.startswith("{") else text.partition(",")[0].partition(" ")[0]
            found[match[1]] = tuple(_NAMES.findall(text))
        return found

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from: "jit(run)/while/body/attention/..."; of a parameter, its name."""
        found = _OP_NAME.search(self.rest)
        return found[1] if found else ""

    @property
    def cycles(self) -> int | None:
        """The TPU compiler's static estimate of one run, or None."""
        found = _CYCLES.search(self.rest)
        return int(found[1]) if found and int(found[1]) < _MOST_CYCLES else None

    @property
    def number(self) -> int:
        """Of a parameter its place, of a get-tuple-element its index."""
        found = (
            re.match(r"(\d+)\)", self.rest) if self.opcode == "parameter" else re.search(r"\bindex=(\d+)", self.rest)
        )
        assert found, self
        return int(found[1])


Computation = dict[str, Instruction]


class Step(NamedTuple):
    """An instruction that runs, how often, and the loops it is in: (computation, instruction that calls the next)."""

    times: int
    computation: str
    instruction: Instruction
    loops: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """Every computation by name, and the one that runs first."""

    computations: dict[str, Computation]
    entry: str

    @classmethod
    def parse(cls, hlo_text: str) -> Program:
        computations: dict[str, Computation] = {}
        entry, own = "", None
        for line in hlo_text.splitlines():
            if own is not None and line.startswith("}"):
                own = None
            elif own is None:
                if head := _COMPUTATION.match(line):
                    own = computations.setdefault(head[2], {})
                    entry = head[2] if head[1] else entry
            elif head := _INSTRUCTION.match(line):
                one = _instruction(line, head)
                own[one.name] = one
        return cls(computations, entry)

    def runs(self, trips: Callable[[Instruction], int] = lambda loop: 1) -> Iterator[Step]:
        """Every instruction that runs on its own, which leaves out those inside a fusion.

        trips: how often a loop runs whose count the compiler does not know.
        """
        yield from self._walk(self.entry, 1, (), trips)

    def _walk(
        self, name: str, times: int, loops: tuple[str, ...], trips: Callable[[Instruction], int]
    ) -> Iterator[Step]:
        for one in self.computations.get(name, {}).values():
            yield Step(times, name, one, loops)
            if one.opcode == "while":
                count = self.known_trips(one) or trips(one)
                yield from self._walk(one.called["body"][0], times * count, (*loops, one.name), trips)
            else:
                for inner in inner_of(one):
                    yield from self._walk(inner, times, loops, trips)

    def known_trips(self, loop: Instruction) -> int | None:
        """How often a loop runs, where the program says so: noted by the compiler, or a counter below a constant."""
        if known := _TRIPS.search(loop.rest):
            return int(known[1])
        condition = self.computations.get(loop.called["condition"][0])
        if not condition:
            return None
        root = root_of(condition)
        if root.opcode != "compare" or "direction=LT" not in root.rest:
            return None
        counter, bound = (condition[name] for name in root.operands)
        limit = re.match(r"(\d+)\)", bound.rest) if bound.opcode == "constant" else None
        return int(limit[1]) if limit and counter.opcode == "get-tuple-element" else None

    def fused(self, one: Instruction) -> Computation | None:
        """What a fusion computes, or None for any other instruction."""
        return self.computations[one.called["calls"][0]] if one.opcode == "fusion" else None

    def producer(self, one: Instruction) -> str:
        """The opcode behind an instruction's result, through fusions and reinterpretations."""
        inner = self.fused(one)
        if inner is None:
            return one.opcode
        root = root_of(inner)
        while root.opcode == "bitcast":
            root = inner[root.operands[0]]
        return self.producer(root)

    def opcodes(self, one: Instruction) -> set[str]:
        """Every opcode in an instruction, those of its fusions included."""
        inner = self.fused(one)
        return {one.opcode} if inner is None else {code for each in inner.values() for code in self.opcodes(each)}


def inner_of(one: Instruction) -> list[str]:
    """The computations that an instruction runs once: of a call, of a conditional, or of an asynchronous start."""
    if one.opcode in ("call", "call-start"):  # the latter is how a TPU 7x gives work to its sparse cores
        roles: tuple[str, ...] = ("to_apply",)
    elif one.opcode == "conditional":
        roles = ("branch_computations", "true_computation", "false_computation")
    elif one.opcode.endswith("-start"):
        roles = ("calls",)
    else:
        return []
    return [name for role in roles for name in one.called.get(role, ())]


def root_of(computation: Computation) -> Instruction:
    return next(one for one in computation.values() if one.root)


def parameters_of(computation: Computation) -> list[str]:
    """Names of a computation's parameters in order."""
    found = {one.number: one.name for one in computation.values() if one.opcode == "parameter"}
    return [found[place] for place in sorted(found)]


def _instruction(line: str, head: re.Match[str]) -> Instruction:
    type_text = leading_type(line[head.end() :])
    at = head.end() + len(type_text)
    opcode = _OPCODE.match(line, at)
    assert opcode, line
    depth, start, operands = 0, opcode.end(), []
    if opcode[1] in ("parameter", "constant"):
        return Instruction(head[2], type_text, opcode[1], (), line[start:], bool(head[1]))
    for end in range(start, len(line)):
        letter = line[end]
        if letter in "([{":
            depth += 1
        elif letter in ")]}" and depth:
            depth -= 1
        elif depth == 0 and letter in ",)":
            if operand := _OPERAND.search(line[start:end]):
                operands.append(operand[1])
            start = end + 1
            if letter == ")":
                break
    return Instruction(head[2], type_text, opcode[1], tuple(operands), line[start:], bool(head[1]))
