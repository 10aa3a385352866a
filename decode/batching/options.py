"""What an engine is told when it is built, and what it tells about itself."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class EngineOptions:
    """How much an engine takes on at once.

    max_batch: requests that run together at most.
    max_len: positions of a request at most, prompt and output; None: what the model was made for, at most 8192. Never
        more than all ``pages`` hold.
    page_size: positions of a cache page; rounded up to 16, 32, 64..., and to a multiple of ``kv_seq``.
    pages: pages of the cache; None: as many as hold ``max_batch`` requests of ``max_len``, within 1/4 of memory.
    token_budget: prompt tokens that a step takes beside its decodes, at most; None: 256, and 64 on CPU, which a few
        tokens keep busy already: larger pieces would take no less time a token there, and hold the decodes up.
    prefix_cache: share full pages of equal prompts, and keep them until their room is needed.
    max_queue: requests that wait at most; one more is refused.
    proposals: most tokens that are proposed for a request and step, 0 to ``MOST_PROPOSALS``; 0: no speculation. See
        ``decode.batching.speculation``: the text stays the same.
    ttft_slo_s, tpot_slo_s: targets in seconds for the time to the first token and for each token after it. With them
        the engine holds the batch where the second is met and refuses what would miss the first. None: no target.
    """

    max_batch: int = 16
    max_len: int | None = None
    page_size: int = 16
    pages: int | None = None
    token_budget: int | None = None
    prefix_cache: bool = True
    max_queue: int = 1024
    proposals: int = 0
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None


@dataclass(frozen=True)
class EngineStats:
    """A moment's state, and totals since the start.

    waiting, running: requests in the queue, and in the batch.
    pages_used, pages_cached, pages_total: pages held by requests; held by none but kept for their content; all.
    submitted, completed, cancelled, refused, failed, preemptions: requests counted; a preempted one goes on later.
    prompt_tokens, cached_tokens, generated_tokens: of admitted requests; cached ones were not computed again.
    proposed_tokens, accepted_tokens: what speculation proposed, and how many of these stood.
    goodput_requests: completed within both targets (all completed ones where there is no target).
    steps, decode_steps: device steps in all, and those without prompt tokens.
    step_s: mean seconds between results while busy, recent; device_s: of these, how long the host waited for the
        device, with nothing else to do.
    host_s: CPU seconds of the engine's thread for one step: scheduling, packing, dispatch and delivery; host_wall_s:
        the same by the clock, which is longer where the thread waits for a core (on CPU the device has them) or for
        other threads of Python; dispatch_s: the part of ``host_wall_s`` in which the runtime takes a step.
    predicted_s: the fitted model's terms of the newest step: "base", "rows", "prompt", "cache" seconds.
    shapes_s: for each (rows, prompt tokens) that steps ran in, their recent mean seconds, and what the fitted model
        says of the newest.
    """

    waiting: int
    running: int
    pages_used: int
    pages_cached: int
    pages_total: int
    submitted: int
    completed: int
    cancelled: int
    refused: int
    failed: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    goodput_requests: int
    steps: int
    decode_steps: int
    step_s: float
    host_s: float
    device_s: float
    predicted_s: dict[str, float]
    host_wall_s: float = 0.0
    dispatch_s: float = 0.0
    shapes_s: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    proposed_tokens: int = 0
    accepted_tokens: int = 0
