"""A cache that takes a few positions a row, beginning anywhere: what a verifying pass writes."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from decode.cache import KVCache
from kernels.cache_attention import Partial


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RunCache:
    """A ``model.llama.Cache`` over a KV cache, which itself takes one position a row or whole prefill pieces.

    A pass writes its positions past each row's length. Those of refused tokens stay behind, are seen by no query of a
    lower position, and are written again: forgetting them is a smaller length and nothing else.
    """

    cache: KVCache

    def write(
        self, layer: jax.Array | int, k: jax.Array, v: jax.Array, positions: jax.Array, *, platform: str
    ) -> RunCache:
        """Store k and v [B, T, K, H] at int32 positions [B, T], which differ from row to row."""
        cache = self.cache
        for at in range(k.shape[1]):
            one = slice(at, at + 1)
            cache = cache.write(layer, k[:, one], v[:, one], positions[:, one], platform=platform)
        return RunCache(cache)

    def attend(
        self,
        layer: jax.Array | int,
        q: jax.Array,
        positions: jax.Array,
        *,
        platform: str,
        implementation: str | None = None,
    ) -> Partial:
        return self.cache.attend(layer, q, positions, platform=platform, implementation=implementation)

    def extend(
        self,
        layer: jax.Array | int,
        heads: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        positions: jax.Array,
        *,
        platform: str,
        implementation: str | None = None,
    ) -> tuple[jax.Array, RunCache] | None:
        """As ``KVCache.extend``, whose one call stores a run wherever it begins."""
        extended = self.cache.extend(layer, heads, rope, positions, platform=platform, implementation=implementation)
        return None if extended is None else (extended[0], RunCache(extended[1]))
