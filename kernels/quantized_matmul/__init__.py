"""``quantized_matmul``: activations times a weight kept in fewer bits, which is never written out in more."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.quantized import QuantizedWeight
from kernels.quantized_matmul import reference, xla
from kernels.select import select

IMPLEMENTATIONS = ("xla", "reference")


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    *,
    platform: str,
    out_dtype: jnp.dtype | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """``x @ weight.T`` with float32 accumulation.

    Args:
        x: activations [..., I].
        weight: [O, I].
        platform: the platform the program is compiled for: "cpu", "gpu" or "tpu".
        out_dtype: dtype of the result; ``None`` keeps x's.
        implementation: one of ``IMPLEMENTATIONS``; ``None`` picks the platform's best.

    Returns:
        [..., O] in ``out_dtype``.

    Raises:
        KernelError: an unknown implementation.
    """
    chosen = select("quantized_matmul", implementation, platform, IMPLEMENTATIONS, lambda: "takes no quantised weight")
    rows = x.reshape(-1, x.shape[-1])
    if chosen == "reference":
        out = reference.quantized_matmul(rows, weight)
    else:
        out = xla.quantized_matmul(rows, weight, platform=platform)
    return out.astype(out_dtype or x.dtype).reshape(*x.shape[:-1], weight.shape[0])
