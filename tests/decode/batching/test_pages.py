"""The block manager, as a state machine against what must always hold."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode.batching.pages import PagePool, chain, root

PAGES = 7


class Pages(RuleBasedStateMachine):
    """Sequences of named pages come, share and go; a model remembers what each holder believes its pages hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.held: list[list[tuple[int, bytes | None]]] = []  # of each holder: (page, its content's name)

    @rule(words=st.lists(st.integers(0, 2), max_size=4), fresh=st.integers(0, 3))
    def admit(self, words: list[int], fresh: int) -> None:
        names, name = [], root("m")
        for word in words:
            names.append(name := chain(name, [word]))
        found = self.pool.find(names)
        before = self.pool.available
        self.pool.hold(found)
        pages = self.pool.allocate(fresh)
        if pages is None:
            assert fresh > self.pool.available
            self.pool.release(found)
            assert self.pool.available == before
            return
        assert len(set(pages)) == fresh
        assert not set(pages) & {page for holder in self.held for page, _ in holder}
        assert not set(pages) & set(found)
        self.held.append([*zip(found, names[: len(found)], strict=True), *((page, None) for page in pages)])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), word=st.integers(0, 2))
    def fill(self, data: st.DataObject, word: int) -> None:
        holder = data.draw(st.sampled_from(self.held))
        place = next((i for i, (_, name) in enumerate(holder) if name is None), None)
        if place is None:
            return
        name = chain(holder[place - 1][1] if place else root("m"), [word])  # type: ignore[arg-type]
        self.pool.name(holder[place][0], name)
        holder[place] = (holder[place][0], name)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), distrust=st.booleans())
    def leave(self, data: st.DataObject, distrust: bool) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        pages = [page for page, _ in self.held.pop(index)]
        if distrust:
            self.pool.distrust(pages)
        self.pool.release(pages)

    @invariant()
    def every_page_is_somewhere_once(self) -> None:
        held = {page for holder in self.held for page, _ in holder}
        assert self.pool.used == len(held)
        assert self.pool.used + self.pool.available == PAGES
        free, cached = self.pool._free, list(self.pool._cached)
        assert sorted([*free, *cached, *held]) == list(range(PAGES))

    @invariant()
    def what_is_found_holds_what_it_is_named(self) -> None:
        for holder in self.held:
            for page, name in holder:
                known = self.pool._names[page]
                assert known is None or known == name
        for name, page in self.pool._by_name.items():
            assert self.pool._names[page] == name


Pages.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPages = Pages.TestCase


def test_the_longest_unused_goes_first_and_a_prefix_outlives_what_builds_on_it() -> None:
    pool = PagePool(4)
    first, second = chain(root("m"), [1]), chain(root("m"), [2])
    deeper = chain(first, [3])
    a = pool.allocate(2)
    b = pool.allocate(1)
    assert a is not None
    assert b is not None
    for page, name in ((a[0], first), (a[1], deeper), (b[0], second)):
        pool.name(page, name)
    pool.release(a)
    pool.release(b)
    assert pool.allocate(2) == [3, a[1]]  # the free one, then of a the last page
    assert pool.find([first, deeper]) == [a[0]]
    assert pool.find([second]) == b


def test_equal_tokens_after_different_ones_or_of_another_model_have_another_name() -> None:
    names = {
        chain(root("m"), [1, 2]),
        chain(root("other"), [1, 2]),
        chain(root("m"), [12]),
        chain(chain(root("m"), [1]), [2]),
    }
    assert len(names) == 4


def test_a_page_is_not_released_twice() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(ValueError, match="released by a holder"):
        pool.release(pages)


def test_without_keeping_nothing_is_found() -> None:
    pool = PagePool(2, keep=False)
    pages = pool.allocate(1)
    assert pages is not None
    pool.name(pages[0], chain(root("m"), [1]))
    assert pool.find([chain(root("m"), [1])]) == []
