"""What chat templates run in: jinja2's immutable sandbox, with bounds on what a template makes and for how long.

A template is a program that came with a model. Besides reaching what is not its own, which jinja2 prevents, it could
fill memory (a repetition, a text doubled in a loop, a field a billion wide) or hold the interpreter (a power of
powers, loops in loops). What it makes is therefore counted, and numbers that ask for much are refused.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 1 << 24  # of one text; an item of a list counts as 8
MAX_MADE = 1 << 28  # the same of all that one rendering makes
MAX_ITEMS = 1 << 20  # of a value with all that it holds, where it becomes a text
MAX_NUMBER = 1 << 20  # a width or a count
MAX_INDENT = 64  # one that every line has
MAX_EXPONENT = 1000
MAX_BITS = 1 << 16  # of a product or a power
MAX_TURNS = 250_000  # of loops, and calls, in one rendering
_TURNS, _JOINED = "turns so far", "parts joined"  # names of filters that no template can write

# In a format: a large number, or one that is given beside it.
_PERCENT = re.compile(r"%(\([^)]*\))?[^a-zA-Z%]*(\*|\d{7,})")
_BRACES = re.compile(r"\{[^{}]*(\{|:[^{}]*\d{7,})")
_EVERY_LINE = frozenset(("indent", "wordwrap", "expandtabs", "tojson"))  # what they are given is repeated
_PASSED_ON = frozenset(("default", "d"))  # filters that do nothing with a number
_KEPT = frozenset(
    """
    attr batch count d default dictsort first groupby items last length list map max min random reject rejectattr
    reverse select selectattr slice sort sum unique
    """.split()  # noqa: SIM905
)
"""Filters that do not write out what they are given."""


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """One environment; several threads may render in it. ``renew`` goes ahead of each rendering."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=_written)
        del self.globals["lipsum"]  # makes text without end, and no chat needs it
        self._spent = threading.local()
        # One that wants the context is not run ahead, while the template is compiled.
        self.filters[_TURNS] = jinja2.pass_context(lambda context, value: self._turn(value))
        self.filters[_JOINED] = self._join
        self.renew()

    def renew(self) -> None:
        """A rendering begins: nothing is spent."""
        self._spent.turns = self._spent.made = 0

    def bound_filters(self) -> None:
        """Bound every filter that is there now."""
        for name, function in self.filters.items():
            if name not in (_TURNS, _JOINED):
                self.filters[name] = self._bounded(name, function)

    def counted(self, template: jinja2.nodes.Template) -> jinja2.nodes.Template:
        """Every turn of every loop counts: where a loop has a condition, ahead of it, else at the start of its body.
        Texts are joined by a filter, which counts what it makes."""
        for loop in list(template.find_all(jinja2.nodes.For)):
            turn = jinja2.nodes.Filter(jinja2.nodes.Const(True), _TURNS, [], [], None, None, lineno=loop.lineno)
            if loop.test is None:
                loop.body.insert(0, jinja2.nodes.ExprStmt(turn, lineno=loop.lineno))
            else:
                loop.test = jinja2.nodes.And(turn, loop.test, lineno=loop.lineno)
        found: jinja2.nodes.Template = _Joins().visit(template)
        return found

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                repeats = isinstance(value, str | bytes | list | tuple) and isinstance(times, int)
                if repeats and len(value) * times > MAX_CHARACTERS:
                    raise jinja2.TemplateRuntimeError(f"it repeated a value to over {MAX_CHARACTERS} items")
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
        elif operator == "**":
            if isinstance(right, int | float) and abs(right) > MAX_EXPONENT:
                raise jinja2.TemplateRuntimeError(f"it took a power above {MAX_EXPONENT}")
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() * right)
        elif operator == "%" and isinstance(left, str | bytes):
            _check_format(left, _PERCENT)
            _check_whole(right)
        return self._made(super().call_binop(context, operator, left, right))

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """As the sandbox's, whose names keep those of a template's own arguments free."""
        __self._turn(True)
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox has its own in place of format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if name in ("format", "format_map"):
            _check_format(owner, _BRACES)
            _check_whole((args, kwargs))
        if isinstance(owner, str | bytes | int | list | tuple):
            _check_method(name, owner, (*args, *kwargs.values()))
        return __self._made(super().call(__context, __obj, *args, **kwargs))

    def _turn(self, value: bool) -> bool:
        self._spent.turns += 1
        if self._spent.turns > MAX_TURNS:
            raise jinja2.TemplateRuntimeError(f"it ran through more than {MAX_TURNS} turns of loops and calls")
        return value

    def _join(self, parts: Iterable[Any]) -> str:
        _check_whole(parts := list(parts))
        texts = [str(part) for part in parts]
        _check_length(sum(map(len, texts)))
        return self._made("".join(texts))

    def _made(self, value: Any) -> Any:
        """Count what was made, once it is there."""
        if isinstance(value, str | bytes | list | tuple):
            size = len(value) if isinstance(value, str | bytes) else 8 * len(value)
            _check_length(size)
            self._spent.made += size
            if self._spent.made > MAX_MADE:
                raise jinja2.TemplateRuntimeError(f"it made more than {MAX_MADE} characters in all")
        return value

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        before = 1 if hasattr(function, "jinja_pass_arg") else 0  # the environment or context comes first

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            if name not in _PASSED_ON and len(args) > before:
                value = args[before]
                if name not in _KEPT:
                    _check_whole(value)
                if name == "format":
                    _check_format(value, _PERCENT)
                if name == "join" and not isinstance(value, str | list | tuple | dict):
                    value = list(value)  # a generator, which can be read once
                    args = (*args[:before], value, *args[before + 1 :])
                _check_method(name, value, (*args[before + 1 :], *kwargs.values()))
            return self._made(function(*args, **kwargs))

        return bounded


