"""Pictures of the numbers that the scripts print. Needs matplotlib, which is an extra.

Functions take the JSON-ready dictionaries of the scripts and write a PNG; none touches pyplot, so no
display and no global state is involved.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from model.wording import number_of
from roofline.errors import RooflineError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by colour-blind readers too.
BLUE, ORANGE, GREEN, SKY, RED, PURPLE, BLACK, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#56B4E9",
    "#D55E00",
    "#CC79A7",
    "#000000",
    "#BBBBBB",
)
TERM_COLOURS = {
    "weights": BLUE,
    "kv": SKY,
    "compute": GREEN,
    "collectives": RED,
    "layers": ORANGE,
    "step": PURPLE,
    "rest": GREY,
}
TERM_LABELS = {
    "weights": "weights",
    "kv": "KV cache",
    "compute": "compute",
    "collectives": "collectives",
    "layers": "overhead, layers",
    "step": "overhead, step",
    "rest": "everything else",
}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure in inches. Raises RooflineError saying what to install when matplotlib is absent."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RooflineError("plots need matplotlib: pip install matplotlib, or this project's extra `plot`") from error
    return Figure(figsize=(width, height), layout="constrained")


def png(figure: Figure) -> bytes:
    """A figure as the content of a PNG file."""
    content = io.BytesIO()
    figure.savefig(content, dpi=130, format="png")
    return content.getvalue()


def draw_scaling(report: dict[str, Any]) -> Figure:
    """Two panels of the report of `scripts.bench_scaling`: a step by device count, and its terms."""
    figure = new_figure(13, 5.2)
    lines, bars = figure.subplots(1, 2)
    _scaling_lines(lines, report["rows"])
    _scaling_terms(bars, report["rows"])
    slice_note = f", {report['num_layers']} of {report['model_layers']} layers" if report["sliced"] else ""
    figure.suptitle(
        f"{report['model']}{slice_note} in {report['dtype']} on {report['device']['kind']}, batch {report['batch']}, "
        f"context {report['context']}, all-reduce by {report['collective']}\n{report['verdict']}",
        fontsize=11,
    )
    return figure


def _scaling_lines(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Measured, ideal and predicted time of a step; the share of collectives is shaded under the measured line."""
    counts = [row["tp"] for row in rows]
    measured = [row["measured_ms"] for row in rows]
    without = [row["measured_ms"] - row["terms_ms"]["collectives"] for row in rows]
    axes.fill_between(counts, without, measured, color=RED, alpha=0.25, lw=0, label="collectives (by removal)")
    axes.errorbar(
        counts,
        measured,
        yerr=[
            [row["measured_ms"] - min(row["samples_ms"]) for row in rows],
            [max(row["samples_ms"]) - row["measured_ms"] for row in rows],
        ],
        color=BLUE,
        marker="o",
        lw=2,
        capsize=4,
        label="measured (median, range)",
    )
    axes.plot(counts, [row["ideal_ms"] for row in rows], color=BLACK, marker="_", ls="--", label="ideal")
    known = [row for row in rows if row["predicted_ms"] is not None]
    if known:
        axes.plot(
            [row["tp"] for row in known],
            [row["predicted_ms"] for row in known],
            color=ORANGE,
            marker="D",
            ls=":",
            lw=2,
            label="predicted",
        )
    beyond = [row["tp"] for row in rows if row["functional_only"]]
    if beyond:
        axes.axvspan(
            min(beyond) * 0.85, max(counts) * 1.15, color="grey", alpha=0.12, label="functional only", zorder=0
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts], minor=False)
    axes.set(
        xlabel="devices (tp)",
        ylabel="time per output token (ms)",
        title="A decode step by device count",
        ylim=(0, _tallest(rows)),
        xlim=(min(counts) * 0.85, max(counts) * 1.15),
    )
    axes.grid(alpha=0.3, lw=0.4)
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.14), ncols=4, fontsize=8, frameon=False)


def _tallest(rows: list[dict[str, Any]]) -> float:
    """The top of both panels, so that equal heights are equal times."""
    return 1.2 * max(max(*row["samples_ms"], row["measured_ms"], row["predicted_ms"] or 0) for row in rows)


