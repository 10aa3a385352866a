"""``paged_attention``: query positions against a KV cache whose rows are pages, found through block tables."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from kernels.cache_attention.partial import Partial
from kernels.cache_attention.scaled import Scales
from kernels.paged_attention import cpu_native, reference, xla
from kernels.rope_attention import taken as extend_taken
from kernels.select import PALLAS, select

IMPLEMENTATIONS = ("xla", "pallas_tpu", "pallas_gpu", "cpu_native", "reference")

__all__ = ["IMPLEMENTATIONS", "extend_taken", "paged_attention", "paged_extend", "paged_write"]


def paged_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    tables: jax.Array,
    *,
    layer: jax.Array | int,
    positions: jax.Array,
    stride: int,
    offset: jax.Array | int,
    platform: str,
    implementation: str | None = None,
    scales: Scales | None = None,
) -> Partial:
    """Causal grouped-query attention of tiles of T positions, each tile over the pages of one sequence.

    Slot s of the i-th page of a table holds position ``(i * S + s) * stride + offset``: the layout of
    ``kernels.cache_attention``, cut into pages. A query at position p sees positions 0..p; one at position -1 is
    padding, and sees nothing. The cost follows ``max(positions)``, not the length of the tables. (Paged attention:
    Kwon et al., 2023.)

    Args:
        q: [B, T, K, G, H], any float dtype.
        keys, values: [L, pages, K, S, H]; ``layer`` picks the first axis. uint16 holds the bits of bf16.
            int8 and fp8 (float8_e4m3fn, or uint8 that holds its bits) go with ``scales``. Heads may be longer than
            those of q, the rest zeros: on TPU heads that fill no register are laid out as no kernel takes them.
        tables: int32 [B, P], the pages of each tile's sequence in order. Entries past its last position are not read,
            or read and not used, so they must be pages too: 0 will do.
        positions: int32 [B, T].
        scales: float32 [L, 1, K, pages * S] each, page after page: what the stored numbers are to be multiplied by;
            None for wide caches. (One long axis, for a page's few scales alone would leave most of a register empty.)

    Returns:
        The partial softmax over this device's slots, float32, as ``kernels.cache_attention`` returns it.

    Raises:
        KernelError: an unknown implementation, or one that does not take these operands.
    """
    H, longer = q.shape[-1], keys.shape[-1]
    if longer > H:  # scores are divided by the root of the longer size
        q = jnp.pad((q.astype(jnp.float32) * (longer / H) ** 0.5).astype(q.dtype), [(0, 0)] * 4 + [(0, longer - H)])
    chosen = select(
        "paged_attention",
        implementation,
        platform,
        IMPLEMENTATIONS,
        lambda: cpu_native.not_taken(q, keys, values, scales is not None),
        {name: functools.partial(_not_pallas, name, q, keys, values, tables, scales) for name in PALLAS.values()},
    )
    where: dict[str, Any] = {"layer": layer, "positions": positions, "stride": stride, "offset": offset}
    if chosen == "reference":
        found = reference.paged_attention(q, keys, values, tables, **where, scales=scales)
    elif chosen in PALLAS.values():
        # On CPU a kernel asked for by name is interpreted: slow, and how it is tested.
        kernel = _pallas(chosen).paged_attention
        found = kernel(q, keys, values, tables, **where, scales=scales, interpret=platform == "cpu")
    elif chosen == "cpu_native":
        found = cpu_native.paged_attention(q, keys, values, tables, **where, scales=scales)
    else:
        found = xla.paged_attention(q, keys, values, tables, **where, platform=platform, scales=scales)
    return found._replace(out=found.out[..., :H])


def paged_write(
    cache: jax.Array,
    new: jax.Array,
    pages: jax.Array,
    slots: jax.Array,
    *,
    layer: jax.Array | int,
    platform: str,
    implementation: str | None = None,
) -> jax.Array:
    """Store new positions, each at its page and slot; in place where the cache is donated.

    Args:
        cache: [L, pages, K, S, H], or without H where it holds one number a position and head (scales: one page then,
            of every slot there is).
        new: [N, K, H] of the cache's dtype, or without H.
        pages, slots: int32 [N]. A page past the end is another device's, or padding: nothing is written.

    Returns:
        The cache with them in it.

    Raises:
        KernelError: an unknown implementation, or one that does not take these operands.
    """
    chosen = select("paged_write", implementation, platform, IMPLEMENTATIONS, lambda: None)
    if chosen == "cpu_native":
        return cpu_native.paged_write(cache, new, pages, slots, layer)
    # XLA's scatter is in place, and there is no kernel: head by head, for with the heads in its window XLA:TPU brings
    # the whole cache into another layout and back.
    return cache.at[layer, pages[:, None], jnp.arange(cache.shape[2]), slots[:, None]].set(new, mode="drop")


def paged_extend(
    heads: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    tables: jax.Array,
    *,
    layer: jax.Array | int,
    positions: jax.Array,
    rows: int,
    tile: int,
    scales: Scales | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, Scales | None]:
    """What a step does between two products, in one call of C++: turn, store and attend. For CPU and a cache that no
    device shares with another, where ``extend_taken``; elsewhere the caller rotates and uses the other two operations.

    Args:
        heads: [1, N, K, G + 2, H], the queries, key and value of each KV head, not turned yet.
        cos, sin: float32 [1, N, H / 2], as for ``kernels.rope_attention``.
        keys, values: [L, pages, K, S, H].
        tables: int32 [rows + (N - rows) / tile, P], the pages of each of the first ``rows`` tokens, and of each tile
            of ``tile`` tokens after them.
        positions: int32 [N]; -1 for padding, which is not stored and gets 0.
        scales: of an int8 or fp8 cache, as for ``paged_attention``.

    Returns:
        The weighted mean of the values [1, N, K, G, H] in heads' dtype, and the cache, its scales too, with the new
        keys and values.
    """
    where: dict[str, Any] = {"layer": layer, "positions": positions, "rows": rows, "tile": tile}
    return cpu_native.paged_extend(heads, cos, sin, keys, values, tables, **where, scales=scales)


def _not_pallas(
    name: str, q: jax.Array, keys: jax.Array, values: jax.Array, tables: jax.Array, scales: Scales | None
) -> str | None:
    return _pallas(name).not_taken(q, keys, values, tables, scaled=scales is not None)


def _pallas(name: str) -> Any:
    """A Pallas implementation, loaded where it is used: the import takes a third of a second."""
    return importlib.import_module(f"{__name__}.{name}")
