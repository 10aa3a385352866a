"""Decoding with speculation: the interface of ``Decoder.generate``, several tokens a pass."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decode.cache import KVCache, check_fits
from decode.decoder import DISPATCH_SECONDS, STOP_SLOTS, Arrival, Decoder, PromptError, abstract_values, as_arrival
from decode.sampling import SamplingForm, SamplingParams
from decode.speculation.control import DRAFT_PRIOR, PRIOR, Controller, Tally, candidates
from decode.speculation.program import MAX_PASSES, Passes, Standing, speculate
from decode.speculation.proposer import MOST_PROPOSALS, Proposer, SpeculationError
from decode.step import BATCH, MAX_STEPS, SEEN, Rows

TIMED_PASSES = 4
"""Passes of each kind that are timed before the first request."""


class SpeculativeDecoder:
    """A decoder and a proposer. Output is the decoder's own; only its speed differs.

    Greedy output is equal up to rounding: a pass adds up the same products in another order than a plain step, so two
    logits that are as near as float32 rounding (about 1e-5) may change places. Sampled output has the same
    distribution, but is another draw than plain decoding of the same seed.

    Args:
        decoder: the target. proposer: what proposes. k: most proposals a pass.
        adaptive: choose fewer than k, or none, where that is faster; False always proposes k.

    Raises:
        SpeculationError: k out of range, a proposer that does not fit, a mesh over several processes.
    """

    def __init__(self, decoder: Decoder, proposer: Proposer, k: int, *, adaptive: bool = True):
        if not 1 <= k <= MOST_PROPOSALS:
            raise SpeculationError(f"k is {k}; a pass takes from 1 to {MOST_PROPOSALS} proposals")
        if decoder.layout.processes > 1:
            raise SpeculationError("speculation runs in one process: each would have to know what the others measure")
        proposer.check(decoder.config)
        self.decoder, self.proposer, self.k, self.adaptive = decoder, proposer, k, adaptive
        self.tally = Tally(k)
        self.choices = candidates(k) if adaptive else [k]
        self.own_compile_s = 0.0
        self._costs: dict[tuple[Any, ...], dict[int, float]] = {}

    @property
    def config(self) -> Any:
        return self.decoder.config

    @property
    def compile_s(self) -> float:
        """Seconds of compilation, the target's own programs included."""
        return self.decoder.compile_s + self.own_compile_s

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        max_len: int | None = None,
        sampling: SamplingParams | None = None,
        stop_token_ids: Sequence[int] = (),
        steps_per_dispatch: int | None = None,
    ) -> Iterator[Arrival]:
        """See ``Decoder.generate``; a step is a pass here, and ``Arrival.steps`` counts passes.

        Raises, beside its errors:
            SpeculationError: more proposals than the cache has positions.
        """
        decoder, sampling = self.decoder, sampling or SamplingParams()
        if max_new_tokens < 1:
            raise PromptError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        decoder.step_args(stop_token_ids, sampling)
        decoder._check_prompts(prompts)
        lens = [len(prompt) for prompt in prompts]
        max_len = decoder.room_for(max(lens), max_new_tokens) if max_len is None else max_len
        check_fits(decoder.config, lens, max_len)
        if self.k >= max_len:
            raise SpeculationError(
                f"k is {self.k}, and the cache is for {max_len} positions: propose fewer, or raise --max-len"
            )
        if steps_per_dispatch is not None and not 1 <= steps_per_dispatch <= MAX_PASSES:
            raise PromptError(f"steps_per_dispatch is {steps_per_dispatch}; with speculation from 1 to {MAX_PASSES}")
        self.prepare(lens, max_len, sampling)
        return self._run(prompts, max_new_tokens, max_len, sampling, stop_token_ids, steps_per_dispatch)

    def prepare(self, prompt_lens: Sequence[int], max_len: int, sampling: SamplingParams | None = None) -> None:
        """Compile what a generation over prompts of these lengths will run, and time a pass of each kind."""
        sampling = sampling or SamplingParams()
        room = max_len + self.k
        self.decoder.prepare(prompt_lens, room, sampling)
        self.own_compile_s += self.proposer.prepare(prompt_lens, room)
        for k in self.choices:
            self._program(len(prompt_lens), room, k, sampling.form)
        self.costs(len(prompt_lens), max_len, sampling)

    def costs(self, batch: int, max_len: int, sampling: SamplingParams | None = None) -> dict[int, float]:
        """Seconds of a pass by its number of proposals, 0 a plain step: measured once for each shape.

        Timed on a text of one token over and over, which has a proposal in every pass.
        """
        sampling = sampling or SamplingParams()
        key = (batch, max_len, sampling.form)
        if key not in self._costs:
            decoder, room = self.decoder, max_len + self.k
            length = max(1, min(max_len // 2, max_len - (self.k + 1) * TIMED_PASSES * 2))
            prompts, plenty = [[0] * length] * batch, [room + 1] * batch
            cache, rows, _ = decoder.start([[0]] * batch, plenty, room, sampling)
            numbers: Any = jax.tree.map(np.asarray, rows)
            filled: Rows = numbers._replace(
                length=np.full(batch, length, np.int32), done=np.zeros(batch, bool), token=np.zeros(batch, np.int32)
            )
            state = self.proposer.begin([[0]] * batch, room)
            stop_ids, values = decoder.step_args((), sampling)
            found = {}
            for k in [*self.choices, 0]:
                taken = []
                for _ in range(3):
                    rows = self._place_rows(filled)
                    standing = Standing(rows, self.decoder.put(self._history(prompts, room), ("batch", None)), state)
                    jax.block_until_ready((standing, cache))
                    began = time.perf_counter()
                    if k:
                        program = self._program(batch, room, k, sampling.form)
                        passes = np.int32(TIMED_PASSES)
                        cache, standing, out = program(
                            decoder.params, cache, self.proposer.leaves(), standing, stop_ids, passes, values
                        )
                        state, done = standing.proposer, int((np.asarray(out.proposed) >= 0).any(axis=1).sum())
                    else:
                        program = decoder.decode_program(batch, room, sampling.form)
                        cache, _, emitted = program(
                            decoder.params, cache, rows, stop_ids, np.int32(TIMED_PASSES), values
                        )
                        done = int((np.asarray(emitted.tokens) >= 0).any(axis=1).sum())
                    taken.append((time.perf_counter() - began) / max(done, 1))
                found[k] = min(taken)
            self._costs[key] = found
        return self._costs[key]

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        max_len: int,
        sampling: SamplingParams,
        stop_token_ids: Sequence[int],
        steps_per_dispatch: int | None,
    ) -> Iterator[Arrival]:
        decoder, batch, room = self.decoder, len(prompts), max_len + self.k
        stop_ids, values = decoder.step_args(stop_token_ids, sampling)
        ends = [min(len(prompt) + max_new_tokens, max_len) for prompt in prompts]
        costs = self.costs(batch, max_len, sampling)
        prior = DRAFT_PRIOR if self.proposer.always else PRIOR
        control = Controller(costs, batch, fixed=None if self.adaptive else self.k, prior=prior)
        cache, rows, logprob = decoder.start(prompts, ends, room, sampling)
        state = self.proposer.begin(prompts, room)
        first = np.asarray(rows.token)
        yield as_arrival(first[None], np.asarray(logprob)[None], 0)
        texts = [[*prompt, int(token)] for prompt, token in zip(prompts, first, strict=True)]
        done = np.isin(first, stop_ids) | (np.array([len(text) for text in texts]) >= ends)
        rows = rows._replace(done=self.decoder.put(done, BATCH))
        standing = Standing(rows, self.decoder.put(self._history(texts, room), ("batch", None)), state)
        pending: list[tuple[int, Any]] = []
        k, plain_left, then = control.choose((~done).tolist()), 0, time.perf_counter()
        while not done.all():
            # One dispatch stays in flight while the host reads the one before it.
            while len(pending) < 2:
                passes = steps_per_dispatch or int(np.clip(DISPATCH_SECONDS / costs[k], 1, MAX_PASSES))
                cache, standing, out = self._dispatch(
                    k, passes, batch, room, sampling.form, cache, standing, stop_ids, values
                )
                pending.append((k, out))
            used, out = pending.pop(0)
            arrival, proposed, accepted = _read(out)
            now = time.perf_counter()
            if arrival.steps:
                self._note(control, used, arrival, proposed, accepted, now - then)
                for text, tokens in zip(texts, arrival.tokens, strict=True):
                    text += tokens
                yield arrival
                then = time.perf_counter() if not pending else now
            done = np.array(
                [
                    len(text) >= end or (text[-1] in stop_token_ids and len(text) > len(prompt))
                    for text, end, prompt in zip(texts, ends, prompts, strict=True)
                ]
            )
            if used == k and k:
                k = control.choose((~done).tolist())
                if k == 0 and not done.all():
                    self.tally.stops += 1
                    plain_left = control.paused()
            elif k == 0:
                plain_left -= arrival.steps
                if plain_left <= 0 and not self.proposer.always and not pending[0][0]:
                    # What was decoded plainly is not in the history on the device. Everything is read before it is
                    # made anew, so that it is whole.
                    for _, out in pending:
                        arrival, proposed, accepted = _read(out)
                        if arrival.steps:
                            self._note(control, 0, arrival, proposed, accepted, time.perf_counter() - then)
                            then = time.perf_counter()
                            for text, tokens in zip(texts, arrival.tokens, strict=True):
                                text += tokens
                            yield arrival
                    pending.clear()
                    history = self.decoder.put(self._history(texts, room), ("batch", None))
                    standing = standing._replace(history=history)
                    k = control.choose((~done).tolist())
                    then = time.perf_counter()

    def _dispatch(
        self,
        k: int,
        passes: int,
        batch: int,
        room: int,
        form: SamplingForm,
        cache: KVCache,
        standing: Standing,
        stop_ids: Any,
        values: Any,
    ) -> tuple[KVCache, Standing, Any]:
        decoder = self.decoder
        if k == 0:
            program = decoder.decode_program(batch, room, form)
            steps = np.int32(min(passes, MAX_STEPS))
            cache, rows, emitted = program(decoder.params, cache, standing.rows, stop_ids, steps, values)
            return cache, standing._replace(rows=rows), emitted
        program = self._program(batch, room, k, form)
        return program(decoder.params, cache, self.proposer.leaves(), standing, stop_ids, np.int32(passes), values)

    def _note(
        self,
        control: Controller,
        k: int,
        arrival: Arrival,
        proposed: np.ndarray,
        accepted: np.ndarray,
        seconds: float,
    ) -> None:
        if k:
            control.update(proposed, accepted)
        self.tally.add(k, proposed, accepted, sum(map(len, arrival.tokens)), seconds)

    def _program(self, batch: int, room: int, k: int, form: SamplingForm) -> Any:
        decoder = self.decoder

        def arguments() -> tuple[Any, ...]:
            number, flag = (decoder._abstract((batch,), kind, BATCH) for kind in (jnp.int32, jnp.bool))
            seen = decoder._abstract((batch, decoder.config.vocab_size), jnp.bool, SEEN) if form.penalty else None
            rows = Rows(number, number, number, flag, seen)
            history = decoder._abstract((batch, room), jnp.int32, ("batch", None))
            standing = Standing(rows, history, self.proposer.abstract_state(batch, room))
            leaves = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.proposer.leaves()
            )
            stops, passes = jax.ShapeDtypeStruct((STOP_SLOTS,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
            return leaves, standing, stops, passes, abstract_values()

        key = ("speculate", batch, k, form, room, id(self.proposer))
        return decoder._compile(key, room, lambda: speculate(decoder.programs, self.proposer, k, form), arguments)

    def _history(self, texts: Sequence[Sequence[int]], room: int) -> np.ndarray:
        out = np.zeros((len(texts), room), np.int32)
        for row, text in enumerate(texts):
            out[row, : len(text)] = text
        return out

    def _place_rows(self, rows: Rows) -> Rows:
        *each, seen = rows
        placed = [self.decoder.put(np.asarray(one), BATCH) for one in each]
        return Rows(placed[0], placed[1], placed[2], placed[3], self._seen(seen))

    def _seen(self, seen: jax.Array | None) -> jax.Array | None:
        return None if seen is None else self.decoder.put(np.asarray(seen), SEEN)


def _read(out: Any) -> tuple[Arrival, np.ndarray, np.ndarray]:
    """A dispatch's tokens, and int [passes, B] proposals and acceptances; all of it on the host."""
    if not isinstance(out, Passes):
        tokens = np.asarray(out.tokens)
        none = np.where(tokens >= 0, 0, -1)
        return as_arrival(tokens, np.asarray(out.logprobs)), none, none
    tokens, proposed = np.asarray(out.tokens), np.asarray(out.proposed)
    passes, batch, width = tokens.shape
    by_step = [np.swapaxes(x, 1, 2).reshape(passes * width, batch) for x in (tokens, np.asarray(out.logprobs))]
    arrival = as_arrival(by_step[0], by_step[1], int((proposed >= 0).any(axis=1).sum()))
    return arrival, proposed, np.asarray(out.accepted)
