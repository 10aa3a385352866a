"""How a tensor-parallel degree becomes a mesh."""

from __future__ import annotations

import math

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.mesh import LayoutError, factorise, make_mesh


@pytest.mark.parametrize(
    ("tp", "heads", "expected"),
    [
        (1, 3, (1, 1)),
        (2, 3, (1, 2)),
        (3, 3, (3, 1)),
        (4, 3, (1, 4)),
        (6, 3, (3, 2)),
        (8, 3, (1, 8)),
        (8, 8, (8, 1)),
        (16, 8, (8, 2)),
        (4, 1, (1, 4)),
        (12, 8, (4, 3)),
    ],
)
def test_factorise(tp: int, heads: int, expected: tuple[int, int]) -> None:
    assert factorise(tp, heads) == expected


@given(st.integers(1, 512), st.integers(1, 128))
def test_factors_multiply_to_tp_and_share_the_heads_evenly(tp: int, heads: int) -> None:
    kv_head, kv_seq = factorise(tp, heads)
    assert kv_head * kv_seq == tp
    assert heads % kv_head == 0
    # No larger share of the heads is possible: what is left of tp has no factor in common with what is left.
    assert all(tp % ways or heads % ways for ways in range(kv_head + 1, heads + 1))


@pytest.mark.parametrize(("tp", "heads"), [(0, 8), (-1, 8), (2, 0)])
def test_sizes_below_one_are_refused(tp: int, heads: int) -> None:
    with pytest.raises(LayoutError, match=rf"tp={tp}, num_kv_heads={heads}"):
        factorise(tp, heads)


@pytest.mark.parametrize(("tp", "heads", "data"), [(1, 3, 1), (6, 3, 1), (4, 2, 2), (2, 8, 4)])
def test_mesh_axes_and_device_order(tp: int, heads: int, data: int) -> None:
    mesh = make_mesh(tp, heads, data=data)
    kv_head = math.gcd(tp, heads)
    assert dict(mesh.shape) == {"data": data, "kv_head": kv_head, "kv_seq": tp // kv_head}
    assert list(mesh.devices.flat) == jax.devices()[: data * tp]


def test_mesh_of_given_devices() -> None:
    chosen = jax.devices()[4:6]
    assert list(make_mesh(2, 8, devices=chosen).devices.flat) == chosen


def test_more_devices_than_there_are() -> None:
    with pytest.raises(LayoutError, match=r"tp=9 \(times data=1\) needs 9 devices.*JAX sees 8.*--cpu-devices 9"):
        make_mesh(9, 8)
    with pytest.raises(LayoutError, match=r"needs 16 devices"):
        make_mesh(8, 8, data=2)
    with pytest.raises(LayoutError, match="data must be at least 1, got 0"):
        make_mesh(1, 8, data=0)
