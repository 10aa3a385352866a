"""``matmul``: activations times a weight stored ``[out, in]``, the product that decode spends its time in."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.matmul import cpu_native, reference, xla
from kernels.native.product import not_taken, outrun
from kernels.quantized import QuantizedWeight
from kernels.quantized_matmul import quantized_matmul
from kernels.select import select

IMPLEMENTATIONS = ("xla", "xla_pieces", "cpu_native", "reference")


def matmul(
    x: jax.Array,
    weight: jax.Array | QuantizedWeight,
    *,
    platform: str,
    out_dtype: jnp.dtype | None = None,
    implementation: str | None = None,
    add: jax.Array | None = None,
) -> jax.Array:
    """``x @ weight.T`` with float32 accumulation, plus ``add``.

    Args:
        x: activations [..., I].
        weight: [O, I]; the contraction axis is last, so one output is one contiguous read. A quantised one goes to
            ``kernels.quantized_matmul``.
        platform: the platform the program is compiled for: "cpu", "gpu" or "tpu".
        out_dtype: dtype of the result; ``None`` keeps x's. float32 skips the rounding of a partial sum.
        implementation: one of ``IMPLEMENTATIONS``; ``None`` picks by platform: on CPU "cpu_native" for up to
            ``kernels.native.product.MOST_ROWS`` rows where it can be built, else "xla".
        add: [..., O], added in float32 before the result is rounded: a residual.

    Returns:
        [..., O] in ``out_dtype``.

    Raises:
        KernelError: an unknown implementation, or one that does not take these rows or dtypes.
    """
    if isinstance(weight, QuantizedWeight):
        wanted = "reference" if implementation == "xla_pieces" else implementation  # either is for evaluation
        return quantized_matmul(x, weight, platform=platform, out_dtype=out_dtype, implementation=wanted, add=add)
    chosen = choose("matmul", x, weight, platform, implementation, add)
    rows = x.reshape(-1, x.shape[-1])
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if chosen == "reference":
        out = reference.matmul(rows, weight)
    elif chosen == "cpu_native":
        flat = None if add is None else add.reshape(-1, weight.shape[0])
        out, add = cpu_native.matmul(rows, weight, out_dtype, flat), None
    elif chosen == "xla_pieces":
        out = xla.matmul_pieces(rows, weight, platform=platform)
    else:
        out = xla.matmul(rows, weight, platform=platform)
    out = out.reshape(*x.shape[:-1], weight.shape[0])
    return (out if add is None else out + add.astype(jnp.float32)).astype(out_dtype)


def choose(
    operation: str,
    x: jax.Array,
    weight: jax.Array | QuantizedWeight,
    platform: str,
    implementation: str | None,
    *others: jax.Array | None,
) -> str:
    """The implementation of a product of x [..., I] with weight [O, I]: the one asked for, or the platform's best.

    others: what else the operation reads in a dtype of its own, such as a norm's scale; None is nothing.
    """
    if implementation is None and platform == "cpu" and outrun(x, weight):
        return "xla"
    return select(operation, implementation, platform, IMPLEMENTATIONS, lambda: not_taken(x, weight, *others))
