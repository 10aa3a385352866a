"""The bandwidth measurement: what it reports, not how fast this machine is."""

from __future__ import annotations

import pytest

from sharding.bandwidth import measure_read_bandwidth, median_bandwidth
from sharding.mesh import make_mesh


@pytest.mark.parametrize("tp", [1, 2])
def test_bandwidth_is_the_best_sample_of_one_device(tp: int) -> None:
    found = measure_read_bandwidth(make_mesh(tp, 8), total_bytes=1 << 20, repeats=3)
    assert len(found.samples) == 3
    assert found.per_device == max(found.samples) > 0
    assert found.devices == tp
    assert found.total == tp * found.per_device
    assert median_bandwidth(found) == sorted(found.samples)[1]
