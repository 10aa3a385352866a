"""The start-up check passes on every mesh, and finds a collective that lies."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import sharding.self_check
from sharding.layout import Layout
from sharding.mesh import make_mesh
from sharding.self_check import MeshFaultError, check_mesh


def layout(tp: int, kv_heads: int, data: int = 1) -> Layout:
    return Layout(make_mesh(tp, kv_heads, data=data))


@pytest.mark.parametrize(
    ("tp", "kv_heads", "data"), [(1, 3, 1), (2, 3, 1), (3, 3, 1), (6, 3, 1), (8, 2, 1), (4, 2, 2), (2, 1, 4)]
)
def test_a_sound_mesh_passes(tp: int, kv_heads: int, data: int) -> None:
    check_mesh(layout(tp, kv_heads, data))


def _reversed(real: Callable[..., jax.Array], *arguments: object, **options: object) -> jax.Array:
    """Values of other devices than they should be."""
    return real(*arguments, **options)[::-1]


def _local(real: Callable[..., jax.Array], x: jax.Array, *_: object) -> jax.Array:
    """A reduction that did nothing."""
    return x


def _corner(real: Callable[..., jax.Array], *arguments: object, **options: object) -> jax.Array:
    """One element of one device off by a part in ten thousand."""
    result = real(*arguments, **options)
    wrong = result.at[..., 7].multiply(1.0001)
    return jnp.where(jax.lax.axis_index(("kv_head", "kv_seq")) == 3, wrong, result)


def _nan(real: Callable[..., jax.Array], *arguments: object, **options: object) -> jax.Array:
    return real(*arguments, **options) * jnp.nan


@pytest.mark.parametrize("fault", [_local, _corner, _nan])
def test_a_wrong_sum_is_found(fault: Callable[..., jax.Array], monkeypatch: pytest.MonkeyPatch) -> None:
    real = sharding.self_check.all_reduce_sum
    monkeypatch.setattr(sharding.self_check, "all_reduce_sum", lambda *a, **k: fault(real, *a, **k))
    with pytest.raises(MeshFaultError, match=r"the all-reduce over tp=4 as 2 kv_head x 2 kv_seq .* is wrong on "):
        check_mesh(layout(4, 2))


@pytest.mark.parametrize("fault", [_reversed, _corner, _nan])
def test_a_wrong_gather_is_found(fault: Callable[..., jax.Array], monkeypatch: pytest.MonkeyPatch) -> None:
    real = sharding.self_check.all_gather
    monkeypatch.setattr(sharding.self_check, "all_gather", lambda *a, **k: fault(real, *a, **k))
    with pytest.raises(MeshFaultError, match=r"the all-gather over .*; check the interconnect and drivers"):
        check_mesh(layout(4, 2))


@pytest.mark.parametrize("fault", [_reversed, _corner, _nan])
def test_a_wrong_exchange_is_found(fault: Callable[..., jax.Array], monkeypatch: pytest.MonkeyPatch) -> None:
    real = sharding.self_check.exchange_heads
    monkeypatch.setattr(sharding.self_check, "exchange_heads", lambda *a, **k: fault(real, *a, **k))
    with pytest.raises(MeshFaultError, match=r"the all-to-all over kv_seq over .* or run with --tp 1"):
        check_mesh(layout(4, 2))
