"""Compiles the decode step or a prefill piece for a machine that is not here, and says what the compiler made of it."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from decode.cache import bucket, chunk_size
from decode.decoder import Decoder
from decode.sampling import SamplingParams
from decode.step import Programs
from kernels.cache_attention.xla import block_size
from model.config import LlamaConfig
from model.llama import LayersForm
from model.quantize import WIDE, Quantization, WeightFormat
from roofline.case import Case
from roofline.chips import CHIPS
from roofline.dtypes import DType
from roofline.footprint import kv_bytes_per_device, kv_scale_bytes_per_device, streamed_bytes_per_device
from roofline.step_collectives import step_collectives
from scripts._scaling import priced_as
from sharding.aot import Target
from sharding.collectives import DEFAULT_COLLECTIVES, Collectives
from sharding.hlo import collective_of
from sharding.hlo_program import Instruction, Program
from sharding.hlo_traffic import Access, accesses
from sharding.layout import Layout

LARGE = 2**20
"""Bytes from which a copy is told."""

SAMPLED = (2, 3)
"""Layers of the two programs from which a deeper one is told."""

Layers = Literal["scan", "unrolled", "sampled"]

KEPT_WIDE = ("embed", "head")
"""Parts that ``Quantization.layers`` leaves in bf16."""

_HBM_NEED = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM")
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class CompileCase:
    """What is compiled.

    context: positions that each row holds when the step runs, and that the cache has room for. program: "decode", one
    step; or "prefill", the last piece of a prompt of ``context`` tokens. layers: "sampled" compiles two unrolled
    programs of a few layers, and takes every further layer to add what the last one did.
    """

    config: LlamaConfig
    target: Target
    tp: int
    format: WeightFormat | None
    kv_dtype: str
    batch: int = 1
    context: int = 2048
    program: str = "decode"
    layers: Layers = "scan"
    collectives: Collectives = DEFAULT_COLLECTIVES
    kernels: str | None = None

    @property
    def quantization(self) -> Quantization:
        return WIDE if self.format is None else Quantization.layers(self.format)

    @property
    def form(self) -> LayersForm:
        """How the model is built."""
        return "scan" if self.layers == "scan" else "unrolled"

    def decoder(self) -> Decoder:
        """A decoder without weights: its parameters are shapes."""
        layout = Layout(self.target.mesh(self.tp, self.config.num_kv_heads))
        form: dict[str, Any] = {"collectives": self.collectives, "kernels": self.kernels}
        form["quantization"] = self.quantization
        programs = Programs(self.config, jnp.bfloat16, layout, self.form, **form)
        shapes: Any = dict(zip(programs.paths, programs.abstract_params(), strict=True))
        cache_dtype = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}.get(self.kv_dtype, self.kv_dtype)
        return Decoder(self.config, shapes, layout, jnp.bfloat16, layers=self.form, cache_dtype=cache_dtype, **form)


def compile_facts(case: CompileCase) -> dict[str, Any]:
    """The JSON fields of the report. Bytes are one device's; a program that does not fit has no others."""
    decoder = case.decoder()
    held = sum(_local_bytes(leaf) for leaf in decoder.params)
    ideal = _ideal_bytes(case)
    facts: dict[str, Any] = {
        "fits": False,
        "memory_bytes": case.target.memory_bytes,
        "weight_bytes": held,
        "cache_bytes": sum(_local_bytes(leaf) for leaf in jax.tree.leaves(_cache_shapes(decoder, case))),
        "ideal_bytes": sum(ideal.values()),
        "ideal_weight_bytes": ideal["weights"],
        "ideal_cache_bytes": ideal["cache"],
        "mesh": dict(decoder.layout.mesh.shape),
        "device_kind": decoder.layout.device_kind,
    }
    began = time.perf_counter()
    try:
        found = _sampled_facts(case) if case.layers == "sampled" else _compiled_facts(case, decoder)
    except jax.errors.JaxRuntimeError as error:
        need = _HBM_NEED.search(str(error))
        if need is None:
            raise
        needed = int(float(need[1]) * 1024 ** _UNITS[need[2]])
        facts |= {"needed_bytes": needed, "spare_bytes": case.target.memory_bytes - needed}
        return facts | {"compile_s": time.perf_counter() - began}
    facts |= found
    needed = facts["argument_bytes"] + facts["new_output_bytes"] + facts["temp_bytes"] + facts["code_bytes"]
    spare = case.target.memory_bytes - needed
    return facts | {"fits": spare >= 0, "needed_bytes": needed, "spare_bytes": spare}


def _compiled_facts(case: CompileCase, decoder: Decoder) -> dict[str, Any]:
    began = time.perf_counter()
    compiled = _compile(decoder, case)
    seconds = time.perf_counter() - began
    return {
        "compile_s": seconds,
        **_memory_facts(compiled.memory_analysis()),
        **program_facts(compiled.as_text(), decoder, case),
    }


