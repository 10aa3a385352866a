"""The memory wall's numbers as text: aligned tables within 110 columns, readable on a terminal or piped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from model.wording import number_of

TERMS = ("weights", "kv", "compute", "collectives", "layers", "step")


def si(value: float, unit: str, digits: int = 1) -> str:
    """`value` with a decimal SI prefix: 141100000000 bytes are "141.1 GB"."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.{digits}f} {prefix}{unit}"
    return f"{value:.{digits}f} {unit}"


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows as aligned lines; columns whose index is in `right` are right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def render(r: dict[str, Any]) -> str:
    """The whole report."""
    chip = r["chip"]
    formats = f"weights {r['weight_dtype']}, cache {r['kv_dtype']}"
    title = f"{r['name']} on {chip['name']}, {formats}, batch {r['batch']}"
    lines = [title, "=" * len(title), ""]
    lines += table([["quantity", "value", "formula"], *_chain(r)], right=(1,))
    lines += ["", *_ceiling(r), "", *_memory(r), "", *_latency(r)]
    notes = _notes(r)
    if notes:
        lines += ["", *notes]
    return "\n".join(lines)


def _chain(r: dict[str, Any]) -> list[list[str]]:
    chip, prefill, decode = r["chip"], r["prefill"], r["decode"]
    source = "measured on this machine" if chip["measured"] else "datasheet"
    tokens, batch = prefill["prompt_len"], r["batch"]
    config_count = sum(r["parameters"].values())
    from_config = "from the config" if r["params"] == config_count else f"given; the config has {config_count:,}"
    rows = [
        ["compute C", si(chip["flops_per_s"], "FLOP/s"), f"{source}, dense {chip['compute_dtype']}"],
        ["bandwidth B", si(chip["bytes_per_s"], "B/s", 2), source],
        ["ridge", f"{r['ridge_flops_per_byte']:.0f} op/byte", "C / B: below it bandwidth binds"],
        ["parameters P", f"{r['params']:,.0f}", from_config],
        ["weights W", si(r["weight_bytes"], "B"), f"P x {r['bytes_per_weight']:g} bytes"],
    ]
    if r["weight_scale_bytes"]:
        rows.append(["scales", si(r["weight_scale_bytes"], "B"), "of quantised weights, and vectors kept in bf16"])
        rows.append(["W with scales", si(r["weight_bytes"] + r["weight_scale_bytes"], "B"), "used as W below"])
    rows += [
        ["read a step", si(r["streamed_bytes"], "B"), "W less the embedding rows that no token asks for"],
        [
            "cache a token",
            f"{r['kv_bytes_per_token']:,.0f} B",
            "kv = 2 x layers x KV heads x head size x bytes",
        ],
        ["prefill work", si(prefill["flops"], "FLOP"), f"2 P T + attention, T = {tokens:,}"],
        ["prefill bytes", si(prefill["bytes"], "B"), "W + T kv + residual stream (4 L T D)"],
        ["prefill intensity", f"{prefill['intensity']:,.0f} op/byte", _side(prefill["intensity"], r)],
        [
            "W per prefill token",
            si(r["weight_bytes"] / tokens, "B"),
            f"W / T: {number_of(tokens, 'token')} in one pass",
        ],
        ["decode work", si(decode["flops"], "FLOP"), "2 P x batch (context 0)"],
        ["decode intensity", f"{decode['intensity']:.2f} op/byte", _side(decode["intensity"], r)],
        ["decode ceiling", f"{decode['ceiling_tokens_per_s']:.1f} tok/s", "batch x B / W, one device"],
        ["", f"{decode['ceiling_ms']:.1f} ms", "W / B, a step" if batch > 1 else "W / B, a token"],
    ]
    return rows


def _side(intensity: float, r: dict[str, Any]) -> str:
    bound = "compute" if intensity >= r["ridge_flops_per_byte"] else "bandwidth"
    return f"work / bytes: {bound} binds"


