"""Distillation on the mesh: the teacher's states, the loss against them, and one optimiser step.

The model runs inside ``jax.shard_map`` and the gradient is taken outside of it. There, the transpose of the whole map
is exact: a sum over devices sends every device's cotangent back, an input that all devices hold gets the sum of theirs.
Differentiated inside of the map, each sum would multiply the gradient by the number of devices.

The loss is the Kullback-Leibler divergence of the draft's next-token distribution from the teacher's (Hinton et al.,
2015; for drafts, DistillSpec, Zhou et al., 2024), both over the draft's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from kernels.matmul import matmul
from model.checkpoint.parameters import abstract_leaves, bind
from model.checkpoint.table import Path
from model.config import LlamaConfig
from model.llama import Llama
from model.training.draft import SHARED
from model.training.full_sequence import FullSequence
from sharding.collectives import all_reduce_max, all_reduce_sum, tensor_index
from sharding.layout import Layout, LogicalAxis
from sharding.mesh import DATA

Params = Mapping[Path, jax.Array]
TOKENS = ("batch", None)
HEAD = ("vocab", None)
NEVER = -1e30
"""Logit of what is not in a vocabulary. Finite, so that no difference of two is NaN."""


class Scores(NamedTuple):
    """Sums over the counted positions of a batch, float32.

    loss: KL divergence in nats, over the draft's vocabulary
    greedy: positions where the draft's best token is the teacher's
    sampled: the probability that a token sampled from the draft is accepted, sum of min(p, q) over the vocabulary
    positions: how many there are
    """

    loss: jax.Array
    greedy: jax.Array
    sampled: jax.Array
    positions: jax.Array


class State(NamedTuple):
    """What training changes: float32 parameters by path, and the optimiser's state."""

    params: dict[Path, jax.Array]
    optimiser: Any


