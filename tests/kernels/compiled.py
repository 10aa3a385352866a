"""Compiling a kernel for a machine that is not here, where the compiler is installed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from sharding.aot import Target, problem, target

ONE = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "h100": "h100x1"}
"""The machines that every kernel is compiled for; one device of each is used."""


@functools.cache
def machine(name: str) -> Target:
    """The machine, or the test is skipped: its compiler is the extra ``aot``."""
    if missing := problem("gpu" if name.startswith("h") else "tpu"):
        pytest.skip(missing)
    return target(name)


def compile_for(name: str, function: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = ()) -> Any:
    """The compiled function on one device of a machine of ``ONE``; shapes are ``jax.ShapeDtypeStruct`` in any tree."""
    found = machine(ONE[name])
    sharding = SingleDeviceSharding(found.devices[0])
    return compile_on(found.mesh(1, 1), sharding, function, *shapes, donate=donate)


def compile_on(
    mesh: Mesh, sharding: Sharding, function: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = ()
) -> Any:
    """The compiled function on a mesh of devices that are not here, every shape placed alike."""
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # tells kernels which chip they are for
        return jax.jit(function, donate_argnums=donate).lower(*placed).compile()