def _sampled_facts(case: CompileCase) -> dict[str, Any]:
    """The facts of a deep program from two shallow ones, each further layer adding as much as the last one did."""
    few, more = (replace(case, config=replace(case.config, num_layers=n), layers="unrolled") for n in SAMPLED)
    first, second = (_compiled_facts(one, one.decoder()) for one in (few, more))
    seconds = first.pop("compile_s") + second.pop("compile_s")
    further = (case.config.num_layers - SAMPLED[0]) / (SAMPLED[1] - SAMPLED[0])
    return {**_extended(first, second, further), "compile_s": seconds}


def _extended(first: Any, second: Any, further: float) -> Any:
    """``first`` with ``further`` times what is more in ``second``: numbers, in nested dicts and in lists of dicts.

    The entries of a list are told apart by their texts and flags.
    """
    if isinstance(second, dict):
        return {key: _extended((first or {}).get(key), value, further) for key, value in second.items()}
    if isinstance(second, list):
        known = {_key(one): one for one in first or []}
        return [_extended(known.get(_key(one)), one, further) for one in second]
    if isinstance(second, bool) or not isinstance(second, int):
        return second
    before = first or 0
    return max(0, before + round((second - before) * further))


def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(value for value in entry.values() if isinstance(value, bool | str))


def program_facts(hlo_text: str, decoder: Decoder, case: CompileCase) -> dict[str, Any]:
    """What the optimised program does in one step."""
    program = Program.parse(hlo_text)
    slots = -(-case.context // decoder.layout.kv_seq)
    blocks = -(-slots // block_size(slots, decoder.layout.platform))

    def trips(loop: Instruction) -> int:
        # Two loops run as long as their data says: that over steps, of which one counts, and XLA's attention.
        return blocks if "attention" in loop.op_name else 1

    names = {f"params[{index}]": _name(path) for index, path in enumerate(decoder.programs.paths)}
    everything = accesses(program, trips)
    inside = [one for one in everything if one.step.loops] if case.program == "decode" else everything
    read = _bytes_read(inside, case.config.num_layers if case.layers == "scan" else 1)
    return {
        "step_bytes": sum(read.values()),
        "step_bytes_of": read,
        "step_written_bytes": sum(one.step.times * one.written for one in inside),
        "written_back_bytes": sum(one.step.times * one.written for one in inside if one.is_write_back),
        "collectives": _collectives(program, trips, case),
        "large_copies": _large_copies(everything, inside, names),
        "weights_read": _weights_read(everything, decoder, names),
        **_cycles(inside),
    }


def _compile(decoder: Decoder, case: CompileCase) -> Any:
    form = SamplingParams().form
    if case.program == "decode":
        return decoder.decode_program(case.batch, case.context, form)
    return decoder.prefill_program(case.batch, piece(case, decoder.layout), case.context, form)


def piece(case: CompileCase, layout: Layout) -> int:
    """Tokens of the prefill piece."""
    return bucket(min(case.context, chunk_size(layout.kv_seq)), layout.kv_seq)


def tokens(case: CompileCase) -> int:
    """New tokens of each row."""
    return 1 if case.program == "decode" else piece(case, Layout(case.target.mesh(case.tp, case.config.num_kv_heads)))


def _memory_facts(memory: Any) -> dict[str, Any]:
    """Bytes as the compiler states them; new_output is what results take that are written over no argument."""
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "new_output_bytes": max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0),
        "code_bytes": memory.generated_code_size_in_bytes,
    }


def _ideal_bytes(case: CompileCase) -> dict[str, int]:
    """What a step or a prefill piece must read: each weight once (of the embedding a row a token), and the cache."""
    dtype: str | DType = "bf16"
    if case.format is not None:
        bits = {"int8": 8, "fp8": 8, "int4": 4}[case.format.kind]
        beside = (32 if case.format.group is None else 16) * (2 if case.format.offsets else 1)  # scale, offset
        dtype = DType(case.format.name, bits, beside, case.format.group)
    keep = KEPT_WIDE if case.format is not None else ()
    weights = streamed_bytes_per_device(case.config, dtype, case.tp, (), keep, case.batch * tokens(case))
    cache = kv_bytes_per_device(case.config, case.context, case.kv_dtype, case.tp, case.batch)
    scales = kv_scale_bytes_per_device(case.config, case.context, case.kv_dtype, case.tp, case.batch)
    return {"weights": sum(weights.values()), "cache": int(cache) + scales}


def _bytes_read(inside: Iterable[Access], layers: int) -> dict[str, int]:
    """Bytes read in a step by what they are."""
    total = {"weights": 0, "cache": 0, "other": 0}
    for one in inside:
        for name, size in one.reads.items():
            kind = "weights" if name.startswith("params[") else "cache" if name.startswith("cache") else "other"
            # A kernel is given the stack of every layer's cache, and reads one.
            part = size // layers if kind == "cache" and one.step.instruction.opcode == "custom-call" else size
            total[kind] += one.step.times * part
    return total


