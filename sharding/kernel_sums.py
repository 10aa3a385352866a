"""All-reduces that are kernels of their own: fewer hops than the compiler's for the few kilobytes of a decode step.

Called inside ``jax.shard_map``. Neither uses a Pallas name that differs between jax 0.10 and 0.12.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sharding.mesh import LayoutError

ONE_SHOT_BYTES = 8 << 20
"""VMEM that a one-shot sum may fill with what all devices send."""

MULTIMEM_BLOCKS = 16
"""Thread blocks of a multimem sum: enough for the kilobytes of a decode step."""

_REGISTER = 8 * 128
"""Numbers of 32 bits in a TPU register; 16-bit ones come in twice as many."""


def one_shot_dma(x: jax.Array, axes: Sequence[str], *, interpret: Any = False) -> jax.Array:
    """The sum of every device's ``x`` over mesh axes, by remote DMA: each sends its own to all others, and adds what it
    got in the order of the devices, in float32, so that all hold the same bits. One hop. For TPU.

    A device enters once all have entered, so what it sends finds its buffer free; it leaves once all have added, so no
    signal of the next call can be taken for one of this.

    Raises:
        LayoutError: what all devices send does not fit in VMEM.
    """
    sizes = {axis: lax.axis_size(axis) for axis in axes}
    devices = math.prod(sizes.values())
    if devices == 1:
        return x
    register = _REGISTER * (4 // x.dtype.itemsize)
    rows = -(-x.size // register) * register // 128
    if (nbytes := (devices + 1) * rows * 128 * x.dtype.itemsize) > ONE_SHOT_BYTES:
        raise LayoutError(
            f"a one_shot_dma sum of {x.shape} {x.dtype} over {devices} devices takes {nbytes / 2**20:.1f} MiB of VMEM, "
            f"more than {ONE_SHOT_BYTES >> 20}; use psum, or a smaller batch"
        )
    padded = jnp.pad(x.reshape(-1), (0, rows * 128 - x.size)).reshape(rows, 128)
    found = pl.pallas_call(
        functools.partial(_one_shot, sizes),
        out_shape=jax.ShapeDtypeStruct(padded.shape, padded.dtype),
        in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM)],
        out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
        scratch_shapes=[
            pltpu.VMEM((devices, *padded.shape), padded.dtype),
            pltpu.SemaphoreType.DMA((devices,)),
            pltpu.SemaphoreType.DMA((devices,)),
            pltpu.SemaphoreType.REGULAR,
        ],
        compiler_params=pltpu.CompilerParams(collective_id=0, has_side_effects=True),
        interpret=interpret,
        name="one_shot_sum",
    )(padded)
    return found.reshape(-1)[: x.size].reshape(x.shape)


def _one_shot(sizes: dict[str, int], x: Any, out: Any, got: Any, sent: Any, received: Any, added: Any) -> None:
    devices = math.prod(sizes.values())
    me = lax.axis_index(tuple(sizes))
    peers = [lax.rem(me + distance, devices) for distance in range(1, devices)]

    def meet(semaphore: Any) -> None:
        for peer in peers:
            pl.semaphore_signal(semaphore, 1, device_id=_coordinates(peer, sizes))
        pl.semaphore_wait(semaphore, devices - 1)

    meet(pltpu.get_barrier_semaphore())
    copies = [
        # Into the sender's place at the receiver. A receiver waits on the semaphore of the sender's distance.
        pltpu.make_async_remote_copy(
            x, got.at[me], sent.at[distance], received.at[distance], device_id=_coordinates(peer, sizes)
        )
        for distance, peer in enumerate(peers, 1)
    ]
    for copy in copies:
        copy.start()
    got[me] = x[...]
    for copy in copies:
        copy.wait()
    out[...] = jnp.sum(got[...].astype(jnp.float32), axis=0).astype(out.dtype)
    meet(added)


def _coordinates(rank: Any, sizes: dict[str, int]) -> dict[str, Any]:
    """The place of a device along each axis; along all others it is this device's own."""
    place = {}
    for axis, size in reversed(sizes.items()):
        place[axis], rank = lax.rem(rank, size), lax.div(rank, size)
    return place


def multimem(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The sum of every device's ``x`` over mesh axes, added by the NVLink switch as it is read. JAX's own kernel,
    for Hopper and later, where one switch joins the devices.

    Raises:
        LayoutError: a dtype that the switch does not add, or axes that leave out devices of the mesh.
    """
    from jax.experimental.pallas.ops.gpu.reduce_scatter_mgpu import reduce_scatter

    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise LayoutError(f"a multimem sum takes float32 and bfloat16, not {x.dtype}; use psum")
    whole = jax.sharding.get_abstract_mesh().axis_names  # JAX's kernel takes no part of the mesh
    devices, everyone = (math.prod(map(lax.axis_size, names)) for names in (axes, whole))
    if devices == 1:
        return x
    if devices != everyone:
        raise LayoutError(f"a multimem sum is over all {everyone} devices of the mesh, not {devices} of them; use psum")
    block = 128 * 16 // x.dtype.itemsize  # a warpgroup's threads, 16 bytes each
    padded = jnp.pad(x.reshape(-1), (0, -x.size % block))
    tile = math.gcd(padded.size, 8 * block)
    blocks = min(MULTIMEM_BLOCKS, padded.size // tile)
    summed = reduce_scatter(padded, axis_name=whole, scatter_dimension=None, num_blocks=blocks, tile_size=tile)
    return summed[: x.size].reshape(x.shape)
