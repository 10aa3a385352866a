"""Which request holds which page of the cache, and which pages hold what a later prompt may want. Plain Python.

A page is in one of three states: free (no content worth keeping), held by one or more requests, or cached (held by
none, but full of tokens that a later prompt may begin with). Cached pages are given up in the order in which they were
last let go. Content is named by a chain of digests: a page's name covers every token before it too, so equal names
mean equal keys and values.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


def chain(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a full page of ``tokens`` that follows the page (or, for the first, the model) named ``previous``."""
    return hashlib.blake2b(array("i", tokens).tobytes(), key=previous[:32], digest_size=16).digest()


def root(model: str) -> bytes:
    """What the first page of every sequence follows: pages of different models have different names."""
    return hashlib.blake2b(model.encode(), digest_size=16).digest()


class PagePool:
    """Reference-counted pages 0..total-1.

    Args:
        total: pages of the cache.
        keep: keep full pages for later prompts; without it ``find`` finds nothing.
    """

    def __init__(self, total: int, *, keep: bool = True):
        self.total, self.keep = total, keep
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total
        self._names: list[bytes | None] = [None] * total
        self._by_name: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def available(self) -> int:
        """Pages that ``allocate`` can give: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Pages that nobody holds, kept for their content."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Pages that requests hold."""
        return self.total - self.available

    def find(self, names: Sequence[bytes]) -> list[int]:
        """The pages that hold the longest prefix of a chain of names. They are not held yet: see ``hold``."""
        found = []
        for name in names:
            page = self._by_name.get(name)
            if page is None:
                break
            found.append(page)
        return found

    def hold(self, pages: Sequence[int]) -> None:
        """Add a holder to each page: one that ``find`` just named."""
        for page in pages:
            if self._holders[page] == 0:
                del self._cached[page]
            self._holders[page] += 1

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages with one holder each and no content, or None where there are not as many."""
        if count > self.available:
            return None
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._forget(page)
            self._holders[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Take a holder from each page of a sequence, given in order.

        The last pages are let go first, so that they are given up before the ones their names build on.
        """
        for page in reversed(pages):
            if self._holders[page] < 1:
                raise ValueError(f"page {page} is released by a holder that it does not have")
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if self._names[page] is None:
                self._free.append(page)
            else:
                self._cached[page] = None

    def name(self, page: int, name: bytes) -> None:
        """Say what a held page is full of. Where another page is full of the same, that one stays known."""
        if self.keep and self._names[page] is None and name not in self._by_name:
            self._names[page], self._by_name[name] = name, page

    def distrust(self, pages: Sequence[int]) -> None:
        """Forget what these held pages are full of: their content is not to be shared."""
        for page in pages:
            self._forget(page)

    def _forget(self, page: int) -> None:
        name = self._names[page]
        if name is not None:
            del self._by_name[name]
            self._names[page] = None
