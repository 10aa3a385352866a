"""The sequences of one HTTP request: from the event loop into the engine's thread, and their events back."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Protocol

from decode.batching.options import EngineOptions, EngineStats
from decode.batching.request import EngineError, Event, RefusedError, Request, RequestError, Ticket
from serve.choice import Choice, Delta
from serve.inbox import Inbox
from serve.metrics import Metrics


class EngineLike(Protocol):
    """What the server needs of ``decode.batching.engine.Engine``."""

    max_len: int
    vocab_size: int
    options: EngineOptions

    def ready(self) -> bool: ...
    def healthy(self) -> bool: ...
    def submit(self, request: Request, on_event: Callable[[Event], None] | None = None) -> Ticket: ...
    def cancel(self, id: int) -> None: ...
    def stats(self) -> EngineStats: ...


class Generation:
    """Submits requests together and follows them. A context manager: on leaving, what has not ended is cancelled.

    Entering it raises what ``Engine.submit`` raises; then none of the requests stays submitted.
    """

    def __init__(
        self,
        engine: EngineLike,
        metrics: Metrics,
        inbox: Inbox,
        requests: Sequence[Request],
        choices: Sequence[Choice],
        began: float,
    ) -> None:
        self.choices = choices
        self.tickets: list[Ticket] = []
        self._engine, self._metrics, self._inbox, self._requests = engine, metrics, inbox, requests
        self._began = began
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._open: set[int] = set()
        self._first: dict[int, float] = {}  # when each one's first token came
        self._fault: Exception | None = None  # of an event; who sends a stream tells it to the client and goes on

    def __enter__(self) -> Generation:
        loop = asyncio.get_running_loop()
        try:
            for index, request in enumerate(self._requests):
                arrived = functools.partial(self._arrived, loop, index)
                self.tickets.append(self._engine.submit(request, arrived))
                self._open.add(index)
        except BaseException as error:
            self._end(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    def fail(self, error: Exception) -> None:
        """End what has not ended with this error, as if the engine had."""
        for index in self._open:
            self._events.put_nowait((index, Event(None, math.nan, (), "error", error, now())))

    async def deltas(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """(index, what is new) of the tokens that came together, until the end of the last. Raises an event's error."""
        while self._open:
            events = [await self._events.get()]
            while not self._events.empty():
                events.append(self._events.get_nowait())
            found = []
            for index, event in events:
                if index not in self._open:  # tokens decoded past a stop string before the engine heard of it
                    continue
                if event.error is not None or event.finish_reason == "cancelled":
                    self._fault = event.error or EngineError("the request was cancelled by the server")
                    break
                found.append((index, self._take(index, event)))
            if found:
                yield found
            if self._fault is not None:
                raise self._fault

    def _take(self, index: int, event: Event) -> Delta:
        choice = self.choices[index]
        delta = choice.take(event)
        first = self._first.setdefault(index, event.at)
        if delta.finish_reason is not None:
            self._open.discard(index)
            if event.finish_reason is None:
                self._engine.cancel(self.tickets[index].id)
            self._metrics.completed(delta.finish_reason, self._began, first, event.at, choice.generated_tokens)
        return delta

    def usage(self) -> dict[str, object]:
        """OpenAI's count of tokens. A prompt counts once, however many choices it has."""
        prompts: dict[int, Ticket] = {}
        for request, ticket in zip(self._requests, self.tickets, strict=True):
            prompts.setdefault(id(request.prompt), ticket)
        prompt_tokens = sum(ticket.prompt_tokens for ticket in prompts.values())
        made = sum(choice.generated_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": made,
            "total_tokens": prompt_tokens + made,
            "prompt_tokens_details": {"cached_tokens": sum(ticket.cached_tokens for ticket in prompts.values())},
        }

    def _arrived(self, loop: asyncio.AbstractEventLoop, index: int, event: Event) -> None:
        """Called in the engine's thread."""
        self._inbox.put(loop, self._events.put_nowait, (index, event))

    def _end(self, error: BaseException | None) -> None:
        for index, ticket in enumerate(self.tickets):
            if index in self._open:
                self._engine.cancel(ticket.id)
        error = self._fault or error
        unfinished = len(self._requests) - sum(choice.finish_reason is not None for choice in self.choices)
        if unfinished:
            refused = isinstance(error, RefusedError)
            gone = error is None or isinstance(error, asyncio.CancelledError | GeneratorExit | OSError | TimeoutError)
            if not isinstance(error, RequestError):  # which never was one of ours
                self._metrics.ended("refused" if refused else "cancelled" if gone else "failed", unfinished)
        self._open.clear()


def now() -> float:
    """The clock of ``Event.at``."""
    return time.perf_counter()
