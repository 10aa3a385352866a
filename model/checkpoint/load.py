"""Loads a checkpoint onto a mesh: each device is handed its own slice, and never holds anything larger.

The model is abstract until then. A block is read, converted and, where asked, quantised on the host, put on its device,
and let go before the next one is read. Host memory beyond the mapped file therefore stays at one device's slice of one
parameter and a few small temporaries (CPU devices take a copy of the block in large pages as their memory). On
several hosts, each reads what its own devices need.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from model.checkpoint.errors import CheckpointError
from model.checkpoint.host_memory import HostMemory
from model.checkpoint.parameters import Leaf, abstract_leaves, check_dtype, matrix_name
from model.checkpoint.progress import LoadProgress, ProgressOption
from model.checkpoint.source import TensorSource
from model.checkpoint.stack import Collector
from model.checkpoint.table import Path
from model.checkpoint.weights import WeightReader
from model.config import LlamaConfig
from model.llama import LayersForm
from model.quantize import WIDE, Quantization, WeightFormat, empty, quantize
from sharding.layout import Layout

Index = tuple[slice, ...]


def load_params(
    source: TensorSource,
    config: LlamaConfig,
    layout: Layout,
    dtype: Any,
    layers: LayersForm = "unrolled",
    progress: ProgressOption = True,
    quantization: Quantization = WIDE,
) -> dict[Path, jax.Array]:
    """Every parameter of `Llama(config, dtype, layers, quantization)` by path, padded and sharded as `layout` says.

    dtype: float32 or bfloat16, or "f32" or "bf16", of what is not quantised.
    progress: True for a bar on stderr when the load lasts, or a callable (bytes done, bytes in all).

    Raises CheckpointError before anything is read when the source does not hold exactly this model, and while
    reading when its data are damaged; QuantizationError where the model cannot be kept as asked.
    """
    dtype = check_dtype(dtype)
    reader = WeightReader(source, config)
    wide = abstract_leaves(config, "unrolled")
    check_paths(reader, wide)
    leaves = abstract_leaves(config, "unrolled", dtype, quantization, layout.platform)
    collector = Collector(config, layout, layers, quantization)
    sizes = _local_sizes(leaves, layout)
    total = sum(sizes)
    # A stack of layers is made on the devices, from blocks that are let go.
    keeps = layout.platform == "cpu" and layers == "unrolled"
    memory = HostMemory(total, len(sizes)) if keeps else None
    with LoadProgress(f"loading {source.path.name}", total, progress) as bar:
        placer = _Placer(layout, bar, memory)
        for path, leaf in wide.items():
            module = matrix_name(path)
            format = quantization.of(module) if module else None
            if format is None:
                collector.add(path, _place(reader, path, leaves[path], placer))
                continue
            for name, array in _place_quantized(reader, path, leaf, leaves, format, placer).items():
                collector.add((*path[:-1], name), array)
    return collector.result()


def _local_sizes(leaves: dict[Path, Leaf], layout: Layout) -> list[int]:
    """Bytes of every block that this process places; one that several of its devices share is one, and scales come with
    each block of their weight."""
    sizes = []
    for path, leaf in leaves.items():
        placed_with = leaves[*path[:-1], "weight"] if path[-1] in ("scales", "offsets") else leaf
        size = math.prod(layout.local_shape(leaf.shape, leaf.axes)) * leaf.dtype.itemsize
        sizes += [size for _ in _blocks(placed_with, layout)]
    return sizes


def check_paths(reader: WeightReader, leaves: dict[Path, Leaf]) -> None:
    """The model and the table of tensors must agree on what parameters there are, and on their shapes."""
    for path in leaves.keys() ^ set(reader.paths):
        raise CheckpointError(f"the model and the checkpoint table disagree on the parameter {path}")
    for path, leaf in leaves.items():
        if leaf.shape != reader.shape(path):
            raise CheckpointError(
                f"parameter {path} is {list(leaf.shape)} in the model and {list(reader.shape(path))} in the checkpoint"
            )


def _blocks(leaf: Leaf, layout: Layout) -> Iterator[tuple[Index, list[jax.Device]]]:
    """The distinct blocks of the padded parameter on this process's devices, each with those devices."""
    shape = layout.padded_shape(leaf.shape, leaf.axes)
    devices_by_block: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in layout.sharding(leaf.axes).addressable_devices_indices_map(shape).items():
        assert index is not None  # every device of a NamedSharding holds a block
        bounds = tuple(side.indices(size)[:2] for side, size in zip(index, shape, strict=True))
        devices_by_block.setdefault(bounds, []).append(device)
    for bounds, devices in devices_by_block.items():
        yield tuple(slice(*side) for side in bounds), devices


