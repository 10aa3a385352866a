"""A draft model inside the engine: its own cache in pages of the same numbers, filled late, and k greedy steps a pass.

The draft's keys and values of a position lie in the page, and the slot of it, that the target's lie in, so both use one
block table and a page that requests share serves both. What the draft has not computed yet, because a request did not
speculate or copied, is filled in when it is asked. Nothing that the draft computes can change a text: a wrong cache
would only be a worse guess.

Proposals are the draft's likeliest tokens, also of requests that sample: see ``decode.batching.speculation``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from decode.batching.jobs import Plan
from decode.batching.packing import Packing
from decode.batching.paged_cache import PagedCache, abstract_pages, page_specs
from decode.batching.shapes import Shapes
from decode.cache import KVCache, empty
from decode.speculation.draft import DraftModel
from decode.speculation.proposer import MOST_PROPOSALS
from sharding.compiling import compile_lowered

ASKED_WORDS = 5
"""Numbers a request: slot, position of its newest token, the token before, the newest, how many to propose."""


@dataclass(frozen=True)
class Asking:
    """How a request for proposals for N jobs lies in its vector; P pages in a table."""

    N: int
    P: int

    @property
    def size(self) -> int:
        return self.N * (ASKED_WORDS + self.P)

    def parts(self, vector: Any) -> tuple[Any, Any]:
        """Views: words [5, N], and tables [N, P]."""
        middle = ASKED_WORDS * self.N
        return vector[:middle].reshape(ASKED_WORDS, self.N), vector[middle:].reshape(self.N, self.P)

    def pack(self, plan: Plan, tables: np.ndarray, no_slot: int) -> np.ndarray:
        """The vector of what a plan asks the draft for. tables: int32 [M, P] by slot."""
        vector = np.zeros(self.size, np.int32)
        words, own_tables = self.parts(vector)
        words[0] = no_slot
        for row, job in enumerate(plan.asked):
            count = len(plan.proposals[job])
            words[:, row] = job.slot, len(job.tokens) - 1, job.tokens[-2], job.tokens[-1], count
            own_tables[row] = tables[job.slot]
        return vector


class PagedDraft:
    """The device side of a draft: its cache, and the proposals of the newest pass, int32 [M, MOST_PROPOSALS],
    by slot.

    Args:
        draft: on the target's layout. pages, page_size: of the target's cache. pages_each: pages of a table.
        shapes: the engine's. max_batch: M. k: most proposals.
    """

    def __init__(
        self, draft: DraftModel, *, pages: int, page_size: int, pages_each: int, shapes: Shapes, max_batch: int, k: int
    ):
        self.draft, self.pages, self.page_size, self.pages_each = draft, pages, page_size, pages_each
        self.max_batch, self.k = max_batch, k
        self.fill_sizes, self.ask_sizes = shapes.prompt, tuple(sorted({1, *shapes.mixed_rows}))
        self._programs: dict[tuple[str, int], Any] = {}
        self._fill_s: dict[int, float] = {}
        self._ask_s: dict[int, tuple[float, float]] = {}

    def compile(self) -> None:
        """Compile every shape, and time it."""
        decoder = self.draft.decoder
        self._cache = empty(abstract_pages(decoder, self.pages, self.page_size))
        self.proposals = decoder.put(np.zeros((self.max_batch, MOST_PROPOSALS), np.int32), (None, None))
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._cache)
        leaves = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.draft.leaves()
        )

        def compiled(kind: str, layout: Packing | Asking, make: Callable[[], Any]) -> Any:
            key = ("batched draft", kind, layout, self.pages, self.page_size, self.max_batch)
            vector = jax.ShapeDtypeStruct((layout.size,), np.int32)
            platform = decoder.layout.platform
            return decoder.once(key, lambda: compile_lowered(make().lower(leaves, shapes, vector), platform))

        for size in self.fill_sizes:
            tiles = Packing(0, size, self.pages_each)
            self._programs["fill", size] = compiled("fill", tiles, functools.partial(fill, self, tiles))
        for size in self.ask_sizes:
            asking = Asking(size, self.pages_each)
            self._programs["propose", size] = compiled("propose", asking, functools.partial(propose, self, asking))
        for size in self.fill_sizes:
            padding = np.full(Packing(0, size, self.pages_each).size, -1, np.int32)
            padding[2 * size :] = 0
            self._fill_s[size] = self._timed("fill", size, padding)
        for size in self.ask_sizes:
            one, many = (self._timed("propose", size, self._imagined(size, count)) for count in (1, self.k))
            each = max(0.0, (many - one) / (self.k - 1)) if self.k > 1 else one
            self._ask_s[size] = (max(one - each, 0.0), each)

    def fill(self, size: int, vector: np.ndarray) -> None:
        """Compute positions; returns at once. vector: a ``Packing`` of no rows."""
        self._cache = self._programs["fill", size](self.draft.leaves(), self._cache, vector)

    def propose(self, size: int, vector: np.ndarray) -> None:
        """Propose for up to ``size`` jobs; returns at once. vector: an ``Asking``."""
        self._cache, self.proposals = self._programs["propose", size](self.draft.leaves(), self._cache, vector)

    def asking(self, jobs: int) -> Asking:
        """The smallest shape for proposals for so many jobs."""
        return Asking(next(size for size in self.ask_sizes if size >= jobs), self.pages_each)

    def seconds(self, jobs: int, ahead: int) -> float:
        """What proposing ``ahead`` tokens for so many jobs takes."""
        base, each = self._ask_s[self.asking(jobs).N]
        return base + ahead * each

    def plan_seconds(self, plan: Plan, filled: int) -> float:
        """What a plan asks of the draft takes. filled: tokens of its fills, in the shape that they run in."""
        took = self._fill_s[filled] if filled else 0.0
        if plan.asked:
            took += self.seconds(len(plan.asked), max(len(plan.proposals[job]) for job in plan.asked))
        return took

    def _imagined(self, size: int, count: int) -> np.ndarray:
        """A vector that costs what a full one does, all of it in page 0, for the time before any request."""
        shape = Asking(size, self.pages_each)
        vector = np.zeros(shape.size, np.int32)
        words, _ = shape.parts(vector)
        words[0], words[1], words[4] = self.max_batch, 1, count
        return vector

    def _timed(self, kind: str, size: int, vector: np.ndarray) -> float:
        """Seconds of a call: the best of two after the first, which pays for more."""
        found = []
        for _ in range(3):
            began = time.perf_counter()
            getattr(self, kind)(size, vector)
            jax.block_until_ready(self._cache)
            found.append(time.perf_counter() - began)
        return min(found[1:])


def fill(paged: PagedDraft, shape: Packing) -> Any:
    """A jitted (leaves, cache, vector) -> cache, donated: the keys and values of tokens in tiles."""
    draft = paged.draft
    programs = draft.decoder.programs
    platform = programs.layout.platform

    def run(leaves: Any, cache: KVCache, vector: jax.Array) -> KVCache:
        model = programs.model(programs.graph, leaves[0])
        tokens, positions, _, tables = shape.parts(vector)
        pages = PagedCache(cache, tables, positions, 0, platform, programs.kernels)
        _, pages = model(tokens[None], jnp.maximum(positions, 0)[None], pages)
        return pages.cache

    specs = (draft.leaf_specs(), page_specs(programs), PartitionSpec())
    return programs.jit(run, specs, page_specs(programs), donate=(1,))


def propose(paged: PagedDraft, shape: Asking) -> Any:
    """A jitted (leaves, cache, vector) -> (cache, proposals int32 [M, MOST_PROPOSALS]), the cache donated.

    The token before the newest is run again: where all proposals of the last pass stood, the draft has not seen the
    last of them.
    """
    draft, N = paged.draft, shape.N
    programs = draft.decoder.programs
    platform = programs.layout.platform

    def run(leaves: Any, cache: KVCache, vector: jax.Array) -> tuple[KVCache, jax.Array]:
        params, cut = leaves
        model = programs.model(programs.decode_graph, params)
        (slots, newest_at, before, newest, counts), tables = shape.parts(vector)

        def computed(
            cache: KVCache, tokens: jax.Array, positions: jax.Array, tables: jax.Array
        ) -> tuple[KVCache, jax.Array]:
            pages = PagedCache(cache, tables, positions, positions.shape[0], platform, programs.kernels)
            hidden, pages = model(tokens[None], jnp.maximum(positions, 0)[None], pages)
            return pages.cache, draft.likeliest(model, cut, hidden[0, -N:])

        def more(carry: tuple[jax.Array, KVCache, jax.Array, jax.Array]) -> jax.Array:
            return carry[0] < jnp.max(counts)

        def step(
            carry: tuple[jax.Array, KVCache, jax.Array, jax.Array],
        ) -> tuple[jax.Array, KVCache, jax.Array, jax.Array]:
            ahead, cache, token, out = carry
            # Past what a job asked for it may hold no page.
            positions = jnp.where(ahead < counts, newest_at + ahead, -1)
            cache, token = computed(cache, token, positions, tables)
            return ahead + 1, cache, token, out.at[:, ahead].set(token)

        asks = counts > 0
        positions = jnp.concatenate([jnp.where(asks, newest_at - 1, -1), jnp.where(asks, newest_at, -1)])
        cache, token = computed(cache, jnp.concatenate([before, newest]), positions, jnp.concatenate([tables, tables]))
        out = jnp.zeros((N, MOST_PROPOSALS), jnp.int32).at[:, 0].set(token)
        _, cache, _, out = lax.while_loop(more, step, (jnp.int32(1), cache, token, out))
        none = jnp.zeros((paged.max_batch, MOST_PROPOSALS), jnp.int32)
        return cache, none.at[slots].set(out, mode="drop")

    specs = (draft.leaf_specs(), page_specs(programs), PartitionSpec())
    return programs.jit(run, specs, (page_specs(programs), PartitionSpec()), donate=(1,))
