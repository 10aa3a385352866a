"""``cache_attention``: query positions against one device's part of the KV cache, as a partial to merge."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax

from kernels.cache_attention import cpu_native, reference, xla
from kernels.cache_attention.partial import Partial
from kernels.cache_attention.scaled import Scales
from kernels.select import PALLAS, select

IMPLEMENTATIONS = ("xla", "pallas_tpu", "pallas_gpu", "cpu_native", "reference")

__all__ = ["IMPLEMENTATIONS", "Partial", "Scales", "cache_attention"]


def cache_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    layer: jax.Array | int,
    positions: jax.Array,
    stride: int,
    offset: jax.Array | int,
    platform: str,
    implementation: str | None = None,
    scales: Scales | None = None,
) -> Partial:
    """Causal grouped-query attention of a few or many new positions over the filled part of a cache.

    Slot s of the cache holds position ``s * stride + offset``: with ``kv_seq`` members, stride is ``kv_seq``
    and offset the member's index. A query at position p sees positions 0..p, so the caller writes the new
    keys and values first. The cost follows ``max(positions)``, not the cache's capacity, and no implementation but the
    reference holds more than a block of scores: this is decode attention and, with many positions, prefill attention.

    Args:
        q: [B, T, K, G, H], any float dtype.
        keys, values: [L, B, K, S, H]; ``layer`` picks the first axis. uint16 holds the bits of bf16. int8
            and fp8 (float8_e4m3fn, or uint8 that holds its bits) go with ``scales``.
        positions: int32 [B, T], the position of each query; never negative.
        scales: what the stored numbers are to be multiplied by, one a position and head; None for wide caches.

    Returns:
        The partial softmax over this device's slots, float32; ``Partial.finish`` or ``merge`` makes it whole.
        A query that sees none of the slots gets sum 0 and output 0, never NaN.

    Raises:
        KernelError: an unknown implementation, or one that does not take these operands.
    """
    chosen = select(
        "cache_attention",
        implementation,
        platform,
        IMPLEMENTATIONS,
        lambda: cpu_native.not_taken(q, keys, values, scaled=scales is not None),
        {name: functools.partial(_not_pallas, name, q, keys, values, scales) for name in PALLAS.values()},
    )
    where: dict[str, Any] = {"layer": layer, "positions": positions, "stride": stride, "offset": offset}
    if chosen == "reference":
        return reference.cache_attention(q, keys, values, **where, scales=scales)
    if chosen in PALLAS.values():
        # On CPU a kernel asked for by name is interpreted: slow, and how it is tested.
        return _pallas(chosen).cache_attention(q, keys, values, **where, scales=scales, interpret=platform == "cpu")
    if chosen == "cpu_native":
        return cpu_native.cache_attention(q, keys, values, **where, scales=scales)
    return xla.cache_attention(q, keys, values, **where, platform=platform, scales=scales)


def _not_pallas(name: str, q: jax.Array, keys: jax.Array, values: jax.Array, scales: Scales | None) -> str | None:
    return _pallas(name).not_taken(q, keys, values, scaled=scales is not None)


def _pallas(name: str) -> Any:
    """A Pallas implementation, loaded where it is used: the import takes a third of a second."""
    return importlib.import_module(f"{__name__}.{name}")
