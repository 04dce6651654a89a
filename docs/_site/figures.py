"""The site's figures of what was measured. Each is drawn from a file in docs/results, with a table of what it shows."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from flashlab.lessons.show import Shown
from flashlab.measure.results import Result

STYLE: Any = {
    "svg.hashsalt": "flashlab",
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "grid.color": "#D9D9D9",
    "legend.frameon": False,
}
LOOKS = [("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "D"), ("#CC79A7", "^"), ("#E69F00", "v"), ("#000000", "P")]
"""The colour and the marker of each series, so that readers need not rely on colour alone."""


def of(result: Result) -> Shown | None:
    """The figure of a result, or None if it has none."""
    draw = FIGURES.get(result.kind)
    return None if draw is None else draw(result.data)


def speed(data: Mapping[str, Any]) -> Shown | None:
    """TFLOP/s over the length, in the first dtype measured: one panel per head dim and mask, one line per kernel.

    Odd cells have more than their length apart: none.
    """
    if any(row.get("shape") for row in data["rows"]):
        return None
    rows = [row for row in data["rows"] if row["dtype"] == data["rows"][0]["dtype"]]
    dims, masks = (sorted({row[key] for row in rows}) for key in ("head_dim", "causal"))
    kernels = list(dict.fromkeys(row["peer"] or data["algorithm"] for row in rows))
    table = [
        [
            row["head_dim"],
            "causal" if row["causal"] else "none",
            row["length"],
            row["peer"] or data["algorithm"],
            row["tflops"],
        ]
        for row in rows
    ]
    top = max(row[4] for row in table)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.2, 2.6 * len(dims) + 0.4), layout="constrained")
        panels = figure.subplots(len(dims), len(masks), sharex=True, sharey=True, squeeze=False)
        for (i, dim), (j, causal) in ((a, b) for a in enumerate(dims) for b in enumerate(masks)):
            panel = panels[i][j]
            for kernel, (colour, marker) in zip(kernels, LOOKS, strict=False):
                points = sorted(
                    (row[2], row[4])
                    for row in table
                    if row[:2] == [dim, "causal" if causal else "none"] and row[3] == kernel
                )
                panel.plot(*zip(*points, strict=True), color=colour, marker=marker, label=kernel)
            panel.set(title=f"head dim {dim}, {'causal' if causal else 'no mask'}", xscale="log", ylim=(0, 1.05 * top))
            lengths = sorted({row["length"] for row in rows})
            panel.set_xticks(lengths, [f"{n:,}" for n in lengths], minor=False)
            panel.minorticks_off()
            panel.grid()
        figure.supxlabel(f"tokens per sequence, {rows[0]['dtype']}", fontsize=10)
        figure.supylabel("TFLOP/s", fontsize=10)
        names = panels[0][0].get_legend_handles_labels()
        figure.legend(*names, loc="outside upper center", ncols=len(kernels))
    return Shown(_svg(figure), ["head dim", "mask", "tokens", "kernel", "TFLOP/s"], table)


def dram(data: Mapping[str, Any]) -> Shown | None:
    """The bytes that each launch read from DRAM, over those that it can't do without, in problems over 1 MB: a dot a launch."""
    judged = [launch["dram"] for launch in data["launches"] if launch["dram"] and launch["dram"]["judged"]]
    table = sorted([found["low"], found["measured"], found["high"]] for found in judged)
    if not table:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.2, 4.0), layout="constrained")
        axes = figure.subplots()
        (colour, marker), (other, another) = LOOKS[:2]
        axes.plot(
            [low for low, _, _ in table],
            [high / low for low, _, high in table],
            another,
            color=other,
            markersize=4,
            alpha=0.6,
            label="requested",
        )
        axes.plot(
            [low for low, _, _ in table],
            [read / low for low, read, _ in table],
            marker,
            color=colour,
            markersize=4,
            label="read from DRAM, measured",
        )
        axes.axhline(1.0, color="#555555", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="compulsory bytes of a launch", ylabel="times the compulsory bytes")
        axes.grid()
        figure.legend(loc="outside upper center", ncols=2)
    columns = ["compulsory bytes", "read from DRAM", "requested"]
    return Shown(_svg(figure), columns, table)


def _svg(figure: Figure) -> str:
    content = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(content, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return content.getvalue()


def clients(data: Mapping[str, Any]) -> Shown | None:
    """Of training runs the losses, a line a run; of training steps the tokens per second, a bar for each shape and attention."""
    return _losses(data["runs"]) if data.get("runs") else _steps(data["speeds"]) if data.get("speeds") else None


def _losses(runs: Sequence[Mapping[str, Any]]) -> Shown:
    names = list(dict.fromkeys(r["attention"] for r in runs))
    table = [
        [r["attention"], r["seed"], step, loss]
        for r in runs
        for step, loss in enumerate(r["losses"], 1)
        if step % 20 == 0
    ]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.2, 3.8), layout="constrained")
        axes = figure.subplots()
        for name, (colour, _) in zip(names, LOOKS, strict=False):
            for i, r in enumerate(r for r in runs if r["attention"] == name):
                label = f"{name}, {sum(x['attention'] == name for x in runs)} runs" if not i else None
                style = "-" if name == names[0] else ":"
                steps = range(1, len(r["losses"]) + 1)
                axes.plot(steps, r["losses"], style, color=colour, linewidth=1.2, alpha=0.8, label=label)
        axes.set(xlabel="training step", ylabel="loss, nats per token")
        axes.grid()
        axes.legend()
    return Shown(_svg(figure), ["attention", "seed", "step", "loss"], table)


def _steps(speeds: Sequence[Mapping[str, Any]]) -> Shown:
    names = list(dict.fromkeys(r["attention"] for r in speeds))
    shapes = list(dict.fromkeys((r["batch"], r["context"]) for r in speeds))
    table = [[r["batch"], r["context"], r["attention"], r["tokens_per_s"]] for r in speeds]
    found = {(r["attention"], r["batch"], r["context"]): r["tokens_per_s"] for r in speeds}
    width = 0.8 / len(names)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.2, 3.6), layout="constrained")
        axes = figure.subplots()
        for n, (name, (colour, _)) in enumerate(zip(names, LOOKS, strict=False)):
            at = [i + (n - (len(names) - 1) / 2) * width for i in range(len(shapes))]
            heights = [found.get((name, *shape), 0) / 1e3 for shape in shapes]
            bars = axes.bar(at, heights, 0.94 * width, color=colour, label=name)
            axes.bar_label(bars, [f"{x:.0f}" for x in heights], fontsize=8)
        axes.set_xticks(range(len(shapes)), [f"{batch} × {context:,}" for batch, context in shapes])
        axes.set(xlabel="windows × tokens of each", ylabel="thousand tokens per second")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=len(names))
    return Shown(_svg(figure), ["windows", "tokens", "attention", "tokens/s"], table)


FIGURES: dict[str, Callable[[Mapping[str, Any]], Shown | None]] = {
    "bench": speed, "ladder": speed, "counters": dram, "clients": clients,
}  # fmt: skip
"""The function that draws a result, by its kind."""
