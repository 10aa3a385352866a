"""``normed_gate``: RMSNorm, the gate and up products, and SwiGLU (Shazeer, 2020), in one pass where that saves some."""

from __future__ import annotations

import jax

from kernels.matmul import IMPLEMENTATIONS, choose, matmul
from kernels.normed_gate import cpu_native
from kernels.quantized import QuantizedWeight
from kernels.rms_norm import rms_norm

__all__ = ["IMPLEMENTATIONS", "gate", "normed_gate"]


def normed_gate(
    x: jax.Array,
    scale: jax.Array,
    eps: float,
    weight: jax.Array | QuantizedWeight,
    bias: jax.Array | None = None,
    *,
    platform: str,
    implementation: str | None = None,
) -> jax.Array:
    """silu(n @ gate.T) * (n @ up.T) for n = rms_norm(x, scale, eps).

    Args:
        x: [..., I], before the norm.
        scale: [I], the norm's weight; ``eps`` is what it adds to the mean square.
        weight: [2F, I], gate before up. bias: [2, F] or None.
        platform, implementation: as for ``kernels.matmul``. "cpu_native" keeps everything in float32; where there
            is a bias, only its product is native.

    Returns:
        [..., F] in x's dtype.

    Raises:
        KernelError: an unknown implementation, or one that does not take these rows or dtypes.
    """
    chosen = choose("normed_gate", x, weight, platform, implementation, scale)
    if chosen == "cpu_native" and bias is None:
        out = cpu_native.normed_gate(x.reshape(-1, x.shape[-1]), scale, eps, weight)
        return out.reshape(*x.shape[:-1], weight.shape[0] // 2)
    return gate(rms_norm(x, scale, eps), weight, bias, platform=platform, implementation=chosen)


def gate(
    x: jax.Array,
    weight: jax.Array | QuantizedWeight,
    bias: jax.Array | None,
    *,
    platform: str,
    implementation: str | None = None,
) -> jax.Array:
    """The same of an x that is normed already: a product, then silu(gate) * up."""
    both = matmul(x, weight, platform=platform, implementation=implementation).reshape(*x.shape[:-1], 2, -1)
    if bias is not None:
        both = both + bias
    return jax.nn.silu(both[..., 0, :]) * both[..., 1, :]
