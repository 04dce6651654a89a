"""Ranks over time: as a figure, and as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flashlab.parallel.times import ParallelTimeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "lines"]

COLOURS = {"forward": "#004a80", "backward": "#00785a", "waits": "#e6b355", "sends": "#b5361c"}


def draw(timelines: Mapping[str, ParallelTimeline]) -> Figure:
    """A panel for each timeline, all on one scale of milliseconds: what each rank computes, when it waits, and what it sends."""
    from flashlab.views.plots import Picture

    heights = [max(2, each.counts.ranks) for each in timelines.values()]
    figure: Any = Picture(figsize=(10, 1.2 + 0.6 * len(heights) + 0.22 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for (name, found), panel in zip(timelines.items(), panels, strict=True):
        for what, colour in COLOURS.items():
            low, height = (0.2, 0.2) if what == "sends" else (-0.4, 0.55)
            for rank in range(found.counts.ranks):
                own = [span for span in found.spans if (span.rank, span.what) == (rank, what)]
                bars = [(1e3 * span.begin, 1e3 * (span.end - span.begin)) for span in own]
                panel.broken_barh(bars, (rank + low, height), facecolors=colour, edgecolor="white", linewidth=0.3)
        panel.set_title(f"{name}: {found.seconds * 1e3:.4g} ms, ranks compute {found.busy:.0%} of it", loc="left")
        panel.set_ylabel("rank")
        panel.set_ylim(found.counts.ranks - 0.4, -0.6)
        panel.set_yticks(range(0, found.counts.ranks, max(1, found.counts.ranks // 8)))
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("milliseconds, predicted")
    shown = {span.what for found in timelines.values() for span in found.spans}
    handles = [_patch(what) for what in COLOURS if what in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _patch(what: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=COLOURS[what], label=what)


def lines(found: ParallelTimeline, width: int = 64, seconds: float | None = None) -> Sequence[str]:
    """A line for each rank: `#` where it computes for most of the time, `.` where it waits, a blank where it does neither.

    `seconds` is what `width` characters stand for; left out, the timeline's own.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=8, len_q=65536, head_dim=128, dtype="bfloat16", causal=True)
    >>> found = fl.parallel.timeline(fl.parallel.count("ring", p, ranks=4, layout="contiguous"))
    >>> print("\\n".join(lines(found, 40)))
    rank 0  ######.............
    rank 1  #################
    rank 2  #############################
    rank 3  ########################################
    """
    whole = seconds or found.seconds
    shown = list[str]()
    for rank in range(found.counts.ranks):
        own = [span for span in found.spans if span.rank == rank and span.what != "sends"]
        cells = ""
        for i in range(width):
            begin, end = i * whole / width, (i + 1) * whole / width
            share = {"computes": 0.0, "waits": 0.0}
            for span in own:
                part = min(end, span.end) - max(begin, span.begin)
                if part > 0:
                    share["waits" if span.what == "waits" else "computes"] += part
            most = max(share, key=lambda what: share[what])
            cells += " " if share[most] < (end - begin) / 2 else "#" if most == "computes" else "."
        shown.append(f"rank {rank:<2} {cells}".rstrip())
    return shown
