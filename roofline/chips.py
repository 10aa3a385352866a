"""Accelerators as numbers: compute, memory bandwidth, memory, and how they are wired.

All figures are dense (no sparsity) and for one device as a program sees it, in SI units (bytes,
bytes/s, operations/s). Bandwidth, memory and 16-bit compute follow the vendors' datasheets, rounded as
they round them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from roofline.collectives import Interconnect
from roofline.efficiency import Efficiency
from roofline.errors import RooflineError


@dataclass(frozen=True)
class Chip:
    """One device.

    `flops_per_s` maps a compute dtype to operations/s. `efficiency` is what software is assumed to reach
    on it where nothing was measured. `shared_bytes_per_s` and `shared_flops_per_s`
    are limits on all devices together, for devices that share one memory and one set of cores (fake CPU
    devices); None where each device has its own. `measured` is true when the numbers were taken on this
    machine instead of from a datasheet.
    """

    name: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    memory_bytes: float
    interconnect: Interconnect
    efficiency: Efficiency = field(default_factory=Efficiency)
    shared_bytes_per_s: float | None = None
    shared_flops_per_s: float | None = None
    measured: bool = False
    notes: tuple[str, ...] = field(default=())

    def flops(self, dtype: str = "bf16", devices: int = 1) -> float:
        """Operations/s of each of `devices` devices in `dtype`.

        f16 and bf16 run at one rate, and so do the plain and the grouped form of a dtype. Raises
        RooflineError listing the dtypes known for this chip.
        """
        name = dtype.split("-")[0]
        name = {"f16": "bf16"}.get(name, name) if name not in self.flops_per_s else name
        if name not in self.flops_per_s:
            raise RooflineError(
                f"{self.name} has no compute rate for {dtype!r}: known are {', '.join(self.flops_per_s)}"
            )
        rate = self.flops_per_s[name]
        return rate if self.shared_flops_per_s is None else min(rate, self.shared_flops_per_s / devices)

    def bandwidth(self, devices: int = 1) -> float:
        """Bytes/s that each of `devices` devices can stream at once."""
        if self.shared_bytes_per_s is None:
            return self.bytes_per_s
        return min(self.bytes_per_s, self.shared_bytes_per_s / devices)

    def memory(self, devices: int = 1) -> float:
        """Bytes of memory that each of `devices` devices has to itself."""
        return self.memory_bytes if self.shared_bytes_per_s is None else self.memory_bytes / devices


def _nvlink(name: str, link_bytes_per_s: float) -> Interconnect:
    # Latencies: the tuning table in NCCL 2.18's src/graph/tuning.cc, tree with the LL protocol: 6.8 us
    # base, 0.6 us a hop over NVLink. Link bandwidth: half of the datasheet's, which counts both directions.
    # One HGX board joins 8 GPUs.
    return Interconnect(name, "switch", link_bytes_per_s, launch_s=6.8e-6, hop_s=0.6e-6, max_devices=8)


def _ici(name: str, link_bytes_per_s: float, dims: int, pod: int) -> Interconnect:
    # One-way bandwidth of one link, pod size and about 1 us a hop: "How to Scale Your Model", TPU chapter
    # and the note on ICI latency. Wraparound: v4 and v5p slices close when every axis is a multiple of 4
    # (whole optical cubes); v5e and v6e axes close only at 16. The launch is an assumption: the collective
    # is part of one compiled program, so about a hop's worth; `fit` replaces it.
    if dims == 3:
        return Interconnect(name, "torus", link_bytes_per_s, 1e-6, 1e-6, 3, 4, "cube", max_devices=pod)
    return Interconnect(name, "torus", link_bytes_per_s, 1e-6, 1e-6, dims, 16, "length", max_devices=pod)


# A TPU runs a step as one program that fetches the next weights while it computes, so little is lost
# between operations: jax-llm-examples states 85 % of the bandwidth over whole steps of Llama 3.1 70B on
# 16 TPU v5e, collectives included, which leaves a few us a layer.
_TPU = Efficiency(bandwidth=0.9, layer_overhead_s=3e-6)

CHIPS: Mapping[str, Chip] = {
    # NVIDIA A100 datasheet (SXM 80GB): 312 TFLOPS bf16, 624 TOPS int8, 19.5 TFLOPS f32, 2,039 GB/s,
    # NVLink 600 GB/s both directions.
    "a100": Chip(
        "A100 SXM 80GB",
        {"bf16": 312e12, "int8": 624e12, "f32": 19.5e12},
        2.04e12,
        80e9,
        _nvlink("NVLink 3", 300e9),
    ),
    # NVIDIA H100 datasheet (SXM), halved where it states sparsity: 989 TFLOPS bf16, 1,979 fp8 and int8,
    # 67 f32, 3.35 TB/s, NVLink 900 GB/s both directions.
    "h100": Chip(
        "H100 SXM",
        {"bf16": 989e12, "fp8": 1979e12, "int8": 1979e12, "f32": 67e12},
        3.35e12,
        80e9,
        _nvlink("NVLink 4", 450e9),
    ),
    # NVIDIA H200 datasheet (SXM): compute and NVLink as H100, 4.8 TB/s, 141 GB.
    "h200": Chip(
        "H200 SXM",
        {"bf16": 989e12, "fp8": 1979e12, "int8": 1979e12, "f32": 67e12},
        4.8e12,
        141e9,
        _nvlink("NVLink 4", 450e9),
    ),
    # NVIDIA HGX B200 datasheet, an eighth of the board, dense: 2.25 PFLOPS bf16, 4.5 fp8 and int8,
    # 75 TFLOPS f32, 8 TB/s, 192 GB, NVLink 1.8 TB/s both directions.
    "b200": Chip(
        "B200",
        {"bf16": 2.25e15, "fp8": 4.5e15, "int8": 4.5e15, "f32": 75e12},
        8.0e12,
        192e9,
        _nvlink("NVLink 5", 900e9),
    ),
    # Google Cloud TPU system architecture pages; int8 rates and link bandwidths from the TPU chapter of
    # "How to Scale Your Model". v4 has no faster int8.
    "tpu-v4": Chip("TPU v4", {"bf16": 275e12, "int8": 275e12}, 1.2e12, 32e9, _ici("ICI v4", 4.5e10, 3, 16**3), _TPU),
    "tpu-v5e": Chip(
        "TPU v5e", {"bf16": 197e12, "int8": 394e12}, 0.81e12, 16e9, _ici("ICI v5e", 4.5e10, 2, 16**2), _TPU
    ),
    "tpu-v5p": Chip(
        "TPU v5p",
        {"bf16": 459e12, "int8": 918e12},
        2.8e12,
        96e9,
        _ici("ICI v5p", 9e10, 3, 16 * 20 * 28),
        _TPU,
    ),
    "tpu-v6e": Chip("TPU v6e", {"bf16": 920e12, "int8": 1840e12}, 1.6e12, 32e9, _ici("ICI v6e", 9e10, 2, 16**2), _TPU),
}


def get_chip(name: str) -> Chip:
    """Return a chip by name (`h100`, `H100`, `tpu-v5e`, `v5e`), measure `cpu`, or read a `.toml` file.

    Raises RooflineError listing the known chips.
    """
    key = name.lower().replace("_", "-").replace(" ", "-")
    if key == "cpu":
        from roofline.cpu import measure_cpu  # measures when asked, and only then needs NumPy

        return measure_cpu()
    for candidate in (key, f"tpu-{key}"):
        if candidate in CHIPS:
            return CHIPS[candidate]
    if name.endswith(".toml"):
        from roofline.chip_file import load_chip

        return load_chip(name)
    raise RooflineError(
        f"unknown chip {name!r}: use one of {', '.join(CHIPS)}, cpu (measured on the spot), or a .toml file"
    )
