"""Several processes as one run: one a host, or several on one machine over loopback.

JAX then sees the devices of all of them, and each process runs the same program on its own. On CPU the collectives are
Gloo's. What differs between processes must never decide what they dispatch: no clock, no local file, no random number.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import jax
from jax._src import distributed  # the only way to the key-value store of the processes that JAX has joined

from sharding.lifeline import HUB, Lifeline, OnLoss

AUTO = "auto"
PEER_TIMEOUT_S = 60
"""Seconds that another process may be late to start, or silent, before a run ends with an error."""

GRACE_S = 30
"""JAX's own limits are so much longer than ours: they end a process with a stack dump and we with a sentence."""

_KEY = "shardstream/lifeline"


class MultihostError(RuntimeError):
    """Processes that cannot be joined, or options that do not say which they are."""


@dataclass(frozen=True)
class Membership:
    """Which process of a run this one is."""

    process_id: int
    process_count: int
    lifeline: Lifeline


def check(coordinator: str | None, process_count: int | None, process_id: int | None) -> None:
    """Refuse addresses and numbers that do not go together.

    Raises:
        MultihostError: says what is missing, too much or out of range.
    """
    given = process_count is not None or process_id is not None
    if coordinator is None:
        if given:
            raise MultihostError("--process-count and --process-id need --coordinator HOST:PORT, process 0's address")
        return
    if coordinator == AUTO:
        if given:
            raise MultihostError("--coordinator auto finds the number of processes itself; leave out the other two")
        return
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise MultihostError(f"--coordinator is {coordinator!r}; it must be HOST:PORT of process 0, or auto")
    if process_count is None or process_id is None:
        raise MultihostError("--coordinator HOST:PORT needs --process-count N and --process-id I (0 to N - 1)")
    if not 0 <= process_id < process_count:
        raise MultihostError(
            f"--process-id is {process_id}; of {process_count} processes it must be from 0 to {process_count - 1}"
        )


def start(
    coordinator: str,
    process_count: int | None,
    process_id: int | None,
    *,
    on_loss: OnLoss,
    timeout_s: float = PEER_TIMEOUT_S,
    agreed: Mapping[str, str] | None = None,
) -> Membership:
    """Join the other processes; call it before JAX starts. Returns once all are there.

    Args:
        coordinator: ``HOST:PORT`` of process 0, which listens there; or "auto", which lets JAX ask SLURM, Open MPI,
            Kubernetes or the Cloud TPU metadata. Under SLURM and Open MPI each process then sees one GPU, so start one
            for each.
        on_loss: called on another thread with a message when a process is late, fails, is silent for ``timeout_s`` or
            goes away. The caller may be inside a collective that never returns, so it should end the process.

        agreed: what must be the same on every process: name and value. Different programs would wait for each other's
            collectives for ever, or mix their results.

    Raises:
        MultihostError: bad options, no cluster found, an address that cannot be used, or processes that do not agree.
    """
    check(coordinator, process_count, process_id)
    if process_id == HUB and coordinator != AUTO:
        _check_free(coordinator)
    # It would catch SIGTERM and leave it to us: a process that is told to end should end.
    jax.config.update("jax_enable_preemption_service", False)
    who = "this process" if process_id is None else f"process {process_id} of {process_count}"
    late = threading.Timer(
        timeout_s,
        on_loss,
        [
            f"{who} waited {timeout_s:g} s for all the others to join at {coordinator}; start them all within that "
            f"time, or raise --peer-timeout"
        ],
    )
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            None if coordinator == AUTO else coordinator,
            process_count,
            process_id,
            # Left to itself, JAX would show a process that SLURM started one GPU of its host, whatever our options say.
            cluster_detection_method=None if coordinator == AUTO else "deactivate",
            initialization_timeout=int(timeout_s + GRACE_S),
            heartbeat_timeout_seconds=int(2 * timeout_s + GRACE_S),
            shutdown_timeout_seconds=int(timeout_s + GRACE_S),
        )
        membership = _tie(timeout_s, on_loss, agreed)
    except (ValueError, RuntimeError, OSError) as error:
        told = str(error).strip().partition("\n")[0]
        if coordinator == AUTO:
            raise MultihostError(
                f"--coordinator auto found no cluster that JAX knows (SLURM, Open MPI, Kubernetes, Cloud TPU); give "
                f"HOST:PORT, --process-count and --process-id instead ({told})"
            ) from None
        raise MultihostError(f"{who} cannot join the others at {coordinator}: {told}") from None
    finally:
        late.cancel()
    return membership


def process_count() -> int:
    """Processes of the run; 1 before ``start``. Unlike ``jax.process_count`` it starts no backend."""
    return distributed.global_state.num_processes or 1


def _check_free(coordinator: str) -> None:
    """JAX's own server may end the process when its port is taken, so it is tried first."""
    port = int(coordinator.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a run that has just ended is no hindrance
        try:
            probe.bind(("", port))
        except OSError as error:
            raise MultihostError(
                f"process 0 cannot listen at port {port} of --coordinator {coordinator} ({error.strerror or error}): "
                f"choose another port, or end what uses it"
            ) from None


def _tie(timeout_s: float, on_loss: OnLoss, agreed: Mapping[str, str] | None) -> Membership:
    state = distributed.global_state
    assert state.client is not None
    assert state.process_id is not None
    assert state.coordinator_address is not None
    me, count = state.process_id, process_count()
    lifeline = Lifeline(me, count, timeout_s, on_loss, {**(agreed or {}), "--process-count": str(count)})
    if count == 1:
        return Membership(me, count, lifeline)
    if me == HUB:
        port, word = lifeline.listen()
        state.client.key_value_set(_KEY, f"{port} {word}")
        lifeline.accept()
    else:
        text = state.client.blocking_key_value_get(_KEY, int(timeout_s * 1000))
        port_text, word = text.split()
        host = state.coordinator_address.rpartition(":")[0].strip("[]")
        lifeline.connect(host, int(port_text), word)
    return Membership(me, count, lifeline)
