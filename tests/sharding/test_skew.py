"""Equal reads with meetings and without: both read everything, and only one of them meets."""

from __future__ import annotations

import jax
import pytest

from scripts.bench_collectives import skew_share
from sharding.hlo import count_collectives
from sharding.mesh import make_mesh
from sharding.skew import BUFFERS, ROUNDS, SkewProbe


def test_one_program_meets_after_every_read_and_the_other_never() -> None:
    probe = SkewProbe(make_mesh(2, 2), total_bytes=1 << 20)
    counts = {
        meet: count_collectives(program.lower(probe._buffers, probe._x, ROUNDS).compile().as_text())
        for meet, program in probe._programs.items()
    }
    assert counts == {True: {"all-reduce": BUFFERS}, False: {}}
    results = [jax.device_get(program(probe._buffers, probe._x, ROUNDS)) for program in probe._programs.values()]
    # Each read adds up 1e-3 x 1e-6 of every number: of all devices' where they meet.
    assert results[0][0, 0] - 1 == pytest.approx(2 * (results[1][0, 0] - 1), rel=0.05)
    assert probe.seconds(True) > 0
    probe.close()


def test_skew_is_the_share_that_meeting_adds_beyond_the_calls() -> None:
    assert skew_share([0.2, 0.13, 0.11], [0.1, 0.09, 0.1], 0.0) == pytest.approx(0.3)
    assert skew_share([0.13], [0.1], 0.01) == pytest.approx(0.2)
    assert skew_share([0.1], [0.11], 0.0) == 0.0
