"""A smaller Llama proposes: its own weights and cache, on the same mesh as the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from decode.decoder import Decoder
from decode.sampling import SamplingForm, SamplingParams, SamplingValues, argmax, filtered, gumbel
from decode.speculation.accept import certain, log_softmax
from decode.speculation.ngram import look_up
from decode.speculation.proposer import Proposal, SpeculationError
from decode.speculation.run_cache import RunCache
from decode.step import Rows
from kernels.matmul import matmul
from model.config import LlamaConfig
from sharding.collectives import tensor_index
from sharding.layout import Layout
from sharding.mesh import TENSOR, place_on_mesh

NOISE = np.array([0xD2AF, 0x7B05], np.uint32)
"""Turns a seed into that of the draft's own choices: they must not depend on the target's."""

HEAD = ("vocab", None)


class DraftModel:
    """A ``Proposer`` that decodes k tokens with a small model before each pass of the large one.

    Where the text repeats itself it copies, as ``ngram.PromptLookup`` does: what followed the same tokens before is
    right more often than a small draft. On text that the demo model wrote, a draft of 2 layers found 41 % of the tokens
    after two that had come before, and the copy 75 %.

    Args:
        decoder: the draft, on the target's layout.
        vocabulary: sorted int32 [S] ids that it may propose, None for all: its head is cut to them, and so is what a
            proposal costs. The target's output does not depend on it.
        copies: False asks the draft alone.
    """

    name, always = "draft", True

    def __init__(self, decoder: Decoder, vocabulary: np.ndarray | None = None, *, copies: bool = True):
        self.copies = copies
        self.decoder, self.layout = decoder, decoder.layout
        self.listed = decoder.config.vocab_size if vocabulary is None else len(vocabulary)
        self._cut: tuple[jax.Array, ...] = ()
        if vocabulary is not None:
            self._cut = self._cut_head(vocabulary)

    def check(self, target: LlamaConfig) -> None:
        self.check_config(self.decoder.config, target)

    @staticmethod
    def check_config(draft: LlamaConfig, target: LlamaConfig) -> None:
        """Raise SpeculationError where such a draft cannot serve ``target``."""
        if draft.vocab_size != target.vocab_size:
            raise SpeculationError(
                f"the draft has a vocabulary of {draft.vocab_size} tokens and the model one of {target.vocab_size}: a "
                f"draft must speak the same tokens; use one of the same family"
            )
        if draft.parameter_count() > target.parameter_count():
            raise SpeculationError(
                f"the draft has {draft.parameter_count():,} parameters, more than the {target.parameter_count():,} of "
                f"the model it is to speed up: use a smaller one"
            )

    def leaves(self) -> Any:
        return self.decoder.params, self._cut

    def leaf_specs(self) -> Any:
        cut = (self.layout.spec(HEAD), self.layout.spec(HEAD[:1])) if self._cut else ()
        return self.decoder.programs.param_specs(), cut

    def prepare(self, prompt_lens: Sequence[int], max_len: int) -> float:
        before = self.decoder.compile_s
        for size in {size for _, size in self.decoder._pieces(max(prompt_lens))}:
            self.decoder.prefill_program(len(prompt_lens), size, max_len, SamplingParams().form)
        return self.decoder.compile_s - before

    def begin(self, prompts: Sequence[Sequence[int]], max_len: int) -> Any:
        cache, _, _ = self.decoder.start(prompts, [max_len] * len(prompts), max_len, SamplingParams())
        return cache

    def state_specs(self) -> Any:
        return self.decoder.programs.cache_spec()

    def abstract_state(self, batch: int, max_len: int) -> Any:
        return self.decoder.abstract_cache(batch, max_len)

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
        (params, cut), programs = leaves, self.decoder.programs
        model = programs.model(programs.decode_graph, params)
        # The token before the newest is run again: where all proposals of the last pass stood, the draft has not seen
        # the last of them.
        before = jnp.take_along_axis(history, jnp.maximum(rows.length - 1, 0)[:, None], axis=1)
        tokens = jnp.concatenate([before, rows.token[:, None]], axis=1)
        positions = jnp.stack([rows.length - 1, rows.length], axis=1)
        cache = RunCache(state)
        proposed, log_qs = [], []
        if self.layout.platform == "cpu":
            # Two passes of a token each: kernels of one row take less than half of what those of two do.
            _, cache = model(tokens[:, :1], positions[:, :1], cache)
            tokens, positions = tokens[:, 1:], positions[:, 1:]
        if self.copies:
            copied, matched = look_up(history, rows.length, k)
        for ahead in range(k):
            hidden, cache = model(tokens, positions, cache)
            place = rows.length + 1 + ahead
            token, log_q = self._choose(model, cut, hidden[:, -1], place, values, form)
            if self.copies:
                token = jnp.where(matched, copied[:, ahead], token)
            proposed.append(token)
            log_qs.append(log_q)
            tokens, positions = token[:, None], place[:, None]
        stacked = jnp.stack(proposed, axis=1)
        log_q = jnp.stack(cast(list[jax.Array], log_qs), axis=1) if form.random else None
        if self.copies and log_q is not None:
            log_q = jnp.where(matched[:, None, None], certain(copied, log_q.shape[-1]), log_q)
        return cache.cache, Proposal(stacked, jnp.full(stacked.shape[:1], k, jnp.int32), log_q)

    def _choose(
        self,
        model: Any,
        cut: tuple[jax.Array, ...],
        hidden: jax.Array,
        positions: jax.Array,
        values: SamplingValues,
        form: SamplingForm,
    ) -> tuple[jax.Array, jax.Array | None]:
        """hidden [B, D] -> tokens int32 [B], and the log-probabilities [B, V / tp] they come from where sampled.

        Temperature and filters are the target's. A repetition penalty is not applied: what the draft proposes may be
        distributed in any way, as long as it is known.
        """
        collectives = self.decoder.collectives
        logits, ids = self._logits(model, cut, hidden)
        if not form.random:
            return argmax(logits, logits, ids, collectives)[0], None
        scores = filtered(logits / values.temperature, values, form, collectives)
        noise = gumbel(jnp.asarray(values.seed) ^ NOISE, positions, ids)
        token, _ = argmax(scores + noise, logits, ids, collectives)
        log_q = log_softmax(scores, collectives)
        if not cut:
            return token, log_q
        # From the draft's vocabulary to this device's part of the whole one.
        log_q, ids = collectives.gather(log_q, TENSOR, axis=1), collectives.gather(ids, TENSOR, axis=0)
        slots = self.layout.local_shape((self.decoder.config.vocab_size,), HEAD[:1])[0]
        local = ids - tensor_index() * slots
        local = jnp.where((ids >= 0) & (local >= 0) & (local < slots), local, slots)
        whole = jnp.full((log_q.shape[0], slots), -jnp.inf)
        return token, whole.at[:, local].set(log_q, mode="drop")

    def likeliest(self, model: Any, cut: tuple[jax.Array, ...], hidden: jax.Array) -> jax.Array:
        """hidden [B, D] -> the likeliest tokens int32 [B] among those that it may propose; inside the ``shard_map``.

        model: as ``decode.step.Programs`` builds it. cut: the second of ``leaves``.
        """
        logits, ids = self._logits(model, cut, hidden)
        return argmax(logits, logits, ids, self.decoder.collectives)[0]

    def _logits(self, model: Any, cut: tuple[jax.Array, ...], hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """hidden [B, D] -> float32 [B, n] and the ids int32 [n] of this device's part of what it may propose."""
        if cut:
            head, ids = cut
            logits = matmul(
                hidden,
                head,
                out_dtype=jnp.dtype(jnp.float32),
                platform=self.layout.platform,
                implementation=self.decoder.programs.kernels,
            )
            valid = ids >= 0
        else:
            logits = model.logits(hidden)
            ids = tensor_index() * logits.shape[-1] + jnp.arange(logits.shape[-1])
            valid = ids < self.decoder.config.vocab_size
        return jnp.where(valid, logits, -jnp.inf), ids

    def _cut_head(self, vocabulary: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """(rows of the head [S padded, D], their ids int32 [S padded], -1 for padding), split over the mesh."""
        programs = self.decoder.programs
        own_head = ("head", "weight") in programs.paths
        table = self.decoder.params[programs.paths.index(("head" if own_head else "embed", "weight"))]
        ids = np.full(self.layout.padded_shape((len(vocabulary),), HEAD[:1]), -1, np.int32)
        ids[: len(vocabulary)] = vocabulary
        take = jax.jit(lambda table: jnp.take(table, np.maximum(ids, 0), axis=0), out_shardings=_head(self.layout))
        return take(table), place_on_mesh(ids, self.layout.sharding(HEAD[:1]))


def _head(layout: Layout) -> Any:
    return layout.sharding(HEAD)
