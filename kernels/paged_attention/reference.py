"""The definition: every tile's pages laid out as a contiguous cache, and the contiguous definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.cache_attention import reference
from kernels.cache_attention.partial import Partial
from kernels.cache_attention.scaled import Scales


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
    scales: Scales | None = None,
) -> Partial:
    """See ``kernels.paged_attention.paged_attention``."""
    k, v = (_contiguous(cache[layer], tables)[None] for cache in (keys, values))
    own = (
        None
        if scales is None
        else Scales(*(_contiguous(_by_page(x[layer, 0], keys.shape[3]), tables)[None] for x in scales))
    )
    return reference.cache_attention(q, k, v, layer=0, positions=positions, stride=stride, offset=offset, scales=own)


def _by_page(scales: jax.Array, S: int) -> jax.Array:
    """scales [K, pages * S] -> [pages, K, S]."""
    return jnp.moveaxis(scales.reshape(scales.shape[0], -1, S), 1, 0)


def _contiguous(cache: jax.Array, tables: jax.Array) -> jax.Array:
    """cache [pages, K, S, ...] by tables [B, P] -> [B, K, P * S, ...]."""
    pages = jnp.moveaxis(cache[tables], 2, 1)  # [B, K, P, S, ...]
    return pages.reshape(*pages.shape[:2], -1, *pages.shape[4:])
