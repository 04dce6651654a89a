"""The usual experiments: bytes over length, head dim, SRAM size, tile, device, as rows, CSV and plot."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashlab.base.files import replace_file
from flashlab.views.progress import Progress, wrapping
from simulator.catalogue import get, names
from simulator.counts import Counts
from simulator.devices import Device
from simulator.errors import SramOverflow, Unavailable, UsageError, unknown
from simulator.fields import Field, flag, listed
from simulator.problem import FIELDS, Problem, Tile
from simulator.program import Program

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Sweep", "sweep"]

_FIGURES = (
    "hbm_read", "hbm_write", "hbm_atomic", "hbm_peak", "sram_read", "sram_write", "sram_peak", "flops_matmul",
    "flops_other", "exp", "compulsory", "compulsory_read", "intensity",
)  # fmt: skip
SHOWN = 60
"""Rows that a notebook shows."""
_DRAM = ("dram_low", "dram_estimate", "dram_high")


@dataclass(frozen=True, kw_only=True, repr=False)
class Sweep:
    """The cells of a sweep as flat `rows`, one dict each, all with the same keys; bytes and plain numbers.

    Where a tile doesn't fit, the figures are None and `reason` says why. `axes` are the keys that were swept.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=1, len_q=1024, head_dim=64, dtype="float16")
    >>> tab = fl.sweep("flash2", p, tile=["64x64", "2048x64"])
    >>> [(row["tile"], row["hbm_read"], row["reason"] is None) for row in tab.rows]
    [('64x64', 4325376, True), ('2048x64', None, False)]
    """

    rows: list[dict[str, Any]]
    axes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<sweep of {len(self.rows):,} rows over {', '.join(self.axes) or 'nothing'}>"

    def _repr_html_(self) -> str:
        """What a notebook's cell shows: the first rows. `to_pandas` and `to_csv` have them all."""
        from flashlab.views import sheets

        sheet, left = sheets.of_sweep(self), len(self.rows) - SHOWN
        more = f"<p>... and {left:,} more rows</p>" if left > 0 else ""
        return sheet._replace(rows=sheet.rows[:SHOWN]).html() + more

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"axes": list(self.axes), "rows": self.rows}

    def to_csv(self, path: str | Path) -> Path:
        """Write the rows to a file, which is replaced; None is an empty cell."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(self.rows[0]) if self.rows else [])
        writer.writeheader()
        writer.writerows(self.rows)
        return replace_file(path, text.getvalue())

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`. Raises `Unavailable` without pandas."""
        try:
            import pandas  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise Unavailable("pandas is not installed: pip install pandas, or use .rows or .to_csv") from None
        return pandas.DataFrame(self.rows)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]

    def plot(self, x: str | None = None, y: str = "hbm_read", path: str | Path | None = None) -> Figure:
        """A line an algorithm and combination of the other axes; `path` also writes it. Default x: the first axis."""
        from flashlab.views import plots

        x = x or next((axis for axis in self.axes if axis != "algorithm"), "len_q")
        keys = list(self.rows[0]) if self.rows else [x, y]
        for argument, key in (("x", x), ("y", y)):
            if key not in keys:
                raise unknown(argument, key, keys)
        if y not in (*_FIGURES, *_DRAM):
            raise UsageError("y", y, f"a figure: one of {', '.join(key for key in keys if key in (*_FIGURES, *_DRAM))}")
        figure = plots.sweep(self.rows, x, y, [axis for axis in self.axes if axis != x])
        if path is not None:
            plots.save(figure, path)
        return figure


