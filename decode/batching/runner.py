"""The device side of the engine: the paged cache, what each slot keeps, and the compiled steps over them."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from decode.batching.draft import PagedDraft
from decode.batching.options import EngineOptions
from decode.batching.packing import Packing
from decode.batching.paged_cache import abstract_pages
from decode.batching.program import Chosen, set_slot, step
from decode.batching.request import RequestError
from decode.batching.shapes import Shapes
from decode.cache import capacity, empty
from decode.decoder import Decoder
from decode.speculation.draft import DraftModel
from decode.speculation.proposer import MOST_PROPOSALS, SpeculationError
from decode.step import SEEN
from sharding.broadcast import Announcer, messages
from sharding.compiling import compile_lowered
from sharding.layout import Layout
from sharding.multihost import PEER_TIMEOUT_S

LONGEST_DEFAULT = 8192
"""``max_len`` by default, where the model allows more: a block table has a page for each part of it."""

DEFAULT_BUDGET = {False: 256, True: 64}
"""Prompt tokens of a step by default, elsewhere and on CPU."""

CHANNEL = "engine"
"""What the processes of one engine call their messages."""

FOLLOWED = 4
"""Steps that a process which follows sends ahead of its device."""

MEMORY_SHARE = 0.25
"""Part of a device's memory that the cache takes by default, at most."""


