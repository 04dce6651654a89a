"""Builds one self-contained HTML page from this package's template, style and scripts, and the packed traces.

Nothing in a trace can become markup. Its data is compressed and in base64, and the page shows it as text only. A
content security policy lets only this package's own script run, and lets nothing be loaded.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from flashlab.player.pack import THINNINGS, Thinning, document, values
from flashlab.player.words import GLOSSARY, REGISTERS
from flashlab.views import palette
from simulator.memory import check_memory
from simulator.trace import Trace

__all__ = ["Part", "attribute", "build"]

_ASSETS = Path(__file__).resolve().parent / "assets"
_SCRIPTS = (
    "trace.js",
    "clock.js",
    "dom.js",
    "draw.js",
    "beside.js",
    "panels.js",
    "values.js",
    "code.js",
    "view.js",
    "player.js",
)


_EMPTY, _STEP = 45_000_000, 800  # bytes that any page takes while it is made, and that each step adds


class Part(NamedTuple):
    """A trace on a page, and the .cu to show beside it (None: its algorithm's own)."""

    trace: Trace
    kernel: str | Path | None = None


def build(parts: list[Part], *, step: int, limit: int, cut: bool, escaped: bool = False) -> str:
    """The page as text, of at most `limit` bytes where possible.

    A page that is too large keeps fewer values, and with `cut` also fewer steps at the end. It opens at `step`, counted
    from 1. With `escaped`, the limit holds for the page as the value of an HTML attribute.
    """
    steps = sum(len(part.trace.events) for part in parts)
    check_memory(f"a page of {steps:,} steps", page_bytes(steps))
    documents = [document(*part) for part in parts]
    packed = [_packed(each) for each in documents]
    settings = {"step": step, "limit": limit, "glossary": GLOSSARY, "registers": REGISTERS, "colours": palette.KINDS}
    title = " and ".join(part.trace.algorithm for part in parts)

    def page(traces: list[str], thinning: Thinning, steps: int | None) -> str:
        told = _packed({**settings, "thinning": [thinning.rows, thinning.cols, thinning.vector]})
        kept = [_compressed(values(part.trace.events[:steps], thinning)) for part in parts]
        return _page(title, [told, *(blob for pair in zip(traces, kept, strict=True) for blob in pair)])

    def over(text: str) -> int:
        return len((attribute(text) if escaped else text).encode()) - limit

    best = ""
    for thinning in _worth_trying(parts, limit):
        best = page(packed, thinning, None)
        if over(best) <= 0:
            return best
    steps = max(len(part.trace.events) for part in parts)
    while cut and over(best) > 0 and steps > 1:
        size = sum(map(len, packed))  # what grows with the steps; aim a little below what would just fit
        steps = max(1, int(steps * min(0.95, 0.98 - over(best) / size)))
        packed = [_packed(_first(each, steps)) for each in documents]
        best = page(packed, THINNINGS[-1], steps)
    return best


def page_bytes(steps: int) -> int:
    """About how many bytes it takes to make a page of that many steps, beside the traces."""
    return _EMPTY + _STEP * steps


def attribute(text: str) -> str:
    """Text, escaped as the value of an HTML attribute between double quotes."""
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _worth_trying(parts: list[Part], limit: int) -> list[Thinning]:
    """The thinnings without those that stay far over the limit however well their values compress."""
    shapes = [x for part in parts for event in part.trace.events for x in event.values.values()]
    sizes = {thinning: sum(rows * cols for rows, cols in map(thinning.shape, shapes)) for thinning in THINNINGS}
    return [thinning for thinning in THINNINGS if sizes[thinning] < 2 * limit]


def _first(document: dict[str, Any], steps: int) -> dict[str, Any]:
    """The document with only the first steps."""
    launches = [{**each, "stop": min(each["stop"], steps)} for each in document["launches"] if each["start"] < steps]
    blocks = [[i, j, start, min(stop, steps), of] for i, j, start, stop, of in document["blocks"] if start < steps]
    return {**document, "events": document["events"][:steps], "launches": launches, "blocks": blocks}


def _page(title: str, blobs: list[str]) -> str:
    """The page from its title and its packed data: the settings, then the document and the values of each trace."""
    script = "\n".join(['"use strict";', *(_asset(name) for name in _SCRIPTS)])
    colours = {"light": palette.variables(palette.LIGHT), "dark": palette.variables(palette.DARK)}
    style = _filled(_asset("player.css"), colours)
    filled = {
        "title": html.escape(f"{title}, step by step"),
        "policy": f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        "style": style,
        "script": script,
        "data": "\n".join(f'<script type="text/plain" class="data">{blob}</script>' for blob in blobs),
    }
    return _filled(_asset("player.html"), filled)


def _filled(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], text)


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    """A source expression that allows exactly this inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _packed(document: dict[str, Any]) -> str:
    return _compressed(json.dumps(document, separators=(",", ":")).encode())


def _compressed(blob: bytes) -> str:
    return base64.b64encode(gzip.compress(blob, 9, mtime=0)).decode()