def sweep(
    algorithms: Iterable[str | Program] | str | Program | None,
    problem: Problem,
    *,
    sram: int | Sequence[int] | None = None,
    tile: Any = None,
    device: Any = "h100",
    lse: bool = False,
    dram: bool = False,
    progress: Progress = False,
    **axes: Any,
) -> Sweep:
    """Count every combination of the lists given: fields of the problem, `sram` (bytes a block), `tile`, `device`.

    What the problem has as None follows: a sweep over `len_q` moves the keys too. `dram=True` adds the estimate of DRAM
    reads, the one figure that takes time. A combination that doesn't fit is a row with a reason. `progress=True`
    shows a bar where it takes over a second; a function wraps the cells, as `tqdm.tqdm` would. Raises `UsageError`.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=1, len_q=1024, head_dim=64, dtype="float16")
    >>> tab = fl.sweep(["flash1", "flash2"], p, len_q=[1024, 2048], sram=[4096, 65536], tile="64x64")
    >>> len(tab.rows), tab.axes, sum(row["reason"] is not None for row in tab.rows)
    (8, ('algorithm', 'len_q', 'sram_per_block'), 6)
    """
    from simulator import count

    problem, lse, dram = Problem.checked(problem), flag("lse", lse), flag("dram", dram)
    if algorithms is None:
        algorithms = names(problem)
    if isinstance(algorithms, str | Program):
        algorithms = [algorithms]
    targets: list[str | Program] = listed("algorithms", algorithms, "an algorithm, a list of them, or None for all")
    for name in axes:
        if name not in FIELDS:
            raise unknown("axis", name, [*FIELDS, "sram", "tile", "device"])
    choices: dict[str, list[Any]] = {
        "algorithm": targets,
        **{name: _choices(x, single=_is_one(FIELDS[name], x)) for name, x in axes.items()},
        "device": [Device.named(each) for each in _choices(device)],
        "sram_per_block": _choices(sram),
        "tile": [None if each is None else Tile.parse(each) for each in _choices(tile, single=_is_pair(tile))],
    }
    for name in axes:
        for value in choices[name]:
            FIELDS[name].checked(value)
    rows: list[dict[str, Any]] = []
    cells = list(itertools.product(*choices.values()))
    for cell in wrapping(progress, "cells")(cells):
        values = dict(zip(choices, cell, strict=True))
        where: Device = values["device"]
        if values["sram_per_block"] is not None:
            where = where.replace(sram_per_block=values["sram_per_block"])
        target: str | Program = values["algorithm"]
        posed, asked = None, {name: values[name] for name in axes}
        row = _row(get(target).name, {**_posed(problem), **asked}, where, values["tile"])
        try:
            posed = problem.replace(**asked)
            row = _row(get(target).name, _posed(posed), where, values["tile"])
            counts = count(target, posed, tile=values["tile"], device=where, lse=lse)
        except UsageError as error:
            together = posed is None and len(cells) > 1  # values that don't go together, such as heads and KV heads
            if (
                not together
                and not isinstance(error, SramOverflow)
                and (posed is None or get(target).refusal(posed) is None)
            ):
                raise
            figures: dict[str, Any] = dict.fromkeys(_FIGURES + (_DRAM if dram else ()))
            rows.append({**row, **figures, "reason": str(error)})
        else:
            rows.append({**row, "tile": str(counts.tile), **_figures(counts, dram=dram), "reason": None})
    swept = tuple(name for name, each in choices.items() if len(each) > 1)
    return Sweep(rows=rows, axes=swept)


def _choices(value: Any, *, single: bool = False) -> list[Any]:
    scalar = isinstance(value, str | Device) or getattr(value, "shape", None) == ()
    if single or scalar or not isinstance(value, Iterable):
        return [value]
    return list(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _is_one(known: Field, value: Any) -> bool:
    """Whether this is one value of a field whose values are pairs or lengths, rather than a list of them."""
    if known.kind is list:
        return not all(x is None or isinstance(x, list) for x in value or ())
    return known.kind is tuple and _is_pair(value)


def _is_pair(value: Any) -> bool:
    """Whether this is one pair, rather than a list of them."""
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(x, int | None) for x in value)  # pyright: ignore


def _posed(problem: Problem) -> dict[str, Any]:
    """A problem's fields; what it leaves to follow is said."""
    return {name: getattr(problem, name) for name in FIELDS}


def _row(algorithm: str, posed: Mapping[str, Any], device: Device, tile: Tile | None) -> dict[str, Any]:
    """What identifies a cell."""
    return {
        "algorithm": algorithm,
        **{name: FIELDS[name].text(value) if isinstance(value, tuple) else value for name, value in posed.items()},
        "device": device.name,
        "sram_per_block": device.sram_per_block,
        "tile": None if tile is None else str(tile),
    }


def _figures(c: Counts, *, dram: bool) -> dict[str, Any]:
    values = (
        c.hbm.read, c.hbm.write, c.hbm.atomic, c.hbm.peak, c.sram.read, c.sram.write, c.sram.peak, c.flops.matmul,
        c.flops.other, c.exp, c.compulsory, c.compulsory_read, c.intensity,
    )  # fmt: skip
    estimate = zip(_DRAM, (c.dram.low, c.dram.estimate, c.dram.high), strict=True) if dram else ()
    return {**dict(zip(_FIGURES, values, strict=True)), **dict(estimate)}
