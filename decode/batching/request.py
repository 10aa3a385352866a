"""What goes into the engine and what comes out: a request, its events, and the errors that refuse it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from decode.sampling import SamplingParams

MOST_TOP_LOGPROBS = 20
"""The most alternatives a token's log-probabilities can list."""

FinishReason = Literal["stop", "length", "cancelled", "error"]


class RequestError(ValueError):
    """A request that can never run here: the message says what was given, what is allowed, and what to do."""


class EngineError(RuntimeError):
    """The engine failed or was closed; the request was not at fault."""


class RefusedError(RuntimeError):
    """A sound request that would be served too late now: the queue is full, or its TTFT target would be missed.

    retry_after_s: when another try has a chance, in seconds, at least 1.
    """

    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = max(1.0, retry_after_s)


@dataclass(frozen=True)
class Request:
    """One prompt to complete.

    prompt: token ids, at least one.
    max_new_tokens: most tokens to generate, at least 1. Prompt and output together fit the engine's ``max_len``.
    stop_token_ids: generation ends with any of these, which is the last token emitted.
    logit_bias: added to the logits of these token ids ahead of everything else, from -100 to 100.
    top_logprobs: how many of the likeliest tokens to report beside each token, 0 to ``MOST_TOP_LOGPROBS``.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: Sequence[int] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int = 0


class Event(NamedTuple):
    """A new token, the end of a request, or both.

    token: the new token; None where the request ended without one ("cancelled" and "error").
    logprob: its log-probability under the model's own softmax at temperature 1, before bias, penalty and filters.
    top: the likeliest (token, logprob) under the same softmax, best first; as many as ``top_logprobs``.
    finish_reason: None while more is to come; it is set on the last event alone. "stop": a stop token; "length":
        ``max_new_tokens``; "cancelled": ``cancel``; "error": see ``error``.
    error: RefusedError (its TTFT target was missed in the queue), NumericsError (NaN logits, of this request alone),
        or EngineError (the engine died or was closed).
    at: ``time.perf_counter`` at which the token reached the host.
    """

    token: int | None
    logprob: float
    top: tuple[tuple[int, float], ...]
    finish_reason: FinishReason | None
    error: Exception | None
    at: float


class Ticket:
    """A submitted request: its id, and its events, which come once each.

    Either iterate (blocking, from one thread), or give ``submit`` a callback, and then no events are kept here.
    """

    def __init__(self, id: int, prompt_tokens: int, on_event: Callable[[Event], None] | None = None):
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        """How many tokens of the prompt came from the prefix cache; known from the first event on."""
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.deliver: Callable[[Event], None] = on_event or self._queue.put

    def __iter__(self) -> Iterator[Event]:
        """Events as they arrive, up to and including the one with a ``finish_reason``."""
        while True:
            event = self._queue.get()
            yield event
            if event.finish_reason:
                return

    def result(self) -> list[int]:
        """Wait for the end: the generated tokens.

        Raises:
            Exception: the ``error`` of the last event.
        """
        tokens = []
        for event in self:
            if event.error is not None:
                raise event.error
            if event.token is not None:
                tokens.append(event.token)
        return tokens
