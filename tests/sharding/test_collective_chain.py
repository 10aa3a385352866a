"""The chain of collectives: the compiled loop makes the calls it was asked for, of the sizes it was asked for."""

from __future__ import annotations

from collections import Counter

import pytest

from sharding.collective_chain import RUN, CollectiveChain, Meeting, Step
from sharding.hlo import collectives
from sharding.mesh import KV_SEQ, TENSOR, LayoutError, make_mesh


@pytest.mark.parametrize("op", RUN)
def test_one_collective(op: str) -> None:
    """The bytes of the result on one device: a reduce-scatter's is a share of what went in."""
    chain = CollectiveChain(make_mesh(4, 4), [Step(op, 1000, TENSOR)])
    (found,) = collectives(chain.program.as_text())
    assert found.kind == op.replace("_", "-")
    assert found.result_bytes == {"reduce_scatter": 252}.get(op, 1008)  # 1000 rounded up to floats that divide by 4
    assert chain.sample(3) > 0
    chain.close()


def test_many_over_either_axis() -> None:
    mesh = make_mesh(4, 2)  # 2 x 2
    steps = [
        Step("all_reduce", 64, TENSOR, 3),
        Step("all_gather", 128, KV_SEQ, 2),
        Step("all_to_all", 32, KV_SEQ, 2),
        Step("reduce_scatter", 256, TENSOR),
    ]
    chain = CollectiveChain(mesh, steps)
    found = Counter((one.kind, one.result_bytes) for one in collectives(chain.program.as_text()))
    assert found == {("all-reduce", 64): 3, ("all-gather", 128): 2, ("all-to-all", 32): 2, ("reduce-scatter", 64): 1}
    assert chain.sample(2) > 0


@pytest.mark.parametrize("op", RUN)
def test_work_between_calls_is_kept_with_and_without_them(op: str) -> None:
    mesh = make_mesh(4, 4)
    whole, bare = (CollectiveChain(mesh, [Step(op, 1000, TENSOR, 2)], work=64, bare=left_out) for left_out in (0, 1))
    assert len(collectives(whole.program.as_text())) == 2
    assert collectives(bare.program.as_text()) == []
    assert [chain.program.as_text().count(" tanh(") for chain in (whole, bare)] == [2, 2]
    assert bare.sample(2) > 0
    whole.sample(2)
    assert all(float(abs(buffer).max()) == 0 for buffer in whole._buffers)


def test_what_cannot_be_chained() -> None:
    mesh = make_mesh(2, 2)
    with pytest.raises(LayoutError, match="needs at least one"):
        CollectiveChain(mesh, [])
    with pytest.raises(LayoutError, match="unknown collective 'broadcast'; it must be one of all_reduce, "):
        CollectiveChain(mesh, [Step("broadcast", 4, TENSOR)])


def test_one_process_meets_nobody() -> None:
    Meeting(make_mesh(2, 2)).wait()
