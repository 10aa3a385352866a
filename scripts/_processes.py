"""A command as one of several processes: options, who prints, and how all of them end when one does."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax

from sharding.multihost import PEER_TIMEOUT_S, Membership, MultihostError, check, start

OUTPUTS = ("json", "plot")
"""Options that name a file to write: process 0's alone."""

SURFACE = ("host", "port", "served_name", "api_key", "api_key_file", "drain_timeout")
"""Options of the HTTP surface, which is process 0's alone."""

OWN_OPTIONS = (*OUTPUTS, *SURFACE, "quiet", "coordinator", "process_count", "process_id", "peer_timeout")
"""Options that may differ between processes; all others decide what is computed."""

BROKEN_PIPE = 128 + 13

NOTICE_S = 5.0
"""How long a process whose collective failed waits to be told which other one is to blame."""


def add_process_options(parser: argparse.ArgumentParser) -> None:
    several = parser.add_argument_group(
        "several processes",
        "run the same command once a host (or several times on one), each with its own --process-id; only process 0 "
        "prints and writes files",
    )
    several.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="where process 0 listens; or auto: JAX asks SLURM, Kubernetes or Cloud TPU, and the next two are left out",
    )
    several.add_argument("--process-count", type=int, metavar="N", help="how many processes")
    several.add_argument("--process-id", type=int, metavar="I", help="which one this is, from 0")
    several.add_argument(
        "--peer-timeout",
        type=float,
        metavar="SECONDS",
        help=f"end with an error when another is so late or so long silent (default {PEER_TIMEOUT_S})",
    )


def join(args: argparse.Namespace) -> Membership | None:
    """Join the processes that the options name, or return None where they name none.

    On every process but 0 standard output and notes are dropped from here on, and so are the files to write.

    Raises:
        MultihostError: options that do not go together, or an address that cannot be used.
    """
    if args.coordinator is None:
        check(None, args.process_count, args.process_id)
        if args.peer_timeout is not None:
            raise MultihostError("--peer-timeout has no effect without --coordinator")
        return None
    timeout_s = PEER_TIMEOUT_S if args.peer_timeout is None else args.peer_timeout
    if not 1 <= timeout_s <= 86400:
        raise MultihostError(f"--peer-timeout is {timeout_s:g}; it must be from 1 to 86400 seconds")
    told = sys.stderr

    def lost(message: str) -> None:
        print(f"error: {message}", file=told, flush=True)
        os._exit(1)

    agreed = {
        f"--{name.replace('_', '-')}": str(value) for name, value in vars(args).items() if name not in OWN_OPTIONS
    }
    member = start(
        args.coordinator,
        args.process_count,
        args.process_id,
        on_loss=lost,
        timeout_s=timeout_s,
        agreed={**agreed, "jax": jax.__version__},
    )
    # Gloo writes to the file of standard output from C++; ours goes around it.
    own = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    os.dup2(nowhere, 1)
    if member.process_id == 0:
        sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding, errors="replace")
    else:
        os.close(own)
        sys.stdout = os.fdopen(nowhere, "w")
        sys.stderr = sys.stdout
        for name in OUTPUTS:
            if hasattr(args, name):
                setattr(args, name, None)
    return member


def run_as_member(member: Membership, outcome: Callable[[], tuple[int, str]]) -> int:
    """Run a command's work (exit status and what to tell on stderr); a failure here ends the other processes too."""
    try:
        status, text = outcome()
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            # Most likely a collective whose peer went away: the lifeline says which, and ends this process.
            time.sleep(NOTICE_S)
        _end(member, 1, traceback.format_exc().rstrip(), reason=f"{type(error).__name__} in its program")
    if status:
        _end(member, status, text, reason=text.removeprefix("error: ") or f"status {status}")
    member.lifeline.leave()
    return 0


def _end(member: Membership, status: int, text: str, *, reason: str) -> NoReturn:
    """Say why on this process and to the others. Not through ``sys.exit``: JAX would wait there for all to come."""
    member.lifeline.fail(reason)  # from here on the failures of others are no news
    if text:
        print(text, file=sys.__stderr__, flush=True)
    if member.process_id == 0 and status != BROKEN_PIPE:
        sys.stdout.flush()
    os._exit(status)
