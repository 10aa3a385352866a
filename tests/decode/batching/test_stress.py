"""A bounded round of ``tests.decode.batching.stress``."""

from __future__ import annotations

import itertools

import pytest

from tests.decode.batching.stress import stress

pytestmark = pytest.mark.xdist_group("engines")


@pytest.mark.parametrize("speculate", [False, True])
def test_random_load_changes_no_text_and_loses_nothing(speculate: bool) -> None:
    left = itertools.count(60, -1)
    counts = stress(1, lambda: next(left) > 0, speculate=speculate)
    assert counts["requests"] == 60
    assert counts["preemptions"] > 0
    assert counts["cached_tokens"] > 0
    assert counts["cancelled"] > 0
    assert (counts["proposed_tokens"] > counts["accepted_tokens"] > 0) == speculate
