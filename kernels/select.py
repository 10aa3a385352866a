"""Which implementation of an operation runs: the caller's choice, checked, or the platform's best."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping

from kernels import native

_log = logging.getLogger(__name__)

PALLAS = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}
"""The Pallas implementation of each platform that has one."""

Refusal = Callable[[], str | None]
"""Says what about the operands an implementation does not take, or None."""


class KernelError(ValueError):
    """An implementation that does not exist, or does not support what was asked."""


def select(
    operation: str,
    implementation: str | None,
    platform: str,
    known: tuple[str, ...],
    not_native: Refusal,
    not_pallas: Mapping[str, Refusal] | None = None,
) -> str:
    """The implementation to run. By default the platform's own ("cpu_native", "pallas_tpu", "pallas_gpu") for operands
    it takes and where it can be had; else "xla".

    Args:
        not_native: of "cpu_native".
        not_pallas: of each Pallas implementation that the operation has and that is to be its platform's default.

    Raises:
        KernelError: one that the operation does not have, or that cannot run what was asked.
    """
    not_pallas = not_pallas or {}
    if implementation is None:
        if platform == "cpu":
            return "cpu_native" if not_native() is None and native.problem() is None else "xla"
        own = PALLAS.get(platform, "")
        if own not in not_pallas:
            return "xla"
        if reason := not_pallas[own]():
            _say_once(f"{operation}: XLA's own operations run it, for {own} {reason}")
            return "xla"
        return own
    if implementation not in known:
        raise KernelError(f"{operation} has no implementation {implementation!r}; it has {', '.join(known)}")
    reason = None
    if implementation == "cpu_native":
        reason = f"runs on CPU, not {platform}" if platform != "cpu" else not_native()
        reason = reason or (f"cannot be had here: {problem}" if (problem := native.problem()) else None)
    elif implementation in PALLAS.values():
        if platform != "cpu" and PALLAS.get(platform) != implementation:
            reason = f"does not run on {platform} (on CPU it is interpreted)"
        elif implementation in not_pallas:
            reason = not_pallas[implementation]()
    if reason:
        raise KernelError(f"{operation}: implementation {implementation!r} {reason}")
    return implementation


@functools.cache
def _say_once(message: str) -> None:
    _log.info(message)
