"""The collectives against NumPy, on meshes with either axis of size one, and the identity where both are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from sharding.collectives import (
    COLLECTIVE_FORMS,
    CollectiveForm,
    Collectives,
    all_gather,
    all_reduce_max,
    all_reduce_sum,
    axis_size,
    exchange_heads,
    reduce_scatter_sum,
    tensor_index,
)
from sharding.hlo import count_collectives
from sharding.mesh import KV_HEAD, KV_SEQ, TENSOR, LayoutError, make_mesh

MESHES = [(1, 3), (3, 3), (2, 3), (6, 3), (8, 2)]
SPLIT = PartitionSpec(TENSOR)


def on_mesh(
    tp: int, heads: int, function: Callable[..., Any], out: PartitionSpec, *arguments: np.ndarray
) -> tuple[np.ndarray, str]:
    """``function`` on every device's slice of the first dimension of each argument; its result and its program."""
    mesh = make_mesh(tp, heads)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=tuple(SPLIT for _ in arguments), out_specs=out, check_vma=False
    )
    compiled = jax.jit(mapped).lower(*arguments).compile()
    return np.asarray(compiled(*arguments)), compiled.as_text()


def numbers(tp: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(tp).standard_normal((tp, *shape)).astype(np.float32)


@pytest.mark.parametrize(("tp", "heads"), MESHES)
def test_reductions_reach_every_device(tp: int, heads: int) -> None:
    x = numbers(tp, 5)
    total, program = on_mesh(tp, heads, all_reduce_sum, SPLIT, x)
    np.testing.assert_allclose(total, np.broadcast_to(x.sum(axis=0), (tp, 5)), rtol=1e-5, atol=1e-6)
    assert count_collectives(program) == ({"all-reduce": 1} if tp > 1 else {})
    top, _ = on_mesh(tp, heads, all_reduce_max, SPLIT, x)
    np.testing.assert_array_equal(top, np.broadcast_to(x.max(axis=0), (tp, 5)))


@pytest.mark.parametrize(("tp", "heads"), MESHES)
def test_a_reduction_over_one_axis_stays_within_its_groups(tp: int, heads: int) -> None:
    x = numbers(tp, 2)
    kv_head = make_mesh(tp, heads).shape[KV_HEAD]
    groups = x.reshape(kv_head, -1, 2)
    total, _ = on_mesh(tp, heads, lambda x: all_reduce_sum(x, KV_SEQ), SPLIT, x)
    expected = np.broadcast_to(groups.sum(axis=1, keepdims=True), groups.shape).reshape(tp, 2)
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("tp", "heads"), MESHES)
def test_gather_is_in_device_order(tp: int, heads: int) -> None:
    x = numbers(tp, 2, 3)
    whole, program = on_mesh(tp, heads, lambda x: all_gather(x, TENSOR, axis=1), PartitionSpec(), x)
    np.testing.assert_array_equal(whole, np.concatenate(x, axis=0)[None])
    assert count_collectives(program) == ({"all-gather": 1} if tp > 1 else {})


@pytest.mark.parametrize(("tp", "heads"), MESHES)
def test_a_reduce_scatter_leaves_each_device_its_slice_of_the_sum(tp: int, heads: int) -> None:
    x = numbers(tp, 2 * tp)
    shares, program = on_mesh(tp, heads, lambda x: reduce_scatter_sum(x, TENSOR, axis=1), SPLIT, x)
    np.testing.assert_allclose(shares, x.sum(axis=0).reshape(tp, 2), rtol=1e-5, atol=1e-6)
    assert count_collectives(program) == ({"reduce-scatter": 1} if tp > 1 else {})


@pytest.mark.parametrize(("tp", "heads"), [(3, 3), (6, 3), (8, 2)])
@pytest.mark.parametrize("form", COLLECTIVE_FORMS)
def test_every_form_adds_up_the_hidden_state_and_its_squares(tp: int, heads: int, form: CollectiveForm) -> None:
    """7 numbers, which no mesh divides: what comes back is the sum of all devices and of its squares, whole."""
    collectives = Collectives(form)

    def body(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        mine = collectives.reduce_hidden(x) + collectives.hidden_share(jnp.arange(7.0))
        return collectives.whole_hidden(mine, jnp.sum(mine**2, axis=-1, keepdims=True), 7)

    x = numbers(tp, 7)
    mapped = jax.shard_map(body, mesh=make_mesh(tp, heads), in_specs=SPLIT, out_specs=SPLIT, check_vma=False)
    whole, square = jax.jit(mapped)(x)
    expected = x.sum(axis=0) + np.arange(7)
    np.testing.assert_allclose(whole, np.broadcast_to(expected, (tp, 7)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(square, np.full((tp, 1), (expected**2).sum()), rtol=1e-5)


def test_an_unknown_form_names_those_known() -> None:
    with pytest.raises(LayoutError, match="collective is 'ring'; it must be one of psum, scatter, one_shot"):
        Collectives("ring")  # type: ignore[arg-type]


@pytest.mark.parametrize(("tp", "heads"), MESHES)
def test_exchange_sends_block_i_to_member_i(tp: int, heads: int) -> None:
    mesh = make_mesh(tp, heads)
    kv_head, members = mesh.shape[KV_HEAD], mesh.shape[KV_SEQ]
    x = numbers(tp, members, 2)
    got, program = on_mesh(tp, heads, lambda x: exchange_heads(x[0])[None], SPLIT, x)
    # [kv_head, from, to, 2] becomes [kv_head, to, from, 2].
    expected = x.reshape(kv_head, members, members, 2).swapaxes(1, 2).reshape(x.shape)
    np.testing.assert_array_equal(got, expected)
    assert count_collectives(program) == ({"all-to-all": 1} if members > 1 else {})


@pytest.mark.parametrize(("tp", "heads"), MESHES)
def test_places_and_sizes(tp: int, heads: int) -> None:
    mesh = make_mesh(tp, heads)

    def body(x: jax.Array) -> jax.Array:
        assert axis_size(TENSOR) == tp
        assert axis_size(KV_SEQ) == mesh.shape[KV_SEQ]
        return x + tensor_index()

    places, _ = on_mesh(tp, heads, body, SPLIT, np.zeros(tp, np.int32))
    np.testing.assert_array_equal(places, np.arange(tp))
