"""Figures that carry their numbers, drawings, and explorers with sliders, for the lessons.

A figure is drawn from a table and goes along with it, so that what a notebook shows can be checked without looking.
"""

from __future__ import annotations

import base64
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from html import escape
from importlib import import_module
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator, NullFormatter

from flashlab.views import figures, palette
from simulator import Device, Trace
from simulator.errors import unknown

TABLE = "application/vnd.flashlab.table+json"
"""The MIME type of a figure's table: `{"columns": [name, …], "rows": [[…], …]}`."""

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_STYLE: Any = {
    "svg.hashsalt": "flashlab",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#D9D9D9",
    "legend.frameon": False,
    "axes.titlelocation": "left",
}

_styled = matplotlib.rc_context(_STYLE)  # pyright: ignore[reportUnknownMemberType]


class Shown:
    """A figure with the table that it was drawn from; a notebook shows the picture, a terminal the table."""

    def __init__(self, svg: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.svg, self.columns, self.rows = svg, list(columns), [list(row) for row in rows]

    def __repr__(self) -> str:
        cells = [self.columns, *([_cell(x) for x in row] for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        return "\n".join("  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)) for row in cells)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {
            "image/svg+xml": self.svg,
            "text/plain": repr(self),
            TABLE: {"columns": self.columns, "rows": self.rows},
        }


@_styled
def lines(
    x: Mapping[str, Sequence[float]],
    y: Mapping[str, Sequence[float | None]],
    *,
    title: str = "",
    of: str = "",
    log: bool = True,
    nbytes: bool = False,
) -> Shown:
    """One line for each series of `y` over the one series of `x`; None leaves a gap. `of` names the y axis
    (where there is one series only, its name does).

    >>> print(lines({"tokens": [1, 2]}, {"bytes": [4, 16]}))
    tokens  bytes
         1      4
         2     16
    """
    ((name, xs),) = x.items()
    figure, ax = _axes()
    for i, (label, ys) in enumerate(y.items()):
        points = [float("nan") if n is None else n for n in ys]
        ax.plot(xs, points, color=_COLOURS[i % 7], marker=_MARKERS[i % 7], label=label, linewidth=1.8, markersize=5)
    if log:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2 if nbytes else 10)
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_xticks(list(xs), [f"{n:,}" for n in xs])
    if nbytes and log:
        ax.yaxis.set_major_formatter(_ticks(figures.nbytes))
    elif nbytes:
        _byte_ticks(ax.yaxis, max(n for ys in y.values() for n in ys if n is not None))
    ax.set(xlabel=name, ylabel=of or (next(iter(y)) if len(y) == 1 else ""), title=title)
    ax.grid()
    if len(y) > 1:
        ax.legend()
    return Shown(_svg(figure), [name, *y], list(zip(xs, *y.values(), strict=True)))


@_styled
def bars(labels: Sequence[str], parts: Mapping[str, Sequence[float]], *, title: str = "", of: str = "bytes") -> Shown:
    """A bar for each label, stacked of `parts`.

    >>> print(bars(["fused"], {"read": [2], "written": [1]}))
           read  written
    fused     2        1
    """
    figure, ax = _axes(1.3 + 0.42 * len(labels))
    left = [0.0] * len(labels)
    for i, (part, sizes) in enumerate(parts.items()):
        ax.barh(range(len(labels)), sizes, left=left, color=_colour(part, i), label=part, edgecolor="white", height=0.7)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for row, total in enumerate(left):
        ax.text(total, row, f" {figures.nbytes(total) if of == 'bytes' else figures.count(total)}", va="center")
    ax.set_yticks(range(len(labels)), labels)
    ax.set_xlim(0, 1.2 * max([*left, 1]))
    ax.invert_yaxis()
    if of == "bytes":
        _byte_ticks(ax.xaxis, max(left))
    else:
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_major_formatter(_ticks(figures.count))
    ax.set(title=title)
    ax.grid(axis="x")
    if len(parts) > 1:
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(parts))
    return Shown(_svg(figure), ["", *parts], list(zip(labels, *parts.values(), strict=True)))


def _colour(part: str, place: int) -> str:
    """That of the tensor which a part is named for, as in "S, P", or else the next one."""
    tensor = part.partition(",")[0].lower()
    return palette.LIGHT[tensor] if tensor in palette.LIGHT else _COLOURS[place % 7]


@_styled
def roofline(device: Device, dtype: str, points: Mapping[str, float]) -> Shown:
    """The roof of a device, and programs under it: FLOPs per byte moved, and the FLOP/s attainable with that.

    >>> from flashlab import DEVICES
    >>> roofline(DEVICES["a100-40"], "float16", {"sum": 1 / 6}).columns
    ['program', 'FLOPs per byte', 'attainable FLOP/s', 'waits for']
    """
    peak, ridge = device.flops(dtype), device.ridge(dtype)
    figure, ax = _axes(width=8.6)
    low, high = min([*points.values(), ridge]) / 4, max([*points.values(), ridge]) * 6
    ax.plot([low, ridge, high], [low * device.bandwidth, peak, peak], color="black", linewidth=1.8)
    rows: list[tuple[str, float, float, str]] = []
    for i, (name, intensity) in enumerate(points.items()):
        attainable = min(peak, intensity * device.bandwidth)
        ax.plot(
            [intensity],
            [attainable],
            marker=_MARKERS[i % 7],
            color=_COLOURS[i % 7],
            markersize=8,
            linestyle="none",
            label=name,
        )
        rows.append((name, intensity, attainable, "memory" if intensity < ridge else "arithmetic"))
    ax.axvline(ridge, color="#8C8C8C", linestyle="--", linewidth=1)
    ax.text(ridge, low * device.bandwidth, f" ridge: {ridge:.0f} FLOPs per byte", fontsize=9)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(_ticks(figures.count))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set(xlabel="FLOPs per byte moved", ylabel="attainable FLOP/s", title=f"{device.title}, {dtype}")
    ax.grid()
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=9)
    return Shown(_svg(figure), ["program", "FLOPs per byte", "attainable FLOP/s", "waits for"], rows)


