"""``quantized_matmul``: activations times a weight kept in fewer bits, which is never written out in more."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from kernels.native.product import not_taken
from kernels.quantized import QuantizedWeight
from kernels.quantized_matmul import cpu_native, reference, table, xla
from kernels.select import PALLAS, select

IMPLEMENTATIONS = ("xla", "pallas_tpu", "pallas_gpu", "cpu_native", "reference")


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
            takes x in two bytes a value, for weights in int8 and packed int4 where it can be built; on TPU and GPU what
            ``table`` says.
        add: [..., O], added in float32 before the result is rounded.

    Returns:
        [..., O] in ``out_dtype``.

    Raises:
        KernelError: an unknown implementation, or one that does not take these operands.
    """
    rows = x.reshape(-1, x.shape[-1])
    best = table.choose(platform, rows.shape[0], weight)
    if implementation is None and best and best.implementation == "xla":
        implementation = "xla"
    chosen = select(
        "quantized_matmul",
        implementation,
        platform,
        IMPLEMENTATIONS,
        lambda: not_taken(x, weight, add),
        {name: functools.partial(_not_pallas, name, rows, weight) for name in PALLAS.values()},
    )
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if chosen == "reference":
        out = reference.quantized_matmul(rows, weight)
    elif chosen == "cpu_native":
        flat = None if add is None else add.reshape(-1, weight.shape[0])
        out, add = cpu_native.quantized_matmul(rows, weight, out_dtype, flat), None
    elif chosen in PALLAS.values():
        # On CPU a kernel asked for by name is interpreted: slow, and how it is tested.
        out = _pallas(chosen).quantized_matmul(rows, weight, interpret=platform == "cpu")
    else:
        out = xla.quantized_matmul(rows, weight, platform=platform)
    out = out.reshape(*x.shape[:-1], weight.shape[0])
    return (out if add is None else out + add.astype(jnp.float32)).astype(out_dtype)


def _not_pallas(name: str, rows: jax.Array, weight: QuantizedWeight) -> str | None:
    return _pallas(name).not_taken(rows, weight)


def _pallas(name: str) -> Any:
    """A Pallas implementation, loaded where it is used: the import takes a third of a second."""
    return importlib.import_module(f"{__name__}.{name}")
