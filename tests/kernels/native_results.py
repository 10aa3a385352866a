"""Results of every native operation as bytes, to compare processes that differ in their threads.

`python -m tests.kernels.native_results` prints a digest of each as JSON; set NPROC before, which is how many threads
XLA:CPU makes. With "--no-memory" it prints what a call says whose temporaries do not fit the process.
"""

from __future__ import annotations

import functools
import hashlib
import json
import resource
import sys

import jax
import jax.numpy as jnp
import numpy as np

from kernels.cache_attention import cache_attention
from kernels.matmul import matmul
from kernels.normed_gate import normed_gate
from kernels.normed_matmul import normed_matmul

NATIVE = {"platform": "cpu", "implementation": "cpu_native"}


@jax.jit
def operations(
    x: jax.Array, scale: jax.Array, weight: jax.Array, q: jax.Array, cache: jax.Array, positions: jax.Array
) -> dict[str, jax.Array]:
    """x [M, I], scale [I], weight [2F, I]; q [B, T, K, G, H] against cache [L, B, K, S, H] as keys and values."""
    where = {"layer": 1, "positions": positions, "stride": 1, "offset": 0}
    return {
        "matmul": matmul(x, weight, **NATIVE),
        # Products of these are denormal: flushed or not, by whichever thread has them.
        "denormal": matmul(x * 1e-20, weight * 1e-20, **NATIVE),
        "normed_matmul": normed_matmul(x, scale, 1e-5, weight, **NATIVE),
        "normed_gate": normed_gate(x, scale, 1e-5, weight, **NATIVE),
        "cache_attention": cache_attention(q, cache, cache * 0.5, **where, **NATIVE).out,
    }


@functools.cache
def operands() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(11)
    shapes = [(3, 577), (577,), (1002, 577), (2, 2, 2, 3, 20), (2, 2, 2, 1700, 20)]
    made = [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]
    return *made, jnp.array([[1690, 1691], [700, 701]], jnp.int32)


def digests() -> dict[str, str]:
    return {name: hashlib.sha256(np.asarray(x)).hexdigest() for name, x in operations(*operands()).items()}


def without_memory() -> str:
    """What attention says that needs 200 GB beside its operands, where a process may have 64."""
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))
    queries, slots = 1 << 17, 1 << 22
    q = jnp.zeros((1, 16, 1, queries, 1), jnp.bfloat16)
    cache = jnp.zeros((1, 1, 1, slots, 1), jnp.bfloat16)
    where = {"layer": 0, "positions": jnp.full((1, 16), slots - 1, jnp.int32), "stride": 1, "offset": 0}
    try:
        cache_attention(q, cache, cache, **where, **NATIVE).out.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    print(json.dumps(without_memory() if "--no-memory" in sys.argv else digests()))
