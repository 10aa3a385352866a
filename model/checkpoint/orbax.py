"""Saves parameters with Orbax and restores them onto any mesh, in either layer layout and in either dtype.

Arrays are stored as they lie on the mesh, padding included, one set per layer. On restore each device reads
its own slice, cut or padded with zeros to what the new mesh needs. `model.checkpoint.orbax_folder` describes
the folder.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]

from kernels.quantized import pack, unpack
from model.checkpoint.errors import CheckpointError
from model.checkpoint.orbax_folder import (
    ARRAYS_FOLDER,
    OrbaxInfo,
    check_destination,
    check_files,
    new_checkpoint,
    read_info,
    write_small_files,
)
from model.checkpoint.parameters import Leaf, abstract_leaves, check_dtype
from model.checkpoint.progress import LoadProgress, ProgressOption
from model.checkpoint.stack import Collector, unstack
from model.checkpoint.table import Path
from model.config import LlamaConfig
from model.llama import LayersForm
from model.quantize import WIDE, Quantization
from model.tokenizer import Tokenizer
from sharding.layout import InUnits, Layout, LogicalAxis

# A restored slice reads whole chunks, so chunks stay small beside a device's slice.
_CHUNK_BYTES = 16 << 20


def save_params(
    path: FilePath | str,
    params: Mapping[Path, jax.Array],
    config: LlamaConfig,
    layout: Layout,
    *,
    tokenizer: Tokenizer | None = None,
    files: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
    quantization: Quantization = WIDE,
) -> FilePath:
    """Writes a checkpoint of `params`, as `load_params` returns them, and returns its absolute path.

    tokenizer: saved beside the arrays. files: name -> content of further files, which go over the
    tokenizer's. quantization: how the parameters were loaded. Stacked layers (layers="scan") are taken apart
    first, which needs room for a second copy of them on the devices.

    On several hosts, every process calls this with the same arguments and a path all of them share.
    Raises CheckpointError when the destination must not be replaced or cannot be written.
    """
    destination = check_destination(path, overwrite)
    check_files(files or {})
    unstacked = {path: to_stored(value) for path, value in unstack(params, config).items()}
    dtype = unstacked["norm", "weight"].dtype
    with new_checkpoint(destination) as folder:
        _write_arrays(folder / ARRAYS_FOLDER, unstacked)
        write_small_files(folder, config, dtype, layout.tp, quantization, tokenizer, files or {})
    return destination


def restore_params(
    path: FilePath | str,
    layout: Layout,
    dtype: Any = None,
    layers: LayersForm = "unrolled",
    progress: ProgressOption = True,
    quantization: Quantization = WIDE,
) -> dict[Path, jax.Array]:
    """Every parameter by path, padded and sharded as `layout` says, whatever mesh it was saved on.

    dtype: as in `load_params`; None keeps the stored one. Each device reads its own slice. Parameters are
    restored in batches no larger than the largest one, so that neither the host nor a device ever holds more
    than that beyond what it keeps.
    quantization: that of the checkpoint, or WIDE for "as it is".

    Raises CheckpointError before any array is read when the checkpoint does not hold its config's parameters, or
    keeps them in another way than asked.
    """
    info = read_info(path)
    if quantization not in (WIDE, info.quantization):
        kept = info.quantization.describe() or "wide"
        raise CheckpointError(
            f"{info.path} keeps its weights as they were saved ({kept}), not as {quantization.describe()}: quantise "
            f"where you save it, with scripts.convert_checkpoint, from the original checkpoint"
        )
    dtype = info.dtype if dtype is None else check_dtype(dtype)
    # Files hold 4-bit numbers as CPU devices do, and each platform takes them as it keeps them.
    leaves = abstract_leaves(info.config, "unrolled", dtype, info.quantization)
    kept_as = abstract_leaves(info.config, "unrolled", dtype, info.quantization, layout.platform)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arrays = info.path.absolute() / ARRAYS_FOLDER
        _check_stored(checkpointer, arrays, leaves, info)
        sizes = {path: _bytes(leaf, layout) for path, leaf in leaves.items()}
        collector = Collector(info.config, layout, layers, info.quantization)
        with LoadProgress(f"loading {info.path.name}", sum(sizes.values()), progress) as bar:
            for batch in _batches(sizes):
                restored = _restore(checkpointer, arrays, {path: leaves[path] for path in batch}, layout)
                while restored:
                    leaf_path, value = restored.popitem()
                    collector.add(leaf_path, from_stored(value, kept_as[leaf_path].dtype))
                bar.advance(sum(sizes[path] for path in batch))
    return collector.result()


def to_stored(value: jax.Array) -> jax.Array:
    """A parameter as files hold it: 4-bit numbers packed, whatever the platform."""
    return jax.jit(pack)(value) if value.dtype == jnp.int4 else value


def from_stored(value: jax.Array, dtype: np.dtype) -> jax.Array:
    """What files hold, as a platform keeps it."""
    return jax.jit(lambda packed: unpack(packed).astype(dtype))(value) if value.dtype != dtype else value


def _write_arrays(folder: FilePath, params: Mapping[Path, jax.Array]) -> None:
    tree = _nest(params)
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    handler = ocp.PyTreeCheckpointHandler(
        # On the demo model in bf16, zstd took 22 % off the disk and made a restore 1.6 times as long.
        use_compression=False,
        # Orbax would bring the whole model to the host at once. It refuses an array as large as the limit.
        save_device_host_concurrent_gb=max(value.nbytes for value in params.values()) // 10**9 + 2,
    )
    with ocp.Checkpointer(handler) as checkpointer:
        try:
            checkpointer.save(folder, args=ocp.args.PyTreeSave(tree, save_args=save_args))
        except Exception as error:  # TensorStore's own errors, as on a full disk, are ValueErrors
            raise CheckpointError(f"cannot write the arrays of {folder.parent}: {error}") from error


def _restore(
    checkpointer: ocp.Checkpointer,
    folder: FilePath,
    leaves: Mapping[Path, Leaf],
    layout: Layout,
) -> dict[Path, jax.Array]:
    """Some of a checkpoint's parameters, ready on their devices."""
    item: dict[Path, Any] = {}
    restore_args: dict[Path, Any] = {}
    for path, leaf in leaves.items():
        shape, sharding = layout.padded_shape(leaf.shape, leaf.axes), layout.sharding(leaf.axes)
        item[path] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
        # strict=False cuts or pads what was saved to `global_shape`; _check_stored has bounded the
        # difference.
        restore_args[path] = ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape, dtype=leaf.dtype, strict=False)
    args = ocp.args.PyTreeRestore(item=_nest(item), restore_args=_nest(restore_args), partial_restore=True)
    try:
        tree = checkpointer.restore(folder, args=args)
    except (jax.errors.JaxRuntimeError, MemoryError):  # no room for the arrays: not the checkpoint's fault
        raise
    except Exception as error:  # Orbax raises plain Exception when it cannot read a slice
        raise CheckpointError(f"{folder.parent} is damaged, an array cannot be read: {error}") from error
    return {path: jax.block_until_ready(_at(tree, path)) for path in leaves}


