"""Starts the processes of one run on loopback, and collects how they ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

ROOT = Path(__file__).parents[2]
PATIENCE_S = 240
"""Far more than any of these runs takes: a test that hangs fails instead."""


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str
    bytes_read: int


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def session_cache() -> dict[str, str]:
    """The environment in which a process finds what the session's others compiled."""
    folder = jax.config.jax_compilation_cache_dir
    assert folder is not None
    return {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def run_several(
    module: str,
    folder: Path,
    arguments: Sequence[str | Path],
    fates: Sequence[str] = ("end", "end"),
    *,
    slurm: bool = False,
    own: Sequence[Sequence[str]] = ((), ()),
) -> list[Ended]:
    """One process for each of ``fates`` (see ``one_of_several``). slurm: find each other by what SLURM would tell them.

    own: options of each process alone.

    One whose fate is "absent" is not started. A process that is frozen is killed once the others have ended.
    """
    coordinator = f"127.0.0.1:{free_port()}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **session_cache()}
    if slurm:
        job = {
            "JOB_ID": str(os.getpid()),
            "STEP_NODELIST": "127.0.0.1",
            "NTASKS": str(len(fates)),
            "STEP_NUM_NODES": "1",
        }
        environment |= {f"SLURM_{name}": value for name, value in job.items()}
    processes = {}
    for index, fate in enumerate(fates):
        if fate == "absent":
            continue
        command = [sys.executable, "-m", "tests.scripts.one_of_several", module, fate, str(folder / f"count-{index}")]
        command += [*map(str, arguments), *(own[index] if index < len(own) else ())]
        if slurm:
            environment |= {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)}
            command += ["--coordinator", "auto"]
        else:
            command += ["--coordinator", coordinator, "--process-count", str(len(fates)), "--process-id", str(index)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes[index] = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)  # type: ignore
    try:
        ends = {}
        for index in sorted(processes, key=lambda index: fates[index] == "freeze"):
            if fates[index] == "freeze":
                processes[index].kill()
            ends[index] = processes[index].communicate(timeout=PATIENCE_S)
    finally:
        for process in processes.values():
            process.kill()
    counts = {index: folder / f"count-{index}" for index in processes}
    return [
        Ended(process.returncode, *ends[index], int(counts[index].read_text()) if counts[index].exists() else 0)
        for index, process in processes.items()
    ]
