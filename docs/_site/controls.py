"""What compute-sanitizer says of a kernel that is right, for a page."""

from __future__ import annotations

from pathlib import Path

from docs._site.timed import device, link
from flashlab.measure import results
from flashlab.measure.planted import CONTROLS

ROOT = Path(__file__).resolve().parents[2]


def control(name: str) -> str:
    """How often a control is reported, by the newest result that has it."""
    what = CONTROLS[name].what
    for of in reversed(results.find(ROOT / results.FOLDER, kind="sanitizers")):
        for row in of.data["rows"]:
            if row["target"] == name:
                found = f"{row['tool']}: {row['findings']} reports" if row["findings"] else f"{row['tool']}: no report"
                return f"*`{name}`*: {what}. {found} ({device(of)}, {of.content['date'][:10]}, {link(of)}).\n"
    return f"*`{name}`*: {what}. This was not measured yet.\n"
