"""The plots: bytes by tensor and level, growth with the length, roofline, sweeps.

Every function returns a matplotlib figure. It is not registered with pyplot, and a notebook shows it by itself. The
colours are Okabe and Ito's, which colour-blind readers can tell apart. Tensors have those of `palette`. Bytes are in
binary units, as in all output for people.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter, NullLocator

from flashlab.base.files import replace_file
from flashlab.views import axes, figures, palette
from simulator.catalogue import CATALOGUE, of
from simulator.counts import Counts

__all__ = ["LENGTHS", "Picture", "bytes_by_tensor", "lengths", "roofline", "save", "sweep"]

LENGTHS = (4 * 1024, 128 * 1024, 1024 * 1024)
"""Lengths in tokens at which `lengths` shows what grows with the square of the length."""

_BLACK, _ORANGE, _SKY, _GREEN, _YELLOW, _BLUE, _RED, _PURPLE = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
_GREY = "#8C8C8C"
_INK, _FAINT = "#222222", "#D9D9D9"

# Colours by an algorithm's place in the catalogue, among those of its operation. Algorithms that follow each other have
# shades of one colour.
_BY_PLACE = (
    _RED, _ORANGE, _SKY, _BLUE, "#B7E1D4", "#7FC9B0", "#40B08E", _GREEN, _PURPLE, "#003F63", "#FAF6C6", "#F5ED84", _YELLOW,
)  # fmt: skip
_OTHERS = (_BLACK, _GREY, "#B8A900", "#8B5A2B", "#5B5EA6")
_MARKERS = "osD^vPX*"

_TENSORS = {
    "q": "Q",
    "k": "K",
    "v": "V",
    "s": "S, scores",
    "p": "P, probabilities",
    "o": "O, float32 accumulator",
    "out": "out",
    "stat": "row statistics (l, m, LSE, …)",
    "other": "other tensors",
}
"""What kinds of tensors are called. A gradient is called as what it is of."""

_STYLE: Any = {
    "font.family": ["DejaVu Sans"], "font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": _GREY,
    "axes.labelcolor": _INK, "text.color": _INK, "xtick.color": _INK, "ytick.color": _INK, "axes.axisbelow": True,
    "grid.color": _FAINT, "grid.linewidth": 0.7, "legend.frameon": False, "hatch.linewidth": 0.6,
}  # fmt: skip


def _style() -> AbstractContextManager[None]:
    return matplotlib.rc_context(_STYLE)  # pyright: ignore[reportUnknownMemberType]


class Picture(Figure):
    """A matplotlib figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        return _png(self)


def save(figure: Any, path: str | Path) -> Path:
    """Write a figure to a file in the format of the path's ending (PNG without one). Its folder has to be there.

    Raises `UsageError` for an unknown ending or a path that can't be written.
    """
    from simulator.errors import UsageError

    target = Path(path)
    form = target.suffix.removeprefix(".").lower() or "png"
    known = figure.canvas.get_supported_filetypes()
    if form not in known:
        raise UsageError("path", str(path), f"a name that ends in one of {', '.join(sorted(known))}")
    content = io.BytesIO()
    with _style():
        figure.savefig(content, format=form, dpi=150, facecolor="white")
    return replace_file(target, content.getvalue())


def bytes_by_tensor(counts: Sequence[Counts]) -> Figure:
    """Draw the bytes that each algorithm requests from HBM, and moves between SRAM and registers, stacked by tensor."""
    with _style():
        figure: Any = Picture(figsize=(11.5, 2.0 + 0.85 * len(counts)), layout="constrained")
        used: dict[str, str] = {}
        panels: Any = figure.subplots(1, 2)
        for ax, level in zip(panels, ("hbm", "sram"), strict=True):
            _stacked_bars(ax, counts, level, used)
        panels[0].set_title("HBM: bytes requested")
        panels[1].set_title("SRAM: bytes read and written")
        handles: list[Any] = [Patch(facecolor=colour, edgecolor="white", label=label) for label, colour in used.items()]
        handles.append(
            Line2D(
                [], [], color=_INK, marker="d", markerfacecolor="white", label="read from DRAM (estimate, low to high)"
            )
        )
        figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), fontsize=9)
        figure.suptitle(_says(counts), x=0.01, ha="left", fontsize=10)
    return figure


