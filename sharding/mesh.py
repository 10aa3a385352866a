"""The device mesh: any tensor-parallel degree as one factorisation over KV heads and cache positions.

With ``tp`` devices and ``num_kv_heads`` KV heads, ``kv_head = gcd(tp, num_kv_heads)`` devices split the heads
and ``kv_seq = tp / kv_head`` devices split the positions of each head's cache. Weights are split over both,
so weight bytes and cache bytes a device fall as 1/tp whether or not tp divides (or exceeds) the KV head
count. Splitting the cache by position past the KV head count is the layout of Helix parallelism (Bhatia et
al., 2025).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

DATA, KV_HEAD, KV_SEQ = "data", "kv_head", "kv_seq"
MESH_AXES = (DATA, KV_HEAD, KV_SEQ)
TENSOR = (KV_HEAD, KV_SEQ)
"""The two mesh axes that together are "tensor parallel"."""


class LayoutError(ValueError):
    """A mesh or layout that cannot be built from what was asked."""


def factorise(tp: int, num_kv_heads: int) -> tuple[int, int]:
    """Split ``tp`` into (kv_head, kv_seq): devices over KV heads, devices over cache positions."""
    if tp < 1 or num_kv_heads < 1:
        raise LayoutError(f"tp and the KV head count must be at least 1, got tp={tp}, num_kv_heads={num_kv_heads}")
    kv_head = math.gcd(tp, num_kv_heads)
    return kv_head, tp // kv_head


def make_mesh(tp: int, num_kv_heads: int, *, data: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of ``data * tp`` devices with axes ``("data", "kv_head", "kv_seq")``.

    Raises:
        LayoutError: more devices asked for than there are.
    """
    if data < 1:
        raise LayoutError(f"data must be at least 1, got {data}")
    kv_head, kv_seq = factorise(tp, num_kv_heads)
    devices = jax.devices() if devices is None else list(devices)
    need = data * tp
    if need > len(devices):
        kind = devices[0].platform
        hint = (
            f"; on CPU add --cpu-devices {need} to make {need} fake ones"
            if kind == "cpu"
            else f"; the largest tp that fits is {len(devices) // data}"
        )
        raise LayoutError(
            f"tp={tp} (times data={data}) needs {need} devices, but JAX sees {len(devices)} ({kind}){hint}"
        )
    return Mesh(np.array(spread(devices, need)).reshape(data, kv_head, kv_seq), MESH_AXES)


def spread(devices: Sequence[jax.Device], count: int) -> list[jax.Device]:
    """The first ``count`` devices, as evenly over the processes that own them as they go."""
    own: dict[int, list[jax.Device]] = {}
    for device in devices:
        own.setdefault(device.process_index, []).append(device)
    chosen: list[jax.Device] = []
    for place, mine in enumerate(own.values()):
        chosen += mine[: -(-(count - len(chosen)) // (len(own) - place))]
    return chosen


def owns_a_device(mesh: Mesh) -> bool:
    """Whether this process takes part in programs over ``mesh``."""
    return any(device.process_index == jax.process_index() for device in mesh.devices.flat)


def check_every_process_has_a_device(mesh: Mesh) -> None:
    """For programs in which every process takes part.

    Raises:
        LayoutError: a process of the run owns no device of ``mesh``.
    """
    owners = {device.process_index for device in mesh.devices.flat}
    if len(owners) < jax.process_count():
        raise LayoutError(
            f"a mesh of {mesh.devices.size} devices leaves {jax.process_count() - len(owners)} of "
            f"{jax.process_count()} processes without one; use --tp {jax.process_count()} or more, or fewer processes"
        )


def place_on_mesh(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Put an array that every process has whole onto a mesh, each process its own devices' slices."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
