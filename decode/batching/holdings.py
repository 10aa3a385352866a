"""Which pages each job holds, and which of them hold what a later prompt may begin with. Plain Python."""

from __future__ import annotations

from decode.batching.drafted import DraftedPages
from decode.batching.jobs import Job
from decode.batching.pages import PagePool, chain


class Holdings:
    """The pages of jobs: taken for their positions, named once full, and let go.

    Args:
        pool: the pages of the cache.
        page_size: positions of one.
        root: the name that the first page of every sequence follows; see ``decode.batching.pages.root``.

    drafted: which of them a draft model has computed too.
    """

    def __init__(self, pool: PagePool, page_size: int, root: bytes):
        self.pool, self.page_size, self._root = pool, page_size, root
        self.drafted = DraftedPages(page_size)

    def admit(self, job: Job, spare: int) -> bool:
        """Give a job the pages of all its tokens: those that the prefix cache has, and new ones. False where that
        would leave fewer than ``spare``."""
        hits = self._hits(job)
        self.pool.hold(hits)
        need = -(-job.length // self.page_size) - len(hits)
        pages = self._allocate(need) if need + spare <= self.pool.available else None
        if pages is None:
            self.pool.release(hits)
            return False
        job.pages = hits + pages
        job.computed = len(hits) * self.page_size
        job.named = len(hits)
        return True

    def grow(self, job: Job, length: int) -> bool:
        """Give a job the pages of ``length`` positions; False, and none, where there are too few."""
        need = -(-length // self.page_size) - len(job.pages)
        if need > 0:
            pages = self._allocate(need)
            if pages is None:
                return False
            job.pages += pages
        return True

    def shrink(self, job: Job) -> None:
        """Take back the pages that a job's tokens do not reach."""
        keep = -(-job.length // self.page_size)
        self.pool.release(job.pages[keep:])
        del job.pages[keep:]
        job.tabled = min(job.tabled, keep)

    def leave(self, job: Job) -> None:
        """Take back all pages of a job. Full ones stay for later prompts as long as their room is not needed."""
        self.name(job)
        self.pool.release(job.pages)
        job.pages, job.named, job.tabled = [], 0, 0

    def name(self, job: Job, coming: int = 0) -> None:
        """Tell the pool of pages that a job's computed positions fill, and the next ``coming``, as far as their tokens
        are known."""
        full = min(job.computed + coming, len(job.tokens)) // self.page_size
        if full <= job.named or not self.pool.keep:
            return
        self._extend_names(job, full)
        for place in range(job.named, full):
            self.pool.name(job.pages[place], job.names[place])
        job.named = full

    def distrust(self, job: Job) -> None:
        """Forget what a job's pages are full of, and learn nothing more of it."""
        self.pool.distrust(job.pages)
        job.named = len(job.pages)

    def uncached(self, job: Job) -> int:
        """Positions of a new job that would have to be computed now."""
        return job.left - len(self._hits(job)) * self.page_size

    def _hits(self, job: Job) -> list[int]:
        """Cached pages of the beginning of a job's tokens, all but the last of which may come from there."""
        if not self.pool.keep:
            return []
        most = (len(job.tokens) - 1) // self.page_size
        self._extend_names(job, most)
        return self.pool.find(job.names[:most])

    def _extend_names(self, job: Job, count: int) -> None:
        while len(job.names) < count:
            at = len(job.names) * self.page_size
            before = job.names[-1] if job.names else self._root
            job.names.append(chain(before, job.tokens[at : at + self.page_size]))

    def _allocate(self, count: int) -> list[int] | None:
        """New pages, of which a draft model has computed nothing."""
        pages = self.pool.allocate(count)
        self.drafted.emptied(pages or ())
        return pages
