"""The limit a decode step is held against: the read bandwidth this machine reaches, measured on the spot.

A decode step can do no better than read its bytes once, so the yardstick is a program that does only that: a
matrix-vector product over a buffer too large for the caches, on every device at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.collective_chain import Meeting
from sharding.mesh import place_on_mesh

COLUMNS = 2048


@dataclass(frozen=True)
class Bandwidth:
    """Read bandwidth of one device while all of them read, and of all together, in bytes/s."""

    per_device: float
    devices: int
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Sequence[float], devices: int) -> Bandwidth:
        """The best of the samples and not the median: interference only ever makes a read slower, and a limit is
        what the machine can do."""
        return cls(max(samples), devices, tuple(samples))

    @property
    def total(self) -> float:
        return self.per_device * self.devices


def buffer_bytes(mesh: Mesh) -> int:
    """What is read to measure memory, over all devices: 512 MiB on CPU (larger than a share of the last-level cache),
    1 GiB a device elsewhere."""
    return 512 << 20 if mesh.devices.flat[0].platform == "cpu" else (1 << 30) * mesh.devices.size


class ReadProbe:
    """A float32 buffer split over a mesh, and a compiled program that reads it once.

    Args:
        total_bytes: size of the buffer over all devices; ``buffer_bytes`` when None.
    """

    def __init__(self, mesh: Mesh, *, total_bytes: int | None = None):
        self.devices = mesh.devices.size
        total_bytes = buffer_bytes(mesh) if total_bytes is None else total_bytes
        rows = max(1, total_bytes // (4 * COLUMNS * self.devices)) * self.devices
        split = PartitionSpec(mesh.axis_names)
        make = jax.jit(lambda: jnp.full((rows, COLUMNS), 1e-3, jnp.float32), out_shardings=NamedSharding(mesh, split))
        self.buffer = make()

        def read(buffer: jax.Array, x: jax.Array) -> jax.Array:
            return lax.dot_general(x, buffer, (((1,), (1,)), ((), ())))

        self._run = jax.jit(
            jax.shard_map(
                read,
                mesh=mesh,
                in_specs=(split, PartitionSpec()),
                out_specs=PartitionSpec(None, mesh.axis_names),
                check_vma=False,
            )
        )
        self._x = place_on_mesh(np.ones((1, COLUMNS), np.float32), NamedSharding(mesh, PartitionSpec()))
        jax.block_until_ready(self._run(self.buffer, self._x))  # compiles, and is not timed
        self._meeting = Meeting(mesh)

    def sample(self) -> float:
        """Bytes/s of one device in one timed read."""
        self._meeting.wait()
        began = time.perf_counter()
        jax.block_until_ready(self._run(self.buffer, self._x))
        return self.buffer.nbytes / self.devices / (time.perf_counter() - began)

    def close(self) -> None:
        """Free the buffer."""
        self.buffer.delete()


def measure_read_bandwidth(mesh: Mesh, *, total_bytes: int | None = None, repeats: int = 7) -> Bandwidth:
    """``repeats`` timed reads of a ``ReadProbe``."""
    probe = ReadProbe(mesh, total_bytes=total_bytes)
    samples = [probe.sample() for _ in range(repeats)]
    probe.close()
    return Bandwidth.of(samples, probe.devices)


def median_bandwidth(bandwidth: Bandwidth) -> float:
    """Median bytes/s a device over the samples, for telling how noisy the machine is."""
    return statistics.median(bandwidth.samples)
