"""The region that CPU devices keep their weights in: values, alignment, and that XLA takes it over as it is."""

from __future__ import annotations

import gc
import mmap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.checkpoint.host_memory import ALIGNMENT, HostMemory

DTYPES = [np.dtype(np.float32), np.dtype(jnp.bfloat16), np.dtype(np.int8)]


def blocks(dtype: np.dtype) -> list[np.ndarray]:
    """Of odd sizes, empty, of no axes, and not contiguous."""
    numbers = np.arange(-60, 60).astype(dtype)
    return [
        numbers[:1],
        numbers.reshape(8, 15),
        numbers[:0],
        numbers[::7],
        numbers.reshape(8, 15).T,
        np.array(5, dtype),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_keep_their_values_apart_and_aligned(dtype: np.dtype) -> None:
    made = blocks(dtype)
    memory = HostMemory(sum(block.nbytes for block in made), len(made))
    kept = [memory.keep(block) for block in made]
    for block, own in zip(made, kept, strict=True):
        assert own.dtype == dtype
        assert own.ctypes.data % ALIGNMENT == 0
        np.testing.assert_array_equal(own, block)
        assert own.flags.c_contiguous


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_device_takes_a_block_over_without_a_copy(dtype: np.dtype) -> None:
    block = np.arange(100).astype(dtype).reshape(4, 25)
    memory = HostMemory(2 * block.nbytes, 2)
    memory.keep(block[:1])  # the next starts inside the region
    kept = memory.keep(block)
    placed = jax.device_put(kept, jax.devices("cpu")[3])
    assert placed.unsafe_buffer_pointer() == kept.ctypes.data
    del memory, kept
    gc.collect()
    np.testing.assert_array_equal(placed, block)  # the region lives as long as the array


def test_a_full_region_refuses() -> None:
    memory = HostMemory(100, 1)
    memory.keep(np.zeros(25, np.float32))
    with pytest.raises(ValueError, match="buffer"):
        memory.keep(np.zeros(25, np.float32))


def test_no_blocks_at_all() -> None:
    assert HostMemory(0, 0).keep(np.zeros((0, 3), np.float32)).shape == (0, 3)


def test_a_kernel_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux answers EINVAL where it was built without them: small pages then."""

    class SmallPages(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", SmallPages)
    np.testing.assert_array_equal(HostMemory(12, 1).keep(np.arange(3, dtype=np.int32)), [0, 1, 2])
