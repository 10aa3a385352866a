"""``quantized_matmul``: activations times a weight kept in fewer bits, which is never written out in more."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from kernels.quantized import QuantizedWeight
from kernels.quantized_matmul import reference, table, xla
from kernels.select import PALLAS, select

IMPLEMENTATIONS = ("xla", "pallas_tpu", "pallas_gpu", "reference")


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
        implementation: one of ``IMPLEMENTATIONS``; ``None`` picks what ``table`` says is the platform's best.

    Returns:
        [..., O] in ``out_dtype``.

    Raises:
        KernelError: an unknown implementation, or one that does not take these operands.
    """
    rows = x.reshape(-1, x.shape[-1])
    if implementation is None and (best := table.choose(platform, rows.shape[0], weight)):
        implementation = None if best.implementation in PALLAS.values() else best.implementation
    chosen = select(
        "quantized_matmul",
        implementation,
        platform,
        IMPLEMENTATIONS,
        lambda: "takes no quantised weight",
        {name: functools.partial(_not_pallas, name, rows, weight) for name in PALLAS.values()},
    )
    if chosen == "reference":
        out = reference.quantized_matmul(rows, weight)
    elif chosen in PALLAS.values():
        # On CPU a kernel asked for by name is interpreted: slow, and how it is tested.
        out = _pallas(chosen).quantized_matmul(rows, weight, interpret=platform == "cpu")
    else:
        out = xla.quantized_matmul(rows, weight, platform=platform)
    return out.astype(out_dtype or x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def _not_pallas(name: str, rows: jax.Array, weight: QuantizedWeight) -> str | None:
    return _pallas(name).not_taken(rows, weight)


def _pallas(name: str) -> Any:
    """A Pallas implementation, loaded where it is used: the import takes a third of a second."""
    return importlib.import_module(f"{__name__}.{name}")
