"""One table from logical axes to mesh axes, and what it makes of every array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.mesh import DATA, KV_HEAD, KV_SEQ, TENSOR, LayoutError


class InUnits(NamedTuple):
    """A logical axis whose devices each get a whole number of units of ``unit`` elements (a quantised weight's groups).
    Such a dimension is padded to whole units even where nothing splits it."""

    axis: str
    unit: int


LogicalAxis = str | InUnits | None
LogicalAxes = Sequence[LogicalAxis]

RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": DATA,
    "vocab": TENSOR,
    "ff": TENSOR,
    "kv_heads": KV_HEAD,
    "head_rows": KV_SEQ,  # output rows of one KV head's group in the fused q, k, v projection
    "head_columns": KV_SEQ,  # input columns of one KV head's group in the attention output projection
    "positions": KV_SEQ,  # cache slots: position p lives on kv_seq member p % kv_seq, slot p // kv_seq
    "layers": None,  # the leading axis of stacked layers
}


@dataclass(frozen=True)
class Layout:
    """Shardings and padded shapes on one mesh.

    A dimension that its mesh axes do not divide is padded at its end to the next multiple; the padding holds
    zeros and is stripped or harmless wherever it is read. ``padding`` tells how much a given array carries.
    """

    mesh: Mesh

    @property
    def tp(self) -> int:
        return self.kv_head * self.kv_seq

    @property
    def data(self) -> int:
        return self.mesh.shape[DATA]

    @property
    def kv_head(self) -> int:
        return self.mesh.shape[KV_HEAD]

    @property
    def kv_seq(self) -> int:
        return self.mesh.shape[KV_SEQ]

    @property
    def processes(self) -> int:
        """How many processes own the devices."""
        return len({device.process_index for device in self.mesh.devices.flat})

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @property
    def device_kind(self) -> str:
        return self.mesh.devices.flat[0].device_kind

    def spec(self, axes: LogicalAxes) -> PartitionSpec:
        """The PartitionSpec of an array whose dimensions carry these logical axes (None: not split)."""
        return PartitionSpec(*(self._mesh_axes(axis) for axis in axes))

    def sharding(self, axes: LogicalAxes) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes))

    def padded_shape(self, shape: Sequence[int], axes: LogicalAxes) -> tuple[int, ...]:
        """``shape`` with each split dimension rounded up to a multiple of the devices that split it, or of a unit for
        each of them."""
        if len(shape) != len(axes):
            raise LayoutError(f"shape {tuple(shape)} has {len(shape)} dimensions but {len(axes)} axes: {tuple(axes)}")
        steps = (self._ways(axis) * (axis.unit if isinstance(axis, InUnits) else 1) for axis in axes)
        return tuple(-(-size // step) * step for size, step in zip(shape, steps, strict=True))

    def local_shape(self, shape: Sequence[int], axes: LogicalAxes) -> tuple[int, ...]:
        """The shape of one device's slice of the padded array."""
        padded = self.padded_shape(shape, axes)
        return tuple(size // self._ways(axis) for size, axis in zip(padded, axes, strict=True))

    def padding(self, shape: Sequence[int], axes: LogicalAxes) -> int:
        """How many padding elements the array carries over all devices."""
        return math.prod(self.padded_shape(shape, axes)) - math.prod(shape)

    def describe(self) -> str:
        """The mesh in one line, for people."""
        shape = "x".join(str(size) for size in self.mesh.devices.shape)
        split = f"{self.kv_head} kv_head x {self.kv_seq} kv_seq"
        return f"tp={self.tp} as {split} (mesh {shape}, {self.device_kind})"

    def _mesh_axes(self, axis: LogicalAxis) -> str | tuple[str, ...] | None:
        if axis is None:
            return None
        if isinstance(axis, InUnits):
            axis = axis.axis
        if axis not in RULES:
            raise LayoutError(f"unknown logical axis {axis!r}; known: {', '.join(sorted(RULES))}")
        return RULES[axis]

    def _ways(self, axis: LogicalAxis) -> int:
        mesh_axes = self._mesh_axes(axis)
        if mesh_axes is None:
            return 1
        if isinstance(mesh_axes, str):
            return self.mesh.shape[mesh_axes]
        return math.prod(self.mesh.shape[name] for name in mesh_axes)
