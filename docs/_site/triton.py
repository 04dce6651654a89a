"""Writes the measured parts of docs/triton.md from the newest results: `python -m docs._site.triton`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from docs._site.blocks import replaced
from docs._site.timed import device, link, timed
from flashlab.base.files import replace_file
from flashlab.measure import results

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "triton.md"
NAME = "flash2_triton"
PEERS = {"sdpa-flash": "SDPA's flash", "flash2": "`flash2.cu`"}


def newest(kind: str) -> results.Result | None:
    """The newest result of a kind that is about this algorithm alone."""
    found = [r for r in results.find(ROOT / results.FOLDER, kind=kind, algorithm=NAME) if r.algorithms == (NAME,)]
    return found[-1] if found else None


def counted(of: results.Result | None) -> str:
    """What the counters say, beside the formula."""
    if of is None:
        return "This was not measured yet.\n"
    launches = of.data["launches"]
    checks = [row for launch in launches for row in launch["rows"]]
    hbm = [row for row in checks if row["what"] in ("hbm.read", "hbm.write")]
    equal = sum(row["verdict"] == "equal" for row in hbm)
    rows = [
        _ratios(f"{row}, {part}", row, [x for x in launches if chosen(x)]) for row in COUNTS for part, chosen in PARTS
    ]
    header = ["count, dtype", "formula", "measured", "measured : formula"]
    said = f"{device(of)}: {equal} of {len(hbm)} counts of HBM's bytes are the formula's ({link(of)})."
    return f"{said}\n\n{results.markdown_table(header, rows)}\n"


COUNTS = ("sram.read", "sram.write", "flops.matmul")
PARTS: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("16 bits", lambda launch: launch["problem"]["dtype"] != "float32"),
    ("float32", lambda launch: launch["problem"]["dtype"] == "float32"),
)
"""Which launches of the matrix a row sums up."""


def _ratios(title: str, what: str, launches: list[Any]) -> tuple[str, ...]:
    rows = [row for launch in launches for row in launch["rows"] if row["what"] == what and row["measured"] is not None]
    formula, measured = sum(row["formula"] for row in rows), sum(row["measured"] for row in rows)
    return (title, f"{formula:,}", f"{measured:,}", f"{measured / formula:.3f}" if formula and measured else "–")


def blocks() -> dict[str, str]:
    return {"counted": counted(newest("counters")), "timed": timed(newest("bench"), PEERS)}


if __name__ == "__main__":
    replace_file(PAGE, replaced(PAGE.read_text(encoding="utf-8"), "triton", blocks()))
