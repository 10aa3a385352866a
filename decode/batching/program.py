"""The compiled step: decodes and pieces of prompts together, through the model and to the next tokens.

What the host says about a step is one vector: see ``decode.batching.packing``. What only the device knows, each slot's
newest token, stays there: the next step may be sent before anyone has read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from decode.batching.packing import Packing
from decode.batching.paged_cache import PagedCache, page_specs
from decode.batching.request import MOST_TOP_LOGPROBS
from decode.batching.sampling import PENALISED, RowValues, sample_rows
from decode.cache import KVCache
from decode.speculation.proposer import MOST_PROPOSALS
from decode.step import SEEN, Programs, mark


class Chosen(NamedTuple):
    """What a step returns: words int32 [R, 3], each row's token, the bits of its logprob and the token that it was fed;
    and the likeliest tokens int32 [R, 2, n], ids above the bits of their logprobs, meaningful where a row asked."""

    words: jax.Array
    top: jax.Array


def step(programs: Programs, shape: Packing) -> Any:
    """A jitted (params, cache, token, seen, bias, proposals, vector) -> (cache, token, seen, chosen); the three that it
    takes and returns are donated. proposals: int32 [M, MOST_PROPOSALS], by slot, of a draft model where there is one.
    """
    graph = programs.graph if shape.C else programs.decode_graph
    collectives = programs.collectives
    platform = programs.layout.platform

    def run(
        params: list[jax.Array],
        cache: KVCache,
        token: jax.Array,
        seen: jax.Array,
        bias: jax.Array,
        proposals: jax.Array,
        vector: jax.Array,
    ) -> tuple[KVCache, jax.Array, jax.Array, Chosen]:
        model = programs.model(graph, params)
        tokens, positions, sampler, tables = shape.parts(vector)
        places, slots = sampler[0], sampler[1]
        floats = lax.bitcast_convert_type(sampler, jnp.float32)
        newest = jnp.take(token, slots, mode="clip")
        asked = tokens[: shape.R]
        guess = proposals[jnp.minimum(slots, proposals.shape[0] - 1), jnp.clip(-2 - asked, 0, MOST_PROPOSALS - 1)]
        own = jnp.where(asked >= 0, asked, jnp.where(asked == -1, newest, guess))
        tokens = jnp.concatenate([own, tokens[shape.R :]])
        paged = PagedCache(cache, tables, positions, shape.R, platform, programs.kernels)
        hidden, paged = model(tokens[None], jnp.maximum(positions, 0)[None], paged)
        values = RowValues(
            asks=sampler[3],
            position=sampler[2],
            temperature=floats[4],
            top_k=sampler[5],
            top_p=floats[6],
            min_p=floats[7],
            penalty=floats[8],
            seed=lax.bitcast_convert_type(sampler[9:11].T, jnp.uint32),
        )
        # Where a row is penalised, the token it was just given counts as seen: a prompt's are marked by the host.
        fed = jnp.take(tokens, places)[:, None]

        def marked(seen: jax.Array) -> jax.Array:
            return seen.at[slots].set(mark(seen[jnp.minimum(slots, seen.shape[0] - 1)], fed, fed >= 0), mode="drop")

        seen = lax.cond(jnp.any(values.asks & PENALISED), marked, lambda seen: seen, seen)
        logits = model.logits(jnp.take(hidden[0], places, axis=0))
        got = sample_rows(logits, values, bias, seen, slots, programs.config.vocab_size, collectives, MOST_TOP_LOGPROBS)
        words = jnp.stack([got.token, lax.bitcast_convert_type(got.logprob, jnp.int32), fed[:, 0]], axis=1)
        top = jnp.stack([got.top_ids, lax.bitcast_convert_type(got.top_logprobs, jnp.int32)], axis=1)
        token = token.at[slots].set(got.token, mode="drop")
        return paged.cache, token, seen, Chosen(words, top)

    everywhere: Any = PartitionSpec()
    split = programs.layout.spec(SEEN)
    return programs.jit(
        run,
        (
            programs.param_specs(),
            page_specs(programs),
            everywhere,
            split,
            split,
            everywhere,
            everywhere,
        ),
        (page_specs(programs), everywhere, split, Chosen(everywhere, everywhere)),
        donate=(1, 2, 3),
    )


def set_slot(programs: Programs) -> Callable[..., Any]:
    """(seen, bias, slot [], seen_row [V], bias_row [V]) -> (seen, bias), both donated: a slot's own rows replaced."""

    def run(
        seen: jax.Array, bias: jax.Array, slot: jax.Array, seen_row: jax.Array, bias_row: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return seen.at[slot].set(seen_row), bias.at[slot].set(bias_row)

    split, row = programs.layout.spec(SEEN), programs.layout.spec(("vocab",))
    return programs.jit(run, (split, split, PartitionSpec(), row, row), (split, split), donate=(0, 1))
