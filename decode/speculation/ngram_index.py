"""Prompt lookup on the host, for one text that grows: ``decode.speculation.ngram.look_up`` without the search.

A trie of the n-grams that were seen, each with the place where it was seen last, deepened only where an n-gram came
twice: what has one place alone can be compared in the text itself. A token costs as many dictionary look-ups as the
match that it ends is long, two for most text, whatever the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from decode.speculation.ngram import LONGEST, SHORTEST


class NgramIndex:
    """One text. The longest match wins, of at most ``longest`` tokens and at least ``shortest``; of equals the latest.

    tokens: the text so far.
    """

    def __init__(self, longest: int = LONGEST, shortest: int = SHORTEST):
        self.longest, self.shortest = longest, shortest
        self.tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}  # n-gram -> place of its last token, where it was seen last
        self._end: int | None = None  # of the match of the newest tokens

    def follow(self, tokens: Sequence[int]) -> None:
        """Take in what ``tokens`` has beyond the text so far, which it begins with."""
        for place in range(len(self.tokens), len(tokens)):
            self._append(tokens[place])

    def propose(self, k: int) -> list[int]:
        """The k tokens that followed the match, or none without one. Where the text ends, what lies between repeats."""
        if self._end is None:
            return []
        start = self._end + 1
        found = self.tokens[start : start + k]
        while len(found) < k:
            found += found[: k - len(found)]
        return found

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        tokens, last, at = self.tokens, self._last, len(self.tokens) - 1
        self._end = None
        for size in range(self.shortest, min(self.longest, at + 1) + 1):
            own = tuple(tokens[at + 1 - size :])
            before = last.get(own)
            last[own] = at
            if before is None:
                return  # nor is there a longer one
            self._end = before
            if size < self.longest and before >= size:
                # The place before was perhaps the only one, and its longer n-gram not noted until now.
                last.setdefault(tuple(tokens[before - size : before + 1]), before)
