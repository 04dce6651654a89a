"""Writes the measured parts of docs/backward.md from the newest results: `python -m docs._site.backward`."""

from __future__ import annotations

from pathlib import Path

from docs._site.blocks import replaced
from docs._site.controls import control
from docs._site.timed import device, link, timed
from flashlab.files import replace_file
from flashlab.measure import results

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "backward.md"
NAME = "flash3_backward"
PEERS = {
    "fa4": "FlashAttention-4", "cudnn": "cuDNN", "sdpa-flash": "SDPA's flash", "flash2_backward": "`flash2_backward`",
}  # fmt: skip


def newest(kind: str) -> results.Result | None:
    """The newest result of a kind that this algorithm is part of."""
    found = results.find(ROOT / results.FOLDER, kind=kind, algorithm=NAME)
    return found[-1] if found else None


def counted(of: results.Result | None) -> str:
    """How many counts are equal, of which algorithms."""
    if of is None:
        return "This was not measured yet.\n"
    rows = [row for launch in of.data["launches"] for row in launch["rows"] if row["verdict"] in ("equal", "differs")]
    equal = sum(row["verdict"] == "equal" for row in rows)
    names = ", ".join(f"`{name}`" for name in of.algorithms)
    return (
        f"{names}, on an {device(of)}:\n{equal:,} of {len(rows):,} counts are equal in tile program, formula and "
        f"hardware counters, over\n{len(of.data['launches'])} launches ({link(of)}).\n"
    )


def blocks() -> dict[str, str]:
    return {
        "counted": counted(newest("counters")),
        "timed": timed(newest("bench"), PEERS),
        "control": control("mbarrier-of-a-warp"),
    }


if __name__ == "__main__":
    replace_file(PAGE, replaced(PAGE.read_text(encoding="utf-8"), "backward", blocks()))
