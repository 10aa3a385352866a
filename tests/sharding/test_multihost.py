"""Options that name the processes of a run. Runs of several processes are in tests/scripts."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from sharding.mesh import spread
from sharding.multihost import MultihostError, check, process_count, start


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((None, 2, None), "need --coordinator HOST:PORT"),
        ((None, None, 0), "need --coordinator HOST:PORT"),
        (("auto", 2, None), "finds the number of processes itself"),
        (("host", 2, 0), "--coordinator is 'host'; it must be HOST:PORT"),
        ((":12", 2, 0), "--coordinator is ':12'"),
        (("host:0", 2, 0), "--coordinator is 'host:0'"),
        (("host:99999", 2, 0), "--coordinator is 'host:99999'"),
        (("host:12", None, 0), "needs --process-count N and --process-id I"),
        (("host:12", 2, None), "needs --process-count N and --process-id I"),
        (("host:12", 2, 2), "--process-id is 2; of 2 processes it must be from 0 to 1"),
        (("host:12", 0, 0), "--process-id is 0; of 0 processes"),
    ],
)
def test_options_that_do_not_go_together(options: tuple[Any, ...], told: str) -> None:
    with pytest.raises(MultihostError, match=told):
        check(*options)


def test_options_that_do() -> None:
    for options in ((None, None, None), ("auto", None, None), ("10.0.0.1:1234", 2, 1), ("[::1]:1234", 1, 0)):
        check(*options)
    assert process_count() == 1


@pytest.mark.parametrize(
    ("owners", "count", "chosen"),
    [
        ([0, 0, 0, 0], 3, [0, 1, 2]),
        ([0, 0, 1, 1], 1, [0]),
        ([0, 0, 1, 1], 2, [0, 2]),
        ([0, 0, 1, 1], 3, [0, 1, 2]),
        ([0, 0, 1, 1], 4, [0, 1, 2, 3]),
        ([0, 0, 0, 1, 1, 1, 2, 2, 2], 4, [0, 1, 3, 6]),
    ],
)
def test_devices_are_taken_evenly_from_every_process(owners: list[int], count: int, chosen: list[int]) -> None:
    devices: Any = [SimpleNamespace(id=place, process_index=owner) for place, owner in enumerate(owners)]
    assert [device.id for device in spread(devices, count)] == chosen


def test_a_port_that_is_taken_is_named_before_jax_is_started() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MultihostError, match=rf"cannot listen at port {port} of --coordinator 127.0.0.1:{port}"):
            start(f"127.0.0.1:{port}", 2, 0, on_loss=lambda message: None)
