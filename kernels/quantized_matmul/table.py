"""Which implementation runs a quantised product where none is asked for, and why: one row a kind of case.

The reasons come from the compilers, for the chips named, without running anything: cycles are the TPU compiler's static
estimate of x bf16 [16, 4096] times a weight [4096, 4096], bytes what a program for H100 reads and writes for the same
product beside its result. Neither was measured on hardware. docs/measurements/compiled-steps.md has both for 1 to 256
rows in every format.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.quantized import QuantizedWeight


@dataclass(frozen=True)
class Choice:
    """A case and what runs it; the first that fits decides.

    platform: "tpu" or "gpu".
    grouped: whether scales change along the contraction (or there are offsets).
    rows: of x at most; None for any number.
    """

    platform: str
    grouped: bool
    rows: int | None
    implementation: str
    reason: str


CHOICES = (
    Choice("tpu", False, None, "xla", "fused into the dot: int8 takes 15,833 cycles on v6e, and a kernel 25,278"),
    Choice(
        "tpu",
        True,
        None,
        "pallas_tpu",
        "XLA writes a float32 for every value: int4 in groups of 128 takes it 534,846 cycles on v6e, and a kernel "
        "21,459; in groups of 32 747,146 against 24,958; int8 in groups of 128 164,600 against 24,923",
    ),
    Choice("gpu", False, None, "xla", "fused into the dot; no copy of the weight is written"),
    Choice(
        "gpu",
        True,
        1,
        "xla",
        "widened inside one reduction, which moves no more than the weight; a kernel 2 to 5 % more, for its parts of a "
        "split contraction",
    ),
    Choice(
        "gpu",
        True,
        256,
        "pallas_gpu",
        "from two rows on XLA writes the weight in 16 bits and reads it again: int4 in groups of 32 reads 44.1 MiB and "
        "writes 34.0, a kernel 11.3 and 1.1",
    ),
    Choice("gpu", True, None, "xla", "with many rows the kernel widens the weight again for each 64 of them"),
)


def choose(platform: str, rows: int, weight: QuantizedWeight) -> Choice | None:
    """The row for this case, or None on a platform that has no kernel of its own here."""
    grouped = weight.group is not None or weight.offsets is not None
    for choice in CHOICES:
        if choice.platform == platform and choice.grouped == grouped and (choice.rows is None or rows <= choice.rows):
            return choice
    return None
