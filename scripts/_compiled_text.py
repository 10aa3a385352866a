"""The report on a compiled program as text, and what changed between two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from model.wording import number_of
from scripts.memory_wall_text import si, table

LAYERS = {
    "scan": "one compiled and looped over",
    "unrolled": "each compiled",
    "sampled": "two and three compiled, the others taken to add as much as the third",
}

TOP = 10
"""Fusions listed by their cycles, or by how these changed."""

TILES_7X = """\
  a 7x compiler that sees no device keeps 16-bit arguments in tiles of 8 rows and takes products in tiles of 16, so it
  copies each such matrix once a dispatch; whether it does on the machine is not known. Without them:
  LIBTPU_INIT_ARGS=--xla_tpu_impure_use_large_2nd_minor_layout_for_x16=false"""

COLUMNS = """\
argument  weights, cache and small inputs of one device; alias is the part that results are written over (the cache)
temp      buffers that the program needs beside them, as the compiler states it: for TPU gaps between buffers count
          twice, which is most of it in a deep unrolled program; code is the program itself
needs     argument + results not written over one + temp + code, to be compared with the device's memory
read      bytes that a step reads from a device's main memory, weights, cache and everything else; a loop's are counted
          for each time round, and a kernel of ours is taken to read all of the arrays that it is given
ideal     each weight once (of the embedding one row a token) and the filled cache once, scales included
made      collectives in the compiled step, their number and the bytes of their results; design is what the layout asks
          for (sums in f32). A compiler may carry out a small all-gather as an all-reduce, and round a sum to bf16 in it
