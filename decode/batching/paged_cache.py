"""The KV cache as pages: ``decode.cache.KVCache`` with a page in place of a row, and where each token of a step goes.

A step's tokens are one flat run: R rows of one token each (decodes), then C tokens of prompts in tiles of ``TILE``, a
tile all of one sequence. Tile and row alike have a block table. Position p of a sequence lies in the page at
``p // page_size`` of its table, on ``kv_seq`` member ``p % kv_seq`` in slot ``p % page_size // kv_seq``: page sizes are
multiples of ``kv_seq``, so this is the contiguous cache's layout, cut up.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from decode.cache import KVCache, held_dtype, to_storage
from kernels.cache_attention import Scales
from kernels.cache_attention.partial import Partial
from kernels.cache_attention.scaled import quantize
from kernels.paged_attention import extend_taken, paged_attention, paged_extend, paged_write
from sharding.collectives import axis_size
from sharding.mesh import KV_SEQ

TILE = 16
"""Prompt tokens that share one reading of their sequence's keys and values."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """What the model sees of the cache in one step (``model.llama.Cache``).

    cache: arrays [layers, pages, K, S, H], and for int8 and fp8 scales [layers, pages, K, S]
    tables: int32 [R + C / TILE, P], the pages of each row and tile
    positions: int32 [R + C], -1 for padding
    rows: R
    """

    cache: KVCache
    tables: jax.Array
    positions: jax.Array
    rows: int = field(metadata={"static": True})
    platform: str = field(metadata={"static": True})
    implementation: str | None = field(metadata={"static": True})

    def write(self, layer: jax.Array | int, k: jax.Array, v: jax.Array, positions: jax.Array) -> PagedCache:
        """Store k and v [1, R + C, K, H] where each token goes."""
        array, slot_layer = self.cache._place(layer)
        members, me = axis_size(KV_SEQ), lax.axis_index(KV_SEQ)
        held, own = self.cache.keys[array], self.positions
        page_size = np.int32(held.shape[3] * members)
        place = lax.div(own, page_size)
        tile = jnp.concatenate([jnp.arange(self.rows), self.rows + jnp.arange(own.shape[0] - self.rows) // TILE])
        mine = (own >= 0) & (lax.rem(own, np.int32(members)) == me)
        pages = jnp.where(mine, self.tables[tile, place], held.shape[1])  # past the end: dropped
        slots = lax.div(lax.rem(own, page_size), np.int32(members))

        def written(arrays: list[jax.Array], new: jax.Array) -> list[jax.Array]:
            changed = list(arrays)
            changed[array] = paged_write(
                arrays[array],
                new,
                pages,
                slots,
                layer=slot_layer,
                platform=self.platform,
                implementation=self.implementation,
            )
            return changed

        def stored(arrays: list[jax.Array], scales: list[jax.Array], new: jax.Array) -> tuple[list[jax.Array], ...]:
            storage = arrays[array].dtype
            if scales:
                new, own = quantize(new, held_dtype(storage))
                scales = written(scales, own)
            return written(arrays, to_storage(new, storage)), scales

        keys, key_scales = stored(self.cache.keys, self.cache.key_scales, k[0])
        values, value_scales = stored(self.cache.values, self.cache.value_scales, v[0])
        return replace(self, cache=KVCache(keys, values, key_scales, value_scales))

    def attend(
        self,
        layer: jax.Array | int,
        q: jax.Array,
        positions: jax.Array,
        *,
        platform: str,
        implementation: str | None = None,
    ) -> Partial:
        """q [1, R + C, K, G, H]: rows and tiles, each over its own pages."""
        array, slot_layer = self.cache._place(layer)
        held = self.cache
        scales = Scales(held.key_scales[array], held.value_scales[array]) if held.key_scales else None

        def part(begin: int, end: int, tables: jax.Array, size: int) -> Partial:
            found = paged_attention(
                q[0, begin:end].reshape(-1, size, *q.shape[2:]),
                held.keys[array],
                held.values[array],
                tables,
                layer=slot_layer,
                positions=self.positions[begin:end].reshape(-1, size),
                stride=axis_size(KV_SEQ),
                offset=lax.axis_index(KV_SEQ),
                platform=platform,
                implementation=implementation,
                scales=scales,
            )
            return Partial(*(x.reshape(1, end - begin, *x.shape[2:]) for x in found))

        R, total = self.rows, q.shape[1]
        parts = [part(0, R, self.tables[:R], 1)] if R else []
        if total > R:
            parts.append(part(R, total, self.tables[R:], TILE))
        return Partial(*(jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True)))

    def extend(
        self,
        layer: jax.Array | int,
        heads: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        positions: jax.Array,
        *,
        platform: str,
        implementation: str | None = None,
    ) -> tuple[jax.Array, PagedCache] | None:
        """heads [1, R + C, K, G + 2, H] -> attention [1, R + C, K, G, H]; see ``decode.cache.KVCache.extend``."""
        array, slot_layer = self.cache._place(layer)
        keys, values = list(self.cache.keys), list(self.cache.values)
        row = heads[:, :1]  # whatever the number of tokens, no tile is longer than the kernel takes
        if self.cache.key_scales or not extend_taken(
            row, keys[array], values[array], platform=platform, implementation=implementation
        ):
            return None
        out, keys[array], values[array] = paged_extend(
            heads,
            *rope,
            keys[array],
            values[array],
            self.tables,
            layer=slot_layer,
            positions=self.positions,
            rows=self.rows,
            tile=TILE,
        )
        return out, replace(self, cache=KVCache(keys, values))
