"""On CPU, one core for each device: what makes a comparison of device counts one of devices, and not of threads."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from typing import Any

import jax

from scripts._cli import UsageError

ONE_THREAD = {"NPROC": "1", "PJRT_NPROC": "1"}
"""What XLA's CPU client reads, as it starts, for the number of its threads. Its flags for the same do nothing. It makes
one thread for each device all the same, and any device uses them all: so a count is also held to as many cores."""


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads-per-device",
        type=int,
        choices=(1,),
        help="on CPU: start again with one thread and one core for each device, so that devices do not share cores",
    )


def start_again(args: argparse.Namespace, module: str, argv: Sequence[str] | None) -> int | None:
    """Run the same command in a child process, where XLA finds ``ONE_THREAD`` as it starts: its status.

    None where the option was not given, or this is the child.
    """
    if not args.threads_per_device:
        return None
    if not hasattr(os, "sched_setaffinity"):
        print("error: --threads-per-device needs Linux, where threads can be held to cores", file=sys.stderr)
        return 1
    if all(os.environ.get(name) == value for name, value in ONE_THREAD.items()):
        return None
    command = [sys.executable, "-m", module, *(sys.argv[1:] if argv is None else argv)]
    child = subprocess.Popen(command, env={**os.environ, **ONE_THREAD})
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:  # the terminal sent it to the child too, which ends
            continue


def check(args: argparse.Namespace, device: Mapping[str, Any]) -> None:
    """Refuse the option for devices that have cores of their own."""
    if args.threads_per_device and device["platform"] != "cpu":
        raise UsageError(f"--threads-per-device is for CPU devices; these are {device['kind']}; leave it out")


def own_cores(count: int) -> frozenset[int]:
    """Cores for ``count`` devices of this process, others than those of the next process as far as they go."""
    cores = sorted(os.sched_getaffinity(0))
    first = jax.process_index() * count
    return frozenset(cores[(first + place) % len(cores)] for place in range(count))


@contextmanager
def held_to(cores: Set[int] | None) -> Iterator[None]:
    """Let every thread of this process run on these cores alone for the while; None changes nothing.

    Where the system allows, they have real-time priority too. After a collective XLA goes on in whichever of its
    threads was there last, and there are more of them than cores; left to ordinary scheduling, two that work then share
    a core for milliseconds while another core idles. A real-time thread is moved to the idle core at once.
    """
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    _hold(cores, os.SCHED_FIFO, 1)
    try:
        yield
    finally:
        _hold(before, os.SCHED_OTHER, 0)


def _hold(cores: Set[int], policy: int, priority: int) -> None:
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # one that has just ended
            os.sched_setaffinity(thread, cores)
            with suppress(PermissionError):
                os.sched_setscheduler(thread, policy, os.sched_param(priority))


def may_be_real_time() -> bool:
    """Whether this process may give its threads real-time priority."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except (AttributeError, OSError):
        return False
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return True
