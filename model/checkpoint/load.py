"""Loads a checkpoint onto a mesh: each device is handed its own slice, and never holds anything larger.

The model is abstract until then. A block is read and converted on the host, put on its device, and let go
before the next one is read. Host memory beyond the mapped file therefore stays at one device's slice of one
parameter and a few small temporaries (CPU devices take a copy of the block in large pages as their memory). On
several hosts, each reads what its own devices need.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from model.checkpoint.errors import CheckpointError
from model.checkpoint.host_memory import HostMemory
from model.checkpoint.parameters import Leaf, abstract_leaves, check_dtype
from model.checkpoint.progress import LoadProgress, ProgressOption
from model.checkpoint.source import TensorSource
from model.checkpoint.stack import Collector
from model.checkpoint.table import Path
from model.checkpoint.weights import WeightReader
from model.config import LlamaConfig
from model.llama import LayersForm
from sharding.layout import Layout


def load_params(
    source: TensorSource,
    config: LlamaConfig,
    layout: Layout,
    dtype: Any,
    layers: LayersForm = "unrolled",
    progress: ProgressOption = True,
) -> dict[Path, jax.Array]:
    """Every parameter of `Llama(config, dtype, layers)` by path, padded and sharded as `layout` says.

    dtype: float32 or bfloat16, or "f32" or "bf16".
    progress: True for a bar on stderr when the load lasts, or a callable (bytes done, bytes in all).

    Raises CheckpointError before anything is read when the source does not hold exactly this model, and while
    reading when its data are damaged.
    """
    dtype = check_dtype(dtype)
    reader = WeightReader(source, config)
    leaves = abstract_leaves(config, "unrolled")
    check_paths(reader, leaves)
    collector = Collector(config, layout, layers)
    total = local_bytes(leaves, layout, dtype)
    # A stack of layers is made on the devices, from blocks that are let go.
    keeps = layout.platform == "cpu" and layers == "unrolled"
    memory = HostMemory(total, sum(len(list(_blocks(leaf, layout))) for leaf in leaves.values())) if keeps else None
    with LoadProgress(f"loading {source.path.name}", total, progress) as bar:
        for path, leaf in leaves.items():
            collector.add(path, _place(reader, path, leaf, layout, dtype, bar, memory))
    return collector.result()


def local_bytes(leaves: dict[Path, Leaf], layout: Layout, dtype: np.dtype) -> int:
    """Bytes this process reads for its own devices; a block that several of them share counts once."""
    values = 0
    for leaf in leaves.values():
        values += sum(math.prod(layout.local_shape(leaf.shape, leaf.axes)) for _ in _blocks(leaf, layout))
    return values * dtype.itemsize


def check_paths(reader: WeightReader, leaves: dict[Path, Leaf]) -> None:
    """The model and the table of tensors must agree on what parameters there are, and on their shapes."""
    for path in leaves.keys() ^ set(reader.paths):
        raise CheckpointError(f"the model and the checkpoint table disagree on the parameter {path}")
    for path, leaf in leaves.items():
        if leaf.shape != reader.shape(path):
            raise CheckpointError(
                f"parameter {path} is {list(leaf.shape)} in the model and {list(reader.shape(path))} in the checkpoint"
            )


def _blocks(leaf: Leaf, layout: Layout) -> Iterator[tuple[tuple[slice, ...], list[jax.Device]]]:
    """The distinct blocks of the padded parameter on this process's devices, each with those devices."""
    shape = layout.padded_shape(leaf.shape, leaf.axes)
    devices_by_block: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in layout.sharding(leaf.axes).addressable_devices_indices_map(shape).items():
        assert index is not None  # every device of a NamedSharding holds a block
        bounds = tuple(side.indices(size)[:2] for side, size in zip(index, shape, strict=True))
        devices_by_block.setdefault(bounds, []).append(device)
    for bounds, devices in devices_by_block.items():
        yield tuple(slice(*side) for side in bounds), devices


def _place(
    reader: WeightReader,
    path: Path,
    leaf: Leaf,
    layout: Layout,
    dtype: np.dtype,
    bar: LoadProgress,
    memory: HostMemory | None,
) -> jax.Array:
    shape = layout.padded_shape(leaf.shape, leaf.axes)
    shards: list[jax.Array] = []
    for index, devices in _blocks(leaf, layout):
        block = reader.read(path, index, shape, dtype)
        if memory is not None:
            block = memory.keep(block)
        placed = [jax.device_put(block, device) for device in devices]
        # The host copy is freed only once every device has its own.
        jax.block_until_ready(placed)
        shards += placed
        bar.advance(block.nbytes)
    return jax.make_array_from_single_device_arrays(shape, layout.sharding(leaf.axes), shards, dtype=dtype)
