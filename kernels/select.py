"""Which implementation of an operation runs: the caller's choice, checked, or the platform's default."""

from __future__ import annotations

from collections.abc import Mapping


class KernelError(ValueError):
    """An implementation that does not exist, or does not support what was asked."""


def select(
    operation: str,
    implementation: str | None,
    platform: str,
    defaults: Mapping[str, str],
    known: tuple[str, ...],
) -> str:
    """The implementation to run. ``defaults`` maps platforms to their choice; any other gets ``"xla"``."""
    chosen = implementation or defaults.get(platform, "xla")
    if chosen not in known:
        raise KernelError(f"{operation} has no implementation {chosen!r}; it has {', '.join(known)}")
    return chosen
