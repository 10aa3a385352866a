"""``normed_matmul``: RMSNorm and the product that follows it, in one pass where that saves one."""

from __future__ import annotations

import jax

from kernels.matmul import IMPLEMENTATIONS, choose, matmul
from kernels.normed_matmul import cpu_native
from kernels.quantized import QuantizedWeight
from kernels.rms_norm import rms_norm

__all__ = ["IMPLEMENTATIONS", "normed_matmul"]


def normed_matmul(
    x: jax.Array,
    scale: jax.Array,
    eps: float,
    weight: jax.Array | QuantizedWeight,
    *,
    platform: str,
    implementation: str | None = None,
) -> jax.Array:
    """``matmul(rms_norm(x, scale, eps), weight)``.

    Args:
        x: [..., I], before the norm.
        scale: [I], the norm's weight; ``eps`` is what it adds to the mean square.
        weight: [O, I].
        platform, implementation: as for ``kernels.matmul``. "cpu_native" keeps the normed x in float32.

    Returns:
        [..., O] in x's dtype.

    Raises:
        KernelError: an unknown implementation, or one that does not take these rows or dtypes.
    """
    chosen = choose("normed_matmul", x, weight, platform, implementation, scale)
    if chosen != "cpu_native":
        return matmul(rms_norm(x, scale, eps), weight, platform=platform, implementation=chosen)
    out = cpu_native.normed_matmul(x.reshape(-1, x.shape[-1]), scale, eps, weight)
    return out.reshape(*x.shape[:-1], weight.shape[0])
