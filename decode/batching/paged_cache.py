"""The KV cache as pages: ``decode.cache.KVCache`` with a page in place of a row, and where each token of a step goes.

A step's tokens are one flat run: R rows of one token each (decodes), then C tokens of prompts in tiles of ``TILE``, a
tile all of one sequence. Tile and row alike have a block table. Position p of a sequence lies in the page at
``p // page_size`` of its table, on ``kv_seq`` member ``p % kv_seq`` in slot ``p % page_size // kv_seq``: page sizes are
multiples of ``kv_seq``, so this is the contiguous cache's layout, cut up.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from decode.cache import KVCache, abstract_cache, cache_specs, held_dtype, to_storage
from decode.decoder import Decoder
from decode.step import Programs
from kernels.cache_attention.partial import Partial
from kernels.cache_attention.scaled import quantize
from kernels.paged_attention import extend_taken, paged_attention, paged_extend, paged_write
from kernels.tpu_rows import LANES
from sharding.collectives import axis_size
from sharding.mesh import KV_SEQ

TILE = 16
"""Prompt tokens that share one reading of their sequence's keys and values."""


def abstract_pages(decoder: Decoder, pages: int, page_size: int) -> KVCache:
    """The sharded shapes of a cache of so many pages of ``page_size`` positions.

    All layers lie in one array, whatever the form of the model's own: a step is sent once a token, and each array that
    it takes and gives back costs the host time.

    On TPU heads are padded to whole registers: XLA lays out an array of shorter ones with the pages innermost, and
    would copy all of it, there and back, in each step.
    """
    config, layout, dtype = decoder.config, decoder.layout, decoder.programs.cache_dtype
    cache = abstract_cache(config, pages, page_size, layout, dtype, stacked=True)

    def whole(numbers: Any) -> Any:
        size = numbers.shape[-1]
        size = -(-size // LANES) * LANES if decoder.layout.platform == "tpu" else size
        return jax.ShapeDtypeStruct((*numbers.shape[:-1], size), numbers.dtype, sharding=numbers.sharding)

    def in_a_row(scale: Any) -> Any:
        layers, _, K, size = scale.shape
        return jax.ShapeDtypeStruct((layers, 1, K, pages * size), scale.dtype, sharding=scale.sharding)

    return replace(
        cache,
        keys=[whole(numbers) for numbers in cache.keys],
        values=[whole(numbers) for numbers in cache.values],
        key_scales=[in_a_row(scale) for scale in cache.key_scales],
        value_scales=[in_a_row(scale) for scale in cache.value_scales],
    )


def page_specs(programs: Programs) -> KVCache:
    """How ``abstract_pages`` is split."""
    return cache_specs(programs.config, programs.layout, programs.cache_dtype, stacked=True)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """What the model sees of the cache in one step (``model.llama.Cache``).

    cache: arrays [layers, pages, K, S, H], and for int8 and fp8 scales [layers, 1, K, pages * S]: ``abstract_pages``
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

    def write(
        self, layer: jax.Array | int, k: jax.Array, v: jax.Array, positions: jax.Array, *, platform: str
    ) -> PagedCache:
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

        def written(
            arrays: list[jax.Array], new: jax.Array, pages: jax.Array = pages, slots: jax.Array = slots
        ) -> list[jax.Array]:
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
                scales = written(scales, own, jnp.where(mine, 0, 1), pages * held.shape[3] + slots)
            if missing := arrays[array].shape[-1] - new.shape[-1]:  # see abstract_pages
                new = jnp.pad(new, ((0, 0), (0, 0), (0, missing)))
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
        held, scales = self.cache, self.cache.scales(array)

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
        keys, values, scales = self.cache.keys[array], self.cache.values[array], self.cache.scales(array)
        row = heads[:, :1]  # whatever the number of tokens, no tile is longer than the kernel takes
        how: dict[str, Any] = {"platform": platform, "implementation": implementation, "scaled": scales is not None}
        if not extend_taken(row, keys, values, **how):
            return None
        out, keys, values, scales = paged_extend(
            heads,
            *rope,
            keys,
            values,
            self.tables,
            layer=slot_layer,
            positions=self.positions,
            rows=self.rows,
            tile=TILE,
            scales=scales,
        )
        return out, replace(self, cache=self.cache.with_array(array, keys, values, scales))
