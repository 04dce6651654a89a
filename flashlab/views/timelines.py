"""Draws a timeline: the units of one SM over time, coloured by the step that uses them."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from flashlab.views.plots import Picture
from simulator.time.prediction import UNIT_NAMES, Timeline

_COLOURS = (
    "#0072B2",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#E69F00",
    "#CC79A7",
    "#F0E442",
    "#444444",
    "#8C8C8C",
    "#B8A900",
)


def draw(timeline: Timeline) -> Figure:
    """Draw one row per unit in use and one per warp or warpgroup, over microseconds from the first block's start."""
    events, scale = timeline.events, 1e6 / timeline.clock
    units = [unit for unit in UNIT_NAMES if any(event.unit == unit for event in events)]
    actors = list(dict.fromkeys(event.actor for event in events))
    rows = {("unit", unit): i for i, unit in enumerate(units)} | {
        ("actor", actor): i + len(units) + 0.5 for i, actor in enumerate(actors)
    }
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(dict.fromkeys(e.name for e in events))}
    figure: Any = Picture(figsize=(11.5, 1.6 + 0.34 * len(rows)), layout="constrained")
    ax: Any = figure.subplots()
    for event in events:
        span = [(event.start * scale, (event.end - event.start) * scale)]
        for row in (rows["unit", event.unit], rows["actor", event.actor]):
            ax.broken_barh(span, (row - 0.38, 0.76), facecolors=colours[event.name], linewidth=0)
    ax.set_yticks(list(rows.values()), [*(UNIT_NAMES[unit] for unit in units), *actors])
    ax.invert_yaxis()
    ax.set_xlabel("microseconds from the start of the SM's first block")
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(f"{timeline.algorithm}: {timeline.longest.name} on one SM of {timeline.device.name}", loc="left")
    handles = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)), frameon=False)
    return figure
