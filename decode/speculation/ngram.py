"""Prompt lookup: what followed the same few tokens before, in the prompt or in the output, will follow again.

The method is "prompt lookup decoding" (Saxena, 2023), here on the device: the search is a few comparisons of one row of
integers, and costs nothing beside a pass through the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from decode.sampling import SamplingForm, SamplingValues
from decode.speculation.proposer import Proposal
from decode.step import Rows
from model.config import LlamaConfig

LONGEST, SHORTEST = 8, 2
"""Tokens that must have come before in the same order. The longest match wins, among equals the latest."""


class PromptLookup:
    """A ``Proposer`` without weights and without state."""

    name, always = "ngram", False

    def __init__(self, longest: int = LONGEST, shortest: int = SHORTEST):
        self.longest, self.shortest = longest, shortest

    def check(self, target: LlamaConfig) -> None:
        pass

    def leaves(self) -> Any:
        return ()

    def leaf_specs(self) -> Any:
        return ()

    def prepare(self, prompt_lens: Sequence[int], max_len: int) -> float:
        return 0.0

    def begin(self, prompts: Sequence[Sequence[int]], max_len: int) -> Any:
        return ()

    def state_specs(self) -> Any:
        return ()

    def abstract_state(self, batch: int, max_len: int) -> Any:
        return ()

    def propose(
        self,
        leaves: Any,
        state: Any,
        rows: Rows,
        history: jax.Array,
        k: int,
        values: SamplingValues,
        form: SamplingForm,
    ) -> tuple[Any, Proposal]:
        tokens, matched = look_up(history, rows.length, k, self.longest, self.shortest)
        return state, Proposal(tokens, jnp.where(matched, k, 0), None)


def look_up(
    history: jax.Array, length: jax.Array, k: int, longest: int = LONGEST, shortest: int = SHORTEST
) -> tuple[jax.Array, jax.Array]:
    """What followed the latest earlier place that ends in the same tokens as ``history[:length + 1]``.

    Args:
        history: int32 [B, S]; positions after ``length`` may hold anything.
        length: int32 [B], the position of each row's newest token.
        longest, shortest: how many tokens to compare: a longer match is preferred, a shorter one is none.

    Returns:
        int32 [B, k] tokens and bool [B], whether there was such a place. Where the text ends before k tokens, what lies
        between the two places repeats.
    """
    B, S = history.shape
    place = jnp.arange(S, dtype=jnp.int32)[None]
    matching = place < length[:, None]  # ends of candidate matches, before the newest token
    size = jnp.zeros((B, S), jnp.int32)
    for back in range(longest):
        tail = jnp.take_along_axis(history, jnp.maximum(length - back, 0)[:, None], axis=1)
        shifted = jnp.pad(history, ((0, 0), (back, 0)), constant_values=-1)[:, :S]
        matching &= (shifted == tail) & (length >= back)[:, None]
        size += matching
    score = jnp.where(size >= shortest, size * S + place, -1)
    end = jnp.argmax(score, axis=1).astype(jnp.int32)
    matched = jnp.max(score, axis=1) >= 0
    period = jnp.maximum(length - end, 1)
    ahead = jnp.arange(k, dtype=jnp.int32)[None] % period[:, None]
    return jnp.take_along_axis(history, jnp.minimum(end[:, None] + 1 + ahead, S - 1), axis=1), matched