def _written(value: Any) -> Any:
    """What an expression prints."""
    if isinstance(value, list | tuple | dict):
        _check_whole(value)
    return value


class _Joins(NodeTransformer):
    """``a ~ b`` becomes a filter over [a, b]."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        parts = jinja2.nodes.List(node.nodes, lineno=node.lineno)
        return jinja2.nodes.Filter(parts, _JOINED, [], [], None, None, lineno=node.lineno)


def _check_method(name: str, value: Any, given: tuple[Any, ...]) -> None:
    """Whether a method of a value, or a filter of that name, may run with what it is given."""
    if name in ("format", "format_map"):
        return  # the format was looked at, and its numbers are no widths
    if name == "translate":
        raise jinja2.TemplateRuntimeError("it called translate, which is not allowed")
    numbers = [abs(number) for number in given if isinstance(number, int)]
    texts = [text for text in given if isinstance(text, str | bytes)]
    if max(numbers, default=0) > (MAX_INDENT if name in _EVERY_LINE else MAX_NUMBER):
        raise jinja2.TemplateRuntimeError(f"it gave {name} the number {max(numbers)}")
    if name in _EVERY_LINE and any(len(text) > MAX_INDENT for text in texts):
        raise jinja2.TemplateRuntimeError(f"it gave {name} a text of more than {MAX_INDENT} characters")
    if name in _EVERY_LINE and isinstance(value, str):
        most = max([*numbers, *map(len, texts)], default=8)
        _check_length(len(value) + most * (value.count("\n") + value.count("\t")))
    if name == "wordwrap" and isinstance(value, str):
        _check_length(len(value) * 16)  # it takes its time
    if name == "replace" and len(texts) > 1 and isinstance(value, str):
        _check_length(len(value) + value.count(str(texts[0])) * len(texts[1]))
    elif name == "join":
        # A method's value goes between the items that it is given; a filter's value has the items.
        items, between = (given[0], value) if isinstance(value, str) and given else (value, "".join(map(str, texts)))
        if isinstance(items, str | list | tuple):
            own = len(items) if isinstance(items, str) else sum(len(one) for one in items if isinstance(one, str))
            _check_length(own + len(items) * len(between))


def _check_format(form: Any, written: re.Pattern[str]) -> None:
    if isinstance(form, bytes) or (isinstance(form, str) and written.search(form)):
        raise jinja2.TemplateRuntimeError("it made a field of a width that is large, or that is not in its format")


def _check_whole(value: Any) -> None:
    """A list that holds another twice, which holds another twice, is short, and endless once it is written out."""
    left, count = [value], 0
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left.extend(one.values())
        elif isinstance(one, list | tuple):
            left.extend(one)
        count += 1
        if count + len(left) > MAX_ITEMS:
            raise jinja2.TemplateRuntimeError(f"it wrote out a value of more than {MAX_ITEMS} items")


def _check_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise jinja2.TemplateRuntimeError(f"it made a value of more than {MAX_CHARACTERS} characters")


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise jinja2.TemplateRuntimeError(f"it made a number of more than {MAX_BITS} bits")
