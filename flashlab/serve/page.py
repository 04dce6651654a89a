"""The player of the pages: one HTML page that shows who owns which page of a pool, step by step. It loads nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashlab.serve.day import Day
from flashlab.views import palette
from simulator.errors import UsageError

__all__ = ["MOST_BLOCKS", "MOST_CHANGES", "page"]

MOST_BLOCKS = 8192
"""The most pages of a pool that a page shows."""
MOST_CHANGES = 300_000
"""The most changes of hands that a page has. It ends with the step that would have more."""
_ASSETS = Path(__file__).resolve().parent / "assets"


def page(day: Day, said: Sequence[str] = ()) -> str:
    """The page as text. Nothing that a trace says can become markup.

    `said` has a sentence for each step, where steps are calls of a manager and take no time. Raises `UsageError` for a day whose
    changes weren't kept, and for a pool of more pages than can be shown.

    >>> from flashlab.serve.blocks import KVCacheManager
    >>> from flashlab.serve.costs import Costs, Model
    >>> from flashlab.serve.day import serve
    >>> from flashlab.serve.scheduler import Scheduler
    >>> from flashlab.serve.traces import demo
    >>> day = serve(demo(), Scheduler(KVCacheManager(64, 8)), Costs(Model(), 8), changes=True)
    >>> text = page(day)
    >>> text.startswith("<!doctype html>"), re.search("src=|https://", text)
    (True, None)
    """
    if not any(step.changes for step in day.steps):
        raise UsageError("day", "a day without changes", "a day that kept them: serve(…, changes=True)")
    if day.num_blocks > MOST_BLOCKS:
        raise UsageError("num_blocks", day.num_blocks, f"at most {MOST_BLOCKS:,} pages, to be shown")
    steps, changes = list[dict[str, Any]](), 0
    sentences = iter(said)
    for step in day.steps:
        changes += len(step.changes)
        if changes > MOST_CHANGES:
            break
        names = (
            "begin",
            "seconds",
            "tokens",
            "launches",
            "nbytes",
            "waiting",
            "preempted",
            "blocks",
            "tables",
            "wasted",
        )
        flat = {
            "changes": [n for change in step.changes for n in change],
            "parts": [n for part in step.parts for n in part],
        }
        steps.append({name: getattr(step, name) for name in names} | flat | ({"said": next(sentences)} if said else {}))
    most = max(range(len(steps)), key=lambda i: steps[i]["tables"] - steps[i]["blocks"])
    data = {
        "blocks": day.num_blocks,
        "requests": [{"seconds": one.seconds} for one in day.requests],
        "steps": steps,
        "opens": 0 if said else most,  # where most is shared
    }
    cut = f" The first {len(steps):,} of {len(day.steps):,} steps are here." if len(steps) < len(day.steps) else ""
    about = (
        f"{len(day.requests):,} requests, {len(day.steps):,} steps, {day.num_blocks - 1:,} pages of {day.block_size} tokens, "
        f"{day.policy}, {day.backend}.{cut}"
    )
    if said:
        about = f"{len(day.steps):,} calls, {day.num_blocks - 1:,} pages of {day.block_size} tokens."
    m = day.model
    model = (
        f"Times are predicted: {m.layers} layers of attention with {m.heads} heads ({m.kv_heads} of K and V) × {m.head_dim}, "
        f"{m.dtype}{f', and {m.weights:,} bytes of weights' if m.weights else ''}; bytes over the rate in {day.source}."
    )
    if said:
        model = "Each step is a call of the manager."
    script, colours = (
        _asset("pages.js"),
        {"light": palette.variables(palette.LIGHT), "dark": palette.variables(palette.DARK)},
    )
    style = _filled(_asset("pages.css"), colours)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    told = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    filled = {"title": html.escape(f"Pages of {day.trace}"), "about": html.escape(about), "model": html.escape(model)}
    return _filled(_asset("pages.html"), filled | {"policy": policy, "style": style, "script": script, "data": told})


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _filled(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], text)


def _hash(content: str) -> str:
    """A source expression that allows exactly this inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
