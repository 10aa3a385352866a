"""Which implementation of an operation runs: the caller's choice, checked, or the platform's best."""

from __future__ import annotations

from collections.abc import Callable

from kernels import native


class KernelError(ValueError):
    """An implementation that does not exist, or does not support what was asked."""


def select(
    operation: str,
    implementation: str | None,
    platform: str,
    known: tuple[str, ...],
    not_native: Callable[[], str | None],
) -> str:
    """The implementation to run. By default "cpu_native" on CPU, for operands it takes and where it can be built; else
    "xla".

    Args:
        not_native: says what about the operands "cpu_native" does not take, or None.

    Raises:
        KernelError: one that the operation does not have, or that cannot run what was asked.
    """
    if implementation is None:
        takes = platform == "cpu" and not_native() is None and native.problem() is None
        return "cpu_native" if takes else "xla"
    if implementation not in known:
        raise KernelError(f"{operation} has no implementation {implementation!r}; it has {', '.join(known)}")
    if implementation == "cpu_native":
        reason = f"runs on CPU, not {platform}" if platform != "cpu" else not_native()
        reason = reason or (f"cannot be had here: {problem}" if (problem := native.problem()) else None)
        if reason:
            raise KernelError(f"{operation}: implementation 'cpu_native' {reason}")
    return implementation
