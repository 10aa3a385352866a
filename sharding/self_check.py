"""Before any weight is loaded: do the collectives of this mesh add up?

A broken interconnect or driver returns wrong sums without an error, and a tensor-parallel model then prints nonsense.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sharding.collectives import all_gather, all_reduce_sum, exchange_heads
from sharding.layout import Layout
from sharding.mesh import KV_SEQ, MESH_AXES, TENSOR, place_on_mesh

WIDTH = 1024


class MeshFaultError(RuntimeError):
    """A collective over the mesh returned a wrong result."""


def check_mesh(layout: Layout) -> None:
    """Run an all-reduce, an all-gather and an all-to-all of known values and compare every device's result.

    Raises:
        MeshFaultError: names the collective, the device and the values.
    """
    split = PartitionSpec(MESH_AXES)
    members, tensor, data = layout.kv_seq, layout.tp, layout.data
    value = np.repeat(np.arange(1, data * tensor + 1, dtype=np.float32), WIDTH).reshape(-1, WIDTH)
    ramp = np.linspace(0.5, 1.5, WIDTH, dtype=np.float32)

    def body(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        mine = x * ramp
        exchanged = exchange_heads(jnp.broadcast_to(mine, (members, WIDTH)))
        return all_reduce_sum(mine), all_gather(mine, TENSOR, axis=0)[None], exchanged[None]

    run = jax.jit(
        jax.shard_map(body, mesh=layout.mesh, in_specs=split, out_specs=(split, split, split), check_vma=False)
    )
    placed = place_on_mesh(value, NamedSharding(layout.mesh, split))
    grouped = (value * ramp).reshape(data, tensor, WIDTH)
    heads = grouped.reshape(data, layout.kv_head, 1, members, WIDTH)
    expected = {
        "all-reduce": np.repeat(grouped.sum(axis=1, dtype=np.float64), tensor, axis=0),
        "all-gather": np.repeat(grouped, tensor, axis=0),
        f"all-to-all over {KV_SEQ}": np.broadcast_to(heads, (data, layout.kv_head, members, members, WIDTH)).reshape(
            -1, members, WIDTH
        ),
    }
    for (name, want), got in zip(expected.items(), run(placed), strict=True):
        for shard in got.addressable_shards:
            have = np.asarray(shard.data)
            if not np.allclose(have, want[shard.index], rtol=1e-5):
                raise MeshFaultError(
                    f"the {name} over {layout.describe()} is wrong on {shard.device}: expected "
                    f"{want[shard.index].flat[0]:g}..., got {have.flat[0]:g}...; check the interconnect and drivers, "
                    f"or run with --tp 1"
                )
