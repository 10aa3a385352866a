"""An engine without a model: what it answers can be told from the prompt, and it can be made to stall, fail and die.

It answers a prompt with the prompt's own ordinary tokens, again and again, from a place that the seed chooses (the
start, where greedy). A full stop is followed by EOS.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from decode.batching.options import EngineOptions, EngineStats
from decode.batching.request import EngineError, Event, RefusedError, Request, RequestError, Ticket
from decode.decoder import NumericsError
from tests.scripts.tiny import BOS, EOS, tokens_of

STOP = tokens_of(".", bos=False)[0]
POISON = tokens_of("~", bos=False)[0]


class FakeEngine:
    """A request holds one page for each 16 tokens of prompt and output."""

    def __init__(self, *, max_len: int = 512, max_queue: int = 64, **options: Any) -> None:
        self.max_len, self.vocab_size = max_len, 258
        self.options = EngineOptions(max_queue=max_queue, **options)
        self.hold_at: int | None = None  # no request gets more tokens than these, so none ends before a test is done
        self.open = threading.Event()  # cleared: no steps run
        self.open.set()
        self.refuse_after_s: float | None = None
        self.is_ready = True
        self.cancelled: list[int] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._running: dict[int, tuple[Request, Ticket, int]] = {}
        self._next, self._dead, self._closed = 0, False, False
        self._counts = dict.fromkeys(("submitted", "completed", "cancelled", "refused", "failed", "steps", "made"), 0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ready(self) -> bool:
        return self.is_ready and self.healthy()

    def healthy(self) -> bool:
        return not self._dead

    def submit(self, request: Request, on_event: Callable[[Event], None] | None = None) -> Ticket:
        if not request.prompt:
            raise RequestError("the prompt is empty; give at least one token")
        if max(request.prompt) >= self.vocab_size:
            raise RequestError(f"token id {max(request.prompt)} is outside the vocabulary; ids end at 257")
        with self._lock:
            if self._dead or self._closed:
                raise EngineError("the engine is closed")
            if self.refuse_after_s is not None or len(self._running) >= self.options.max_queue:
                self._counts["refused"] += 1
                raise RefusedError("the queue is full", self.refuse_after_s or 1)
            self._next += 1
            ticket = Ticket(self._next, len(request.prompt), on_event)
            ticket.cached_tokens = 16 * (len(request.prompt) // 32)
            self._running[ticket.id] = (request, ticket, 0)
            self._counts["submitted"] += 1
        self._wake.set()
        return ticket

    def cancel(self, id: int) -> None:
        with self._lock:
            if id in self._running:
                self.cancelled.append(id)
                self._end(id, "cancelled")

    def stats(self) -> EngineStats:
        with self._lock:
            pages = sum(-(-(len(request.prompt) + made) // 16) for request, _, made in self._running.values())
            running, counts = len(self._running), self._counts
            return EngineStats(
                waiting=0, running=running, pages_used=pages, pages_cached=0, pages_total=1024,
                submitted=counts["submitted"], completed=counts["completed"], cancelled=counts["cancelled"],
                refused=counts["refused"], failed=counts["failed"], preemptions=0, prompt_tokens=0, cached_tokens=0,
                generated_tokens=counts["made"], goodput_requests=0, steps=counts["steps"], decode_steps=0,
                step_s=0.0, host_s=0.0, device_s=0.0, predicted_s={"base": 0.5},
            )  # fmt: skip

    def drain(self, timeout_s: float | None = None) -> bool:
        return True

    def die(self) -> None:
        """As when the engine's thread meets an unforeseen fault."""
        with self._lock:
            self._dead = True
            self._fail_all("the engine died: RuntimeError: an unforeseen fault")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._fail_all("the engine was closed")
        self.open.set()
        self._wake.set()
        self._thread.join()

    def _fail_all(self, message: str) -> None:
        for id in list(self._running):
            self._end(id, "error", EngineError(message))

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            while self._running and not self._closed:
                self.open.wait()
                if not self._step():
                    time.sleep(0.001)

    def _step(self) -> bool:
        """Whether any request got on."""
        moved = False
        with self._lock:
            self._counts["steps"] += 1
            for id, (request, ticket, made) in list(self._running.items()):
                if POISON in request.prompt:
                    self._end(id, "error", NumericsError("the model produced NaN or infinite logits for this request"))
                    continue
                if self.hold_at is not None and made >= self.hold_at:
                    continue
                moved = True
                token = answer_token(request, made)
                reason = "stop" if token in request.stop_token_ids else None
                if reason is None and made + 1 == request.max_new_tokens:
                    reason = "length"
                self._counts["made"] += 1
                self._running[id] = (request, ticket, made + 1)
                if reason:
                    del self._running[id]
                    self._counts["completed"] += 1
                top = tuple(((token + i) % 256, logprob(token) - i) for i in range(request.top_logprobs))
                ticket.deliver(Event(token, logprob(token), top, reason, None, time.perf_counter()))
        return moved

    def _end(self, id: int, reason: Any, error: Exception | None = None) -> None:
        _, ticket, _ = self._running.pop(id)
        self._counts["cancelled" if error is None else "failed"] += 1
        ticket.deliver(Event(None, math.nan, (), reason, error, time.perf_counter()))


def answer_token(request: Request, made: int) -> int:
    cycle = [token for token in request.prompt if token not in (BOS, EOS)]
    shift = request.sampling.seed % len(cycle) if request.sampling.temperature else 0
    if request.logit_bias:
        return max(request.logit_bias, key=request.logit_bias.__getitem__)
    if made and cycle[(made - 1 + shift) % len(cycle)] == STOP:
        return EOS
    return cycle[(made + shift) % len(cycle)]


def logprob(token: int) -> float:
    return -(token + 1) / 64
