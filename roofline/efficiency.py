"""How far software is from what the hardware could do: the few numbers that no datasheet states."""

from __future__ import annotations

from dataclasses import dataclass

from roofline.errors import RooflineError


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peak, overheads, and the cost of collectives. `fit.fit` estimates them from measurements.

    `bandwidth` and `compute` are shares of the peak, 0 < share <= 1. `layer_overhead_s` is paid once a
    layer and `step_overhead_s` once a step, at every device count: launches, norms, the ramp at the start
    and end of each kernel. `collective_scale` multiplies the latencies of the chip's interconnect. `skew` is the
    share of its work that a device waits for the slowest of them, where there are several: equal work never takes
    equally long, and every collective waits for the last to come.

    The defaults are assumptions about a good compiled decoder on a GPU: 85 % of the bandwidth, 60 % of
    the compute, about ten kernels a layer of 2 us each, and 50 us to start a step.
    """

    bandwidth: float = 0.85
    compute: float = 0.6
    layer_overhead_s: float = 20e-6
    step_overhead_s: float = 50e-6
    collective_scale: float = 1.0
    skew: float = 0.0

    def __post_init__(self) -> None:
        for key in ("bandwidth", "compute"):
            if not 0 < getattr(self, key) <= 1:
                raise RooflineError(f"efficiency {key} is {getattr(self, key)}: it must be above 0 and at most 1")
        for key in ("layer_overhead_s", "step_overhead_s", "collective_scale", "skew"):
            if getattr(self, key) < 0:
                raise RooflineError(f"efficiency {key} is {getattr(self, key)}: it must not be negative")
