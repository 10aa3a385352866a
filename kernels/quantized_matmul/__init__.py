"""``quantized_matmul``: activations times a weight kept in fewer bits, which is never written out in more."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.native.product import not_taken
from kernels.quantized import QuantizedWeight
from kernels.quantized_matmul import cpu_native, reference, xla
from kernels.select import select

IMPLEMENTATIONS = ("xla", "cpu_native", "reference")


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    *,
    platform: str,
    out_dtype: jnp.dtype | None = None,
    implementation: str | None = None,
    add: jax.Array | None = None,
) -> jax.Array:
    """``x @ weight.T`` with float32 accumulation, plus ``add``.

    Args:
        x: activations [..., I].
        weight: [O, I].
        platform: the platform the program is compiled for: "cpu", "gpu" or "tpu".
        out_dtype: dtype of the result; ``None`` keeps x's.
        implementation: one of ``IMPLEMENTATIONS``; ``None`` picks the platform's best: on CPU "cpu_native", which
            rounds x to 8 bits, for weights in int8 and packed int4 where it can be built.
        add: [..., O], added in float32 before the result is rounded.

    Returns:
        [..., O] in ``out_dtype``.

    Raises:
        KernelError: an unknown implementation, or one that does not take these operands.
    """
    chosen = select("quantized_matmul", implementation, platform, IMPLEMENTATIONS, lambda: not_taken(x, weight, add))
    rows = x.reshape(-1, x.shape[-1])
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if chosen == "reference":
        out = reference.quantized_matmul(rows, weight)
    elif chosen == "cpu_native":
        flat = None if add is None else add.reshape(-1, weight.shape[0])
        out, add = cpu_native.quantized_matmul(rows, weight, out_dtype, flat), None
    else:
        out = xla.quantized_matmul(rows, weight, platform=platform)
    out = out.reshape(*x.shape[:-1], weight.shape[0])
    return (out if add is None else out + add.astype(jnp.float32)).astype(out_dtype)
