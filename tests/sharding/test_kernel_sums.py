"""Sums that are kernels: by remote DMA, simulated with race detection; and both through the vendors' compilers."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels.pallas import forget_simulation, race_found, simulated
from sharding import kernel_sums
from sharding.collectives import Collectives
from sharding.mesh import TENSOR, LayoutError, make_mesh
from tests.kernels.compiled import compile_on, machine

SPLIT = PartitionSpec(TENSOR)


def mapped(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False))


def sums(x: jax.Array, *, detect_races: bool) -> jax.Array:
    return kernel_sums.one_shot_dma(x, TENSOR, interpret=simulated(detect_races=detect_races))


@pytest.mark.parametrize(("tp", "heads"), [(4, 4), (8, 2)])
def test_every_device_gets_the_same_sum_without_a_race(tp: int, heads: int) -> None:
    """Three calls in one program, each of what the one before gave: a signal or a buffer left over would show."""
    mesh = make_mesh(tp, heads)
    x = np.random.default_rng(tp).integers(-8, 8, (tp, 1, 200)).astype(np.float32)  # sums are exact

    def thrice(x: jax.Array) -> jax.Array:
        for call in range(3):
            x = sums(x, detect_races=True) * (call + 2) + lax.axis_index(TENSOR)
        return x

    found = np.asarray(mapped(mesh, thrice)(x))
    assert not race_found(None)
    for call in range(3):
        x = x.sum(0, keepdims=True) * (call + 2) + np.arange(tp)[:, None, None]
    np.testing.assert_array_equal(found, x)


def test_changing_data_and_a_16_bit_dtype() -> None:
    """Called again and again from the host."""
    call = mapped(make_mesh(4, 4), functools.partial(sums, detect_races=False))
    for seed in range(3):
        x = np.random.default_rng(seed).integers(-8, 8, (4, 3, 5)).astype(jnp.bfloat16)
        expected = np.broadcast_to(x.astype(np.float32).sum(0), x.shape)
        np.testing.assert_array_equal(np.asarray(call(x), np.float32), expected)


def test_a_planted_race_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others send is waited for only after it was added."""
    copies: list[Any] = []

    class Hasty:
        def __init__(self, copy: Any):
            copies.append(copy)
            self.start, self.wait = copy.start, lambda: None

    def wait(*arguments: Any) -> None:  # the barriers; between them the sum is taken
        real_wait(*arguments)
        waits.append(None)
        if len(waits) == 2:
            for copy in copies:
                copy.wait()

    waits: list[None] = []
    real_copy, real_wait = kernel_sums.pltpu.make_async_remote_copy, kernel_sums.pl.semaphore_wait
    monkeypatch.setattr(kernel_sums.pltpu, "make_async_remote_copy", lambda *a, **k: Hasty(real_copy(*a, **k)))
    monkeypatch.setattr(kernel_sums.pl, "semaphore_wait", wait)
    error = None
    try:
        jax.block_until_ready(mapped(make_mesh(4, 4), functools.partial(sums, detect_races=True))(np.ones((4, 1, 128))))
    except Exception as raised:
        error = raised
    assert race_found(error)
    forget_simulation()


def test_one_device_and_too_much() -> None:
    np.testing.assert_array_equal(mapped(make_mesh(1, 1), lambda x: kernel_sums.one_shot_dma(x, TENSOR))(np.ones(3)), 1)
    with pytest.raises(LayoutError, match=r"one_shot_dma sum of \(1, 64, 8192\).*18\.0 MiB.*use psum"):
        mapped(make_mesh(8, 8), lambda x: kernel_sums.one_shot_dma(x, TENSOR))(np.ones((8, 64, 8192), np.float32))


@pytest.mark.parametrize("form", ["one_shot_dma", "multimem"])
def test_platforms_without_it_are_told(form: Any) -> None:
    with pytest.raises(LayoutError, match=rf"{form} runs on .*, not cpu; use one of psum"):
        Collectives(form).check_platform("cpu")
    Collectives(form).check_platform({"one_shot_dma": "tpu", "multimem": "gpu"}[form])
    Collectives("scatter").check_platform("cpu")


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("name", "form", "call"),
    [
        ("v5e:2x4", "one_shot_dma", "tpu_custom_call"),
        ("v6e:2x4", "one_shot_dma", "tpu_custom_call"),
        ("h100x8", "multimem", "mosaic_gpu"),
    ],
)
@pytest.mark.parametrize(("heads", "shape", "dtype"), [(8, (1, 1, 4096), jnp.float32), (2, (3, 1, 576), jnp.bfloat16)])
def test_it_compiles(name: str, form: Any, call: str, heads: int, shape: tuple[int, ...], dtype: Any) -> None:
    """One kernel, and no collective of XLA's."""
    mesh = machine(name).mesh(8, heads)
    reduce = jax.shard_map(
        Collectives(form).reduce_hidden,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    replicated = NamedSharding(mesh, PartitionSpec())
    text = compile_on(mesh, replicated, reduce, jax.ShapeDtypeStruct(shape, dtype)).as_text()
    assert len(re.findall(rf'custom_call_target="{call}', text)) == 1
    assert not re.search(r"all-(reduce|gather|to-all)|collective-permute|reduce-scatter\(", text)


def test_multimem_takes_the_whole_mesh() -> None:
    mesh = make_mesh(2, 2, data=2)
    with pytest.raises(LayoutError, match="over all 4 devices of the mesh, not 2"):
        mapped(mesh, lambda x: kernel_sums.multimem(x, TENSOR))(np.ones((2, 128), np.float32))
