"""Fills any block of any parameter straight from a checkpoint, reading no more than the block needs."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from model.checkpoint.errors import CheckpointError
from model.checkpoint.source import QuantizedSource, TensorSource
from model.checkpoint.table import Part, Path, parameter_parts
from model.config import LlamaConfig
from model.quantize import Quantized, WeightFormat, unpack

# Values converted at a time. A dequantiser's temporaries are a few times this, so host memory stays close to
# the block being filled, and they stay in a core's cache. Threads were tried: 2 gave nothing on 2 cores.
CHUNK_VALUES = 1 << 18
_MAX_NAMED = 10
# jax takes a host array over without a copy only if it begins on such a boundary.
_ALIGNMENT = 64

# Buffers that old Hugging Face checkpoints saved and that a model computes for itself.
_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


@dataclass(frozen=True)
class _Read:
    """One read of the source, and where in the block its values go."""

    name: str
    rows: slice
    cols: slice | None
    where: tuple[slice, ...]


class WeightReader:
    """Blocks of a model's parameters out of one checkpoint, which was checked to hold exactly that model."""

    def __init__(self, source: TensorSource, config: LlamaConfig) -> None:
        """Compares every tensor's name and shape with what `config` needs, before any data is read.

        Raises CheckpointError that names what is missing, what would go unused, and what has another shape.
        Names may or may not begin with "model.". `rotary_emb.inv_freq` buffers are left unread, and so is an
        `lm_head.weight` when the config ties the head to the embedding: Hugging Face saves it then at times,
        and ignores it on loading.
        """
        self._source = source
        self._parts = parameter_parts(config)
        self._names = _match_names(source, config, self._parts)

    @property
    def paths(self) -> Sequence[Path]:
        """The parameters this reader can fill."""
        return tuple(self._parts)

    def shape(self, path: Path) -> tuple[int, ...]:
        """The parameter's own shape, unpadded."""
        ends = ([at + size for at, size in zip(part.offset, part.shape, strict=True)] for part in self._parts[path])
        return tuple(max(sides) for sides in zip(*ends, strict=True))

    def read(self, path: Path, index: Sequence[slice], shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """The block `index` of a parameter, in `dtype`, as a new array.

        `shape` is the whole parameter's, padded or not: where the block reaches past the checkpoint's own
        shape it is zero. Slices have step 1; None stands for an end, as in the indices jax hands out.
        """
        bounds = [side.indices(size)[:2] for side, size in zip(index, shape, strict=True)]
        block = _aligned_empty(tuple(stop - start for start, stop in bounds), np.dtype(dtype))
        reads = [read for part in self._parts[path] for read in self._reads(part, bounds)]
        if sum(block[read.where].size for read in reads) < block.size:
            block[...] = 0
        for one in reads:
            target = block[one.where]
            target[...] = self._source.read(one.name, one.rows, one.cols).reshape(target.shape)
        return block

    def parts(self, path: Path) -> tuple[Part, ...]:
        """What a parameter is made of, under the names that the source has for it."""
        return tuple(replace(part, name=self._names[part.name]) for part in self._parts[path])

    def stored_parts(self, path: Path, format: WeightFormat) -> list[Part]:
        """The parts of a matrix whose small numbers the checkpoint has just as `format` needs them."""
        return [part for part in self._parts[path] if self._holds(part, format)]

    def all_stored(self, path: Path, format: WeightFormat) -> bool:
        """Whether nothing of a matrix needs to be rounded for `format`."""
        return len(self.stored_parts(path, format)) == len(self._parts[path])

    def copy_stored(self, path: Path, index: Sequence[slice], format: WeightFormat, into: Quantized) -> None:
        """Writes the `stored_parts` of a block into `into`, the arrays of that block: small numbers as they are, scales
        and offsets rounded to the dtype there."""
        bounds = [(side.start, side.stop) for side in index]
        pack = 2 if into.values.dtype == np.uint8 else 1
        for part in self.stored_parts(path, format):
            for one in self._reads(part, bounds):
                assert one.cols is not None  # a matrix has columns
                assert isinstance(self._source, QuantizedSource)  # or it would hold nothing
                read = self._source.read_stored(one.name, one.rows, one.cols, format)
                *lead, last = one.where
                values = unpack(read.values) if read.values.dtype == np.uint8 and pack == 1 else read.values
                _fill(into.values[(*lead, slice(last.start // pack, last.stop // pack))], values)
                places = tuple(lead[: part.row_axes])
                if format.group is not None:
                    places = (*lead, slice(last.start // format.group, -(-last.stop // format.group)))
                _fill(into.scales[places], read.scales)
                if into.offsets is not None:
                    _fill(into.offsets[places], np.zeros_like(read.scales) if read.offsets is None else read.offsets)

    def _holds(self, part: Part, format: WeightFormat) -> bool:
        if not isinstance(self._source, QuantizedSource):
            return False
        stored = self._source.stored_format(self._names[part.name])
        if stored is None or not stored.holds(format):
            return False
        # The file's groups run along whole rows, a parameter's along its last axis.
        return format.group is None or part.row_axes + 1 == len(part.shape) or part.shape[-1] % format.group == 0

    def _reads(self, part: Part, bounds: Sequence[tuple[int, int]]) -> Iterator[_Read]:
        """The reads that fill where `part` meets the block, each of about CHUNK_VALUES values."""
        box = [
            (max(start - at, 0), min(stop - at, size))
            for (start, stop), at, size in zip(bounds, part.offset, part.shape, strict=True)
        ]
        if any(start >= stop for start, stop in box):
            return
        name, split = self._names[part.name], part.row_axes
        # From the part's coordinates to the block's.
        shift = [at - start for (start, _), at in zip(bounds, part.offset, strict=True)]
        for col_box, cols in _runs(box[split:], part.shape[split:]):
            step = max(1, CHUNK_VALUES // max(1, cols.stop - cols.start))
            for row_box, rows in _chunks(box[:split], part.shape[:split], step):
                where = tuple(
                    slice(start + move, stop + move)
                    for (start, stop), move in zip([*row_box, *col_box], shift, strict=True)
                )
                yield _Read(name, rows, cols if split < len(part.shape) else None, where)


def _fill(target: np.ndarray, values: np.ndarray) -> None:
    target[...] = values.reshape(target.shape)


def _match_names(source: TensorSource, config: LlamaConfig, table: Mapping[Path, tuple[Part, ...]]) -> dict[str, str]:
    """The source's own name for each tensor of the table. Raises CheckpointError as WeightReader does."""
    found: dict[str, str] = {}
    for name in source.tensors:
        short = name.removeprefix("model.")
        if short in found:
            raise CheckpointError(f"{source.path} holds both {found[short]!r} and {name!r}: one of them must go")
        found[short] = name
    needed = {part.name: part.tensor_shape for parts in table.values() for part in parts}
    missing = [f"{name} {list(shape)}" for name, shape in needed.items() if name not in found]
    unused = [
        f"{name} {list(source.tensors[name].shape)}"
        for short, name in found.items()
        if short not in needed
        and not _IGNORED.fullmatch(short)
        and not (short == "lm_head.weight" and config.tie_word_embeddings)
    ]
    misshapen = [
        f"{found[name]} {list(source.tensors[found[name]].shape)} instead of {list(shape)}"
        for name, shape in needed.items()
        if name in found and source.tensors[found[name]].shape != shape
    ]
    faults = [
        _describe(what, names)
        for what, names in (
            ("needed but missing", missing),
            ("present but not part of the model", unused),
            ("of another shape", misshapen),
        )
        if names
    ]
    if faults:
        hint = ""
        if "lm_head.weight" in needed and "lm_head.weight" not in found:
            hint = ". The config does not tie the LM head to the embedding (tie_word_embeddings)"
        raise CheckpointError(f"{source.path} does not hold the model its config describes. {'; '.join(faults)}{hint}")
    return {name: found[name] for name in needed}


def _describe(what: str, names: Sequence[str]) -> str:
    more = f", and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} {what}: {', '.join(names[:_MAX_NAMED])}{more}"


Box = list[tuple[int, int]]


def _runs(box: Box, sizes: Sequence[int]) -> Iterator[tuple[Box, slice]]:
    """Splits a box of the axes `sizes` into sub-boxes that are contiguous once the axes are flattened.

    Yields each sub-box with its flat range. No axes at all are one run of one value.
    """
    outer = len(box)
    while outer > 0 and all(side == (0, size) for side, size in zip(box[outer:], sizes[outer:], strict=True)):
        outer -= 1  # in the end, the outermost axis that may be partial while all axes inside it are whole
    inside = math.prod(sizes[outer + 1 :])
    for lead in itertools.product(*(range(*side) for side in box[:outer])):
        flat = 0
        for index, size in zip(lead, sizes[:outer], strict=True):
            flat = flat * size + index
        fixed = [(index, index + 1) for index in lead]
        if outer == len(box):
            yield fixed, slice(flat, flat + 1)
        else:
            start, stop = box[outer]
            flat *= sizes[outer]
            yield [*fixed, *box[outer:]], slice((flat + start) * inside, (flat + stop) * inside)


def _chunks(box: Box, sizes: Sequence[int], step: int) -> Iterator[tuple[Box, slice]]:
    """As `_runs`, but in sub-boxes of at most `step` values, each along the innermost axis."""
    *outer, (start, stop) = box
    for lead in itertools.product(*(range(*side) for side in outer)):
        flat = 0
        for index, size in zip(lead, sizes[:-1], strict=True):
            flat = flat * size + index
        flat *= sizes[-1]
        for at in range(start, stop, step):
            end = min(at + step, stop)
            yield [*((index, index + 1) for index in lead), (at, end)], slice(flat + at, flat + end)


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Like np.empty, on a 64-byte boundary."""
    count = math.prod(shape) * dtype.itemsize
    raw = np.empty(count + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + count].view(dtype).reshape(shape)
