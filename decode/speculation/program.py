"""The compiled loop: propose, verify k + 1 positions in one pass of the model, keep what stands, and again.

Several passes run in one dispatch, and nothing eager between them. Where no row has a proposal a pass is a plain step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from decode.cache import KVCache
from decode.sampling import SamplingForm, SamplingValues
from decode.speculation.accept import Verdict, judge
from decode.speculation.proposer import Proposal, Proposer
from decode.speculation.run_cache import RunCache
from decode.step import BATCH, Programs, Rows, mark

MAX_PASSES = 16
"""Most passes in one dispatch: the size of the buffers that it returns."""


class Standing(NamedTuple):
    """What one dispatch hands to the next, beside the cache.

    rows: as in plain decoding
    history: int32 [B, S], the token at each position up to ``rows.length``
    proposer: the proposer's own state
    """

    rows: Rows
    history: jax.Array
    proposer: Any


class Passes(NamedTuple):
    """What a dispatch did in each pass.

    tokens: int32 [passes, B, k + 1], -1 past the last token of a row
    logprobs: float32 [passes, B, k + 1]
    proposed, accepted: int32 [passes, B]; -1 where the row was done, or the pass did not run
    """

    tokens: jax.Array
    logprobs: jax.Array
    proposed: jax.Array
    accepted: jax.Array


class _Carry(NamedTuple):
    """What goes round the loop."""

    passed: jax.Array
    cache: KVCache
    standing: Standing
    out: Passes
    proposal: Proposal


def speculate(programs: Programs, proposer: Proposer, k: int, form: SamplingForm) -> Callable[..., Any]:
    """(params, cache, leaves, standing, stop_ids [n], passes [], values) -> (cache, standing, Passes).

    Runs up to ``passes`` (at most ``MAX_PASSES``) passes, fewer when every row is done. The cache must have room for k
    positions past the end of any row. Cache and standing are donated.
    """
    vocab_size, collectives = programs.config.vocab_size, programs.collectives

    def run(
        params: list[jax.Array],
        cache: KVCache,
        leaves: Any,
        standing: Standing,
        stop_ids: jax.Array,
        passes: jax.Array,
        values: SamplingValues,
    ) -> tuple[KVCache, Standing, Passes]:
        model = programs.model(programs.decode_graph, params)
        B = standing.rows.token.shape[0]

        def check(cache: KVCache, rows: Rows, seen: jax.Array | None, proposal: Proposal) -> tuple[KVCache, Verdict]:
            """The target's word on ``proposal``, whose tokens are as many as are checked."""
            T = proposal.tokens.shape[1] + 1
            tokens = jnp.concatenate([rows.token[:, None], proposal.tokens], axis=1)
            positions = rows.length[:, None] + jnp.arange(T, dtype=jnp.int32)
            hidden, runs = model(tokens, positions, RunCache(cache))
            seens = None
            if seen is not None:
                each = [seen]
                for at in range(T - 1):
                    each.append(mark(each[-1], proposal.tokens[:, at : at + 1], (proposal.meant > at)[:, None]))
                seens = jnp.stack(each, axis=1)
            verdict = judge(model.logits(hidden), proposal, positions + 1, seens, values, form, vocab_size, collectives)
            return runs.cache, verdict

        def plain(cache: KVCache, rows: Rows, seen: jax.Array | None, proposal: Proposal) -> tuple[KVCache, Verdict]:
            nothing = Proposal(jnp.zeros((B, 0), jnp.int32), jnp.zeros(B, jnp.int32), None)
            cache, verdict = check(cache, rows, seen, nothing)
            wide = [jnp.pad(x, ((0, 0), (0, k))) for x in (verdict.tokens, verdict.logprobs)]
            return cache, Verdict(wide[0], wide[1], verdict.accepted)

        def more(carry: _Carry) -> jax.Array:
            return (carry.passed < passes) & ~jnp.all(carry.standing.rows.done)

        def proposed(carry: _Carry) -> jax.Array:
            return jnp.any(carry.proposal.meant > 0)

        def propose(carry: _Carry) -> _Carry:
            rows, history, state = carry.standing
            with jax.named_scope("propose"):
                state, proposal = proposer.propose(leaves, state, rows, history, k, values, form)
            proposal = proposal._replace(meant=jnp.where(rows.done, 0, proposal.meant))
            return carry._replace(standing=Standing(rows, history, state), proposal=proposal)

        def one(check: Callable[..., tuple[KVCache, Verdict]], carry: _Carry) -> _Carry:
            index, cache, (rows, history, state), out, proposal = carry
            active = ~rows.done
            seen = rows.seen
            if seen is not None:
                seen = mark(seen, rows.token[:, None], active[:, None])
            with jax.named_scope("verify"):
                cache, verdict = check(cache, rows, seen, proposal)
            slots = jnp.arange(k + 1, dtype=jnp.int32)[None]
            emitted = verdict.accepted + 1
            stops = jnp.any(verdict.tokens[..., None] == stop_ids, axis=-1) & (slots < emitted[:, None])
            first_stop = jnp.min(jnp.where(stops, slots + 1, k + 1), axis=1)
            count = jnp.minimum(jnp.minimum(emitted, first_stop), rows.end - 1 - rows.length)
            count = jnp.where(active, count, 0)
            kept = slots < count[:, None]
            last = jnp.take_along_axis(verdict.tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
            length = rows.length + count
            stopped = jnp.any(stops & kept, axis=1)
            if seen is not None:  # the newest token is marked when it is fed
                seen = mark(seen, verdict.tokens, slots < (count - 1)[:, None])
            places = jnp.where(kept, rows.length[:, None] + 1 + slots, history.shape[1])
            history = history.at[jnp.arange(B)[:, None], places].set(verdict.tokens, mode="drop")
            out = Passes(
                out.tokens.at[index].set(jnp.where(kept, verdict.tokens, -1)),
                out.logprobs.at[index].set(verdict.logprobs),
                out.proposed.at[index].set(jnp.where(active, proposal.meant, -1)),
                out.accepted.at[index].set(jnp.where(active, verdict.accepted, -1)),
            )
            rows = Rows(
                jnp.where(active, last, rows.token),
                length,
                rows.end,
                rows.done | stopped | (length + 1 >= rows.end),
                seen,
            )
            return _Carry(index + 1, cache, Standing(rows, history, state), out, proposal)

        def runs(check: Callable[..., tuple[KVCache, Verdict]], goes_on: Callable[[_Carry], jax.Array]) -> Any:
            """Passes of one kind, for as long as it is the one that is wanted."""
            return functools.partial(
                lax.while_loop, lambda carry: more(carry) & goes_on(carry), lambda carry: propose(one(check, carry))
            )

        verifying, stepping = runs(check, proposed), runs(plain, lambda carry: ~proposed(carry))

        out = Passes(
            jnp.full((MAX_PASSES, B, k + 1), -1, jnp.int32),
            jnp.zeros((MAX_PASSES, B, k + 1), jnp.float32),
            jnp.full((MAX_PASSES, B), -1, jnp.int32),
            jnp.full((MAX_PASSES, B), -1, jnp.int32),
        )
        nothing = Proposal(jnp.zeros((B, k), jnp.int32), jnp.zeros(B, jnp.int32), None)
        carry = _Carry(jnp.int32(0), cache, standing, out, nothing)
        if proposer.always:

            def step(carry: _Carry) -> _Carry:
                # What was proposed ends with its pass: a draft's distributions are large.
                return one(check, propose(carry))._replace(proposal=nothing)

            carry = lax.while_loop(more, step, carry)
        else:
            # Two loops and not a condition: XLA copies the cache into a branch, and a loop works in place.
            carry = lax.while_loop(more, lambda carry: stepping(verifying(carry)), propose(carry))
        return carry.cache, carry.standing, carry.out

    batch: Any = programs.layout.spec(BATCH)
    rows = Rows(batch, batch, batch, batch, programs._seen_spec(form))
    standing = Standing(rows, programs.layout.spec(("batch", None)), proposer.state_specs())  # type: ignore[arg-type]
    one_each: Any = programs.layout.spec((None, "batch"))
    many_each: Any = programs.layout.spec((None, "batch", None))
    whole = PartitionSpec()
    return programs.jit(
        run,
        (programs.param_specs(), programs.cache_spec(), proposer.leaf_specs(), standing, whole, whole, whole),
        (programs.cache_spec(), standing, Passes(many_each, many_each, one_each, one_each)),
        donate=(1, 3),
    )