class Runner:
    """Owns the device arrays: one caller at a time, and every step in the order of the calls.

    Raises:
        RequestError: options that contradict each other or the model. SpeculationError: proposals that do.
    """

    def __init__(self, decoder: Decoder, options: EngineOptions, draft: DraftModel | None = None):
        config, layout = decoder.config, decoder.layout
        if layout.data != 1:
            raise RequestError(
                f"the engine runs on a mesh with a data axis of 1, not {layout.data}; start one a replica"
            )
        cpu = layout.platform == "cpu"
        token_budget = DEFAULT_BUDGET[cpu] if options.token_budget is None else options.token_budget
        if token_budget < 1:
            raise RequestError(f"token_budget is {token_budget}; it must be at least 1")
        for name in ("max_batch", "page_size", "max_queue"):
            if getattr(options, name) < 1:
                raise RequestError(f"{name} is {getattr(options, name)}; it must be at least 1")
        most = config.max_position_embeddings
        self.max_len = min(most, LONGEST_DEFAULT) if options.max_len is None else options.max_len
        if not 2 <= self.max_len <= most:
            raise RequestError(f"max_len is {self.max_len}; this model allows 2 to {most} positions")
        self.decoder, self.max_batch = decoder, options.max_batch
        # A page is a row of the contiguous cache, so its size is one that such a row can have.
        self.page_size = capacity(options.page_size, layout.kv_seq)
        self.pages_each = -(-self.max_len // self.page_size)
        self.pages = options.pages or min(options.max_batch * self.pages_each, self._affordable(draft))
        # One request may fill the whole cache, and be no longer than that.
        self.max_len = min(self.max_len, self.pages * self.page_size)
        self.pages_each = min(self.pages_each, self.pages)
        if not 0 <= options.proposals <= MOST_PROPOSALS:
            raise SpeculationError(f"proposals is {options.proposals}; a step takes up to {MOST_PROPOSALS} a request")
        if options.proposals >= self.max_len:
            raise SpeculationError(
                f"k is {options.proposals}, and a request has room for {self.max_len} positions: propose fewer, or "
                f"raise max_len"
            )
        if draft is not None:
            self._check_draft(draft, decoder, options)
        self.shapes = Shapes.of(options.max_batch, token_budget, options.proposals, fine=cpu)
        self.draft: PagedDraft | None = None
        if draft is not None:
            self.draft = PagedDraft(
                draft,
                pages=self.pages,
                page_size=self.page_size,
                pages_each=self.pages_each,
                shapes=self.shapes,
                max_batch=self.max_batch,
                k=options.proposals,
            )
        self._announcer: Announcer | None = None
        self._steps: dict[tuple[int, int], jax.stages.Compiled] = {}
        self._vocab = layout.padded_shape((config.vocab_size,), ("vocab",))[0]

    def compile(self) -> list[tuple[int, int, float]]:
        """Compile and run every shape: (rows, prompt tokens, seconds a step) of each."""
        programs, layout = self.decoder.programs, self.decoder.layout
        began = time.perf_counter()
        M, V = self.max_batch, self._vocab
        self._cache = empty(abstract_pages(self.decoder, self.pages, self.page_size))
        self._token = self.decoder.put(np.zeros(M, np.int32), (None,))
        make = jax.jit(
            lambda: (jnp.zeros((M, V), bool), jnp.zeros((M, V), jnp.float32)),
            out_shardings=(layout.sharding(SEEN), layout.sharding(SEEN)),
        )
        self._seen, self._bias = make()
        self._no_proposals = self.decoder.put(np.zeros((M, MOST_PROPOSALS), np.int32), (None, None))
        held = (self._cache, self._token, self._seen, self._bias, self._no_proposals)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), held)
        for R, C in self.shapes.all():
            packing = Packing(R, C, self.pages_each)
            key = ("batched", packing, self.pages, self.page_size, M)  # engines over one decoder share what fits both

            def compiled(packing: Packing = packing) -> Any:
                vector = jax.ShapeDtypeStruct((packing.size,), np.int32)
                lowered = step(programs, packing).lower(programs.abstract_params(), *shapes, vector)
                return compile_lowered(lowered, layout.platform)

            self._steps[R, C] = self.decoder.once(key, compiled)
        self._set_slot = set_slot(programs)
        self.set_slot(0, [], {})
        jax.block_until_ready(self._seen)
        if self.draft is not None:
            self.draft.compile()
        self.decoder.compile_s += time.perf_counter() - began
        return [(R, C, self._timed(R, C)) for R, C in self.shapes.all()]

    def _timed(self, R: int, C: int) -> float:
        """Seconds of a step of this shape that is all padding: the second, as the first pays for more."""
        shape = Packing(R, C, self.pages_each)
        vector = np.zeros(shape.size, np.int32)
        _, positions, sampler, _ = shape.parts(vector)
        positions[:], sampler[1] = -1, self.max_batch
        for _ in range(2):
            began = time.perf_counter()
            jax.block_until_ready(self.step(R, C, vector))
            seconds = time.perf_counter() - began
        return seconds

    def step(self, R: int, C: int, vector: np.ndarray) -> Chosen:
        """Send a step to the device; returns at once."""
        self._tell(["step", R, C], vector)
        proposals = self._no_proposals if self.draft is None else self.draft.proposals
        self._cache, self._token, self._seen, chosen = self._steps[R, C](
            self.decoder.params, self._cache, self._token, self._seen, self._bias, proposals, vector
        )
        return chosen

    def fill(self, size: int, vector: np.ndarray) -> None:
        """Have the draft compute positions ahead of the next step; returns at once."""
        assert self.draft is not None
        self._tell(["fill", size], vector)
        self.draft.fill(size, vector)

    def propose(self, size: int, vector: np.ndarray) -> None:
        """Have the draft propose for the next step; returns at once."""
        assert self.draft is not None
        self._tell(["propose", size], vector)
        self.draft.propose(size, vector)

    def _tell(self, call: list[Any], vector: np.ndarray | None = None) -> None:
        """Send a call to those that follow."""
        if self._announcer is not None:
            self._announcer.send(json.dumps(call).encode() + b"\n" + (b"" if vector is None else vector.tobytes()))

    def set_slot(self, slot: int, seen: Sequence[int], bias: Mapping[int, float]) -> None:
        """Replace what a slot has seen, and its logit bias, for the steps sent from now on."""
        self._tell(["slot", slot, list(seen), list(bias.items())])
        seen_row, bias_row = np.zeros(self._vocab, bool), np.zeros(self._vocab, np.float32)
        seen_row[np.asarray(seen, np.int64)] = True
        for token, value in bias.items():
            bias_row[token] = value
        rows = (self.decoder.put(row, ("vocab",)) for row in (seen_row, bias_row))
        self._seen, self._bias = self._set_slot(self._seen, self._bias, np.int32(slot), *rows)

    def lead(self) -> None:
        """Tell the other processes of the mesh, which ``follow``, of every call from now on."""
        if self.decoder.layout.processes > 1:
            self._announcer = Announcer(CHANNEL, PEER_TIMEOUT_S)

    def follow(self) -> None:
        """Do what the process that leads does, until it closes."""
        sent: deque[Chosen] = deque()
        for message in messages(CHANNEL, PEER_TIMEOUT_S):
            head, _, vector = message.partition(b"\n")
            kind, *call = json.loads(head)
            numbers = np.frombuffer(vector, np.int32)
            if kind == "slot":
                slot, seen, bias = call
                self.set_slot(slot, seen, dict(bias))
            elif kind == "fill":
                self.fill(call[0], numbers)
            elif kind == "propose":
                self.propose(call[0], numbers)
            else:
                sent.append(self.step(call[0], call[1], numbers))
            if len(sent) > FOLLOWED:
                jax.block_until_ready(sent.popleft())

    def close(self) -> None:
        """Let those that follow go."""
        if self._announcer is not None:
            self._announcer.close()

    def _check_draft(self, draft: DraftModel, decoder: Decoder, options: EngineOptions) -> None:
        """Raise SpeculationError where it cannot propose for this engine."""
        draft.check(decoder.config)
        if not options.proposals:
            raise SpeculationError("a draft model proposes 0 tokens; set how many it may")
        if draft.layout != decoder.layout:
            raise SpeculationError("the draft model must lie on the same mesh as the model")
        most = draft.decoder.config.max_position_embeddings
        if most < self.max_len:
            raise SpeculationError(
                f"the draft was made for {most} positions (max_position_embeddings), and a request may have "
                f"{self.max_len}: lower max_len, or take another draft"
            )

    def _affordable(self, draft: DraftModel | None) -> int:
        """Pages that ``MEMORY_SHARE`` of the smallest device's memory holds, at least one request's."""
        layout = self.decoder.layout
        devices = layout.mesh.local_devices
        limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices if layout.platform != "cpu"]
        limit = min((limit for limit in limits if limit is not None), default=None)
        if limit is None:
            limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
        decoders = (self.decoder, *([] if draft is None else [draft.decoder]))
        page = jax.tree.leaves([abstract_pages(decoder, 1, self.page_size) for decoder in decoders])
        page_bytes = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in page)
        return max(self.pages_each, _least(layout, int(MEMORY_SHARE * limit) // page_bytes))


def _least(layout: Layout, own: int) -> int:
    """The least of what each process of the mesh gives: memory differs a little from host to host, and programs of
    different shapes would wait for each other for ever."""
    if layout.processes == 1:
        return own
    mesh = layout.mesh
    everyones = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    numbers = jax.make_array_from_callback((mesh.size,), everyones, lambda index: np.full(1, own, np.int32))
    return int(jax.jit(jnp.min, out_shardings=NamedSharding(mesh, PartitionSpec()))(numbers))
