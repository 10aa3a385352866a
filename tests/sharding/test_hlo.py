"""Reading collectives from HLO text, in the forms that XLA writes on CPU, GPU and TPU."""

from __future__ import annotations

import pytest

from sharding.hlo import Collective, collectives, count_collectives, type_bytes

PROGRAM = """
HloModule jit_run, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (arg: (s32[], f32[2,8])) -> (s32[], f32[2,8]) {
  %all-reduce.3 = f32[2,8]{1,0} all-reduce(%x), channel_id=1, to_apply=%add, metadata={op_name="all-gather("}
  %pair = (f32[2,8]{1,0}, bf16[4]{0}) all-reduce(%x, %y), to_apply=%add
  ROOT %tuple = (s32[], f32[2,8]) tuple(%i, %all-reduce.3)
}

ENTRY %main (p: f32[2,8]) -> f32[8,8] {
  %gathered = f32[8,8]{1,0} all-gather(%p), dimensions={0}
  exchanged = f32[4,2]{1,0} all-to-all(p), dimensions={0}
  %note = f32[] fusion(%gathered), calls=%f, metadata={op_name="jit(run)/ all-reduce(x)"}
  %user = (f32[1]{0}, f32[2]{0}) fusion(%gathered), kind=kLoop, calls=%f, backend_config="(a) all-reduce(b)"
  %loop = (s32[], f32[2,8]) while(%init), condition=%more, body=%body
  ROOT %copy = f32[8,8]{1,0} copy(%gathered)
}
"""


def test_every_form_is_counted_once_with_its_bytes() -> None:
    assert collectives(PROGRAM) == [
        Collective("all-reduce", 64),
        Collective("all-reduce", 72),
        Collective("all-gather", 256),
        Collective("all-to-all", 32),
    ]
    assert count_collectives(PROGRAM) == {"all-gather": 1, "all-reduce": 2, "all-to-all": 1}
    assert count_collectives("") == {}


def test_a_loop_of_known_length_counts_each_trip() -> None:
    known = PROGRAM.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}')
    assert count_collectives(known) == {"all-gather": 1, "all-reduce": 6, "all-to-all": 1}


@pytest.mark.parametrize(
    ("line", "kind", "nbytes"),
    [
        ("%a = f32[16]{0} all-reduce-start(%x), to_apply=%add", "all-reduce", 64),
        ("%a = (f32[16]{0}, f32[4]{0}) all-reduce-start(%x, %y), to_apply=%add", "all-reduce", 80),
        ("%a = (f32[2,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%x), dimensions={0}", "all-gather", 128),
        (
            "%a = ((f32[2]{0}, bf16[2]{0}), (f32[8]{0}, bf16[8]{0})) all-gather-start(%x, %y)",
            "all-gather",
            48,
        ),
        ("%a = ((f32[8]{0}), f32[2]{0}, u32[]) reduce-scatter-start(%x)", "reduce-scatter", 8),
        (
            "%a = (bf16[3]{0}, bf16[3]{0}, u32[], u32[]) collective-permute-start(%x)",
            "collective-permute",
            6,
        ),
        # TPU layouts hold tiles and memory spaces in brackets of their own.
        ("ROOT a = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} all-reduce(x)", "all-reduce", 2048),
        (
            "  %a = (f32[8]{0:T(256)}, /*index=1*/f32[8]{0:T(256)S(1)}) all-to-all(%x, %y)",
            "all-to-all",
            64,
        ),
    ],
)
def test_asynchronous_forms_and_layouts(line: str, kind: str, nbytes: int) -> None:
    assert collectives(line) == [Collective(kind, nbytes)]


@pytest.mark.parametrize(
    "line",
    [
        "%done = f32[16]{0} all-reduce-done(%a)",
        "%g = f32[16]{0} get-tuple-element(%all-reduce.3), index=0",
        "%n = f32[16]{0} add(%all-gather, %all-to-all)",
        '%c = f32[2]{0} custom-call(%x), custom_call_target="all-reduce("',
    ],
)
def test_what_is_no_collective(line: str) -> None:
    assert collectives(line) == []


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("pred[]", 1),
        ("pred[7]", 7),
        ("s4[3]", 2),
        ("f8e4m3fn[10]", 10),
        ("bf16[2,3]{1,0}", 12),
        ("u64[2]", 16),
        ("c64[2]", 16),
        ("f32[0,5]", 0),
        ("(f32[8,16]{1,0}, pred[])", 513),
        ("token[]", 0),
    ],
)
def test_bytes_of_a_type(text: str, nbytes: int) -> None:
    assert type_bytes(text) == nbytes