def _collectives(program: Program, trips: Any, case: CompileCase) -> dict[str, Any]:
    """{kind: {"count", "bytes"}} of one step, and the same of the design."""
    made: dict[str, Counter[str]] = {}
    for step in program.runs(trips):
        if found := collective_of(step.instruction):
            own = made.setdefault(found.kind, Counter())
            own["count"] += step.times
            own["bytes"] += step.times * found.result_bytes
    design: dict[str, Counter[str]] = {}
    model = Case(
        case.config,
        tp=case.tp,
        batch=case.batch,
        context=case.context,
        collective=priced_as(case.collectives.collective),
    )
    for call in step_collectives(model, tokens(case)):
        own = design.setdefault(call.op.replace("_", "-"), Counter())
        own["count"] += call.count
        own["bytes"] += int(call.count * call.nbytes / (call.devices if call.op == "reduce_scatter" else 1))
    return {"made": _plain(made), "design": _plain(design)}


def _plain(counts: dict[str, Counter[str]]) -> dict[str, dict[str, int]]:
    return {kind: dict(counts[kind]) for kind in sorted(counts)}


def _large_copies(everything: list[Access], inside: list[Access], names: dict[str, str]) -> list[dict[str, Any]]:
    """Copies, transposes and conversions of at least ``LARGE`` bytes, like ones together."""
    within = {id(one) for one in inside}
    found: Counter[tuple[str, str, str, int, bool]] = Counter()
    for one in everything:
        if one.copies(LARGE):
            of = ", ".join(sorted(_kind(names.get(name, name)) for name, size in one.reads.items() if size >= LARGE))
            shape = one.step.instruction.type.lstrip("(").partition("{")[0]
            found[one.opcode, shape, of.strip(", "), one.written, id(one) in within] += one.step.times
    return [
        {"op": op, "shape": shape, "of": of or "values of the step", "bytes": size, "times": times, "in_step": in_step}
        for (op, shape, of, size, in_step), times in sorted(found.items(), key=lambda item: -item[0][3] * item[1])
    ]


def _weights_read(everything: list[Access], decoder: Decoder, names: dict[str, str]) -> list[dict[str, Any]]:
    """For each kind of quantised matrix, whether products alone read its small numbers."""
    bad: dict[str, bool] = {}
    count: Counter[str] = Counter()
    dtypes: dict[str, str] = {}
    small = {
        f"params[{index}]"
        for index, leaf in enumerate(decoder.params)
        if leaf.dtype.itemsize == 1 and decoder.programs.paths[index][-1] == "weight"
    }
    readers: dict[str, list[Access]] = {name: [] for name in small}
    for one in everything:
        for name in one.uses & small:
            readers[name].append(one)
    for name in small:
        kind = _kind(names[name])
        count[kind] += 1
        dtypes[kind] = decoder.params[int(name[7:-1])].dtype.name
        direct = bool(readers[name]) and all(one.is_product or one.is_fetch for one in readers[name])
        bad[kind] = bad.get(kind, False) or not direct
    return [
        {"weight": kind, "dtype": dtypes[kind], "arrays": count[kind], "direct": not bad[kind]}
        for kind in sorted(count)
    ]


def _cycles(inside: list[Access]) -> dict[str, Any]:
    """The TPU compiler's static estimate, by fusion and by part of the model; None where there is none (GPU)."""
    own: Counter[tuple[str, str]] = Counter()
    unknown: Counter[str] = Counter()
    for one in inside:
        instruction = one.step.instruction
        scope = _scope(instruction.op_name)
        if (cycles := instruction.cycles) is not None:
            own[scope, instruction.type.lstrip("(").partition("{")[0]] += one.step.times * cycles
        elif "tpu_custom_call" in instruction.rest:
            unknown[scope] += one.step.times
    if not own:
        return {"estimated_cycles": None, "cycles": [], "without_estimate": {}}
    return {
        "estimated_cycles": sum(own.values()),
        "cycles": [{"of": scope, "result": shape, "cycles": n} for (scope, shape), n in own.most_common()],
        "without_estimate": dict(unknown),
    }


def _scope(op_name: str) -> str:
    """The end of an operation's name, from the model's own scope on: "mlp/dot_general"."""
    for scope in ("embed", "attention", "mlp", "head"):
        if f"/{scope}/" in op_name:
            return scope + "/" + op_name.rpartition("/")[2]
    return op_name.rpartition("/")[2] or "compiler's own"


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _kind(name: str) -> str:
    """A parameter's or cache array's name without its layer."""
    return re.sub(r"\d+", "*", name)


def _local_bytes(leaf: Any) -> int:
    bits = 4 if leaf.dtype.name in ("int4", "uint4") else 8 * leaf.dtype.itemsize
    shape = leaf.sharding.shard_shape(leaf.shape)
    count = 1
    for size in shape:
        count *= size
    return count * bits // 8


def _cache_shapes(decoder: Decoder, case: CompileCase) -> Any:
    return decoder.abstract_cache(case.batch, case.context)


def memory_floor_s(target: Target, nbytes: int) -> float | None:
    """Seconds that reading so many bytes takes at the datasheet's bandwidth, where the chip has one here."""
    chip = CHIPS.get(target.kind) or CHIPS.get(f"tpu-{target.kind}")
    return None if chip is None else nbytes / chip.bytes_per_s
