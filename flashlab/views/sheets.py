"""Results as tables, the same in a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from flashlab.views import figures, tables
from simulator.counts import Counts
from simulator.simulate import Run

if TYPE_CHECKING:
    from flashlab.views.comparison import Comparison
    from flashlab.views.sweeps import Sweep

__all__ = ["Sheet", "html", "of_comparison", "of_counts", "of_run", "of_sweep"]


class Sheet(NamedTuple):
    """A table as text: `left` columns say what a row is about, the others are figures."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    left: int = 1

    def print(self) -> None:
        """Print it, in parts where the terminal is narrow."""
        tables.table(self.title, self.columns, self.rows, left=self.left)

    def html(self) -> str:
        """A table of HTML, as a notebook shows it. A column without any text is left out."""
        shown = [i for i in range(len(self.columns)) if i < self.left or any(row[i] for row in self.rows)]
        sides = ["left" if i < self.left else "right" for i in range(len(self.columns))]

        def cells(tag: str, row: tuple[str, ...]) -> str:
            return "".join(f'<{tag} style="text-align: {sides[i]}">{escape(row[i])}</{tag}>' for i in shown)

        body = "".join(f"<tr>{cells('td', row)}</tr>" for row in self.rows)
        caption = f"<p><b>{escape(self.title)}</b></p>" if self.title else ""
        return f"{caption}<table><thead><tr>{cells('th', self.columns)}</tr></thead><tbody>{body}</tbody></table>"


def html(sheets: Iterable[Sheet]) -> str:
    """Tables for a notebook: the first as it is, the others where one opens them."""
    first, *others = sheets
    opened = (
        f"<details><summary>{escape(sheet.title)}</summary>{sheet._replace(title='').html()}</details>"
        for sheet in others
    )
    return "\n".join([first.html(), *opened])


def of_counts(c: Counts) -> list[Sheet]:
    """All counts, then those by tensor and by launch."""
    low, estimate, high = (figures.nbytes(n) for n in (c.dram.low, c.dram.estimate, c.dram.high))
    rows = [
        ("HBM read, requested", figures.nbytes(c.hbm.read), f"{c.hbm.read:,}"),
        ("HBM written, requested", figures.nbytes(c.hbm.write), f"{c.hbm.write:,}"),
        *([("HBM atomics, requested", figures.nbytes(c.hbm.atomic), f"{c.hbm.atomic:,}")] if c.hbm.atomic else []),
        ("HBM taken at once", figures.nbytes(c.hbm.peak), f"{c.hbm.peak:,}"),
        ("compulsory", figures.nbytes(c.compulsory), f"{c.compulsory:,}"),
        ("DRAM read, estimated", f"{estimate} ({low} to {high})", f"{c.dram.estimate:,}"),
        ("SRAM read", figures.nbytes(c.sram.read), f"{c.sram.read:,}"),
        ("SRAM written", figures.nbytes(c.sram.write), f"{c.sram.write:,}"),
        ("SRAM taken by a block", figures.nbytes(c.sram.peak), f"{c.sram.peak:,}"),
        ("matmul FLOPs", figures.count(c.flops.matmul), f"{c.flops.matmul:,}"),
        ("other FLOPs", figures.count(c.flops.other), f"{c.flops.other:,}"),
        ("exponentials", figures.count(c.exp), f"{c.exp:,}"),
        *([("rows of blocks inferred from others", "", f"{c.inferred:,}")] if c.inferred else []),
        ("FLOPs per requested byte", f"{c.intensity:.4g}", ""),
        (
            "FLOPs per DRAM byte",
            f"{_dram_intensity(c):.4g}",
            f"ridge of {c.device.name}: {c.device.ridge(c.problem.dtype):.0f}",
        ),
    ]
    title = f"{c.algorithm}: {figures.problem(c.problem)}, tile {c.tile}, on {c.device.title or c.device.name}"
    tensors = [
        (
            name,
            *(figures.nbytes(n) for n in (t.hbm_read, t.hbm_write, t.sram_read, t.sram_write)),
            figures.nbytes(c.tensors[name].nbytes) if name in c.tensors else "SRAM only",
        )
        for name, t in c.by_tensor.items()
    ]
    launches = [
        (
            x.name,
            f"{x.blocks:,}",
            str(x.warps),
            figures.nbytes(x.sram_peak),
            figures.nbytes(x.bytes("hbm.read")),
            figures.nbytes(x.bytes("hbm.write")),
        )
        for x in c.launches
    ]
    moved = ("HBM read", "HBM written")
    return [
        Sheet(title, ("what", "about", "exact"), rows),
        Sheet("by tensor", ("tensor", *moved, "SRAM read", "SRAM written", "takes"), tensors),
        Sheet("by launch", ("launch", "blocks", "warps", "SRAM of a block", *moved), launches),
    ]


def _dram_intensity(c: Counts) -> float:
    """FLOPs per byte that reaches DRAM, by the estimate of reads and all that is written once."""
    moved = c.dram.estimate + sum(c.distinct(launch, "write") for launch in c.launches)
    return (c.flops.matmul + c.flops.other + c.exp) / moved if moved else 0.0


def of_run(run: Run) -> list[Sheet]:
    """The outputs, then the counts."""
    rows = [(name, " × ".join(f"{n:,}" for n in x.shape), x.dtype.name) for name, x in run.outputs.items()]
    if run.trace is not None:
        rows.append(("trace", f"{len(run.trace.events):,} steps", f"batch, head {run.trace.head}"))
    return [Sheet(f"run of {run.counts.algorithm}", ("has", "shape", "dtype"), rows), *of_counts(run.counts)]


def of_comparison(comparison: Comparison) -> Sheet:
    """A row per algorithm."""
    from flashlab.views.comparison import COLUMNS

    title = f"{figures.problem(comparison.problem)}, on {comparison.device.title or comparison.device.name}"
    return Sheet(title, COLUMNS, [row.cells() for row in comparison.rows])


def of_sweep(sweep: Sweep, title: str = "") -> Sheet:
    """A row per cell: what was swept, the bytes, and why a cell has none."""
    swept = [axis for axis in sweep.axes if axis not in ("algorithm", "tile")]
    known = sweep.rows[0] if sweep.rows else {}
    sizes = [key for key in ("hbm_read", "hbm_write", "dram_estimate", "hbm_peak", "sram_peak") if key in known]
    columns = ("algorithm", *swept, "tile", *(_title(size) for size in sizes), "FLOPs/byte", "reason")
    rows = [
        (
            row["algorithm"],
            *(_cell(axis, row[axis]) for axis in swept),
            row["tile"] or "",
            *("" if row[size] is None else figures.nbytes(row[size]) for size in sizes),
            "" if row["intensity"] is None else f"{row['intensity']:.3g}",
            _short(row["reason"]),
        )
        for row in sweep.rows
    ]
    return Sheet(title, columns, rows, left=2 + len(swept))


def _title(key: str) -> str:
    first, _, rest = key.partition("_")
    return f"{first.upper()} {rest}"


def _cell(axis: str, value: object) -> str:
    if axis == "sram_per_block" and isinstance(value, int):
        return figures.nbytes(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _short(reason: str | None) -> str:
    """The part of an overflow's line that the row doesn't say already."""
    return "" if reason is None else reason.partition("this one ")[2] or reason