def make_optimiser(steps: int, learning_rate: float, warmup: int, clip: float) -> optax.GradientTransformation:
    """AdamW under a cosine schedule with a linear warm-up, gradients clipped to a global norm."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup, max(steps, warmup + 1), learning_rate / 50
    )
    return optax.chain(optax.clip_by_global_norm(clip), optax.adamw(schedule, b2=0.98, weight_decay=0.01))


class Distiller:
    """The compiled programs of one distillation.

    Args:
        teacher, draft: configurations of equal hidden size and vocabulary.
        vocabulary: sorted token ids that the draft proposes, int32 [S]; None for all.
        dtype: of the forward passes; the draft's own parameters stay float32.
    """

    def __init__(
        self,
        teacher: LlamaConfig,
        draft: LlamaConfig,
        layout: Layout,
        dtype: Any,
        optimiser: optax.GradientTransformation,
        vocabulary: np.ndarray | None = None,
    ):
        self.layout, self.dtype, self.optimiser = layout, jnp.dtype(dtype), optimiser
        self.vocab_size = teacher.vocab_size
        self.vocabulary = np.arange(self.vocab_size, dtype=np.int32) if vocabulary is None else vocabulary
        self._teacher, self._draft = self._model(teacher), self._model(draft)
        self._teacher_specs, self._draft_specs = self._specs(teacher), self._specs(draft)
        self.teacher_states = jax.jit(self._map(self._run_teacher, (self._teacher_specs, TOKENS), (*TOKENS, None)))
        self.step = jax.jit(self._step, donate_argnums=(0,))
        self.evaluate = jax.jit(self._scores())

    def start(self, params: Params) -> tuple[State, dict[Path, jax.Array]]:
        """A draft's parameters -> what is trained, and what stays as it is."""
        trained = {path: value.astype(jnp.float32) for path, value in params.items() if path[0] not in SHARED}
        # A fresh copy where nothing was cast: the step donates what it is given.
        trained = {path: jnp.copy(value) for path, value in trained.items()}
        frozen = {path: value for path, value in params.items() if path[0] in SHARED}
        return State(trained, jax.jit(self.optimiser.init)(trained)), frozen

    def cut_head(self, frozen: Params) -> jax.Array:
        """The head's rows for the draft's vocabulary, [S padded, D], split over the mesh."""
        table = frozen[("head", "weight") if ("head", "weight") in frozen else ("embed", "weight")]
        if len(self.vocabulary) == self.vocab_size:
            return table
        rows = np.zeros(self.layout.padded_shape((len(self.vocabulary),), ("vocab",)), np.int32)
        rows[: len(self.vocabulary)] = self.vocabulary
        cut = jax.jit(lambda table: jnp.take(table, rows, axis=0), out_shardings=self.layout.sharding(HEAD))
        return cut(table)

    def loss(self) -> Callable[..., jax.Array]:
        """(trained, frozen, head, states [B, T, D], tokens [B, T], counted bool [B, T]) -> mean KL, float32 []."""

        def run(
            trained: Params, frozen: Params, head: jax.Array, states: jax.Array, tokens: jax.Array, counted: jax.Array
        ) -> jax.Array:
            teacher, draft = self._logits(trained, frozen, head, states, tokens)
            divergence = _divergence(teacher, draft)
            total = lax.psum(jnp.stack([jnp.sum(divergence * counted), jnp.sum(counted, dtype=jnp.float32)]), DATA)
            return total[0] / jnp.maximum(total[1], 1.0)

        return self._map(run, self._loss_specs(), ())

    def _step(
        self, state: State, frozen: Params, head: jax.Array, states: jax.Array, tokens: jax.Array, counted: jax.Array
    ) -> tuple[State, jax.Array, jax.Array]:
        """One optimiser step -> the new state, the loss before it, and the gradient's norm before clipping."""
        loss, gradient = jax.value_and_grad(self.loss())(state.params, frozen, head, states, tokens, counted)
        updates, optimiser = self.optimiser.update(gradient, state.optimiser, state.params)
        return State(optax.apply_updates(state.params, updates), optimiser), loss, optax.tree.norm(gradient)

    def _scores(self) -> Callable[..., Scores]:
        """The loss's arguments -> ``Scores``. The teacher's distribution is over its whole vocabulary."""
        ids = np.full(self.layout.padded_shape((len(self.vocabulary),), ("vocab",)), -1, np.int32)
        ids[: len(self.vocabulary)] = self.vocabulary

        def run(
            trained: Params,
            frozen: Params,
            head: jax.Array,
            states: jax.Array,
            tokens: jax.Array,
            counted: jax.Array,
            ids: jax.Array,
        ) -> Scores:
            teacher, draft = self._logits(trained, frozen, head, states, tokens)
            table = frozen[("head", "weight") if ("head", "weight") in frozen else ("embed", "weight")]
            whole = self._product(states, table)
            rows = tensor_index() * table.shape[0] + jnp.arange(table.shape[0])
            whole = jnp.where(rows < self.vocab_size, whole, NEVER)
            p = jnp.exp(teacher - _log_sum(whole)[..., None])
            accepted = all_reduce_sum(jnp.sum(jnp.minimum(p, jnp.exp(_log_softmax(draft))), axis=-1))
            agreed = _best(whole, rows) == _best(draft, ids)
            sums = [
                jnp.sum(x * counted, dtype=jnp.float32)
                for x in (_divergence(teacher, draft), agreed, accepted, jnp.ones_like(accepted))
            ]
            return Scores(*lax.psum(jnp.stack(sums), DATA))

        mapped = self._map(run, (*self._loss_specs(), ("vocab",)), Scores)
        return lambda *arguments: mapped(*arguments, jnp.asarray(ids))

    def _logits(
        self, trained: Params, frozen: Params, head: jax.Array, states: jax.Array, tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """This device's slice of the teacher's and the draft's logits over the draft's vocabulary, [B, T, S / tp]."""
        params = {path: value.astype(self.dtype) for path, value in {**trained, **frozen}.items()}
        hidden, _ = bind(self._draft, params)(tokens, _positions(tokens), FullSequence())
        ids = tensor_index() * head.shape[0] + jnp.arange(head.shape[0])
        listed = ids < len(self.vocabulary)
        teacher, draft = (jnp.where(listed, self._product(x, head), NEVER) for x in (states, hidden))
        return lax.stop_gradient(teacher), draft

    def _product(self, x: jax.Array, head: jax.Array) -> jax.Array:
        form: dict[str, Any] = {"platform": self.layout.platform, "implementation": "xla"}
        return matmul(x.astype(self.dtype), head.astype(self.dtype), out_dtype=jnp.dtype(jnp.float32), **form)

    def _run_teacher(self, params: Params, tokens: jax.Array) -> jax.Array:
        """The teacher's states after its final norm, float32 [B, T, D]."""
        hidden, _ = bind(self._teacher, params)(tokens, _positions(tokens), FullSequence())
        return hidden.astype(jnp.float32)

    def _model(self, config: LlamaConfig) -> Llama:
        return Llama(config, self.dtype, platform=self.layout.platform, matmul="xla", attention="xla")

    def _specs(self, config: LlamaConfig) -> dict[Path, tuple[LogicalAxis, ...]]:
        return {path: leaf.axes for path, leaf in abstract_leaves(config, "unrolled").items()}

    def _loss_specs(self) -> tuple[Any, ...]:
        trained = {path: axes for path, axes in self._draft_specs.items() if path[0] not in SHARED}
        frozen = {path: axes for path, axes in self._draft_specs.items() if path[0] in SHARED}
        return trained, frozen, HEAD, (*TOKENS, None), TOKENS, TOKENS

    def _map(self, run: Callable[..., Any], axes: Any, out_axes: Any) -> Callable[..., Any]:
        """``jax.shard_map`` with inputs and outputs named by logical axes."""

        def specs(tree: Any) -> Any:
            if isinstance(tree, dict):
                return {path: self.layout.spec(one) for path, one in tree.items()}
            return self.layout.spec(tree)

        whole: Any = PartitionSpec()
        out: Any = Scores(whole, whole, whole, whole) if out_axes is Scores else specs(out_axes)
        return jax.shard_map(
            run, mesh=self.layout.mesh, in_specs=tuple(map(specs, axes)), out_specs=out, check_vma=False
        )


def _positions(tokens: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


def _log_sum(logits: jax.Array) -> jax.Array:
    """log of the sum of exp over the split last axis, [B, T]."""
    top = all_reduce_max(lax.stop_gradient(jnp.max(logits, axis=-1)))
    return top + jnp.log(all_reduce_sum(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1)))


def _log_softmax(logits: jax.Array) -> jax.Array:
    return logits - _log_sum(logits)[..., None]


def _divergence(teacher: jax.Array, draft: jax.Array) -> jax.Array:
    """KL(teacher || draft) [B, T] of logits that are split over the vocabulary."""
    log_p, log_q = _log_softmax(teacher), _log_softmax(draft)
    return all_reduce_sum(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1))


def _best(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """The id with the largest logit over all devices, [B, T]; the lowest of equals."""
    top = jnp.max(logits, axis=-1)
    mine = jnp.where(logits == all_reduce_max(top)[..., None], ids, np.iinfo(np.int32).max)
    return -all_reduce_max(-jnp.min(mine, axis=-1))
