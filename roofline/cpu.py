"""This machine as a chip, measured when asked. Needs NumPy, and only here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from roofline.chips import Chip
from roofline.collectives import Interconnect

# Waking the other threads and meeting at a barrier: an assumption until collectives are measured.
ASSUMED_LAUNCH_S = 50e-6
ASSUMED_HOP_S = 10e-6


def measure_cpu(megabytes: int = 512, matrix: int = 1024, repeats: int = 5) -> Chip:
    """Measure streaming reads and matrix products on all cores of this machine, in about two seconds.

    Bandwidth: each core sums its share of `megabytes` MB of float64, the best of `repeats` passes.
    Compute: products of two f32 matrices of `matrix` rows, the best of `repeats`. The chip is the whole
    machine; devices on it share its memory and its cores, so n of them have 1 / n each.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    bandwidth = streaming_read(cores, megabytes, repeats)
    flops = matmul(matrix, repeats)
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    link = Interconnect("shared memory", "switch", bandwidth, ASSUMED_LAUNCH_S, ASSUMED_HOP_S)
    return Chip(
        name=f"this machine's CPU ({cores} cores)",
        flops_per_s={"f32": flops, "bf16": flops},
        bytes_per_s=bandwidth,
        memory_bytes=memory,
        interconnect=link,
        shared_bytes_per_s=bandwidth,
        shared_flops_per_s=flops,
        measured=True,
        notes=(
            "bandwidth and compute were measured just now, with NumPy on all cores",
            "bf16 arithmetic is taken at the measured f32 rate",
            "devices share these cores and this memory: n of them have 1/n each, and no n is faster",
            "latencies of collectives are assumed, not measured",
        ),
    )


def streaming_read(threads: int, megabytes: int = 512, repeats: int = 5) -> float:
    """Bytes/s that `threads` threads together read from memory, the best of `repeats` passes."""
    import numpy as np

    data = np.ones((threads, max(1, megabytes * 10**6 // 8 // threads)))
    with ThreadPoolExecutor(threads) as pool:  # a NumPy reduction lets go of the interpreter lock
        return data.nbytes / _best(lambda: list(pool.map(np.sum, data)), repeats)


def matmul(rows: int = 1024, repeats: int = 5) -> float:
    """Operations/s of an f32 product of two square matrices, the best of `repeats`."""
    import numpy as np

    a = np.ones((rows, rows), np.float32)
    return 2.0 * rows**3 / _best(lambda: a @ a, repeats)


def _best(action: Callable[[], object], repeats: int) -> float:
    action()  # pages are mapped and threads started outside the measurement
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)
