"""Machines that are not here: devices that programs can be compiled for, and never run on.

The compilers are the vendors' own: libtpu for TPU, XLA:GPU in JAX's CUDA plugin for GPU. Neither needs a driver, a
device or the network, and both live beside the CPU backend of one process. A program is lowered from shapes whose
shardings lie on such a mesh (``jax.jit(f).lower(jax.ShapeDtypeStruct(..., sharding=...)).compile()``).
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from sharding.mesh import LayoutError, make_mesh

INSTALL = (
    'pip install -e ".[aot]" brings the TPU compiler, and pip install --no-deps jax-cuda13-plugin=={version} '
    "jax-cuda13-pjrt=={version} the GPU one (without --no-deps it brings 2.5 GB of CUDA libraries that compiling does "
    "not need)"
)


class TargetError(LayoutError):
    """A machine that no compiler here knows, or whose compiler is not installed."""


@dataclass(frozen=True)
class Kind:
    """A kind of device.

    topology: libtpu's name of it, or None for a GPU.
    memory_bytes: what a program may use of one device's memory: for TPU as its compiler counts it, for GPU all of it.
    gpu: XLA's description of a GPU, as a protocol buffer in text.
    """

    topology: str | None
    memory_bytes: int
    gpu: str = ""


def _gpu(name: str, cores: int, bytes_per_s: float, l2: int, ghz: float, memory: int, capability: int) -> Kind:
    """A GPU. Threads, registers and shared memory are the same from Hopper to Blackwell (CUDA programming guide)."""
    info = f"""
        threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 fpus_per_core: 128
        shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
        registers_per_core_limit: 65536 registers_per_block_limit: 65536
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        core_count: {cores} clock_rate_ghz: {ghz} l2_cache_size: {l2}
        memory_bandwidth: {bytes_per_s:.0f} device_memory_size: {memory}
        cuda_compute_capability {{ major: {capability} minor: 0 }}"""
    text = f"""gpu_device_info {{ {info} }} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }}
        device_description_str: "{name}" """
    return Kind(None, memory, gpu=text)


_GIB = 2**30

KINDS: Mapping[str, Kind] = {
    # As the compiler states it where a program does not fit.
    "v4": Kind("v4", int(15.25 * _GIB)),  # two devices a chip
    "v5e": Kind("v5e", int(15.75 * _GIB)),
    "v5p": Kind("v5p", int(95.74 * _GIB)),
    "v6e": Kind("v6e", int(31.25 * _GIB)),
    "tpu7x": Kind("tpu7x", int(94.75 * _GIB)),  # two devices a chip
    # H100 and H200: as XLA's own target descriptions have them. B200: NVIDIA's figures for one GPU of an HGX board.
    "h100": _gpu("NVIDIA H100 80GB HBM3", 132, 3.35232e12, 52428800, 1.98, 84942979072, 9),
    "h200": _gpu("NVIDIA H200", 132, 4.8e12, 52428800, 1.98, 151397597184, 9),
    "b200": _gpu("NVIDIA B200", 148, 8e12, 132644864, 1.965, 191500000000, 10),
}

EXAMPLES = "v5e:2x4, v5e:4x4, v6e:2x4, v6e:4x4, v5p:2x2x2, tpu7x:2x2x1, h100x8, h200x8, b200x8"

GPUS_A_HOST = 8
"""GPUs that share one NVLink switch, and one process, on an HGX board."""

_TPU = re.compile(r"([a-z]\w+):(\d+(?:x\d+){1,2})")
_GPU = re.compile(r"([a-z]\d+)x(\d+)")


@dataclass(frozen=True)
class Target:
    """A machine to compile for.

    name: as it was asked for, such as "v5e:2x4".
    platform: "tpu" or "gpu".
    devices: compile-only devices, in the order of the machine.
    memory_bytes: of one device, see ``Kind``.
    """

    name: str
    kind: str
    platform: str
    devices: Sequence[jax.Device]
    memory_bytes: int

    def mesh(self, tp: int, num_kv_heads: int) -> Mesh:
        """The mesh of ``sharding.mesh`` on the first ``tp`` devices.

        Raises:
            TargetError: more devices than the machine has.
        """
        if tp > len(self.devices):
            raise TargetError(
                f"tp={tp} needs {tp} devices, but {self.name} has {len(self.devices)}; name a larger target, such as "
                f"one of {EXAMPLES}"
            )
        return make_mesh(tp, num_kv_heads, devices=self.devices)


def target(name: str) -> Target:
    """The machine called ``name``: a TPU slice "KIND:AxB" or "KIND:AxBxC" of chips, or "KINDxN" GPUs.

    Raises:
        TargetError: an unknown name, a shape that the kind does not come in, or a compiler that is not installed.
    """
    chip, shape = _parse(name)
    kind = KINDS[chip]
    missing = problem("tpu" if kind.topology else "gpu")
    if missing:
        raise TargetError(missing)
    topology = _tpu_topology(name, chip, shape) if kind.topology else _gpu_topology(name, kind, shape[0])
    devices: list[Any] = list(topology.devices)
    return Target(name, chip, devices[0].platform, devices, kind.memory_bytes)


def problem(platform: str) -> str | None:
    """Why nothing can be compiled for "tpu" or "gpu" here and what to install, or None where it can."""
    module, what = {"tpu": ("libtpu", "TPU"), "gpu": ("jax_plugins.xla_cuda13", "GPU")}[platform]
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    return None if found else f"the {what} compiler is not installed: {INSTALL.format(version=jax.__version__)}"


def _parse(name: str) -> tuple[str, list[int]]:
    """The kind of device and the shape of the machine."""
    for pattern, is_tpu in ((_TPU, True), (_GPU, False)):
        found = pattern.fullmatch(name)
        if found and found[1] in KINDS and (KINDS[found[1]].topology is not None) == is_tpu:
            shape = [int(size) for size in found[2].split("x")]
            if math.prod(shape):
                return found[1], shape
    raise TargetError(
        f"unknown target {name!r}; known are TPU slices (v4, v5e, v5p, v6e or tpu7x, then the chips of each axis) and "
        f"GPUs (h100, h200 or b200, then how many), such as {EXAMPLES}"
    )


def _tpu_topology(name: str, chip: str, shape: list[int]) -> topologies.TopologyDescription:
    # Read by libtpu when it starts: ask no metadata server, let processes compile side by side, write no log files.
    # It looks for the last two on a machine that is no TPU host, and warns where they are not set.
    for variable, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
        ("TPU_LOG_DIR", "disabled"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_ACCELERATOR_TYPE", "v5litepod-8"),
    ):
        os.environ.setdefault(variable, value)
    options = {"chips_per_host_bounds": [1, 1, 1]} if math.prod(shape) == 1 else {}
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except Exception as error:
        told = str(error).partition("\n")[0]
        raise TargetError(f"the TPU compiler has no slice {name!r} ({told}); use such as {EXAMPLES}") from None


def _gpu_topology(name: str, kind: Kind, count: int) -> topologies.TopologyDescription:
    hosts = -(-count // GPUS_A_HOST)
    if count % hosts:
        raise TargetError(
            f"{name}: more than {GPUS_A_HOST} GPUs come in hosts of {GPUS_A_HOST}; use such as {EXAMPLES}"
        )
    shape = f"1x{hosts}x{count // hosts}"
    return topologies.get_topology_desc(platform="cuda", topology_name=shape, topology=shape, target_config=kind.gpu)
