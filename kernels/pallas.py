"""What differs between the Pallas of jax 0.10 and of 0.12, or is private there: the only place that knows."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

LANES, SUBLANES = 128, 8
"""A TPU vector register holds 8 x 128 numbers of 32 bits."""


def slots_along_lanes(S: int, H: int) -> bool:
    """Whether XLA:TPU keeps a cache [..., S, H] with S along the lanes: where that takes fewer registers."""

    def registers(down: int, across: int) -> int:
        return -(-down // SUBLANES) * -(-across // LANES)

    return registers(H, S) < registers(S, H)


def simulated(*, detect_races: bool = False) -> Any:
    """``interpret=`` of a TPU kernel that talks to other devices: memories, copies and semaphores are simulated.

    Uninitialised memory holds NaN. detect_races: a race raises RuntimeError (jax 0.12), or is told by ``race_found``.
    """
    return pltpu.InterpretParams(dma_execution_mode="on_wait", detect_races=detect_races)


def race_found(error: BaseException | None) -> bool:
    """Whether the last simulated kernel had a race; ``error`` is what its run raised, or None."""
    if error is not None:
        return "RACE DETECTED" in str(error)
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return bool(getattr(interpret_pallas_call.races, "races_found", False))


def forget_simulation() -> None:
    """After a simulated kernel raised: nothing waits for it any more, and the next one starts with fresh memories."""
    with contextlib.suppress(Exception):  # that of the run that raised, told again
        jax.effects_barrier()
    pltpu.reset_tpu_interpret_mode_state()
