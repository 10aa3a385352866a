"""How much devices that do equal work wait for each other: the cost of meeting, beside the cost of the message.

A collective ends when the slowest device has come to it. Devices that read equal amounts are never equally fast each
time: memory they share, other programs and clock speeds see to that. Between two meetings each loses what the slowest
of them lost, where without a meeting good and bad luck even out. What that costs is a share of the work, so no latency
of a collective alone can say it.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.bandwidth import COLUMNS, buffer_bytes
from sharding.collective_chain import Meeting
from sharding.mesh import place_on_mesh

BUFFERS = 8
"""Equal reads in one round. Each is of a buffer of its own, so that none is found in a cache."""

ROUNDS = 2
"""Rounds in a sample, where nothing else is asked for."""


class SkewProbe:
    """Streaming reads one after another on every device, with an all-reduce after each, and without.

    Args:
        total_bytes: of all buffers over all devices; by default those of ``sharding.bandwidth.ReadProbe``.

    ``bytes_per_read`` is what one device reads at a time.
    """

    def __init__(self, mesh: Mesh, *, total_bytes: int | None = None):
        devices = mesh.devices.size
        total = buffer_bytes(mesh) if total_bytes is None else total_bytes
        rows = max(1, total // (4 * COLUMNS * devices * BUFFERS)) * devices
        self.bytes_per_read = rows // devices * COLUMNS * 4
        split = PartitionSpec(mesh.axis_names)
        sharding = NamedSharding(mesh, split)
        make = jax.jit(
            lambda: [jnp.full((rows, COLUMNS), 1e-3, jnp.float32)] * BUFFERS, out_shardings=[sharding] * BUFFERS
        )
        self._buffers = make()
        self._x = place_on_mesh(np.ones((1, COLUMNS), np.float32), NamedSharding(mesh, PartitionSpec()))

        def reads(buffers: list[jax.Array], x: jax.Array, rounds: jax.Array, meet: bool) -> jax.Array:
            def one_round(_: jax.Array, x: jax.Array) -> jax.Array:
                for buffer in buffers:
                    link = jnp.sum(lax.dot_general(x, buffer, (((1,), (1,)), ((), ())))) * 1e-6
                    link = lax.psum(link, mesh.axis_names) if meet else lax.optimization_barrier(link)
                    x = 1 + link * jnp.ones_like(x)
                return x

            return lax.fori_loop(0, rounds, one_round, x)[:, :1]

        def compiled(meet: bool) -> jax.stages.Wrapped:
            return jax.jit(
                jax.shard_map(
                    lambda buffers, x, rounds: reads(buffers, x, rounds, meet),
                    mesh=mesh,
                    in_specs=([split] * BUFFERS, PartitionSpec(), PartitionSpec()),
                    out_specs=PartitionSpec(None, mesh.axis_names),
                    check_vma=False,
                )
            )

        self._programs = {meet: compiled(meet) for meet in (True, False)}
        self._meeting = Meeting(mesh)
        for meet in self._programs:
            self.seconds(meet)  # compiles, and is not timed

    def seconds(self, meet: bool, rounds: int = ROUNDS) -> float:
        """Seconds of one read of a sample of ``BUFFERS * rounds``, with the meetings or without.

        What slows one device for a while slows a long sample by its share of the time and a short one wholly or not at
        all: compare with work that takes as long as the sample.
        """
        # Devices that were idle, or busy with something else, are slow to begin.
        jax.block_until_ready(self._programs[meet](self._buffers, self._x, np.int32(ROUNDS)))
        self._meeting.wait()
        began = time.perf_counter()
        jax.block_until_ready(self._programs[meet](self._buffers, self._x, np.int32(rounds)))
        return (time.perf_counter() - began) / (BUFFERS * rounds)

    def close(self) -> None:
        """Free the buffers."""
        for buffer in self._buffers:
            buffer.delete()
