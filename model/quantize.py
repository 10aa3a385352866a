"""Which weights are kept in fewer bits, in which format, and how their numbers are rounded.

Round to nearest, with one scale for a row or for a group of consecutive values of a row. Everything happens on the
host, on the block that one device will hold, so that no second copy of the model exists anywhere.

int4 has an offset beside each scale: its 16 levels lie evenly between a group's least and its most. On the demo model
(`scripts.eval_quality`) groups of 32 without offsets raise perplexity by 23 %; scales chosen for the least squared
error by 24 %, and by 17 % with errors weighted by the squares of calibration activations. With offsets, 5 bits a weight
instead of 4.5, it is unchanged: that file's blocks are of this form, and any such block comes back. Groups of 128 with
offsets raise it by 27 %; with the range of each shrunk to its least error in squares by 36 %, in fourth powers by 33 %.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kernels.quantized import BLOCK

Kind = Literal["int8", "int4", "fp8"]
KINDS: tuple[Kind, ...] = ("int8", "int4", "fp8")
DEFAULT_GROUP = {"int8": None, "int4": BLOCK, "fp8": None}
"""Values a scale where none is asked for; None is one scale for a whole row."""

_LARGEST = {"int8": 127.0, "fp8": float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)}
_OFFSETS = {"int8": False, "int4": True, "fp8": False}
"""Whether groups have offsets where a name does not say: 16 values are too few to be centred on zero."""
_NAME = re.compile(r"(int8|int4|fp8)(?:-g(\d+))?(-offsets|-symmetric)?")


class QuantizationError(ValueError):
    """A format or a rule that does not exist, or that does not fit the model."""


@dataclass(frozen=True)
class WeightFormat:
    """How one matrix is kept.

    group: consecutive values of a row that share a scale; None is the whole row.
    offsets: has a number beside each scale that is added after it (ggml's Q4_1, zero points of AWQ and GPTQ).
    """

    kind: Kind
    group: int | None = None
    offsets: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise QuantizationError(f"unknown quantisation {self.kind!r}; known: {', '.join(KINDS)}")
        if self.kind == "fp8" and self.group is not None:
            raise QuantizationError("fp8 has one scale a row; leave the group out")
        if self.kind == "int4" and self.group is None:
            raise QuantizationError(f"int4 needs a group, such as {BLOCK}: a scale for a whole row loses too much")
        if self.offsets and self.group is None:
            raise QuantizationError("offsets go with a group: one number for a whole row shifts nothing that matters")
        if self.group is not None and (self.group < BLOCK or self.group % BLOCK):
            raise QuantizationError(f"a group of {self.group} is not a multiple of {BLOCK}; use 32, 64 or 128")

    @classmethod
    def parse(cls, name: str) -> WeightFormat:
        """The format called "int8", "int4" or "fp8", "int4-g128" with a group. int4 has offsets, save in
        "int4-g32-symmetric"; int8 has none, save in "int8-g32-offsets"."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise QuantizationError(
                f"unknown quantisation {name!r}; known: {', '.join(KINDS)}, int8-gN, int4-gN, int8-gN-offsets, "
                "int4-gN-symmetric"
            )
        offsets = None if match[3] is None else match[3] == "-offsets"
        return cls.of(match[1], None if match[2] is None else int(match[2]), offsets)

    @classmethod
    def of(cls, kind: str, group: int | None = None, offsets: bool | None = None) -> WeightFormat:
        """The kind with this group and with or without offsets, each as is usual for it where None."""
        group = DEFAULT_GROUP.get(kind) if group is None else group
        return cls(kind, group, _OFFSETS.get(kind, False) if offsets is None else offsets)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """As ``parse`` reads it."""
        group = "" if self.group is None else f"-g{self.group}"
        usual = self.offsets == _OFFSETS[self.kind]
        return f"{self.kind}{group}{'' if usual else '-offsets' if self.offsets else '-symmetric'}"

    def holds(self, other: WeightFormat) -> bool:
        """Whether numbers in this format are numbers in ``other`` as they stand: of one kind, in groups that whole
        groups of ``other`` make up, and with offsets only where ``other`` has them."""
        if self.kind != other.kind or self.offsets > other.offsets:
            return False
        if self.group is None or other.group is None:
            return self.group == other.group
        return self.group % other.group == 0

    def check_columns(self, module: str, columns: int) -> None:
        """Raises QuantizationError where rows of ``columns`` values cannot be kept so."""
        if self.kind == "int4" and columns % BLOCK:
            raise QuantizationError(f"{module}: a group of {self.group} does not divide rows of {columns} values")

    def values_dtype(self, platform: str) -> np.dtype:
        """What q is stored in: two 4-bit codes a byte, save on TPU, where XLA packs int4 itself."""
        if self.kind == "int4":
            return np.dtype(jnp.int4) if platform == "tpu" else np.dtype(np.uint8)
        return np.dtype(np.int8) if self.kind == "int8" else np.dtype(ml_dtypes.float8_e4m3fn)

    def scales_dtype(self, platform: str) -> np.dtype:
        """A whole row's scale costs nothing in float32. Groups take 16 bits: float16 has the finer steps."""
        if self.group is None:
            return np.dtype(np.float32)
        return np.dtype(ml_dtypes.bfloat16) if platform == "tpu" else np.dtype(np.float16)


