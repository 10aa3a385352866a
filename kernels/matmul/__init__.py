"""``matmul``: activations times a weight stored ``[out, in]``, the product that decode spends its time in."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.matmul import reference, xla
from kernels.select import select

IMPLEMENTATIONS = ("xla", "xla_pieces", "reference")


def matmul(
    x: jax.Array,
    weight: jax.Array,
    *,
    platform: str,
    out_dtype: jnp.dtype | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """``x @ weight.T`` with float32 accumulation.

    Args:
        x: activations [..., I].
        weight: [O, I]; the contraction axis is last, so one output is one contiguous read.
        platform: the platform the program is compiled for: "cpu", "gpu" or "tpu".
        out_dtype: dtype of the result; ``None`` keeps x's. float32 skips the rounding of a partial sum.
        implementation: one of ``IMPLEMENTATIONS``; ``None`` picks by platform.

    Returns:
        [..., O] in ``out_dtype``.

    Raises:
        KernelError: unknown implementation.
    """
    chosen = select("matmul", implementation, platform, {}, IMPLEMENTATIONS)
    rows = x.reshape(-1, x.shape[-1])
    if chosen == "reference":
        out = reference.matmul(rows, weight)
    elif chosen == "xla_pieces":
        out = xla.matmul_pieces(rows, weight, platform=platform)
    else:
        out = xla.matmul(rows, weight, platform=platform)
    return out.astype(out_dtype or x.dtype).reshape(*x.shape[:-1], weight.shape[0])