def _stacked_bars(ax: Any, counts: Sequence[Counts], level: str, used: dict[str, str]) -> None:
    sums = {
        (c.algorithm, way): sum(getattr(t, f"{level}_{way}") for t in c.by_tensor.values())
        for c in counts
        for way in ("read", "write")
    }
    most = max([*sums.values(), 1])
    size, unit = axes.unit_of(most)
    positions: list[float] = []
    labels: list[str] = []
    for row, c in enumerate(counts):
        for place, way in enumerate(("read", "write")):
            y = row * 2.5 + place
            left = 0.0
            for (label, colour), n in _pieces(c, level, way).items():
                used.setdefault(label, colour)
                ax.barh(y, n / size, left=left, height=0.82, color=colour, edgecolor="white", linewidth=0.6)
                left += n / size
            ax.text(left + 0.012 * most / size, y, figures.nbytes(sums[c.algorithm, way]), va="center", fontsize=8.5)
            positions.append(y)
            labels.append(f"{c.algorithm}  read" if way == "read" else "written")
        if level == "hbm":
            d, y = c.dram, row * 2.5 - 0.58
            ax.plot([d.low / size, d.high / size], [y, y], color=_INK, linewidth=1.2, solid_capstyle="butt")
            ax.plot([d.estimate / size], [y], color=_INK, marker="d", markerfacecolor="white", markersize=6)
    ax.set_yticks(positions, labels)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(counts) * 2.5 - 0.9, -0.95)
    ax.set_xlim(0, 1.16 * most / size)
    ax.set_xlabel(unit)
    ax.grid(axis="x")


def _pieces(counts: Counts, level: str, way: str) -> dict[tuple[str, str], int]:
    """Bytes by (label, colour) of the legend, in the legend's order."""
    pieces = dict.fromkeys(_TENSORS, 0)
    for name, tensor in counts.by_tensor.items():
        pieces[palette.kind_of(name)] += getattr(tensor, f"{level}_{way}")
    return {(_TENSORS[kind], palette.LIGHT[kind]): n for kind, n in pieces.items() if n}


def lengths(counts: Sequence[Counts]) -> Figure:
    """Draw the same heads at several lengths: the HBM taken, beside what the device has, and the bytes requested."""
    with _style():
        tokens = sorted({c.problem.len_q for c in counts})
        figure: Any = Picture(figsize=(11.5, 1.9 + 0.27 * len(counts) + 0.3 * len(tokens)), layout="constrained")
        panels: Any = figure.subplots(1, 2, sharey=True)
        rows: list[tuple[float, Counts]] = []
        headings: list[tuple[float, str]] = []
        y = 0.0
        for n in tokens:
            headings.append((y, f"{axes.tokens(n)} tokens"))
            for c in (c for c in counts if c.problem.len_q == n):
                y += 1
                rows.append((y, c))
            y += 1.5
        _dots(panels[0], [(at, c, c.hbm.peak) for at, c in rows])
        _dots(panels[1], [(at, c, c.hbm.read + c.hbm.write + c.hbm.atomic) for at, c in rows])
        panels[0].set_title("HBM taken at once (log scale)")
        panels[1].set_title("HBM requested, read and written (log scale)")
        for ax in panels:
            ax.set_yticks([at for at, _ in rows], [c.algorithm for _, c in rows])
            ax.tick_params(axis="y", length=0)
            ax.set_ylim(y - 0.6, -0.7)
            for at, text in headings:
                ax.text(0.012, at, text, transform=ax.get_yaxis_transform(), weight="bold", va="center", fontsize=9.5)
        if counts:
            _memory_limit(panels[0], counts[0])
            figure.suptitle(_says(counts, length=False), x=0.01, ha="left", fontsize=10)
    return figure


def _dots(ax: Any, rows: Sequence[tuple[float, Counts, int]]) -> None:
    low = min([n for _, _, n in rows if n] or [1])
    high = max([n for _, _, n in rows] or [1])
    floor, top = 2.0 ** (math.floor(math.log2(low)) - 2), 2.0 ** (math.ceil(math.log2(max(high, 2))) + 1)
    top = max(top, floor * 64) * (top / floor) ** 0.14  # room for the text right of the last dot
    ax.set_xscale("log", base=2)
    ax.set_xlim(floor, top)
    for y, c, n in rows:
        colour = _colour(c.algorithm)
        ax.plot([floor, max(n, floor)], [y, y], color=colour, linewidth=1.6, alpha=0.55, solid_capstyle="butt")
        ax.plot([max(n, floor)], [y], color=colour, marker="o", markersize=7)
        text = ax.annotate(
            figures.nbytes(n), (max(n, floor), y), (8, 0), textcoords="offset points", va="center", fontsize=8.5
        )
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85})
    exponents = range(math.ceil(math.log2(floor)), math.floor(math.log2(top)) + 1)
    ax.set_xticks([2.0**e for e in exponents if e % 10 == 0])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(axes.formatter("hbm_peak"))
    ax.grid(axis="x")


