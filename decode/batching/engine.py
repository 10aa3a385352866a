"""The engine: a thread that runs one compiled step after another for whichever requests there are."""

from __future__ import annotations

from collections.abc import Callable

from decode.batching.options import EngineOptions, EngineStats
from decode.batching.request import Event, Request, Ticket
from decode.decoder import Decoder


class Engine:
    """Continuous batching over one loaded model; token ids in, token ids out.

    Every method may be called from any thread.

    Args:
        decoder: a loaded model on its mesh, with ``layout.data`` 1.

    Raises:
        RequestError: options that contradict each other or the model.
    """

    max_len: int
    vocab_size: int
    options: EngineOptions

    def __init__(self, decoder: Decoder, options: EngineOptions | None = None):
        raise NotImplementedError

    def start(self) -> None:
        """Compile every shape and start the engine's thread. Returns when ``ready``."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Whether ``start`` is done and the engine takes requests."""
        raise NotImplementedError

    def healthy(self) -> bool:
        """False from the moment that the engine's thread has died; then every request has ended with an error."""
        raise NotImplementedError

    def check(self, request: Request) -> None:
        """Raises RequestError where ``submit`` would, without submitting."""
        raise NotImplementedError

    def submit(self, request: Request, on_event: Callable[[Event], None] | None = None) -> Ticket:
        """Queue a request. Does not block.

        on_event: called with each event from the engine's thread, in order; it must return at once and not raise
            (``loop.call_soon_threadsafe`` is meant).

        Raises:
            RequestError: it can never run: empty, token ids outside the vocabulary, too long, with the numbers.
            RefusedError: too late now; carries ``retry_after_s``.
            EngineError: the engine died, is closed, or drains.
        """
        raise NotImplementedError

    def cancel(self, id: int) -> None:
        """End a request; its pages are free within one step. Unknown and ended ids are ignored."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """Counters and gauges, cheap enough for every scrape."""
        raise NotImplementedError

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests and wait for those there are. False where some were left after the timeout."""
        raise NotImplementedError

    def close(self) -> None:
        """End every request with EngineError, and the thread."""
        raise NotImplementedError