@dataclass(frozen=True)
class Quantization:
    """A format for each matrix that a pattern of ``rules`` matches (as a shell would); the last one that does decides,
    and None keeps the matrix wide. Patterns match module paths such as ``layers.0.mlp.down``, ``embed`` and ``head``.
    """

    rules: tuple[tuple[str, WeightFormat | None], ...] = ()

    @classmethod
    def layers(cls, format: WeightFormat, rules: Sequence[str] = ()) -> Quantization:
        """``format`` for the matrices of every layer, then ``rules`` as ``of_rules`` reads them."""
        return cls((("layers.*", format),)).also(cls.of_rules(rules))

    @classmethod
    def of_rules(cls, rules: Sequence[str]) -> Quantization:
        """Rules of the form "PATTERN=FORMAT" or "PATTERN=none". Raises QuantizationError for one of another form."""
        parsed: list[tuple[str, WeightFormat | None]] = []
        for rule in rules:
            pattern, sign, name = rule.partition("=")
            if not sign or not pattern:
                raise QuantizationError(f"rule {rule!r} is not PATTERN=FORMAT, such as head=int8 or layers.0.*=none")
            parsed.append((pattern, None if name == "none" else WeightFormat.parse(name)))
        return cls(tuple(parsed))

    def also(self, other: Quantization) -> Quantization:
        """These rules, and then the other's."""
        return Quantization(self.rules + other.rules)

    def of(self, module: str) -> WeightFormat | None:
        """The format of a module's weight, by its path; None is wide."""
        found = None
        for pattern, format in self.rules:
            if fnmatch.fnmatchcase(module, pattern):
                found = format
        return found

    def check(self, modules: Sequence[str]) -> None:
        """Raises QuantizationError for a rule that matches none of a model's modules."""
        for pattern, _ in self.rules:
            if not any(fnmatch.fnmatchcase(module, pattern) for module in modules):
                some = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".N.", module) for module in modules))
                raise QuantizationError(f"no matrix is called {pattern!r}; this model has {some}")

    def to_json(self) -> list[list[str | None]]:
        """Every rule as [pattern, format's name or None]."""
        return [[pattern, None if format is None else format.name] for pattern, format in self.rules]

    @classmethod
    def from_json(cls, rules: Any) -> Quantization:
        """What ``to_json`` made. Raises QuantizationError for anything else."""
        found = []
        for rule in rules if isinstance(rules, list) else [rules]:
            match rule:
                case [str(pattern), str() | None as name]:
                    found.append((pattern, None if name is None else WeightFormat.parse(name)))
                case _:
                    raise QuantizationError(f"rule {rule!r} is not a pattern and the name of a format")
        return cls(tuple(found))

    def describe(self) -> str:
        """For people: every rule."""
        return ", ".join(f"{pattern} {'wide' if format is None else format.name}" for pattern, format in self.rules)


WIDE = Quantization()


@dataclass(frozen=True)
class Quantized:
    """What a block of a matrix became: arrays as ``kernels.quantized.QuantizedWeight`` has them."""

    values: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None = None