def _memory_limit(ax: Any, c: Counts) -> None:
    memory = c.device.memory
    right = ax.get_xlim()[1]
    if memory < right:
        ax.axvspan(memory, right, color=_FAINT, alpha=0.45, linewidth=0, zorder=0)
    ax.axvline(memory, color=_INK, linewidth=1.3, linestyle=(0, (4, 2)))
    beyond = math.log(right / memory) > 0.35 * math.log(right / ax.get_xlim()[0])
    text = f"memory of {c.device.title or c.device.name}: {figures.nbytes(memory)}"
    ax.annotate(
        text,
        (memory, 0),
        (6 if beyond else -6, 0),
        textcoords="offset points",
        va="center",
        ha="left" if beyond else "right",
        fontsize=8.5,
    )


def roofline(counts: Sequence[Counts]) -> Figure:
    """Draw the device's roofline and where each algorithm lies: by the bytes that it requests, and by DRAM traffic.

    All counts must be of one device and one dtype.
    """
    with _style():
        figure: Any = Picture(figsize=(9.5, 4.4 + 0.38 * len(counts)), layout="constrained")
        panels: Any = figure.subplots(2, 1, sharex=True, height_ratios=[3.4, 0.6 + 0.38 * len(counts)])
        roof, rows = panels
        if not counts:
            return figure
        device, dtype = counts[0].device, counts[0].problem.dtype
        ridge, peak = device.ridge(dtype), device.flops(dtype)
        points = [(c, c.intensity, _dram_intensity(c)) for c in counts]
        seen = [x for _, *pair in points for x in pair if x]
        left, right = min([*seen, ridge / 8]) / 3, max([*seen, ridge * 2]) * 4
        xs = [left, ridge, right]
        roof.loglog(xs, [min(peak, x * device.bandwidth) for x in xs], color=_INK, linewidth=2)
        roof.fill_between(xs, [min(peak, x * device.bandwidth) for x in xs], 1, color=_FAINT, alpha=0.35, linewidth=0)
        roof.set_ylim(left * device.bandwidth / 2, peak * 3.2)
        roof.set_xlim(left, right)
        roof.set_ylabel("attainable FLOP/s")
        roof.yaxis.set_major_formatter(axes.formatter("flops"))
        for axis in (roof.xaxis, roof.yaxis, rows.xaxis):
            axis.set_minor_formatter(NullFormatter())
        roof.set_title(f"Roofline of {device.title or device.name}, {dtype}")
        roof.annotate(
            f"arithmetic: {figures.count(peak)}FLOP/s", (ridge, peak), (8, 8), textcoords="offset points", fontsize=9
        )
        middle = math.sqrt(left * ridge)
        roof.annotate(
            f"DRAM: {device.bandwidth / 1e9:,.0f} GB/s",
            (middle, middle * device.bandwidth),
            (-8, 6),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=9,
        )
        for row, (c, requested, dram) in enumerate(points):
            colour = _colour(c.algorithm)
            rows.plot([requested, dram], [row, row], color=colour, linewidth=2, alpha=0.6)
            rows.plot(
                [requested], [row], marker="o", color=colour, markerfacecolor="white", markersize=8, markeredgewidth=1.8
            )
            rows.plot([dram], [row], marker="o", color=colour, markersize=8)
            hidden = sum(abs(math.log((x or 1) / (dram or 1))) < 0.05 for _, _, x in points[row + 1 :])
            roof.plot(
                [dram],
                [min(peak, dram * device.bandwidth)],
                marker="o",
                color=colour,
                markersize=9 + 5 * hidden,
                markeredgecolor="white",
                linestyle="none",
            )
        for ax in panels:
            ax.axvline(ridge, color=_GREY, linewidth=1, linestyle=(0, (4, 2)))
            ax.grid(which="major")
        roof.annotate(
            f"ridge: {ridge:,.0f} FLOPs/byte",
            (ridge, roof.get_ylim()[0]),
            (5, 6),
            fontsize=8.5,
            textcoords="offset points",
            color=_INK,
        )
        rows.set_yticks(range(len(points)), [c.algorithm for c in counts])
        rows.set_ylim(len(points) - 0.4, -0.6)
        rows.set_xlabel("FLOPs per byte")
        rows.xaxis.set_major_formatter(axes.formatter("intensity"))
        handles = [
            Line2D(
                [],
                [],
                color=_INK,
                marker="o",
                markerfacecolor="white",
                linestyle="none",
                label="per byte requested of HBM",
            ),
            Line2D(
                [],
                [],
                color=_INK,
                marker="o",
                linestyle="none",
                label="per byte of DRAM traffic (estimate): the L2 serves the rest",
            ),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9)
        figure.suptitle(_says(counts), x=0.01, ha="left", fontsize=10)
    return figure


