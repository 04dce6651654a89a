"""Writes the measured parts of docs/triton.md from the newest results: `python -m docs._site.triton`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docs._site.blocks import replaced
from flashlab.files import replace_file
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
    said = f"{_device(of)}: {equal} of {len(hbm)} counts of HBM's bytes are the formula's ({_link(of)})."
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


def timed(of: results.Result | None) -> str:
    """Its speed, and the ratios to others."""
    if of is None:
        return "This was not measured yet.\n"
    cells: dict[tuple[Any, ...], dict[str | None, Any]] = {}
    for row in of.data["rows"]:
        cells.setdefault((row["dtype"], row["head_dim"], row["causal"], row["length"]), {})[row["peer"]] = row
    rows = [
        (
            f"{dtype} × {dim}", "causal" if causal else "full", f"{length:,}", f"{found[None]['tflops']:.0f}",
            *(f"{found[peer]['ratio']:.2f} ×" if peer in found else "–" for peer in PEERS),
        )
        for (dtype, dim, causal, length), found in cells.items()
    ]  # fmt: skip
    header = ["dtype × head dim", "mask", "tokens", "TFLOP/s", *PEERS.values()]
    said = [
        f"{min(ratios):.2f} to {max(ratios):.2f} × as fast as {title} (median {statistics.median(ratios):.2f} ×)"
        for peer, title in PEERS.items()
        if (ratios := ratios_to(of, peer))
    ]
    return f"{_device(of)}, 16,384 tokens: {', '.join(said)} ({_link(of)}).\n\n{results.markdown_table(header, rows)}\n"


def ratios_to(of: results.Result, peer: str) -> list[float]:
    """The peer's time over the kernel's, in each cell."""
    return [row["ratio"] for row in of.data["rows"] if row["peer"] == peer]


def _device(of: results.Result) -> str:
    return str(of.content["device"]["name"])


def _link(of: results.Result) -> str:
    return f"[data]({of.path.relative_to(PAGE.parent).as_posix()})"


def blocks() -> dict[str, str]:
    return {"counted": counted(newest("counters")), "timed": timed(newest("bench"))}


if __name__ == "__main__":
    replace_file(PAGE, replaced(PAGE.read_text(encoding="utf-8"), "triton", blocks()))
