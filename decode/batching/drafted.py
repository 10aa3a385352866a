"""Which pages of the cache a draft model has computed, too. Plain Python.

A draft computes only what it needs to propose, and later than the target. So a page that a new request takes from the
prefix cache may be whole for the target and empty for the draft, which then computes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from decode.batching.jobs import Job


class DraftedPages:
    """Pages whose every position the draft has; they keep that until they get another content."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self._whole: set[int] = set()

    def emptied(self, pages: Iterable[int]) -> None:
        """These pages get a new content."""
        self._whole.difference_update(pages)

    def grew(self, job: Job, before: int) -> None:
        """The draft got from ``before`` positions of a job to ``job.guess.drafted``."""
        assert job.guess is not None, "it proposed for this job"
        self._whole.update(job.pages[before // self.page_size : job.guess.drafted // self.page_size])

    def beginning(self, job: Job) -> int:
        """Positions that the draft has of those which a newly admitted job found in the prefix cache."""
        hits = job.pages[: job.computed // self.page_size]
        return self.page_size * sum(1 for _ in itertools.takewhile(self._whole.__contains__, hits))