def _dram_intensity(c: Counts) -> float:
    """FLOPs per byte of DRAM traffic: the estimate of its reads, and all bytes that are written or added atomically."""
    moved = c.dram.estimate + c.hbm.write + c.hbm.atomic
    return (c.flops.matmul + c.flops.other + c.exp) / moved if moved else 0.0


def sweep(rows: Sequence[Mapping[str, Any]], x: str, y: str, series: Sequence[str]) -> Figure:
    """Draw `y` over `x`, one line per combination of the keys in `series`. Rows that don't fit are marked on the
    axis."""
    with _style():
        values = _distinct(row[x] for row in rows)
        numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        width = 9.5 if numeric else max(9.5, 1.1 * len(values))  # inches: names need room
        figure: Any = Picture(figsize=(width, 5), layout="constrained")
        ax: Any = figure.subplots()
        if numeric:
            values = sorted(values)
        logarithmic = numeric and len(values) > 1 and values[0] > 0 and values[-1] >= 4 * values[0]
        place = {value: value if numeric else index for index, value in enumerate(values)}
        lines = _distinct(tuple(row[key] for key in series) for row in rows)
        rest = _distinct(tuple(row[key] for key in series if key != "algorithm") for row in rows)
        styles = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
        missing: list[float] = []
        for index, line in enumerate(lines):
            named = dict(zip(series, line, strict=True))
            mine = [row for row in rows if tuple(row[key] for key in series) == line]
            if numeric:
                mine.sort(key=lambda row: row[x])
            other = rest.index(tuple(value for key, value in named.items() if key != "algorithm"))
            ours = x != "algorithm" and ("algorithm" in series or len(lines) == 1)
            figures = [math.nan if row[y] is None else row[y] for row in mine]
            missing += [place[row[x]] for row in mine if row[y] is None]
            label = ", ".join(axes.said(key, value) for key, value in named.items()) or str(mine[0]["algorithm"])
            below = min(
                2, len(rest) - 1 - other
            )  # draw it wider, so that it stays visible under later lines with the same figures
            aside = 0 if numeric else (index - (len(lines) - 1) / 2) * min(0.12, 0.8 / len(lines))
            ax.plot(
                [place[row[x]] + aside for row in mine],
                figures,
                marker=_MARKERS[other % len(_MARKERS)],
                color=_colour(mine[0]["algorithm"]) if ours else _OTHERS[index % len(_OTHERS)],
                linestyle=styles[other % len(styles)] if numeric else "none",  # no line between names
                linewidth=1.8 + below,
                markersize=6 + 2.5 * below if numeric else 8,
                markeredgecolor="white",
                markeredgewidth=0.8,
                label=label + (" (does not fit)" if all(map(math.isnan, figures)) else ""),
            )
        if logarithmic:
            ax.set_xscale("log", base=2)
        if numeric:
            ax.set_xticks(values if len(values) <= 12 else values[:: -(-len(values) // 12)])
            ax.xaxis.set_minor_locator(NullLocator())
            ax.xaxis.set_major_formatter(axes.formatter(x))
        else:
            ax.set_xticks(range(len(values)), [str(value) for value in values])
            ax.set_xlim(-0.6, len(values) - 0.4)
        axes.scale_of(ax, y, [row[y] for row in rows if row[y] is not None])
        if missing:
            at = sorted(set(missing))
            ax.plot(at, [0.015] * len(at), color=_INK, marker="x", linestyle="none", clip_on=False,
                    transform=ax.get_xaxis_transform(), label="some or all do not fit in SRAM")  # fmt: skip
        ax.set_xlabel(axes.AXES.get(x, x.replace("_", " ")))
        ax.grid()
        if len(lines) > 1 or missing:
            figure.legend(loc="outside right upper", fontsize=8.5)
        only = "" if "algorithm" in series or x == "algorithm" or not rows else f", {rows[0]['algorithm']}"
        ax.set_title(f"{axes.AXES.get(y, y)}{only}")
    return figure


def _says(counts: Sequence[Counts], *, length: bool = True) -> str:
    """One line that says what was counted."""
    if not counts:
        return ""
    device = counts[0].device
    parts = [figures.problem(counts[0].problem, length=length)]
    tiles = _distinct(str(c.tile) for c in counts)
    parts.append(f"tile {tiles[0]}" if len(tiles) == 1 else "each algorithm's own tile")
    return ", ".join([*parts, device.title or device.name])


def _colour(algorithm: str) -> str:
    if row := CATALOGUE.get(algorithm):
        place = list(of(row.operation)).index(algorithm)
        return _BY_PLACE[place % len(_BY_PLACE)]
    return _OTHERS[sum(algorithm.encode()) % len(_OTHERS)]


def _distinct(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))


def _png(figure: Any) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110, facecolor="white")
    return content.getvalue()
