"""``cache_write``: a new position of each row into one device's part of the KV cache, in place where it is donated."""

from __future__ import annotations

import importlib
from typing import Any

import jax

from kernels.cache_write import xla
from kernels.select import select

IMPLEMENTATIONS = ("xla", "pallas_tpu")


def cache_write(
    cache: jax.Array,
    new: jax.Array,
    slots: jax.Array,
    *,
    layer: jax.Array | int,
    platform: str,
    implementation: str | None = None,
) -> jax.Array:
    """Store each row's new entry in its slot.

    Args:
        cache: [L, B, K, S, H], or [L, B, K, S] where it holds one number a position and head (scales).
        new: [B, K, H] or [B, K], of the cache's dtype.
        slots: int32 [B]; S where nothing is to be written.
        implementation: "xla", which defines it, or "pallas_tpu"; None picks the platform's best.

    Returns:
        The cache with them in it.

    Raises:
        KernelError: an unknown implementation, or one that does not take these operands.
    """
    if implementation is None and (platform != "tpu" or _pallas_tpu().not_taken(cache)):
        implementation = "xla"  # the better one there, and nothing to tell
    chosen = select(
        "cache_write",
        implementation,
        platform,
        IMPLEMENTATIONS,
        lambda: "is not there for this operation",
        {"pallas_tpu": lambda: _pallas_tpu().not_taken(cache)},
    )
    if chosen == "pallas_tpu":
        # On CPU a kernel asked for by name is interpreted: slow, and how it is tested.
        return _pallas_tpu().cache_write(cache, new, slots, layer=layer, interpret=platform == "cpu")
    return xla.cache_write(cache, new, slots, layer=layer)


def _pallas_tpu() -> Any:
    """Loaded where it is used: the import takes a third of a second."""
    return importlib.import_module(f"{__name__}.pallas_tpu")
