"""The whole decode step, compiled for machines that are not here: what it sends, copies, keeps and reads.

Matrices have their full width and the programs two layers: a further layer adds as much as the last one did, which the
test against a deeper program shows.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from model.presets import preset
from model.quantize import WeightFormat
from scripts._compiled import CompileCase, compile_facts
from sharding.aot import problem, target

pytestmark = [pytest.mark.xdist_group("aot"), pytest.mark.optimized]  # one worker compiles

L = 2
MIB = 2**20

MACHINES = {8: ("v5e:2x4", "v6e:2x4", "h100x8"), 16: ("v5e:4x4", "v6e:4x4", "h100x16")}
# One row and many; over 16 devices positions are split over two.
MODELS = [("llama-3.1-8b", 8, 1, 2048), ("llama-3-70b", 8, 16, 8192), ("llama-3-70b", 16, 16, 8192)]
CASES = [
    pytest.param((model, tp, batch, context, dtype, machine), id=f"{model}-tp{tp}-{dtype}-{machine}")
    for model, tp, batch, context in MODELS
    for dtype in ("bf16", "int8", "int4")
    for machine in MACHINES[tp]
] + [pytest.param(("llama-3.2-1b", 8, 16, 2048, "bf16", "v5e:2x4"), id="heads-of-64")]


def machine(name: str) -> Any:
    """The machine, or the test is skipped: its compiler is the extra ``aot``."""
    if missing := problem("gpu" if name.startswith("h") else "tpu"):
        pytest.skip(missing)
    return target(name)


@functools.cache
def facts(
    model: str, tp: int, batch: int, context: int, dtype: str, name: str, depth: int = L, layers: Any = "unrolled"
) -> dict[str, Any]:
    config = preset(model)
    config = replace(config, num_layers=depth or config.num_layers)
    format = None if dtype == "bf16" else WeightFormat.of(dtype)
    return compile_facts(
        CompileCase(config, machine(name), tp, format, "bf16", batch=batch, context=context, layers=layers)
    )


def check_collectives(found: dict[str, Any], layers: int) -> None:
    """As designed: two all-reduces a layer and one for the embedding; the sampler's small gather may be one too."""
    made = {kind: one["count"] for kind, one in found["collectives"]["made"].items()}
    design = {kind: one["count"] for kind, one in found["collectives"]["design"].items()}
    assert design["all-reduce"] == 2 * layers + 1
    as_reduce = {**design, "all-reduce": design["all-reduce"] + 1, "all-gather": design["all-gather"] - 1}
    assert made in (design, {kind: count for kind, count in as_reduce.items() if count})


@pytest.mark.parametrize("case", CASES)
class TestStep:
    def test_two_all_reduces_a_layer(self, case: tuple[Any, ...]) -> None:
        check_collectives(facts(*case), L)

    def test_copies_no_weight_and_no_cache(self, case: tuple[Any, ...]) -> None:
        """Nor any other array of 1 MiB, in a step or before the first; what is quantised is read by products alone."""
        found = facts(*case)
        assert found["large_copies"] == []
        assert all(one["direct"] for one in found["weights_read"])
        assert len(found["weights_read"]) == (0 if case[4] == "bf16" else 4)

    def test_the_cache_is_written_in_place_and_little_else_is_needed(self, case: tuple[Any, ...]) -> None:
        found = facts(*case)
        assert found["alias_bytes"] >= found["cache_bytes"]
        # None of it is fetched whole to be updated on the chip; a few numbers a row, of the step's own, are.
        assert found["written_back_bytes"] < 16384  # rows of state
        assert found["temp_bytes"] < 16 * MIB

    def test_reads_what_it_must(self, case: tuple[Any, ...]) -> None:
        """Weights once, scales and offsets included, and the cache once; and what the step made itself, which on GPU
        lies in memory too (float32 parts of products above all, beside two layers at up to 16 rows)."""
        found = facts(*case)
        read = found["step_bytes_of"]
        assert read["weights"] == pytest.approx(found["ideal_weight_bytes"], rel=1e-3)
        assert read["cache"] == pytest.approx(found["ideal_cache_bytes"], rel=1e-3)
        assert read["other"] < (0.1 if case[5].startswith("h") else 0.01) * found["ideal_bytes"]


def test_a_deep_scan_is_as_clean() -> None:
    found = facts("llama-3-70b", 8, 1, 8192, "bf16", "v6e:2x4", depth=0, layers="scan")
    check_collectives(found, 80)
    assert found["fits"]
    assert found["large_copies"] == []
    assert found["temp_bytes"] < 64 * MIB
    assert 0.99 < found["step_bytes"] / found["ideal_bytes"] < 1.01


def test_what_does_not_fit_is_said_and_by_how_much() -> None:
    """llama-3-70b in bf16 on eight devices of 16 GB: whether the compiler refuses it or two layers foretell it."""
    for layers in ("scan", "sampled"):
        found = facts("llama-3-70b", 8, 1, 2048, "bf16", "v5e:2x4", depth=0, layers=layers)
        assert not found["fits"]
        assert found["weight_bytes"] > found["memory_bytes"]
        assert 0.97 < found["needed_bytes"] / (found["weight_bytes"] + found["cache_bytes"]) < 1.03
        assert found["spare_bytes"] == found["memory_bytes"] - found["needed_bytes"] < 0


def test_two_and_three_layers_tell_of_more() -> None:
    small = ("llama-3.2-1b", 2, 8, 512, "bf16", "h100x2", 4)
    told, compiled = (facts(*small, layers=layers) for layers in ("sampled", "unrolled"))
    for key in ("argument_bytes", "alias_bytes", "collectives", "large_copies"):
        assert told[key] == compiled[key], key
    assert told["step_bytes"] == pytest.approx(compiled["step_bytes"], rel=1e-3)  # small values are fused here or there