def _ceiling(r: dict[str, Any]) -> list[str]:
    rows = [["context s", "bytes a step", "ceiling tok/s", "ms a step", "of start", "op/byte"]]
    for c in r["ceiling"]:
        rows.append(
            [
                f"{c['context']:,}",
                si(c["bytes_per_step"], "B"),
                f"{c['tokens_per_s']:.1f}",
                f"{c['ms_per_step']:.2f}",
                f"{c['share_of_start']:.0%}",
                f"{c['intensity']:.2f}",
            ]
        )
    head = "Ceiling by context, one device: batch x B / (W + batch x s x kv)"
    return [head, *table(rows, right=range(6))]


def _memory(r: dict[str, Any]) -> list[str]:
    rows = [["tp", "weights", "cache", "memory", "left", "largest batch"]]
    for m in r["memory"]:
        left = si(m["free_bytes"], "B") if m["fits"] else f"SHORT by {si(-m['free_bytes'], 'B')}"
        largest = "any" if m["largest_batch"] is None else str(m["largest_batch"])
        rows.append(
            [
                str(m["tp"]),
                si(m["weight_bytes"], "B"),
                si(m["kv_bytes"], "B"),
                si(m["memory_bytes"], "B"),
                left,
                largest,
            ]
        )
    context = r["memory"][0]["context"]
    lines = [f"Memory a device at context {context:,}, batch {r['batch']}", *table(rows, right=range(6))]
    if not all(m["fits"] for m in r["memory"]):
        tp = r["smallest_tp_that_fits"]
        fits = f"it fits from tp = {tp}" if tp else "it fits at no tp up to 1,024"
        lines.append(f"  WARNING: does not fit where it says SHORT; {fits}. Below is what it would do if it did.")
    return lines


def _latency(r: dict[str, Any]) -> list[str]:
    rows = [["tp", "TPOT ms", *TERMS, "ideal", "tok/s", "gain", "TTFT ms"]]
    for step in r["latency"]:
        rows.append(
            [
                str(step["tp"]),
                f"{step['tpot_ms']:.2f}",
                *(f"{step['terms_ms'][name]:.2f}" for name in TERMS),
                f"{step['ideal_ms']:.2f}",
                f"{step['tokens_per_s']:.1f}",
                "" if step["gain"] is None else f"{step['gain']:+.0%}",
                f"{step['ttft_ms']:.1f}",
            ]
        )
    e = r["efficiency"]
    link = f"latencies of {r['chip']['interconnect']['name']} x {e['collective_scale']:g}"
    if r["collectives_measured"]:
        link = "measured collectives"
    shares = f"{e['bandwidth']:.0%} of B, {e['compute']:.0%} of C"
    overheads = f"{e['layer_overhead_s'] * 1e6:g} us a layer, {e['step_overhead_s'] * 1e6:g} us a step"
    context = r["latency"][0]["context"]
    return [
        f"Predicted latency at context {context:,}, in ms: TPOT is the sum of the six columns after it",
        *table(rows, right=range(len(rows[0]))),
        f"  verdict: {r['verdict']['text']}",
        *([f"  doubling from {r['doubling']['from']}: {r['doubling']['text']}"] if r["doubling"] else []),
        "  weights, kv   bytes a device reads / (B x bandwidth efficiency)",
        "  compute       arithmetic that does not hide behind those reads, at C x compute efficiency",
        "  collectives   2 all-reduces a layer, 1 a step, 1 gather to sample; more past the KV heads",
        "  layers, step  overhead paid once a layer and once a step, at every tp",
        "  ideal         max(bytes / B, work / C), nothing else: no step is faster",
        "  gain          TPOT in the row above / TPOT here - 1; under 10 % more devices stop paying",
        f"  TTFT          a prefill of {number_of(r['prefill']['prompt_len'], 'token')} a sequence, with no queue",
        f"  assumed       {shares}, {overheads}; {link}",
    ]


def _notes(r: dict[str, Any]) -> list[str]:
    notes = [f"note: {note}" for note in r["chip"]["notes"]]
    joined = r["chip"]["interconnect"]["max_devices"]
    if joined and (most := r["latency"][-1]["tp"]) > joined:
        link = r["chip"]["interconnect"]["name"]
        notes.append(f"note: {link} joins {joined:,} devices; tp = {most:,} is priced as if it joined them all")
    trained = r["max_position_embeddings"]
    if (longest := r["ceiling"][-1]["context"]) > trained:
        notes.append(f"note: context {longest:,} is beyond the {trained:,} positions the model states")
    return notes
