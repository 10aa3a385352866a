"""Which device holds what: the table of logical axes, padding and descriptions."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from sharding.layout import RULES, Layout
from sharding.mesh import LayoutError, make_mesh


def layout(tp: int, heads: int, data: int = 1) -> Layout:
    return Layout(make_mesh(tp, heads, data=data))


def test_sizes_and_description() -> None:
    six = layout(6, 3)
    assert (six.tp, six.kv_head, six.kv_seq, six.data, six.platform) == (6, 3, 2, 1, "cpu")
    assert six.describe() == "tp=6 as 3 kv_head x 2 kv_seq (mesh 1x3x2, cpu)"
    assert layout(2, 8, data=2).data == 2


def test_specs_of_the_parameters_and_the_cache() -> None:
    one = layout(6, 3)
    tensor = ("kv_head", "kv_seq")
    assert one.spec(("vocab", None)) == PartitionSpec(tensor, None)
    assert one.spec((None, "ff", None)) == PartitionSpec(None, tensor, None)
    assert one.spec(("kv_heads", "head_rows", None)) == PartitionSpec("kv_head", "kv_seq", None)
    assert one.spec((None, "kv_heads", "head_columns")) == PartitionSpec(None, "kv_head", "kv_seq")
    cache = (None, "batch", "kv_heads", "positions", None)
    assert one.spec(cache) == PartitionSpec(None, "data", "kv_head", "kv_seq", None)
    assert one.spec(("layers", None)) == PartitionSpec(None, None)
    assert one.sharding(("vocab", None)).spec == one.spec(("vocab", None))


def test_padding_is_at_the_end_of_each_split_dimension() -> None:
    eight = layout(8, 3)  # one kv_head, eight kv_seq
    shape, axes = (3, 13, 5), ("kv_heads", "head_rows", None)
    assert eight.padded_shape(shape, axes) == (3, 16, 5)
    assert eight.local_shape(shape, axes) == (3, 2, 5)
    assert eight.padding(shape, axes) == 3 * 3 * 5
    assert layout(1, 3).padding(shape, axes) == 0


@given(
    tp=st.sampled_from([1, 2, 3, 4, 6, 8]),
    heads=st.integers(1, 8),
    axes=st.lists(st.sampled_from([None, *RULES]), min_size=1, max_size=3),
    data=st.data(),
)
def test_padded_shapes_divide_and_waste_less_than_one_slice(
    tp: int, heads: int, axes: list[str | None], data: st.DataObject
) -> None:
    one = layout(tp, heads)
    shape = data.draw(st.lists(st.integers(1, 40), min_size=len(axes), max_size=len(axes)))
    padded, local = one.padded_shape(shape, axes), one.local_shape(shape, axes)
    for size, whole, part, axis in zip(shape, padded, local, axes, strict=True):
        ways = whole // part
        assert part * ways == whole
        assert 0 <= whole - size < ways
        assert ways == (
            1
            if axis is None or RULES[axis] is None
            else math.prod(one.mesh.shape[name] for name in np.atleast_1d(RULES[axis]))
        )


def test_jax_places_the_slices_that_the_layout_predicts() -> None:
    one = layout(6, 3)
    axes = ("kv_heads", "head_rows", None)
    shape = one.padded_shape((3, 7, 2), axes)
    value = np.arange(math.prod(shape)).reshape(shape)
    placed = jax.device_put(value, one.sharding(axes))
    assert {shard.data.shape for shard in placed.addressable_shards} == {one.local_shape((3, 7, 2), axes)}
    for shard in placed.addressable_shards:
        head, member = divmod(one.mesh.devices.flatten().tolist().index(shard.device), 2)
        np.testing.assert_array_equal(shard.data, value[head : head + 1, 4 * member : 4 * member + 4])


def test_mistakes_are_named() -> None:
    with pytest.raises(LayoutError, match="unknown logical axis 'heads'; known: batch, ff"):
        layout(2, 8).spec(("heads",))
    with pytest.raises(LayoutError, match=r"shape \(2, 3\) has 2 dimensions but 1 axes"):
        layout(2, 8).padded_shape((2, 3), ("vocab",))
