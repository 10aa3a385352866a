"""Tests of the native kernels need a C++ compiler; every other test of kernels runs without."""

from __future__ import annotations

import pytest

from kernels import native


@pytest.fixture(autouse=True)
def _native_or_skip(request: pytest.FixtureRequest) -> None:
    asked = getattr(request.node, "callspec", None)
    if asked and "cpu_native" in asked.params.values() and (problem := native.problem()):
        pytest.skip(f"no native kernels here: {problem}")