def quantize(block: np.ndarray, format: WeightFormat, platform: str, peak: np.ndarray | None = None) -> Quantized:
    """Round a block of a matrix, the contraction axis last.

    Args:
        block: float32 [..., I].
        platform: of the device that will hold it.
        peak: where a scale is a whole row's: the largest magnitude [...] of each row, of which the block may be a part.
    """
    scales_dtype = format.scales_dtype(platform)
    if format.group is None:
        largest = np.max(np.abs(block), axis=-1, keepdims=True, initial=0) if peak is None else peak[..., None]
        scales = (largest / _LARGEST[format.kind]).astype(scales_dtype)
        scaled = np.clip(block / _divisor(scales), -_LARGEST[format.kind], _LARGEST[format.kind])
        if format.kind == "int8":
            scaled = np.rint(scaled)
        return Quantized(scaled.astype(format.values_dtype(platform)), scales)
    grouped = _grouped(block, format.group)
    low, high = (-8, 7) if format.kind == "int4" else (-127, 127)
    offsets = None
    if format.offsets:
        least, most = np.min(grouped, axis=-1, keepdims=True), np.max(grouped, axis=-1, keepdims=True)
        if format.group > BLOCK:
            # Most of a large group is small beside its step: levels that missed zero would move it all to one side.
            least, most = np.minimum(least, 0), np.maximum(most, 0)
        scales = ((most - least) / (high - low)).astype(scales_dtype)
        if format.group > BLOCK:
            least = np.rint(least / _divisor(scales)) * _divisor(scales)
        offsets = (least - low * scales.astype(np.float32)).astype(scales_dtype)
        grouped = grouped - offsets.astype(np.float32)
    elif format.kind == "int4":
        scales = _signed_scales(grouped, scales_dtype)
    else:
        scales = (np.max(np.abs(grouped), axis=-1, keepdims=True) / high).astype(scales_dtype)
    codes = np.clip(np.rint(grouped / _divisor(scales)), low, high).astype(np.int8)
    codes = codes.reshape(*block.shape[:-1], -1)[..., : block.shape[-1]]
    if format.kind == "int4":
        codes = codes.astype(jnp.int4) if platform == "tpu" else pack(codes)
    return Quantized(codes, scales[..., 0], None if offsets is None else offsets[..., 0])


def empty(shape: Sequence[int], inner: Sequence[int], format: WeightFormat, platform: str) -> Quantized:
    """Zeros: a block of a matrix [shape], to be filled. inner: the axes that a whole row's scale does not have."""
    *lead, last = shape
    if format.kind == "int4" and platform != "tpu":
        values = np.full((*lead, last // 2), 0x88, np.uint8)
    else:
        values = np.zeros(shape, format.values_dtype(platform))
    if format.group is None:
        sides = [1 if axis in inner else size for axis, size in enumerate(shape)]
    else:
        sides = [*lead, -(-last // format.group)]
    scales = np.zeros(sides, format.scales_dtype(platform))
    return Quantized(values, scales, np.zeros_like(scales) if format.offsets else None)


def pack(codes: np.ndarray) -> np.ndarray:
    """``kernels.quantized.pack`` on the host: -8 to 7 [..., I] -> uint8 [..., I / 2]."""
    halves = (codes + 8).astype(np.uint8).reshape(*codes.shape[:-1], -1, 2, BLOCK // 2)
    packed: np.ndarray = (halves[..., 0, :] | halves[..., 1, :] << 4).reshape(*codes.shape[:-1], -1)
    return packed


def unpack(packed: np.ndarray) -> np.ndarray:
    """``kernels.quantized.unpack`` on the host: uint8 [..., I / 2] -> int8 [..., I]."""
    blocks = packed.reshape(*packed.shape[:-1], -1, BLOCK // 2)
    codes = np.concatenate([blocks & 0xF, blocks >> 4], axis=-1)
    return codes.reshape(*packed.shape[:-1], -1).astype(np.int8) - np.int8(8)


def widen(stored: Quantized, format: WeightFormat) -> np.ndarray:
    """float32 [rows, columns] of what is stored in ``format``, 4-bit numbers two a byte."""
    q = (unpack(stored.values) if format.kind == "int4" else stored.values).astype(np.float32)

    def per_value(scales: np.ndarray) -> np.ndarray:
        return scales if format.group is None else np.repeat(scales, format.group, axis=-1)[..., : q.shape[-1]]

    wide = q * per_value(stored.scales)
    return wide if stored.offsets is None else wide + per_value(stored.offsets)


def regroup(scales: np.ndarray, cols: slice, stored: int, group: int) -> np.ndarray:
    """Scales [rows, groups of ``stored`` that meet ``cols``] as one for each ``group`` of ``cols``."""
    if stored == group:
        return scales
    return scales[:, np.arange(cols.start, cols.stop, group) // stored - cols.start // stored]


def _grouped(block: np.ndarray, group: int) -> np.ndarray:
    """[..., I] -> [..., groups, group], the last one filled with zeros."""
    short = -block.shape[-1] % group
    if short:
        block = np.concatenate([block, np.zeros((*block.shape[:-1], short), block.dtype)], axis=-1)
    return block.reshape(*block.shape[:-1], -1, group)


def _signed_scales(grouped: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Scales [..., groups, 1] at which each group's largest magnitude is -8: codes reach one further down than up."""
    at = np.argmax(np.abs(grouped), axis=-1)[..., None]
    return (np.take_along_axis(grouped, at, axis=-1) / -8).astype(dtype)


def _divisor(scales: np.ndarray) -> np.ndarray:
    """The scales as they were stored, in float32; 1 for a group of zeros."""
    wide = scales.astype(np.float32)
    return np.where(wide == 0, np.float32(1), wide)