copies    copies, transposes and conversions of 1 MiB or more into a buffer of their own, in each step or once in each
          dispatch"""

CYCLES = """\
cycles    the TPU compiler's static estimate, never checked against hardware: of its own fusions, times how often each
          runs; without collectives, fetches that run beside them, and our kernels, which it does not price"""


def render(r: Mapping[str, Any]) -> str:
    """The whole report."""
    what = "decode step" if r["program"] == "decode" else f"prefill piece of {number_of(r['piece'], 'token')}"
    mesh = " x ".join(f"{size} {name}" for name, size in r["mesh"].items())
    compiler = "libtpu" if "TPU" in r["device_kind"] else "jax-cuda13-plugin"
    lines = [
        f"{r['model']}, {what}, for {r['target']} ({r['device_kind']}), which is not here: tp={r['tp']} ({mesh})",
        f"{r['dtype']} weights, {r['kv_dtype']} cache, batch {r['batch']}, context {r['context']}; {r['num_layers']} "
        f"layers, {LAYERS[r['layers']]}; {r['kernels']} kernels; jax {r['versions']['jax']}, {compiler} "
        f"{r['versions'].get(compiler, 'unknown')}",
        f"compiled in {r['compile_s']:.1f} s",
        "",
        *_fits(r),
    ]
    if "step_bytes" not in r:
        return "\n".join(lines)
    lines += ["", *_memory(r), "", *_bytes(r), "", *_collectives(r), "", *_copies(r)]
    if r["weights_read"]:
        lines += ["", *_weights(r)]
    if r["estimated_cycles"] is not None:
        lines += ["", *_cycles(r)]
    lines += ["", COLUMNS]
    if r["estimated_cycles"] is not None:
        lines += [CYCLES]
    return "\n".join(lines)


def _fits(r: Mapping[str, Any]) -> list[str]:
    needed, memory = si(r["needed_bytes"], "B", 2), si(r["memory_bytes"], "B", 2)
    if r["fits"]:
        return [f"fits: {needed} of {memory} a device, {si(r['spare_bytes'], 'B', 2)} to spare"]
    return [
        f"does not fit: needs {needed} of {memory} a device, {si(-r['spare_bytes'], 'B', 2)} too much (weights "
        f"{si(r['weight_bytes'], 'B', 2)}, cache {si(r['cache_bytes'], 'B', 2)}); use more devices, fewer bits, a "
        "smaller batch or a shorter context"
    ]


def _memory(r: Mapping[str, Any]) -> list[str]:
    names = ("argument", "alias", "temp", "code")
    head = ["a device", *names, "needs", "has"]
    cells = ["memory", *(si(r[f"{name}_bytes"], "B", 2) for name in names)]
    return table(
        [head, [*cells, si(r["needed_bytes"], "B", 2), si(r["memory_bytes"], "B", 2)]], right=range(1, len(head))
    )


def _bytes(r: Mapping[str, Any]) -> list[str]:
    of, ideal = r["step_bytes_of"], {"weights": r["ideal_weight_bytes"], "cache": r["ideal_cache_bytes"], "other": 0}
    rows = [[_a_run(r), "weights", "cache", "other", "all"]]
    rows.append(["read", *(si(of[name], "B", 2) for name in ideal), si(r["step_bytes"], "B", 2)])
    rows.append(["ideal", *(si(value, "B", 2) for value in ideal.values()), si(r["ideal_bytes"], "B", 2)])
    ratios = [f"{of[name] / value:.3f}" if value else "" for name, value in ideal.items()]
    rows.append(["read/ideal", *ratios, f"{r['step_bytes'] / r['ideal_bytes']:.3f}"])
    lines = table(rows, right=range(1, 5))
    if r["written_back_bytes"]:
        told = si(r["written_back_bytes"], "B")
        lines.append(f"  {told} kept on chip for a while (parts of the cache) are written back whole")
    if r["ideal_s"]:
        lines.append(f"  the ideal takes {r['ideal_s'] * 1e3:.2f} ms at the datasheet's bandwidth")
    return lines


def _collectives(r: Mapping[str, Any]) -> list[str]:
    made, design = r["collectives"]["made"], r["collectives"]["design"]
    kinds = sorted({*made, *design})
    if not kinds:
        return ["  no collectives"]
    rows = [[f"collectives {_a_run(r)}", "made", "bytes", "design", "bytes"]]
    for kind in kinds:
        cells = [kind]
        for side in (made, design):
            one = side.get(kind)
            cells += [str(one["count"]), si(one["bytes"], "B")] if one else ["0", ""]
        rows.append(cells)
    return table(rows, right=range(1, 5))


def _copies(r: Mapping[str, Any]) -> list[str]:
    if not r["large_copies"]:
        return ["  copies: none of 1 MiB or more"]
    rows = [["copies", "shape", "of", "bytes", "times"]]
    for one in r["large_copies"]:
        when = f"{one['times']} {_a_run(r) if one['in_step'] else 'a dispatch'}"
        rows.append([one["op"], one["shape"], one["of"], si(one["bytes"], "B"), when])
    lines = table(rows, right=(3, 4))
    if r["target"].startswith("tpu7x") and not all(one["in_step"] for one in r["large_copies"]):
        lines.append(TILES_7X)
    return lines


def _a_run(r: Mapping[str, Any]) -> str:
    return "a step" if r["program"] == "decode" else "a piece"


def _weights(r: Mapping[str, Any]) -> list[str]:
    rows = [["quantised weights", "stored as", "arrays", "read by"]]
    for one in r["weights_read"]:
        how = "products directly" if one["direct"] else "something that writes them out first"
        rows.append([one["weight"], one["dtype"], str(one["arrays"]), how])
    return table(rows, right=(2,))


def _cycles(r: Mapping[str, Any]) -> list[str]:
    total = r["estimated_cycles"]
    rows = [["cycles (the compiler's static estimate)", "result", _a_run(r), "share"]]
    most = sorted(r["cycles"], key=lambda one: -one["cycles"])
    for one in most[:TOP]:
        rows.append([one["of"], one["result"], f"{one['cycles']:,}", f"{one['cycles'] / total:.0%}"])
    rest = sum(one["cycles"] for one in most[TOP:])
    rows += [["the rest", "", f"{rest:,}", f"{rest / total:.0%}"], ["all", "", f"{total:,}", ""]]
    lines = table(rows, right=(2, 3))
    if r["without_estimate"]:
        told = ", ".join(f"{count} {name}" for name, count in r["without_estimate"].items())
        lines.append(f"  without an estimate: {told} (calls of kernels {_a_run(r)})")
    return lines


def difference(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> str:
    """What changed between two reports, field by field; tuples of text and numbers alike."""
    old, new = dict(_flat(before)), dict(_flat(after))
    rows = [[f"changed since {name}", "before", "now", ""]]
    changed = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    cycles = [key for key in changed if key.startswith("cycles[")]
    cycles.sort(key=lambda key: -abs((new.get(key) or 0) - (old.get(key) or 0)))
    for key in changed:
        if key in cycles[TOP:]:
            continue
        was, now = old.get(key), new.get(key)
        numbers = isinstance(was, int | float) and isinstance(now, int | float) and not isinstance(now, bool)
        ratio = f"{now / was - 1:+.1%}" if numbers and was else ""
        rows.append([key, _told(key, was), _told(key, now), ratio])
    if not changed:
        return f"nothing changed since {name}"
    more = [f"  and the cycles of {len(cycles) - TOP} more, which changed less"] if len(cycles) > TOP else []
    return "\n".join([*table(rows, right=(1, 2, 3)), *more])


def _flat(value: Any, prefix: str = "") -> Sequence[tuple[str, Any]]:
    """(dotted name, value) of each leaf; entries of a list are named by what they say, and like ones added up."""
    if isinstance(value, Mapping):
        return [pair for key, each in value.items() for pair in _flat(each, f"{prefix}.{key}" if prefix else key)]
    if isinstance(value, list):
        found: dict[str, Any] = {}
        for each in value:
            texts = " ".join(str(part) for part in each.values() if isinstance(part, str))
            for key, part in each.items():
                if not isinstance(part, str):
                    known = found.get(name := f"{prefix}[{texts}].{key}")
                    found[name] = part if known is None or isinstance(part, bool) else known + part
        return list(found.items())
    return [(prefix, value)]


def _told(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if "bytes" in key and isinstance(value, int):
        return si(value, "B", 2)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else _short(value)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
