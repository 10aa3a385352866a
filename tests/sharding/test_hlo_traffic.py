"""Bytes read and written, counted by hand for a small program in the forms that the TPU compiler writes."""

from __future__ import annotations

from sharding.hlo import count_collectives
from sharding.hlo_program import Program
from sharding.hlo_traffic import accesses

KERNEL = 'custom_call_target="tpu_custom_call", operand_layout_constraints={f32[2]{0}}'
PROGRAM = f"""
HloModule jit_run

%add (a: f32[], b: f32[]) -> f32[] {{
  ROOT %sum = f32[] add(%a, %b)
}}

%copied (w: bf16[64,128]) -> bf16[64,128] {{
  %w = bf16[64,128]{{1,0:T(8,128)(2,1)}} parameter(0)
  ROOT %again = bf16[64,128]{{1,0:T(16,128)(2,1)}} copy(%w)
}}, execution_thread="sparsecore"

%summed (x: f32[8,128], t: token[]) -> f32[8,128] {{
  %x = f32[8,128]{{1,0}} parameter(0)
  %t = token[] parameter(1)
  ROOT %all-reduce.1 = f32[8,128]{{1,0}} all-reduce(%x), to_apply=%add
}}, execution_thread="sparsecore"

ENTRY %main (w: bf16[64,128], cache: f32[4,128], new: f32[2], x: f32[8,128]) -> f32[4,128] {{
  %w = bf16[64,128]{{1,0}} parameter(0), metadata={{op_name="params[0]"}}
  %cache = f32[4,128]{{1,0}} parameter(1), metadata={{op_name="cache"}}
  %new = f32[2]{{0}} parameter(2), metadata={{op_name="new"}}
  %x = f32[8,128]{{1,0}} parameter(3), metadata={{op_name="x"}}
  %start = ((bf16[64,128]{{1,0}}), bf16[64,128]{{1,0}}, u32[]) call-start(%w), to_apply=%copied
  %done = bf16[64,128]{{1,0}} call-done(%start)
  %ready = token[] after-all()
  %sum-start = ((f32[8,128]{{1,0}}, token[]), f32[8,128]{{1,0}}) call-start(%x, %ready), to_apply=%summed
  %sum-done = f32[8,128]{{1,0}} call-done(%sum-start)
  %written = f32[4,128]{{1,0}} custom-call(%new, %cache), {KERNEL}, output_to_operand_aliasing={{{{}}: (1, {{}})}}
  ROOT %read = f32[4,128]{{1,0}} custom-call(%done, %sum-done, %written), {KERNEL}
}}
"""


def test_what_runs_on_other_cores_is_counted() -> None:
    """A copy and a sum inside asynchronous calls, as a TPU 7x has them, once each."""
    assert count_collectives(PROGRAM) == {"all-reduce": 1}
    copies = [one for one in accesses(Program.parse(PROGRAM)) if one.copies(8192)]
    assert [(one.opcode, one.reads, one.written) for one in copies] == [("copy", {"params[0]": 64 * 128 * 2}, 64 * 256)]


def test_a_kernel_that_writes_in_place_moves_what_is_new() -> None:
    """It reads none of the array and writes none of it anew; who reads the result reads that array."""
    written, read = list(accesses(Program.parse(PROGRAM)))[-2:]
    assert (written.in_place, written.reads, written.written) == ("cache", {"new": 8, "cache": 0}, 0)
    assert read.in_place is None
    assert read.reads["cache"] == read.written == 4 * 128 * 4