@dataclass(frozen=True)
class _Placer:
    """Puts blocks on their devices."""

    layout: Layout
    bar: LoadProgress
    memory: HostMemory | None

    def put(self, block: np.ndarray, devices: list[jax.Device]) -> list[jax.Array]:
        if self.memory is not None:
            block = self.memory.keep(block)
        placed = [jax.device_put(block, device) for device in devices]
        # The host copy is freed only once every device has its own.
        jax.block_until_ready(placed)
        self.bar.advance(block.nbytes)
        return placed

    def joined(self, leaf: Leaf, shards: list[jax.Array]) -> jax.Array:
        shape = self.layout.padded_shape(leaf.shape, leaf.axes)
        sharding = self.layout.sharding(leaf.axes)
        return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=leaf.dtype)


def _place(reader: WeightReader, path: Path, leaf: Leaf, placer: _Placer) -> jax.Array:
    shape = placer.layout.padded_shape(leaf.shape, leaf.axes)
    shards: list[jax.Array] = []
    for index, devices in _blocks(leaf, placer.layout):
        shards += placer.put(reader.read(path, index, shape, leaf.dtype), devices)
    return placer.joined(leaf, shards)


def _place_quantized(
    reader: WeightReader, path: Path, wide: Leaf, leaves: dict[Path, Leaf], format: WeightFormat, placer: _Placer
) -> dict[str, jax.Array]:
    """A matrix as "weight", "scales" and, where the format has them, "offsets": each block rounded as it is read, save
    what the checkpoint holds in this format."""
    layout, stored = placer.layout, leaves[path]
    pack = 2 if stored.dtype == np.uint8 else 1
    names = ["weight", "scales"] + ["offsets"] * format.offsets
    of = {name: leaves[*path[:-1], name] for name in names}
    shape = layout.padded_shape(stored.shape, stored.axes)
    shape = (*shape[:-1], shape[-1] * pack)
    shards: dict[str, list[jax.Array]] = {name: [] for name in names}
    # Axes that the scales of whole rows do not have: those that a product adds up over.
    inner = [axis for axis, size in enumerate(of["scales"].shape) if size == 1 and format.group is None]
    peaks: dict[tuple[tuple[int, int], ...], np.ndarray] = {}
    for index, devices in _blocks(stored, layout):
        index = (*index[:-1], slice(index[-1].start * pack, index[-1].stop * pack))
        if reader.all_stored(path, format):
            made = empty([side.stop - side.start for side in index], inner, format, layout.platform)
        else:
            block = reader.read(path, index, shape, np.dtype(np.float32))
            peak = None
            if format.group is None:
                rows = tuple((side.start, side.stop) for axis, side in enumerate(index) if axis not in inner)
                if rows not in peaks:
                    peaks[rows] = _peak(reader, path, index, shape, inner)
                peak = peaks[rows]
            made = quantize(block, format, layout.platform, peak)
        reader.copy_stored(path, index, format, made)
        for name, array in (("weight", made.values), ("scales", made.scales), ("offsets", made.offsets)):
            if array is not None:
                shards[name] += placer.put(array, devices)
    return {name: placer.joined(of[name], shards[name]) for name in names}


def _peak(reader: WeightReader, path: Path, index: Index, shape: tuple[int, ...], inner: list[int]) -> np.ndarray:
    """The largest magnitude of each whole row that a block has a part of, with 1 for every axis of ``inner`` but the
    last, which is gone. Read in blocks of the size that one device holds."""
    found: np.ndarray | None = None
    sizes = [index[axis].stop - index[axis].start for axis in inner]
    for at in np.ndindex(*(-(-shape[axis] // size) for axis, size in zip(inner, sizes, strict=True))):
        other = list(index)
        for axis, size, place in zip(inner, sizes, at, strict=True):
            other[axis] = slice(place * size, min((place + 1) * size, shape[axis]))
        block = reader.read(path, other, shape, np.dtype(np.float32))
        peak = np.max(np.abs(block), axis=tuple(inner), keepdims=True)[..., 0]
        found = peak if found is None else np.maximum(found, peak)
    assert found is not None  # there is at least one block
    return found
