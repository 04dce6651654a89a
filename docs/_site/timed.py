"""A table of a benchmark's cells for a page: how fast an algorithm is, beside its peers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashlab.measure import results

DOCS = Path(__file__).resolve().parents[1]


def timed(of: results.Result | None, peers: Mapping[str, str]) -> str:
    """Its speed in each cell, and the ratios to `peers`, whose titles they map to."""
    if of is None:
        return "This was not measured yet.\n"
    cells: dict[tuple[Any, ...], dict[str | None, Any]] = {}
    for row in of.data["rows"]:
        cells.setdefault((row["dtype"], row["head_dim"], row["causal"], row["length"]), {})[row["peer"]] = row
    rows = [
        (
            f"{dtype} × {dim}", "causal" if causal else "full", f"{length:,}", f"{found[None]['tflops']:.0f}",
            *(f"{found[peer]['ratio']:.2f} ×" if peer in found else "–" for peer in peers),
        )
        for (dtype, dim, causal, length), found in cells.items()
    ]  # fmt: skip
    header = ["dtype × head dim", "mask", "tokens", "TFLOP/s", *peers.values()]
    said = [
        f"{min(ratios):.2f} to {max(ratios):.2f} × as fast as {title} (median {statistics.median(ratios):.2f} ×)"
        for peer, title in peers.items()
        if (ratios := ratios_to(of, peer))
    ]
    table = results.markdown_table(header, rows)
    return f"{device(of)}, 16,384 tokens: {', '.join(said)} ({link(of)}).\n\n{table}\n"


def ratios_to(of: results.Result, peer: str) -> list[float]:
    """The peer's time over the kernel's, in each cell."""
    return [row["ratio"] for row in of.data["rows"] if row["peer"] == peer]


def device(of: results.Result) -> str:
    """The GPU's name."""
    return str(of.content["device"]["name"])


def link(of: results.Result) -> str:
    """A link to the data, from a page in docs. It says so if the data are of older kernels."""
    return f"[data]({of.path.relative_to(DOCS).as_posix()}){age(of)}"


def age(of: results.Result) -> str:
    """Which of a result's kernels have changed since, in a few words, or nothing.

    >>> age(results.Result(Path("a/b/c"), {"algorithms": []}))
    ''
    """
    if not of.older:
        return ""
    which = "" if of.older == of.algorithms else f" ({', '.join(of.older)})"
    return f" ○ of older kernels{which}"
