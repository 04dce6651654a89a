"""Writes the measured part of docs/decoding.md from the newest result: `python -m docs._site.decoding`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docs._site.agreed import agreed
from docs._site.blocks import replaced
from docs._site.controls import control
from docs._site.timed import device, link
from flashlab.base.files import replace_file
from flashlab.measure import results
from studies import division
from studies import timed as studies

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "decoding.md"


RUNGS = ("flash_decoding_1", "flash_decoding_2", "flash_decoding", "paged_1", "paged")
"""What the ladder is measured with: three rungs, and two over pages."""


def ladder() -> str:
    """A table of the rungs beside a plain read of the same bytes."""
    found = results.find(ROOT / results.FOLDER, kind="decoding", algorithm=RUNGS[0])
    of = next((r for r in reversed(found) if r.data["algorithm"] == RUNGS[0] and r.condition is None), None)
    if of is None:
        return "This was not measured yet.\n"
    return f"{rungs(of.data['rows'])}\n\n*{device(of)}, {of.content['date'][:10]}: `{of.content['command']}` ({link(of)}).*\n"


def rungs(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row per cell: the µs of a plain read, and those of each rung with the share that the read is of them."""
    header = ["batch", "heads", "keys", "plain read, µs", *(f"`{name}`" for name in RUNGS)]

    def each(row: Mapping[str, Any], name: str) -> str:
        took = row["microseconds"].get(name)
        return "–" if took is None else f"{took:,.1f} ({row['microseconds']['read'] / took:.0%})"

    cells = [
        (f"{row['batch']}", f"{row['heads']}, {row['kv_heads']}", f"{row['len_kv']:,}", f"{row['microseconds']['read']:,.1f}",
         *(each(row, name) for name in RUNGS))
        for row in rows
    ]  # fmt: skip
    return results.markdown_table(header, cells)


def timed(algorithm: str, condition: str | None = None, *, on: str | None = None) -> str:
    """A table of an algorithm's cells beside others' kernels and a plain read: the newest, of one GPU or of any."""
    found = results.find(ROOT / results.FOLDER, kind="decoding", algorithm=algorithm, device=on)
    own = (r for r in reversed(found) if r.data["algorithm"] == algorithm and r.content["condition"] == condition)
    of = next(own, None)
    if of is None:
        return "This was not measured yet.\n"
    table = studies.DECODING.table(studies.DECODING.schema.model_validate(of.data))
    return f"{table}\n\n*{device(of)}, {of.content['date'][:10]}: `{of.content['command']}` ({link(of)}).*\n"


def runs(algorithm: str) -> str:
    """Drawn shapes: the way in which an algorithm divides keys, and the best way. The headline, then the table."""
    found = results.find(ROOT / results.FOLDER, kind="runs", algorithm=algorithm)
    of = next((r for r in reversed(found) if r.data["algorithm"] == algorithm), None)
    if of is None:
        return "This was not measured yet.\n"
    data = division.RUNS.data(of)
    said = f"*{device(of)}, {of.content['date'][:10]}: `{of.content['command']}` ({link(of)}).*"
    return f"{division.RUNS.headline(data)}.\n\n{division.RUNS.table(data)}\n\n{said}\n"


def appended() -> str:
    """A table of appends beside others' kernels."""
    found = results.find(ROOT / results.FOLDER, kind="append", algorithm="flash3_paged")
    own = (r for r in reversed(found) if r.data["algorithm"] == "flash3_paged" and r.condition is None)
    of = next(own, None)
    if of is None:
        return "This was not measured yet.\n"
    table = studies.APPEND.table(studies.APPEND.schema.model_validate(of.data))
    return f"{table}\n\n*{device(of)}, {of.content['date'][:10]}: `{of.content['command']}` ({link(of)}).*\n"


def blocks() -> dict[str, str]:
    return {
        "ladder": ladder(),
        "timed": timed("flash_decoding", on="h200"),
        "runs": runs("flash_decoding"),
        "paged": timed("paged", on="h100"),
        "paged_h200": timed("paged", on="h200"),
        "quantized": timed("paged", "quantized", on="h100"),
        "quantized_h200": timed("paged", "quantized", on="h200"),
        "features": timed("paged", "features"),
        "cascade": timed("cascade", on="h200"),
        "append": appended(),
        "control": control("barrier-arrive"),
        "agreed": agreed(("flash_decoding", "paged", "flash3_paged", "cascade")),
    }


if __name__ == "__main__":
    replace_file(PAGE, replaced(PAGE.read_text(encoding="utf-8"), "decoding", blocks()))
