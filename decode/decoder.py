"""A model on a mesh, ready to run: its parameters as plain leaves, and the compiled programs that use them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decode.cache import (
    CacheOverflowError,
    KVCache,
    abstract_cache,
    bucket,
    capacity,
    check_fits,
    chunk_size,
    make_cache,
)
from decode.sampling import SamplingForm, SamplingParams, SamplingValues
from decode.step import BATCH, MAX_STEPS, SEEN, Emitted, Programs, Rows
from model.config import LlamaConfig
from model.llama import LayersForm
from model.quantize import WIDE, Quantization
from model.wording import prompt_at
from sharding.collectives import DEFAULT_COLLECTIVES, Collectives
from sharding.compiling import compile_lowered
from sharding.layout import Layout
from sharding.mesh import place_on_mesh

DISPATCH_SECONDS = 0.05
"""How long one dispatch of decode steps should take: short enough to read as a stream, long enough to hide the host."""

STOP_SLOTS = 16
"""How many stop tokens the decode program compares with; unused slots hold -1."""

AGREED_STEPS = 8
"""Decode steps a dispatch where several processes must dispatch the same without asking each other's clocks."""


class PromptError(ValueError):
    """A prompt that cannot be run: empty, or with a token id outside the vocabulary."""


class NumericsError(RuntimeError):
    """The model produced a NaN or an infinity."""


