"""The product in the form that XLA compiles best on each platform."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from jax import lax

from kernels.tpu_rows import tpu_rows

STREAMED_ROWS = 8
"""On CPU, up to this many rows a bf16 product is a fused convert-multiply-reduce.

XLA:CPU's bf16 ``dot`` converts the whole weight to float32 in memory first. The fused reduction reads the
bf16 weight once per call instead; measured on 2 cores at [49152, 576]: 7.6, 3.8, 2.0, 1.2, 0.7 billion
weights/s at 1, 2, 4, 8, 16 rows, against 0.8 to 0.9 through the converted copy at every row count.
"""


def matmul(x: jax.Array, weight: jax.Array, *, platform: str) -> jax.Array:
    """x [M, I] times weight [O, I] -> float32 [M, O]."""
    if platform == "tpu" and x.shape[0] == 1:
        return matmul(tpu_rows(x), weight, platform=platform)[:1]
    if platform == "cpu" and weight.dtype != jnp.float32:
        if x.shape[0] <= STREAMED_ROWS:
            # The barrier ties the weight to x: on its own its conversion is hoisted out of the decode loop,
            # which writes a float32 copy of the whole model. It also keeps what made x out of the reduction's
            # inner loop.
            x, weight = lax.optimization_barrier((x, weight))
            return jnp.sum(weight.astype(jnp.float32)[None] * x.astype(jnp.float32)[:, None, :], axis=-1)
        if x.dtype == weight.dtype:  # as it is: a CPU with tiles for bf16 multiplies it 3 to 6 times as fast as float32
            return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    # float32 stays float32 where the platform's default is less; bf16 is as it is.
    form = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    blocks = _row_blocks(x.shape[0], weight.shape[0]) if platform == "cpu" else 1
    if blocks == 1:
        return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), **form)
    split = weight.reshape(blocks, -1, weight.shape[1])
    out = lax.dot_general(jnp.broadcast_to(x, (blocks, *x.shape)), split, (((2,), (2,)), ((0,), (0,))), **form)
    return out.transpose(1, 0, 2).reshape(x.shape[0], weight.shape[0])


def _row_blocks(rows: int, outputs: int) -> int:
    """Into how many blocks of outputs XLA:CPU should be given a product, as one batched dot.

    XLA:CPU runs a small matrix-vector product on one thread, and a large one in pieces too long for the caches; the
    blocks of a batch are what it hands to its threads. Measured on 2 cores in us, plain / as chosen here, at 1 row:
    [960, 576] 195 / 122, [576, 576] 136 / 78, [3072, 576] 372 / 318, [576, 1536] 198 / 167, [49152, 576] 5649 / 3514;
    at 8 rows: 832 / 459, 398 / 296, 1056 / 850, 796 / 474, 16373 / 9395; at 128 rows 10 to 25 % less.
    """
    blocks = 2 if rows > 1 else (32 if outputs >= 16384 else 8)
    while outputs % blocks:
        blocks //= 2
    return blocks


PIECE = 64
"""Terms that ``matmul_pieces`` lets one dot add up."""


def matmul_pieces(x: jax.Array, weight: jax.Array, *, platform: str) -> jax.Array:
    """The same product as a sum over equal pieces of the contraction, for evaluation: it copies the weight.

    A float32 dot that adds term after term is off by about sqrt(terms) roundings. In pieces, the demo model's largest
    logit error against float64 (logits up to 38, tp 1 to 8) falls from 1.2e-4 to 0.8e-4.
    """
    size = x.shape[1]
    count = -(-size // PIECE)
    bounds = [size * index // count for index in range(count + 1)]
    parts = [
        matmul(x[:, start:end], weight[:, start:end], platform=platform) for start, end in itertools.pairwise(bounds)
    ]
    return sum(parts[1:], parts[0])