def _scaling_terms(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Where the measured step went, with the speed-up over the smallest count."""
    names = [str(row["tp"]) for row in rows]
    stacked_bars(axes, names, [row["terms_ms"] for row in rows])
    for index, row in enumerate(rows):
        axes.annotate(
            f"{row['measured_ms']:.3g} ms\n{row['speedup']:.2f}x",
            (index, row["measured_ms"]),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    axes.set(
        xlabel="devices (tp)",
        ylabel="time per output token (ms)",
        title="Where the measured step went",
        ylim=(0, _tallest(rows)),
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8.5)


def draw_memory_wall(report: dict[str, Any]) -> Figure:
    """Three panels: the roofline, the decay of the ceiling, and the latency by device count."""
    figure = new_figure(18, 5.4)
    roofline, decay, latency = figure.subplots(1, 3)
    _roofline(roofline, report)
    _decay(decay, report)
    _latency(latency, report)
    figure.suptitle(
        f"{report['name']} on {report['chip']['name']}: weights {report['weight_dtype']}, "
        f"cache {report['kv_dtype']}, batch {report['batch']}"
    )
    return figure


def _roofline(axes: Axes, report: dict[str, Any]) -> None:
    """Attainable rate against intensity, with prefill and decode placed where they run."""
    compute, bandwidth = report["chip"]["flops_per_s"], report["chip"]["bytes_per_s"]
    ridge = report["ridge_flops_per_byte"]
    points = [
        ("decode, context 0", report["decode"]["intensity"], ORANGE, "o"),
        (f"prefill, {number_of(report['prefill']['prompt_len'], 'token')}", report["prefill"]["intensity"], GREEN, "s"),
    ]
    last = report["ceiling"][-1]
    if last["context"]:
        points.insert(1, (f"decode, context {last['context']:,}", last["intensity"], RED, "^"))
    low = min(0.3, *(intensity / 3 for _, intensity, _, _ in points))
    high = max(10 * ridge, *(intensity * 3 for _, intensity, _, _ in points))
    axes.loglog(
        [low, ridge, high],
        [bandwidth * low / 1e12, compute / 1e12, compute / 1e12],
        color=BLUE,
        lw=2,
        label="min(C, B x I)",
    )
    axes.axvline(ridge, color="grey", ls=":", lw=1.2, label=f"ridge C / B = {ridge:.0f} op/byte")
    for label, intensity, colour, marker in points:
        rate = min(compute, bandwidth * intensity)
        text = f"{label}: {intensity:,.3g} op/byte" if intensity < 1000 else f"{label}: {intensity:,.0f} op/byte"
        axes.plot(intensity, rate / 1e12, marker, color=colour, ms=9, mec="black", ls="none", label=text)
    axes.set(
        xlabel="arithmetic intensity (operations per byte)",
        ylabel="attainable rate (TFLOP/s)",
        title="Roofline of one device",
        xlim=(low, high),
    )
    axes.grid(alpha=0.3, which="both", lw=0.4)
    axes.legend(loc="lower right", fontsize=8.5)


def _decay(axes: Axes, report: dict[str, Any]) -> None:
    """The decode ceiling as the cache grows."""
    batch, bandwidth = report["batch"], report["chip"]["bytes_per_s"]
    weights = report["weight_bytes"] + report["weight_scale_bytes"]
    rows = report["ceiling"]
    reach = max(row["context"] for row in rows) or 1_000
    contexts = [reach * i / 200 for i in range(201)]
    curve = [batch * bandwidth / (weights + batch * s * report["kv_bytes_per_token"]) for s in contexts]
    axes.plot(contexts, curve, color=BLUE, lw=2, label="batch x B / (W + batch x s x kv)")
    axes.axhline(curve[0], color="grey", ls=":", lw=1.2, label=f"batch x B / W = {curve[0]:.1f} tokens/s")
    axes.plot(
        [row["context"] for row in rows],
        [row["tokens_per_s"] for row in rows],
        "o",
        color=ORANGE,
        mec="black",
    )
    for row in rows[-1:]:
        axes.annotate(
            f"{row['tokens_per_s']:.1f}",
            (row["context"], row["tokens_per_s"]),
            xytext=(-6, -14),
            textcoords="offset points",
            ha="right",
        )
    axes.set(
        xlabel="context (positions in the cache)",
        ylabel="ceiling (tokens/s)",
        title="Decode ceiling of one device by context",
        ylim=(0, curve[0] * 1.25),
    )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")
    axes.grid(alpha=0.3, lw=0.4)
    axes.legend(loc="upper right", fontsize=8.5)


def _latency(axes: Axes, report: dict[str, Any]) -> None:
    """Stacked terms of a decode step for each device count, with the ideal beside them."""
    rows = report["latency"]
    stacked_bars(axes, [str(row["tp"]) for row in rows], [row["terms_ms"] for row in rows])
    for index, row in enumerate(rows):
        axes.annotate(
            f"{row['tpot_ms']:.3g} ms",
            (index, row["tpot_ms"]),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
        axes.plot(
            [index - 0.38, index + 0.38],
            [row["ideal_ms"]] * 2,
            color=BLACK,
            lw=1.8,
            label=None if index else "ideal",
        )
    axes.set(
        xlabel="devices (tp)",
        ylabel="time per output token (ms)",
        title=f"Predicted decode step at context {rows[0]['context']:,}",
        ylim=(0, max(row["tpot_ms"] for row in rows) * 1.1),
    )
    # Outside, because the bars may be of one height and leave no free corner.
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8.5)


def stacked_bars(axes: Axes, names: list[str], terms_ms: list[dict[str, float]]) -> None:
    """One bar for each name, its terms stacked in order; terms that are zero everywhere are left out."""
    bottoms = [0.0] * len(names)
    for term, colour in TERM_COLOURS.items():
        heights = [terms.get(term, 0.0) for terms in terms_ms]
        if not any(heights):
            continue
        axes.bar(names, heights, bottom=bottoms, width=0.62, color=colour, label=TERM_LABELS[term])
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    axes.grid(axis="y", alpha=0.3, lw=0.4)
    axes.set_axisbelow(True)


def draw_serving(reports: list[dict[str, Any]]) -> Figure:
    """Throughput (full lines) and goodput (broken) against the load, for reports of `scripts.bench_serving`."""
    figure = new_figure(8.5, 5.6)
    axes = figure.subplots()
    load = "rate" if "rate" in reports[0]["points"][0] else "concurrency"
    tallest = 0.0
    for report, colour in zip(reports, (BLUE, RED, GREEN, ORANGE, PURPLE, SKY), strict=False):
        points = sorted((point for point in report["points"] if load in point), key=lambda point: point[load])
        at = [point[load] for point in points]
        whole = [point["output_tokens_per_s"] for point in points]
        axes.plot(at, whole, color=colour, marker="o", lw=2, label=f"{report['label']}: throughput")
        tallest = max([tallest, *whole])
        if points and all(point["goodput"] for point in points):
            good = [point["goodput"]["output_tokens_per_s"] for point in points]
            axes.plot(at, good, color=colour, marker="D", ls="--", lw=2, label=f"{report['label']}: goodput")
    targets = reports[0]["points"][0]["goodput"] or {}
    told = [
        f"{name} at most {targets[key]:g} ms"
        for name, key in (("TTFT", "ttft_target_ms"), ("TPOT", "tpot_target_ms"))
        if targets.get(key) is not None
    ]
    title = "Throughput and goodput" if told else "Throughput"
    axes.set(
        xlabel="offered load (requests/s)" if load == "rate" else "requests open at once",
        ylabel="output tokens/s",
        title=f"{title} by load" + (f"\ngood: {' and '.join(told)}" if told else ""),
        xlim=(0, None),
        ylim=(0, (tallest or 1) * 1.1),
    )
    axes.grid(alpha=0.3, lw=0.4)
    axes.legend(fontsize=9)
    return figure


def draw_serving_peers(report: dict[str, Any]) -> Figure:
    """Two panels of the report of `scripts.bench_serving_peers`: throughput by load, and a step by its rows."""
    figure = new_figure(12, 5)
    loads, steps = figure.subplots(1, 2)
    widths = list(dict.fromkeys(row["width"] for row in report["rows"]))
    for width, colour in zip(widths, (BLUE, ORANGE, GREEN, PURPLE, RED), strict=False):
        own = [row for row in report["rows"] if row["width"] == width]
        at = [row["concurrency"] for row in own]
        for key, name, style in (("ours", "shardstream", "o-"), ("peer", "llama.cpp", "s--")):
            rates = [row[f"{key}_tokens_per_s"] for row in own]
            loads.plot(at, rates, style, color=colour, lw=2, label=f"{name}, {width}")
        taken = [step for step in report["steps"] if step["width"] == width]
        at = [step["rows"] for step in taken]
        for key, name, style in (
            ("measured_ms", "measured", "o-"),
            ("predicted_ms", "predicted", "x--"),
            ("weights_ms", "one read of the weights", ":"),
        ):
            steps.plot(at, [step[key] for step in taken], style, color=colour, lw=2, label=f"{name}, {width}")
    loads.set(xlabel="requests open at once", ylabel="output tokens/s", title="Throughput", xlim=(0, None))
    steps.set(xlabel="rows of a step", ylabel="ms", title="A step of shardstream", xlim=(0, None))
    for axes in (loads, steps):
        axes.set_ylim(0, None)
        axes.grid(alpha=0.3, lw=0.4)
        axes.legend(fontsize=9)
    return figure
