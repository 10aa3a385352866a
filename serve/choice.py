"""One sequence's tokens as the client sees them: text, without its stop, and the tokens that the text is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from decode.batching.request import Event
from model.tokenizer import StopStrings, Tokenizer


@dataclass(frozen=True)
class ShownToken:
    """A generated token, its log-probability, the likeliest (id, log-probability), and where its text begins."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True)
class Delta:
    """What became certain with an event. ``tokens`` are those of the text released so far, each once."""

    text: str
    tokens: list[ShownToken]
    finish_reason: Literal["stop", "length"] | None


class Choice:
    """Follows one sequence.

    Text is held back while it may begin a stop string, and tokens are released with the text that they begin. So the
    deltas add up to the same whole however they come: the text before the stop string, and the tokens that begin in
    it. A stop token is counted, and not shown.

    stop: stop strings, none of them empty.
    continuation: see ``StreamingDecoder``.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], *, continuation: bool) -> None:
        self.generated_tokens = 0
        self.finish_reason: Literal["stop", "length"] | None = None
        self._stream = tokenizer.stream(continuation=continuation)
        self._stops = StopStrings(stop)
        self._decoded = self._released = 0  # characters
        self._held: list[ShownToken] = []

    def take(self, event: Event) -> Delta:
        """The next event with a token -> what it makes certain; nothing once the choice is finished."""
        if self.finish_reason is not None or event.token is None:
            return Delta("", [], None)
        self.generated_tokens += 1
        text = ""
        if event.finish_reason != "stop":
            self._held.append(ShownToken(event.token, event.logprob, event.top, self._decoded))
            piece = self._stream.push(event.token)
            self._decoded += len(piece)
            text = self._stops.push(piece)
        if event.finish_reason is not None and not self._stops.stopped:
            text += self._stops.push(self._stream.flush())
            if not self._stops.stopped:
                text += self._stops.flush()
        if self._stops.stopped or event.finish_reason == "stop":
            self.finish_reason = "stop"
        elif event.finish_reason is not None:
            self.finish_reason = "length"
        self._released += len(text)
        return Delta(text, self._release(), self.finish_reason)

    def _release(self) -> list[ShownToken]:
        whole = self.finish_reason is not None and not self._stops.stopped
        count = len(self._held) if whole else sum(token.offset < self._released for token in self._held)
        released, self._held = self._held[:count], self._held[count:]
        return released
