"""Emulator beside GPU, for a page: what both counted of the same launches, and how far their outputs lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from docs._site.timed import device, link
from flashlab.measure import results
from flashlab.measure.agreement import REPORTED

ROOT = Path(__file__).resolve().parents[2]


def agreed(algorithms: Sequence[str]) -> str:
    """A row per algorithm, by the newest result that has it."""
    rows = []
    for name in algorithms:
        found = results.find(ROOT / results.FOLDER, kind="agreement", algorithm=name)
        of = next((x for x in reversed(found) if x.algorithms == (name,)), None)
        if of is None:
            rows.append(f"| {name} | not measured yet | | | | |")
            continue
        data, summary = of.data, of.data["summary"]
        judged = [row for row in data["rows"] if row["what"] not in REPORTED]
        equal = sum(row["emulator"] == row["gpu"] for row in judged)
        cells = [
            name,
            f"{summary['problems']}",
            f"{equal:,} of {len(judged):,}",
            f"{summary['worst_output']:.2f}",
            f"{summary['findings']}",
            f"{device(of)}, {of.content['date'][:10]}, {link(of)}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    head = "| algorithm | problems | counts equal | outputs apart, of the rule's bound | findings | measured |"
    return "\n".join((head, "| --- " * 6 + "|", *rows)) + "\n"
