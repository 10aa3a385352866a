"""``rope_attention``: what a decode step does between two products: turn, store and attend, with the cache in place."""

from __future__ import annotations

import jax

from kernels import native
from kernels.cache_attention import Scales
from kernels.rope_attention import cpu_native, reference
from kernels.select import select

IMPLEMENTATIONS = ("cpu_native", "reference")

__all__ = ["IMPLEMENTATIONS", "rope_attention", "taken"]


def taken(
    heads: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    platform: str,
    implementation: str | None = None,
    scaled: bool = False,
) -> bool:
    """Whether one call does it all here. Elsewhere the caller rotates, writes and attends with operations of their own.

    implementation: what attention is to run on, as for ``kernels.cache_attention``. scaled: the cache has scales.
    """
    if platform != "cpu" or implementation not in (None, "cpu_native"):
        return False
    return cpu_native.not_taken(heads, keys, values, scaled=scaled) is None and native.problem() is None


def rope_attention(
    heads: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    layer: jax.Array | int,
    positions: jax.Array,
    platform: str,
    implementation: str = "cpu_native",
    scales: Scales | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, Scales | None]:
    """Causal grouped-query attention of new positions that are not in the cache yet.

    Slot s of the cache holds position s, so this is for a cache that no device shares with another.

    Args:
        heads: [B, T, K, G + 2, H], the queries, key and value of each KV head, not turned yet.
        cos, sin: float32 [B, T, H / 2], of the angles that queries and keys turn by (Su et al., 2021): number i of a
            head goes with i + H / 2.
        keys, values: [L, B, K, S, H]; ``layer`` picks the first axis. uint16 holds the bits of bf16. int8 and fp8
            (float8_e4m3fn, or uint8 that holds its bits) go with ``scales``.
        positions: int32 [B, T]. A position past the cache is not stored.
        implementation: one of ``IMPLEMENTATIONS``.
        scales: float32 [L, B, K, S] each, of int8 and fp8 caches; None for wide ones.

    Returns:
        The weighted mean of the values [B, T, K, G, H] in heads' dtype, and the cache, its scales too, with the new
        keys and values.

    Raises:
        KernelError: an unknown implementation, or one that does not take these operands.
    """
    chosen = select(
        "rope_attention",
        implementation,
        platform,
        IMPLEMENTATIONS,
        lambda: cpu_native.not_taken(heads, keys, values, scaled=scales is not None),
    )
    module = reference if chosen == "reference" else cpu_native
    return module.rope_attention(heads, cos, sin, keys, values, layer=layer, positions=positions, scales=scales)
