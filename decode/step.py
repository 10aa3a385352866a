"""The two compiled programs: one prefill piece, and a loop of decode steps. Each is one ``jax.shard_map``.

Sampling is inside both, so nothing eager runs between steps. The decode loop takes its number of steps as an argument:
one compiled program serves one token for a quick first answer or many tokens a dispatch, and ends early when every
row is done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from decode.cache import KVCache, cache_specs
from decode.sampling import SamplingForm, SamplingValues, sample
from model.config import LlamaConfig
from model.llama import LayersForm, Llama
from model.quantize import WIDE, Quantization
from sharding.collectives import DEFAULT_COLLECTIVES, Collectives, tensor_index
from sharding.layout import Layout, LogicalAxis

MAX_STEPS = 32
"""Most decode steps in one dispatch: the size of the token buffer that a dispatch returns."""

BATCH = ("batch",)
SEEN = ("batch", "vocab")


class Rows(NamedTuple):
    """Where each row of a batch stands, between dispatches.

    token: int32 [B], the newest token, not in the cache yet
    length: int32 [B], positions in the cache, so the position ``token`` will take
    end: int32 [B], the row is done once ``length + 1`` tokens reach it
    done: bool [B]
    seen: bool [B, V] split over the vocabulary, or None where no repetition penalty is applied
    """

    token: jax.Array
    length: jax.Array
    end: jax.Array
    done: jax.Array
    seen: jax.Array | None


class Emitted(NamedTuple):
    """Tokens that a dispatch produced: int32 and float32 [steps, B]; -1 where a row was done already."""

    tokens: jax.Array
    logprobs: jax.Array


class Programs:
    """Builds the jitted programs for one model on one layout. Holds no arrays.

    The model is split once; programs take its parameters as a flat list of leaves, in the order of ``treedef``.
    ``collectives`` are those of decode steps. Prefill moves whole prompts, where bytes count and not hops, so there
    every all-reduce is left to the compiler. ``kernels`` is the implementation of every operation, None for the best;
    ``quantization`` says which weights are kept in fewer bits, and ``cache_dtype`` is that of the KV cache, the model's
    when None.
    """

    def __init__(
        self,
        config: LlamaConfig,
        dtype: Any,
        layout: Layout,
        layers: LayersForm,
        collectives: Collectives = DEFAULT_COLLECTIVES,
        kernels: str | None = None,
        cache_dtype: Any = None,
        quantization: Quantization = WIDE,
    ):
        collectives.check_platform(layout.platform)
        self.config, self.layout, self.collectives = config, layout, collectives
        self.cache_dtype = jnp.dtype(cache_dtype or dtype)
        self.stacked, self.kernels = layers == "scan", kernels
        build = functools.partial(
            Llama, config, dtype, platform=layout.platform, layers=layers, attention=kernels, quantization=quantization
        )
        model = build(matmul=kernels, collectives=Collectives("psum"))
        decoding = build(matmul=kernels, collectives=collectives)
        precise = build(matmul="xla_pieces", collectives=Collectives("psum"))
        self.graph, state = nnx.split(model)
        self.decode_graph, _ = nnx.split(decoding)
        self.precise_graph, _ = nnx.split(precise)
        self.shapes, self.treedef = jax.tree.flatten(state)
        variables = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        self.axes: list[tuple[LogicalAxis, ...]] = [variable.get_metadata()["axes"] for variable in variables]
        paths = {id(variable): path for path, variable in nnx.to_flat_state(state)}
        self.paths = [paths[id(variable)] for variable in variables]

    def leaves(self, params: Mapping[Any, jax.Array]) -> list[jax.Array]:
        """Parameters by path -> the flat list that programs take."""
        return [params[path] for path in self.paths]

    def abstract_params(self) -> list[jax.ShapeDtypeStruct]:
        """The parameters as padded, sharded shapes: what a program is compiled for without any weights."""
        return [
            jax.ShapeDtypeStruct(
                self.layout.padded_shape(leaf.shape, axes), leaf.dtype, sharding=self.layout.sharding(axes)
            )
            for leaf, axes in zip(self.shapes, self.axes, strict=True)
        ]

    def prefill(self, form: SamplingForm) -> Callable[..., Any]:
        """(params, cache, hidden [B, D], seen, tokens [B, T], start [], lengths [B], values)
        -> (cache, hidden, seen, token [B], logprob [B]).

        Runs positions start..start+T of every row. ``hidden`` carries each row's state at its last prompt position
        once a piece has passed it; token and logprob are meaningful after the last piece. Cache, hidden and seen are
        donated.
        """

        def run(
            params: list[jax.Array],
            cache: KVCache,
            hidden: jax.Array,
            seen: jax.Array | None,
            tokens: jax.Array,
            start: jax.Array,
            lengths: jax.Array,
            values: SamplingValues,
        ) -> tuple[KVCache, jax.Array, jax.Array | None, jax.Array, jax.Array]:
            model = self.model(self.graph, params)
            B, T = tokens.shape
            positions = jnp.broadcast_to(start + jnp.arange(T, dtype=jnp.int32), (B, T))
            states, cache = model(tokens, positions, cache)
            last = lengths - 1 - start
            here = (last >= 0) & (last < T)
            picked = jnp.take_along_axis(states, jnp.clip(last, 0, T - 1)[:, None, None], axis=1)[:, 0]
            hidden = jnp.where(here[:, None], picked, hidden)
            if seen is not None:
                seen = mark(seen, tokens, positions < lengths[:, None])
            token, logprob = sample(model.logits(hidden), lengths, seen, values, form, self.config.vocab_size)
            return cache, hidden, seen, token, logprob

        seen = self._seen_spec(form)
        batch = self.layout.spec(BATCH)
        hidden = self.layout.spec(("batch", None))
        return self.jit(
            run,
            (
                self.param_specs(),
                self.cache_spec(),
                hidden,
                seen,
                hidden,
                PartitionSpec(),
                batch,
                PartitionSpec(),
            ),
            (self.cache_spec(), hidden, seen, batch, batch),
            donate=(1, 2, 3),
        )

    def decode(self, form: SamplingForm) -> Callable[..., Any]:
        """(params, cache, rows, stop_ids [n], steps [], values) -> (cache, rows, emitted [MAX_STEPS, B]).

        Runs up to ``steps`` (at most ``MAX_STEPS``) steps, fewer when every row is done. Cache and rows are donated.
        """

        def run(
            params: list[jax.Array],
            cache: KVCache,
            rows: Rows,
            stop_ids: jax.Array,
            steps: jax.Array,
            values: SamplingValues,
        ) -> tuple[KVCache, Rows, Emitted]:
            model = self.model(self.decode_graph, params)
            B = rows.token.shape[0]
            emitted = Emitted(jnp.full((MAX_STEPS, B), -1, jnp.int32), jnp.zeros((MAX_STEPS, B), jnp.float32))

            def more(carry: tuple[jax.Array, KVCache, Rows, Emitted]) -> jax.Array:
                index, _, rows, _ = carry
                return (index < steps) & ~jnp.all(rows.done)

            def step(
                carry: tuple[jax.Array, KVCache, Rows, Emitted],
            ) -> tuple[jax.Array, KVCache, Rows, Emitted]:
                index, cache, rows, emitted = carry
                seen = rows.seen
                if seen is not None:
                    seen = mark(seen, rows.token[:, None], ~rows.done[:, None])
                hidden, cache = model(rows.token[:, None], rows.length[:, None], cache)
                logits = model.logits(hidden[:, 0])
                token, logprob = sample(
                    logits, rows.length + 1, seen, values, form, self.config.vocab_size, self.collectives
                )
                active = ~rows.done
                length = rows.length + active
                stopped = jnp.any(token[:, None] == stop_ids, axis=1)
                emitted = Emitted(
                    emitted.tokens.at[index].set(jnp.where(active, token, -1)),
                    emitted.logprobs.at[index].set(logprob),
                )
                rows = Rows(
                    jnp.where(active, token, rows.token),
                    length,
                    rows.end,
                    rows.done | stopped | (length + 1 >= rows.end),
                    seen,
                )
                return index + 1, cache, rows, emitted

            _, cache, rows, emitted = lax.while_loop(more, step, (jnp.int32(0), cache, rows, emitted))
            return cache, rows, emitted

        batch: Any = self.layout.spec(BATCH)
        rows = Rows(batch, batch, batch, batch, self._seen_spec(form))
        out: Any = self.layout.spec((None, "batch"))
        return self.jit(
            run,
            (
                self.param_specs(),
                self.cache_spec(),
                rows,
                PartitionSpec(),
                PartitionSpec(),
                PartitionSpec(),
            ),
            (self.cache_spec(), rows, Emitted(out, out)),
            donate=(1, 2),
        )

    def all_logits(self) -> Callable[..., Any]:
        """(params, cache, tokens [B, T], start []) -> (cache, logits [B, T, V padded]): every position's logits.

        For evaluation, so sums are taken in pieces to round less. The result stays split over the vocabulary; the
        caller decides to gather it.
        """

        def run(
            params: list[jax.Array], cache: KVCache, tokens: jax.Array, start: jax.Array
        ) -> tuple[KVCache, jax.Array]:
            model = self.model(self.precise_graph, params)
            positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
            hidden, cache = model(tokens, positions, cache)
            return cache, model.logits(hidden)

        tokens = self.layout.spec(("batch", None))
        return self.jit(
            run,
            (self.param_specs(), self.cache_spec(), tokens, PartitionSpec()),
            (self.cache_spec(), self.layout.spec(("batch", None, "vocab"))),
            donate=(1,),
        )

    def model(self, graph: nnx.GraphDef[Llama], params: list[jax.Array]) -> Llama:
        """One of the graphs with parameters, inside a program."""
        return nnx.merge(graph, jax.tree.unflatten(self.treedef, params))

    def param_specs(self) -> list[PartitionSpec]:
        """How each parameter is split."""
        return [self.layout.spec(axes) for axes in self.axes]

    def cache_spec(self) -> KVCache:
        """How the contiguous cache is split."""
        return cache_specs(self.config, self.layout, self.cache_dtype, stacked=self.stacked)

    def _seen_spec(self, form: SamplingForm) -> Any:
        return self.layout.spec(SEEN) if form.penalty else None

    def jit(
        self, run: Callable[..., Any], in_specs: Any, out_specs: Any, *, donate: tuple[int, ...]
    ) -> Callable[..., Any]:
        """``run`` over the devices of the mesh, jitted: one ``jax.shard_map``. donate: arguments it may overwrite."""
        # Outputs that are the same on every device (tokens) leave the map unsplit; that they agree is by construction.
        mapped = jax.shard_map(run, mesh=self.layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return jax.jit(mapped, donate_argnums=donate)


def mark(seen: jax.Array, tokens: jax.Array, valid: jax.Array) -> jax.Array:
    """seen [B, V / tp] with tokens [B, T] set where valid [B, T]."""
    local = tokens - tensor_index() * seen.shape[1]
    inside = valid & (local >= 0) & (local < seen.shape[1])
    rows = jnp.arange(tokens.shape[0])[:, None]
    return seen.at[rows, jnp.where(inside, local, seen.shape[1])].set(True, mode="drop")
