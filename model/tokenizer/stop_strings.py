"""Ends a generated text before the first stop string, wherever tokens cut it."""

from collections.abc import Sequence

from model.tokenizer.errors import TokenizerError


class StopStrings:
    """Watches one text as it streams.

    The stop string that is complete first wins; where two end together, the one that began first. That makes
    the result the same however the text is cut. Text that may begin a stop string is held back.

    stops: the stop strings; none at all is fine. TokenizerError for an empty one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise TokenizerError(f"stop strings are given as {stops!r}; give a list of strings")
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise TokenizerError(f"stop string {stop!r} is not usable; give non-empty strings")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.matched: str | None = None  # the stop string that ended the text

    @property
    def stopped(self) -> bool:
        return self.matched is not None

    def push(self, text: str) -> str:
        """The text that is safe to show now; nothing any more after a stop string."""
        if self.stopped:
            return ""
        text = self._held + text
        self._held = ""
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            return text[:start]
        kept = len(text) - self._overlap(text)
        self._held = text[kept:]
        return text[:kept]

    def flush(self) -> str:
        """The text held back, which no stop string completed; for when the generation ends otherwise."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
