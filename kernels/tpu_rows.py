"""One row for TPU: padded, so that its products use the matrix unit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

ROWS = 8
"""The rows of a register.

XLA:TPU makes a product with one row a multiply and a reduction on the vector unit, at 3.9 times the time that the
memory needs for a bf16 weight on v5e (4.1 on v6e); with two rows or more it takes the matrix unit, which keeps up. By
the compiler's own estimate, [3584, 4096]: 209810 cycles at 1 row and 12203 at 2 to 8 on v5e, 129335 and 13689 on v6e.
"""


LANES = 128
"""The numbers of 32 bits in each of them."""


def tpu_rows(x: jax.Array) -> jax.Array:
    """x [1, I] -> [``ROWS``, I], zeros below."""
    # The barrier hides from the compiler that the other rows are zeros.
    return lax.optimization_barrier(jnp.pad(x, ((0, ROWS - 1), (0, 0))))
