"""Attention over the sequence at hand, in place of a KV cache: what a forward pass that is differentiated needs."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from kernels.cache_attention.partial import MASKED, Partial
from sharding.collectives import axis_size
from sharding.mesh import KV_SEQ


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FullSequence:
    """A ``model.llama.Cache`` that remembers one layer's keys and values [B, T, K, H], and only while it runs.

    Every position of a row must be in the call. Each ``kv_seq`` member attends to every ``kv_seq``-th position, as it
    does with the cache of decoding, so that the model's own merge applies.
    """

    keys: jax.Array | None = None
    values: jax.Array | None = None

    def write(
        self, layer: jax.Array | int, k: jax.Array, v: jax.Array, positions: jax.Array, *, platform: str
    ) -> FullSequence:
        return FullSequence(k, v)

    def attend(
        self,
        layer: jax.Array | int,
        q: jax.Array,
        positions: jax.Array,
        *,
        platform: str,
        implementation: str | None = None,
    ) -> Partial:
        """q [B, T, K, G, H] at int32 positions [B, T] against the keys of the same positions; all in float32."""
        assert self.keys is not None, "attend follows write"
        assert self.values is not None
        keys, values = self.keys.astype(jnp.float32), self.values.astype(jnp.float32)
        precise = lax.Precision.HIGHEST
        scores = jnp.einsum("btkgh,bskh->btkgs", q.astype(jnp.float32), keys, precision=precise) * q.shape[-1] ** -0.5
        seen = positions[:, None, :] <= positions[:, :, None]
        if (members := axis_size(KV_SEQ)) > 1:
            seen &= (positions % members == lax.axis_index(KV_SEQ))[:, None, :]
        seen = seen[:, :, None, None, :]
        # The maximum cancels out of the result, so nothing is lost by not differentiating it.
        top = lax.stop_gradient(jnp.max(jnp.where(seen, scores, MASKED), axis=-1))
        weight = jnp.where(seen, jnp.exp(jnp.where(seen, scores, MASKED) - top[..., None]), 0.0)
        out = jnp.einsum("btkgs,bskh->btkgh", weight, values, precision=precise)
        return Partial(out, top, jnp.sum(weight, axis=-1))