def _check_stored(
    checkpointer: ocp.Checkpointer, folder: FilePath, leaves: Mapping[Path, Leaf], info: OrbaxInfo
) -> None:
    """Compares names and shapes of the stored arrays with those the config needs; only metadata is read."""
    try:
        metadata = checkpointer.metadata(folder).item_metadata
        flat = jax.tree_util.tree_flatten_with_path(metadata.tree)[0]
        stored = {".".join(str(key.key) for key in keys): tuple(value.shape) for keys, value in flat}
    except Exception as error:  # whatever a damaged file makes Orbax raise
        raise CheckpointError(f"{info.path} is damaged, its arrays cannot be listed: {error}") from error
    faults = []
    needed = {".".join(map(str, path)): leaf.shape for path, leaf in leaves.items()}
    units = {".".join(map(str, path)): [_unit(axis) for axis in leaf.axes] for path, leaf in leaves.items()}
    faults += [f"{name} {list(shape)} is missing" for name, shape in needed.items() if name not in stored]
    faults += [f"{name} {list(shape)} is not part of the model" for name, shape in stored.items() if name not in needed]
    for name in needed.keys() & stored.keys():
        # Every dimension is padded by less than a unit for each of the devices that can have split it.
        fits = len(needed[name]) == len(stored[name]) and all(
            0 <= have - want < info.tp * unit
            for have, want, unit in zip(stored[name], needed[name], units[name], strict=True)
        )
        if not fits:
            faults.append(f"{name} is {list(stored[name])} instead of {list(needed[name])} (saved at tp={info.tp})")
    if faults:
        more = f", and {len(faults) - 10} more" if len(faults) > 10 else ""
        raise CheckpointError(
            f"{info.path} does not hold the model its config describes: {', '.join(sorted(faults)[:10])}{more}"
        )


def _batches(sizes: Mapping[Path, int]) -> Iterator[list[Path]]:
    """Paths in order, in runs of no more bytes than the largest parameter has."""
    limit = max(sizes.values())
    batch: list[Path] = []
    total = 0
    for path, size in sizes.items():
        if batch and total + size > limit:
            yield batch
            batch, total = [], 0
        batch.append(path)
        total += size
    yield batch


def _unit(axis: LogicalAxis) -> int:
    return axis.unit if isinstance(axis, InUnits) else 1


def _bytes(leaf: Leaf, layout: Layout) -> int:
    return math.prod(layout.padded_shape(leaf.shape, leaf.axes)) * leaf.dtype.itemsize


def _nest(flat: Mapping[Path, Any]) -> dict[str, Any]:
    """Nested dictionaries with string keys, the tree Orbax stores."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, name = map(str, path)
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = value
    return tree


def _at(tree: Mapping[str, Any], path: Path) -> Any:
    return functools.reduce(lambda node, key: node[str(key)], path, tree)
