"""The race of traces on one clock, which counts the bytes that each has asked HBM for: a frame in a notebook, and docs/race.md."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from flashlab.player.page import attribute
from flashlab.views import palette
from simulator.errors import UsageError
from simulator.trace import Trace

__all__ = ["Race", "data", "style"]

_HERE = Path(__file__).resolve().parent
_HEIGHT = 480
_THEMES = """
:root { --color-background-border: #d8dde4; --color-background-secondary: #f1f3f6; --color-foreground-primary: #1b2027;
  --color-foreground-muted: #56606e; --color-brand-primary: #0a5fb4; --ground: #ffffff; }
@media (prefers-color-scheme: dark) { :root:not(:has(body[data-theme="light"])) { DARK } }
:root:has(body[data-theme="dark"]) { DARK }
body { margin: 0; font: 15px/1.5 system-ui, sans-serif; color: var(--color-foreground-primary); background: var(--ground); }
.race section { margin: 0; }
@media (max-width: 500px) { .race h2 + p { display: none; } }
""".replace(
    "DARK",
    "--color-background-border: #333d48; --color-background-secondary: #1a2027; --color-foreground-primary: #e7ebf0; "
    "--color-foreground-muted: #a3aebb; --color-brand-primary: #6cb4f5; --ground: #131416;",
)
"""Colours of a page that has no theme. The page around a frame says which one it has."""
_TOLD = """
addEventListener("message", ({ source, data }) => {
  if (source === parent && ["auto", "light", "dark"].includes(data?.theme)) document.body.dataset.theme = data.theme;
});
document.getElementById("race").replaceChildren(race(RACE, "On one clock"));
"""


def data(traces: Mapping[str, Trace]) -> dict[str, Any]:
    """What the race shows of traces by their titles: their requests in order, and the kinds of tensors, which have colours."""
    first = next(iter(traces.values()))
    p, (rows, cols) = first.problem, first.tile
    programs = [{"name": trace.algorithm, "title": title, "moves": moves(trace)} for title, trace in traces.items()]
    return {
        "problem": f"{p['len_q']} queries and keys, head dim {p['head_dim']}, {p['dtype']}, tiles of {rows} × {cols}",
        "programs": programs,
        "kinds": {tensor: palette.kind_of(tensor) for each in programs for _, tensor, _ in each["moves"]},
    }


def moves(trace: Trace) -> list[tuple[str, str, int]]:
    """What a program requests of HBM, in its order: the step, the tensor and the bytes."""
    return [
        (event.step, each.tensor, n)
        for event in trace.events
        for each in event.transfers
        for what, n in each.nbytes.items()
        if what.startswith("hbm")
    ]


def style() -> str:
    """The race's style sheet."""
    text = _asset("race.css")
    for name, colours in (("light", palette.LIGHT), ("dark", palette.DARK)):
        text = text.replace(f"{{{{{name}}}}}", palette.variables(colours))
    return text


def script(shown: Mapping[str, Any]) -> str:
    """The race's script after its data, as JavaScript. A page that is opened as a file may load that, and no JSON."""
    told = json.dumps(shown, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    return f"const RACE = {told};\n\n{_asset('race.js')}"


class Race:
    """A race of traces by their titles. Jupyter and VS Code show it by themselves.

    Raises `UsageError` for fewer than two.
    """

    def __init__(self, traces: Mapping[str, Trace]) -> None:
        if len(traces) < 2:
            raise UsageError("traces", f"{len(traces)}", "two or more, by title")
        self.traces = dict(traces)

    def page(self) -> str:
        """The page as text. It loads nothing."""
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(self._title)}</title>'
            f"<style>{_THEMES}{style()}</style><body><main id=race class=race></main>"
            f"<script>{script(data(self.traces))}{_TOLD}</script></body></html>"
        )

    def frame(self) -> str:
        """What a notebook shows: the page in an iframe that may only run its script."""
        return (
            f'<iframe title="{html.escape(self._title)}" sandbox="allow-scripts" width="100%" height="{_HEIGHT}" '
            f'style="border: 0; width: 100%; height: {_HEIGHT}px" srcdoc="{attribute(self.page())}"></iframe>'
        )

    _repr_html_ = frame

    @property
    def _title(self) -> str:
        return f"A race on one clock: {' and '.join(self.traces)}"

    def __repr__(self) -> str:
        return f"<race of {' and '.join(self.traces)}>"


@cache
def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