@dataclass(frozen=True)
class Arrival:
    """Tokens that reached the host together.

    tokens, logprobs: one list a row; a row that was done gets none.
    steps: decode steps that made them (0 for the first token, which prefill makes).
    at: ``time.perf_counter`` when they arrived.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    steps: int
    at: float


class Decoder:
    """Runs one model: prefill, decode and logits, compiled once for each shape and kept.

    Args:
        config: the model's configuration.
        params: each parameter by path, padded and sharded by ``layout`` (what ``model.checkpoint.load`` returns).
        layout: the mesh they are on.
        dtype: float32 or bfloat16, the dtype of the activations, and of the parameters that are not quantised.
        layers: "unrolled" or "scan"; must match how ``params`` is stacked.
        cache_dtype: dtype of the KV cache, float32, bfloat16, int8 or float8_e4m3fn; the model's when None.
        collectives: how the devices talk in a decode step.
        quantization: which weights are kept in fewer bits; must match how ``params`` were loaded.
        kernels: the implementation of every kernel, "xla" or "cpu_native"; each one's best for the platform when None.
    """

    def __init__(
        self,
        config: LlamaConfig,
        params: Mapping[tuple[str | int, ...], jax.Array],
        layout: Layout,
        dtype: Any,
        *,
        layers: LayersForm = "unrolled",
        cache_dtype: Any = None,
        collectives: Collectives = DEFAULT_COLLECTIVES,
        kernels: str | None = None,
        quantization: Quantization = WIDE,
    ):
        self.config, self.layout, self.dtype = config, layout, jnp.dtype(dtype)
        self.collectives, self.quantization = collectives, quantization
        self.cache_dtype = jnp.dtype(cache_dtype or dtype)
        self.programs = Programs(
            config, self.dtype, layout, layers, collectives, kernels, self.cache_dtype, quantization
        )
        self.params = self.programs.leaves(params)
        self.compile_s = 0.0
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._cache_shapes: set[tuple[int, int]] = set()

    def prepare(self, prompt_lens: Sequence[int], max_len: int, sampling: SamplingParams | None = None) -> None:
        """Compile what a generation over prompts of these lengths will run, so that none of it is timed as TTFT."""
        form = (sampling or SamplingParams()).form
        shape = (len(prompt_lens), capacity(max_len, self.layout.kv_seq))
        if shape not in self._cache_shapes:  # the first call with a shape compiles
            began = time.perf_counter()
            jax.block_until_ready(self.make_cache(*shape))
            self.compile_s += time.perf_counter() - began
            self._cache_shapes.add(shape)
        for size in {size for _, size in self._pieces(max(prompt_lens))}:
            self.prefill_program(len(prompt_lens), size, max_len, form)
        self.decode_program(len(prompt_lens), max_len, form)

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
        """Generate for a batch of prompts, each as if it were alone.

        A row ends with a stop token (which is emitted), after ``max_new_tokens``, or when prompt and output reach
        ``max_len``. Closing the iterator early abandons the rest.

        Args:
            prompts: token ids, one list a row; lengths may differ.
            max_len: positions to make room for; by default just enough, within the model's own limit.
            steps_per_dispatch: decode steps a dispatch; by default as many as take ``DISPATCH_SECONDS``, or
                ``AGREED_STEPS`` where the mesh spans processes.

        Raises:
            PromptError: an empty prompt, or a token id outside the vocabulary.
            CacheOverflowError: a prompt that does not fit.
            NumericsError: NaN or infinite logits.
        """
        sampling = sampling or SamplingParams()
        if max_new_tokens < 1:
            raise PromptError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        self.step_args(stop_token_ids, sampling)  # refuses too many stop tokens before anything runs
        self._check_prompts(prompts)
        lens = [len(prompt) for prompt in prompts]
        max_len = self.room_for(max(lens), max_new_tokens) if max_len is None else max_len
        check_fits(self.config, lens, max_len)
        if steps_per_dispatch is not None and not 1 <= steps_per_dispatch <= MAX_STEPS:
            raise PromptError(f"steps_per_dispatch is {steps_per_dispatch}; it must be from 1 to {MAX_STEPS}")
        if steps_per_dispatch is None and self.layout.processes > 1:
            steps_per_dispatch = AGREED_STEPS
        self.prepare(lens, max_len, sampling)
        return self._run(prompts, max_new_tokens, max_len, sampling, stop_token_ids, steps_per_dispatch)

    def room_for(self, prompt_len: int, new_tokens: int) -> int:
        """The ``max_len`` that holds a prompt and its output, at most what the model was made for."""
        return min(prompt_len + new_tokens, self.config.max_position_embeddings)

    def logits(self, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        """Logits after every position of equally long rows, float32 [B, T, V], gathered on the host. For evaluation."""
        self._check_prompts(tokens)
        if len({len(row) for row in tokens}) > 1:
            raise PromptError(f"logits takes rows of one length, got lengths {[len(row) for row in tokens]}")
        B, T = len(tokens), len(tokens[0])
        max_len = self.room_for(T, 1)
        if max_len < T:
            raise CacheOverflowError(f"rows have {T} tokens; this model allows {max_len}")
        cache = self.make_cache(B, max_len)
        out = []
        for start, size in self._pieces(T):
            piece = _pad([row[start : start + size] for row in tokens], size)
            program = self._logits_program(B, size, max_len)
            cache, logits = program(self.params, cache, self.put(piece, ("batch", None)), np.int32(start))
            out.append(np.asarray(logits)[:, : min(size, T - start), : self.config.vocab_size])
        return np.concatenate(out, axis=1)

    def make_cache(self, batch: int, max_len: int) -> KVCache:
        """An empty cache for ``batch`` rows of up to ``max_len`` positions."""
        return make_cache(self.config, batch, max_len, self.layout, self.cache_dtype, stacked=self.programs.stacked)

    def decode_program(self, batch: int, max_len: int, form: SamplingForm | None = None) -> Any:
        """The compiled decode loop: its ``as_text()`` is the optimised HLO, ``memory_analysis()`` its buffers."""
        chosen = form or SamplingParams().form

        def arguments() -> tuple[Any, ...]:
            rows = Rows(
                self._abstract((batch,), jnp.int32, BATCH),
                self._abstract((batch,), jnp.int32, BATCH),
                self._abstract((batch,), jnp.int32, BATCH),
                self._abstract((batch,), jnp.bool, BATCH),
                self._abstract((batch, self.config.vocab_size), jnp.bool, SEEN) if chosen.penalty else None,
            )
            stop_ids, steps = jax.ShapeDtypeStruct((STOP_SLOTS,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
            return rows, stop_ids, steps, abstract_values()

        return self._compile(("decode", batch, chosen), max_len, lambda: self.programs.decode(chosen), arguments)

    def start(
        self, prompts: Sequence[Sequence[int]], ends: Sequence[int], max_len: int, sampling: SamplingParams
    ) -> tuple[KVCache, Rows, jax.Array]:
        """Prefill: the cache, the rows with their first token, and its log-probabilities float32 [B]."""
        B, form, values = len(prompts), sampling.form, SamplingValues.of(sampling)
        lens = np.array([len(prompt) for prompt in prompts], np.int32)
        lengths = self.put(lens, BATCH)
        cache = self.make_cache(B, max_len)
        hidden = self.put(np.zeros((B, self.config.hidden_size), self.dtype), ("batch", None))
        seen = None
        if form.penalty:
            shape = self.layout.padded_shape((B, self.config.vocab_size), SEEN)
            seen = self.put(np.zeros(shape, bool), SEEN)
        for at, size in self._pieces(int(lens.max())):
            piece = self.put(_pad([prompt[at : at + size] for prompt in prompts], size), ("batch", None))
            program = self.prefill_program(B, size, max_len, form)
            cache, hidden, seen, token, logprob = program(
                self.params, cache, hidden, seen, piece, np.int32(at), lengths, values
            )
        done = self.put(np.zeros(B, bool), BATCH)
        return cache, Rows(token, lengths, self.put(np.array(ends, np.int32), BATCH), done, seen), logprob

    def step_args(self, stop_token_ids: Sequence[int], sampling: SamplingParams) -> tuple[np.ndarray, SamplingValues]:
        """What the decode program takes beside cache, rows and step count: padded stop ids, and sampler numbers."""
        if len(stop_token_ids) > STOP_SLOTS:
            raise PromptError(f"{len(stop_token_ids)} stop tokens given; at most {STOP_SLOTS} are supported")
        ids = np.full(STOP_SLOTS, -1, np.int32)
        ids[: len(stop_token_ids)] = list(stop_token_ids)
        return ids, SamplingValues.of(sampling)

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        max_len: int,
        sampling: SamplingParams,
        stop_token_ids: Sequence[int],
        steps_per_dispatch: int | None,
    ) -> Iterator[Arrival]:
        stop_ids, values = self.step_args(stop_token_ids, sampling)
        ends = [min(len(prompt) + max_new_tokens, max_len) for prompt in prompts]
        cache, rows, logprob = self.start(prompts, ends, max_len, sampling)
        first = np.asarray(rows.token)
        yield as_arrival(first[None], np.asarray(logprob)[None], 0)
        done = np.isin(first, stop_ids) | (np.array([len(prompt) for prompt in prompts]) + 1 >= ends)
        rows = rows._replace(done=self.put(done, BATCH))
        program = self.decode_program(len(prompts), max_len, sampling.form)
        pending: list[Emitted] = []
        left = max(end - len(prompt) for end, prompt in zip(ends, prompts, strict=True)) - 1
        steps, finished, then = steps_per_dispatch or 1, bool(done.all()), time.perf_counter()
        while pending or (left > 0 and not finished):
            # One dispatch stays in flight while the host reads the one before it; both know when every row is done.
            while left > 0 and not finished and len(pending) < 2:
                cache, rows, emitted = program(self.params, cache, rows, stop_ids, np.int32(min(steps, left)), values)
                left -= min(steps, left)
                pending.append(emitted)
            emitted = pending.pop(0)
            arrival = as_arrival(np.asarray(emitted.tokens), np.asarray(emitted.logprobs))
            if arrival.steps == 0:
                finished = True
                continue
            yield arrival
            now = time.perf_counter()
            if steps_per_dispatch is None:
                steps = int(np.clip(DISPATCH_SECONDS * arrival.steps / max(arrival.at - then, 1e-6), 1, MAX_STEPS))
            then = now

    def _check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        if not prompts:
            raise PromptError("no prompt given; at least one is needed")
        for row, prompt in enumerate(prompts):
            if not len(prompt):
                raise PromptError(f"{prompt_at(row, len(prompts))} is empty; give at least one token")
            for place, token in enumerate(prompt):
                if not 0 <= token < self.config.vocab_size:
                    raise PromptError(
                        f"{prompt_at(row, len(prompts))} has token id {token} at place {place}; this model's ids run "
                        f"from 0 to {self.config.vocab_size - 1}"
                    )
        if len(prompts) % self.layout.data:
            raise PromptError(f"{len(prompts)} prompts do not divide over the data axis of {self.layout.data}")

    def _pieces(self, length: int) -> list[tuple[int, int]]:
        """(start, compiled size) of each prefill piece of a prompt of this length."""
        chunk = chunk_size(self.layout.kv_seq)
        return [(at, bucket(min(chunk, length - at), self.layout.kv_seq)) for at in range(0, length, chunk)]

    def prefill_program(self, batch: int, size: int, max_len: int, form: SamplingForm) -> Any:
        def arguments() -> tuple[Any, ...]:
            return (
                self._abstract((batch, self.config.hidden_size), self.dtype, ("batch", None)),
                self._abstract((batch, self.config.vocab_size), jnp.bool, SEEN) if form.penalty else None,
                self._abstract((batch, size), jnp.int32, ("batch", None)),
                jax.ShapeDtypeStruct((), jnp.int32),
                self._abstract((batch,), jnp.int32, BATCH),
                abstract_values(),
            )

        return self._compile(("prefill", batch, size, form), max_len, lambda: self.programs.prefill(form), arguments)

    def _logits_program(self, batch: int, size: int, max_len: int) -> Any:
        def arguments() -> tuple[Any, ...]:
            return self._abstract((batch, size), jnp.int32, ("batch", None)), jax.ShapeDtypeStruct((), jnp.int32)

        return self._compile(("logits", batch, size), max_len, self.programs.all_logits, arguments)

    def _compile(
        self,
        key: tuple[Any, ...],
        max_len: int,
        program: Callable[[], Any],
        arguments: Callable[[], tuple[Any, ...]],
    ) -> Any:
        """The program for ``key`` and a cache of this size: its arguments are parameters, cache, and ``arguments()``.

        Shapes are made only for a new program: a lookup is on the way to the first token.
        """
        key = (*key, capacity(max_len, self.layout.kv_seq))

        def compiled() -> Any:
            began = time.perf_counter()
            cache = self.abstract_cache(key[1], max_len)
            lowered = program().lower(self.programs.abstract_params(), cache, *arguments())
            found = compile_lowered(lowered, self.layout.platform)
            self.compile_s += time.perf_counter() - began
            return found

        return self.once(key, compiled)

    def once(self, key: tuple[Any, ...], compiled: Callable[[], Any]) -> Any:
        """What ``compiled()`` made for this key at the first call: programs are kept as long as the decoder."""
        if key not in self._compiled:
            self._compiled[key] = compiled()
        return self._compiled[key]

    def abstract_cache(self, batch: int, max_len: int) -> KVCache:
        return abstract_cache(self.config, batch, max_len, self.layout, self.cache_dtype, stacked=self.programs.stacked)

    def _abstract(self, shape: Sequence[int], dtype: Any, axes: Sequence[str | None]) -> Any:
        return jax.ShapeDtypeStruct(self.layout.padded_shape(shape, axes), dtype, sharding=self.layout.sharding(axes))

    def put(self, value: np.ndarray, axes: Sequence[str | None]) -> jax.Array:
        """The same on the mesh, split by these logical axes."""
        return place_on_mesh(value, self.layout.sharding(axes))


def abstract_values() -> SamplingValues:
    """The shapes of a sampler's numbers, to compile for."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), SamplingValues.of(SamplingParams()))


def _pad(rows: Sequence[Sequence[int]], size: int) -> np.ndarray:
    """int32 [B, size], each row's tokens and then zeros, which masks built from lengths hide."""
    out = np.zeros((len(rows), size), np.int32)
    for row, tokens in enumerate(rows):
        out[row, : len(tokens)] = tokens
    return out


def as_arrival(tokens: np.ndarray, logprobs: np.ndarray, steps: int | None = None) -> Arrival:
    """From tokens int32 and logprobs float32 [steps, B], -1 where a row was done.

    Raises:
        NumericsError: a logprob that is NaN.
    """
    at = time.perf_counter()
    live = tokens >= 0
    if np.isnan(logprobs[live]).any():
        row = int(np.argwhere(live & np.isnan(logprobs))[0][1])
        raise NumericsError(
            f"the model produced NaN or infinite logits for {prompt_at(row, tokens.shape[1])}; check the checkpoint "
            f"and the dtype"
        )
    columns = range(tokens.shape[1])
    return Arrival(
        [[int(token) for token in tokens[live[:, row], row]] for row in columns],
        [[float(value) for value in logprobs[live[:, row], row]] for row in columns],
        int(live.any(axis=1).sum()) if steps is None else steps,
        at,
    )
