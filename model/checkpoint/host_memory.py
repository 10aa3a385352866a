"""Memory for weights that CPU devices keep as their own: one region in large pages.

Streaming weights touches a new page every few hundred nanoseconds, and looking up a 4 KiB page costs a good part of
that. In 2 MiB pages, which Linux gives where it is asked to (`MADV_HUGEPAGE`), 120 products of 4.5 MB each went from
23.3 to 26.2 GB/s on 2 cores.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

ALIGNMENT = 64
"""Bytes. XLA takes a block over without a copy where it starts at a multiple of this."""


class HostMemory:
    """A region of `size` bytes that blocks are copied into. It lives as long as any array made from it.

    Args:
        size: bytes of all blocks together; `blocks` is how many there will be.
    """

    def __init__(self, size: int, blocks: int):
        length = max(1, size + blocks * ALIGNMENT)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Private: what is shared between processes comes in small pages.
            self._map = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without large pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        else:
            self._map = mmap.mmap(-1, length)
        self._used = 0

    def keep(self, block: np.ndarray) -> np.ndarray:
        """The same values, in this region: an array of the block's shape and dtype, at a multiple of `ALIGNMENT`.

        Raises ValueError when the region is full.
        """
        kept = np.frombuffer(self._map, block.dtype, block.size, self._used).reshape(block.shape)
        kept[...] = block
        self._used += -(-block.nbytes // ALIGNMENT) * ALIGNMENT
        return kept