def explore(show: Callable[..., Any], **choices: Sequence[Any]) -> Any:
    """Sliders over the choices, which call `show(name=value, …)` and show what it prints and returns; they begin in the middle.

    Without ipywidgets, or where a page is being made (FLASHLAB_STATIC is set), what the middle looks like.
    """
    start = {name: values[len(values) // 2] for name, values in choices.items()}
    try:
        import ipywidgets  # pyright: ignore  (optional: the extra `lab`)
    except ImportError:
        ipywidgets = None
    if ipywidgets is None or os.environ.get("FLASHLAB_STATIC"):
        at = ", ".join(
            f"{name} = {value:,}" if isinstance(value, int) else f"{name} = {value}" for name, value in start.items()
        )
        print(f"[{at}; in Jupyter there are sliders here]")
        return show(**start)
    sliders: Any = {
        name: ipywidgets.SelectionSlider(
            options=list(values), value=start[name], description=name, continuous_update=False
        )
        for name, values in choices.items()
    }
    page: Any = ipywidgets.HTML()  # not Output, which stays empty under some versions of the kernel

    def update(_: Any = None) -> None:
        page.value = _html(show, {name: slider.value for name, slider in sliders.items()})

    for slider in sliders.values():
        slider.observe(update, names="value")
    update()
    return ipywidgets.VBox([*sliders.values(), page])


def _html(show: Callable[..., Any], values: Mapping[str, Any]) -> str:
    """What a call prints and returns: a figure with its table folded below, anything else as text."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        result = show(**values)
    text = printed.getvalue() + ("" if result is None or isinstance(result, Shown) else str(result))
    parts = [f"<pre>{escape(text)}</pre>"] if text else []
    if isinstance(result, Shown):
        picture = base64.b64encode(result.svg.encode()).decode("ascii")
        parts.append(f'<img alt="the figure; its table is below" src="data:image/svg+xml;base64,{picture}">')
        parts.append(f"<details><summary>As a table</summary><pre>{escape(repr(result))}</pre></details>")
    return "".join(parts)


def drawn(name: str) -> Shown:
    """A drawing of docs/in-pictures.md, computed anew, with the figures that it was drawn from.

    >>> drawn("banks")
              Eight rows of 128 bytes in the banks, before and after the swizzle
       plain                                                                   8
    swizzled                                                                   1
    """
    from flashlab.lessons.drawings import DRAWINGS

    if name not in DRAWINGS:
        raise unknown("drawing", name, list(DRAWINGS))
    drawing = DRAWINGS[name]()
    return Shown(drawing.svg, ["", drawing.title], list(drawing.figures.items()))


def step_through(*traces: Trace) -> Any:
    """The player of one trace or two; where a page is being made, the bytes that it would show, step by step."""
    if not os.environ.get("FLASHLAB_STATIC"):
        return import_module("flashlab").player(*traces)
    print("[in Jupyter there is a player here: every step, with its bytes, its values and its line of code]")
    return _bytes_so_far(*traces)


def _bytes_so_far(*traces: Trace) -> Shown:
    """What each trace has requested of HBM up to a step."""
    columns: dict[str, list[float | None]] = {}
    longest = max(len(trace.events) for trace in traces)
    steps = sorted({round(n * longest / 24) for n in range(25)})
    for trace in traces:
        moved = [
            sum(n for t in e.transfers for what, n in t.nbytes.items() if what.startswith("hbm")) for e in trace.events
        ]
        columns[trace.algorithm] = [sum(moved[:n]) if n <= len(moved) else None for n in steps]
    return lines({"steps": steps}, columns, of="bytes requested of HBM so far", log=False, nbytes=True)


def race(traces: Mapping[str, Trace]) -> Any:
    """The race of traces by their titles, on one clock. Where a page is being made, the bytes of each."""
    if not os.environ.get("FLASHLAB_STATIC"):
        from flashlab.lessons.race import Race

        return Race(traces)
    return _bytes_so_far(*traces.values())


def _axes(height: float = 3.6, width: float = 7.0) -> tuple[Any, Any]:
    figure: Any = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _ticks(text: Callable[[float], str]) -> FuncFormatter:
    def of(n: float, _: int | None) -> str:
        return text(n)

    return FuncFormatter(of)


def _byte_ticks(axis: Any, most: float) -> None:
    """About four ticks, at powers of two."""
    axis.set_major_locator(MultipleLocator(2.0 ** math.ceil(math.log2(max(most, 4) / 5))))
    axis.set_major_formatter(_ticks(figures.nbytes))


def _svg(figure: Any) -> str:
    content = io.StringIO()
    figure.savefig(content, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return content.getvalue()


def _cell(x: Any) -> str:
    if x is None:
        return "–"
    return f"{x:,}" if isinstance(x, int) else f"{x:.4g}" if isinstance(x, float) else str(x)
