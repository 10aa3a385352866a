"""Collectives timed as a decode step makes them: one after another in one dispatch, each needing the one before.

A call that is dispatched and waited for alone costs more than its collective, and calls that do not depend on each
other overlap. Here the result of each is, or becomes part of, the input of the next.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.collectives import Axes, all_gather, all_reduce_sum, exchange, reduce_scatter_sum
from sharding.mesh import MESH_AXES, LayoutError

RUN: dict[str, Callable[..., jax.Array]] = {
    "all_reduce": all_reduce_sum,
    "all_gather": lambda x, axes: all_gather(x, axes, axis=0),
    "reduce_scatter": lambda x, axes: reduce_scatter_sum(x, axes, axis=0),
    "all_to_all": exchange,
}
SAME_SHAPE = ("all_reduce", "all_to_all")


@dataclass(frozen=True)
class Step:
    """``count`` times one collective over mesh axes ``axes``.

    nbytes: of the array that is summed (all_reduce), or of the whole array over the group (the gathered result, what
        one device holds before a reduce_scatter or an all_to_all). Rounded up to float32 numbers that divide.
    """

    op: str
    nbytes: int
    axes: Axes
    count: int = 1


class CollectiveChain:
    """A compiled loop over ``steps``, on arrays of zeros, whose sums stay zero.

    Args:
        work: float32 numbers that every device goes over before each call, as a step has products between its
            collectives. Without any, the threads of CPU devices that only wait for each other end up on one core,
            where a call takes 8 us; devices that compute keep a core each, and waking the other takes 76 us (measured
            on 2 cores of a virtual machine).
        bare: leave the calls out, to find what the work costs.

    Raises:
        LayoutError: no step, or an unknown op.
    """

    def __init__(self, mesh: Mesh, steps: Sequence[Step], *, work: int = 0, bare: bool = False):
        if not steps:
            raise LayoutError("a chain of collectives needs at least one")
        unknown = [step.op for step in steps if step.op not in RUN]
        if unknown:
            raise LayoutError(f"unknown collective {unknown[0]!r}; it must be one of {', '.join(RUN)}")
        self.steps, self._work, self._bare = tuple(steps), work, bare
        split = NamedSharding(mesh, PartitionSpec(MESH_AXES))
        shapes = [(mesh.devices.size, _local_elements(mesh, step)) for step in steps]
        self._buffers = jax.jit(
            lambda: [jnp.zeros(shape, jnp.float32) for shape in shapes], out_shardings=[split] * len(shapes)
        )()
        mapped = jax.shard_map(
            self._loop,
            mesh=mesh,
            in_specs=([PartitionSpec(MESH_AXES)] * len(shapes), PartitionSpec()),
            out_specs=[PartitionSpec(MESH_AXES)] * len(shapes),
            check_vma=False,
        )
        arguments = (self._buffers, jax.ShapeDtypeStruct((), jnp.int32))
        self.program = jax.jit(mapped, donate_argnums=0).lower(*arguments).compile()

    def sample(self, rounds: int) -> float:
        """Seconds of one round through the steps, as the mean over a dispatch of ``rounds``."""
        began = time.perf_counter()
        self._buffers = self.program(self._buffers, np.int32(rounds))
        jax.block_until_ready(self._buffers)
        return (time.perf_counter() - began) / rounds

    def close(self) -> None:
        """Free the buffers."""
        for buffer in self._buffers:
            buffer.delete()

    def _loop(self, buffers: list[jax.Array], rounds: jax.Array) -> list[jax.Array]:
        def one_round(turn: jax.Array, carry: tuple[list[jax.Array], jax.Array]) -> tuple[list[jax.Array], jax.Array]:
            buffers, link = carry
            # By its own result of the round before.
            fed = len(self.steps) == 1 and self.steps[0].op in SAME_SHAPE and not self._work
            for index, step in enumerate(self.steps):
                for _ in range(step.count):
                    if self._work:
                        numbers = lax.optimization_barrier(jnp.ones(self._work, jnp.float32))
                        link = jnp.sum(jnp.tanh(numbers * link))
                    if not fed:
                        buffers[index] = buffers[index].at[0].set(link)
                    call = lax.optimization_barrier if self._bare else functools.partial(RUN[step.op], axes=step.axes)
                    result = call(buffers[index])
                    fed = step.op in SAME_SHAPE and not self._work
                    if step.op in SAME_SHAPE:
                        buffers[index] = result
                    link = result[0]
                fed = fed and len(self.steps) == 1
            return buffers, link

        flat = [buffer[0] for buffer in buffers]
        flat, _ = lax.fori_loop(0, rounds, one_round, (flat, jnp.float32(0)))
        return [buffer[None] for buffer in flat]


class Meeting:
    """Where the processes that own ``mesh`` wait for each other, so that a timed run begins together."""

    def __init__(self, mesh: Mesh):
        several = len({device.process_index for device in mesh.devices.flat}) > 1
        self._chain = CollectiveChain(mesh, [Step("all_reduce", 4, MESH_AXES)]) if several else None

    def wait(self) -> None:
        """Returns once every process has called it; at once where there is one."""
        if self._chain is not None:
            self._chain.sample(1)


def _local_elements(mesh: Mesh, step: Step) -> int:
    """float32 numbers that one device puts in."""
    names = (step.axes,) if isinstance(step.axes, str) else step.axes
    group = int(np.prod([mesh.shape[name] for name in names]))
    share = max(1, -(-step.nbytes // (4 * group)))
    return share if step.op == "all_gather" else share * group
