"""What the hardware allows: ridge, attainable rate, decode ceiling, and what fits in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from roofline.case import Case
from roofline.chips import Chip
from roofline.footprint import kv_bytes_per_device, weight_bytes_per_device


def ridge(chip: Chip, dtype: str = "bf16", devices: int = 1) -> float:
    """Operations per byte at which compute and bandwidth bind alike: `C / B`.

    Source: Williams, Waterman and Patterson, "Roofline" (2009).
    """
    return chip.flops(dtype, devices) / chip.bandwidth(devices)


def attainable(chip: Chip, intensity: float, dtype: str = "bf16", devices: int = 1) -> float:
    """Operations/s of one device at an arithmetic intensity: `min(C, B x I)`, same source as `ridge`."""
    return min(chip.flops(dtype, devices), chip.bandwidth(devices) * intensity)


@dataclass(frozen=True)
class Ceiling:
    """The most tokens a second that bandwidth allows at one context length."""

    context: int
    bytes_per_step: float
    tokens_per_s: float
    ms_per_step: float


def decode_ceiling(
    chip: Chip,
    weight_bytes: float,
    kv_bytes_per_token: float = 0.0,
    context: int = 0,
    *,
    batch: int = 1,
    devices: int = 1,
) -> Ceiling:
    """`tokens/s = batch x n B / (W + batch x s x kv)`: every step reads all weights and caches once.

    `n` devices each stream their slice; nothing is charged for collectives or overhead.
    """
    moved = weight_bytes + batch * context * kv_bytes_per_token
    seconds = moved / (devices * chip.bandwidth(devices))
    return Ceiling(context, moved, batch / seconds, seconds * 1e3)


def decay(
    chip: Chip,
    weight_bytes: float,
    kv_bytes_per_token: float,
    contexts: Iterable[int],
    *,
    batch: int = 1,
    devices: int = 1,
) -> tuple[Ceiling, ...]:
    """`decode_ceiling` at each context."""
    return tuple(
        decode_ceiling(chip, weight_bytes, kv_bytes_per_token, context, batch=batch, devices=devices)
        for context in contexts
    )


@dataclass(frozen=True)
class MemoryFit:
    """Whether weights and cache fit one device of `tp`, in bytes a device.

    `free_bytes` is negative by the amount that is missing. `largest_batch` is how many sequences of this
    context fit beside the weights: 0 when not even one does, None at context 0, where a sequence is free.
    """

    tp: int
    weight_bytes: float
    kv_bytes: float
    memory_bytes: float
    largest_batch: int | None

    @property
    def free_bytes(self) -> float:
        """Memory left over; negative when it does not fit."""
        return self.memory_bytes - self.weight_bytes - self.kv_bytes

    @property
    def fits(self) -> bool:
        """True when weights and cache are within memory."""
        return self.free_bytes >= 0


def memory_fit(chip: Chip, case: Case) -> MemoryFit:
    """Weights and cache a device against its memory.

    The cache is that of `case.batch` sequences of `case.context` positions. Activations and the
    runtime's own needs come on top.
    """
    held = weight_bytes_per_device(case.config, case.dtype, case.tp, case.replicated, case.keep)
    weights = case.weight_scale * sum(held.values())
    sequence = kv_bytes_per_device(case.config, case.context, case.kv_dtype, case.tp, 1, case.replicated)
    memory = chip.memory(case.tp)
    largest = max(0, int((memory - weights) // sequence)) if sequence else None
    return MemoryFit(case.tp, weights, case.batch * sequence, memory, largest)


def smallest_tp(chip: Chip, case: Case, limit: int = 1024) -> int | None:
    """The least power of two of devices on which the case fits, or None up to `limit`."""
    tp = 1
    while tp <= limit:
        if memory_fit(chip, case.at(tp=tp)).fits:
            return tp
        tp *= 2
    return None
