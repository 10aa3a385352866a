"""The write for TPU, into a cache that lies in memory with its positions along the lanes of registers.

XLA's scatter takes such an array into another layout and back, all of it, for each step. Here the registers that hold
a row's slot pass through VMEM, and one lane of them is changed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.pallas import LANES, slots_along_lanes


def not_taken(cache: jax.Array) -> str | None:
    """None, or what about the cache this implementation does not take."""
    if cache.ndim == 5 and slots_along_lanes(*cache.shape[3:]):
        return None
    return "takes caches whose heads are shorter than a register, for whose layout alone it is better"


def cache_write(
    cache: jax.Array, new: jax.Array, slots: jax.Array, *, layer: jax.Array | int, interpret: bool = False
) -> jax.Array:
    """See ``kernels.cache_write.cache_write``."""
    _, B, K, S, H = cache.shape
    width = min(S, LANES)
    turned = jnp.swapaxes(cache, 3, 4)
    if not interpret:
        turned = pltpu.with_memory_space_constraint(turned, pltpu.HBM)  # see kernels.cache_attention.pallas_tpu
    registers = pl.BlockSpec((1, 1, K, H, width), lambda b, layer, block, lane: (layer[0], b, 0, 0, block[b]))
    written = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B,),
            in_specs=[pl.BlockSpec((1, K, H, 1), lambda b, *_: (b, 0, 0, 0)), registers],
            out_specs=registers,
        ),
        out_shape=jax.ShapeDtypeStruct(turned.shape, turned.dtype),
        input_output_aliases={4: 0},
        interpret=interpret,
        name="cache_write",
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        jnp.minimum(slots, S - 1) // width,
        jnp.where(slots < S, slots % width, -1),
        new[..., None],
        turned,
    )
    return jnp.swapaxes(written, 3, 4)


def _kernel(layer: Any, block: Any, lane: Any, new: Any, held: Any, out: Any) -> None:
    wide = jnp.float32 if jnp.issubdtype(held.dtype, jnp.floating) else jnp.int32  # what a vector unit selects in
    own = lane[pl.program_id(0)]
    for head in range(held.shape[2]):
        before = held[0, 0, head].astype(wide)
        here = lax.broadcasted_iota(jnp.int32, before.shape, 1) == own
        out[0, 0, head] = jnp.where(here, new[0, head].astype(wide), before).astype(out.dtype)
