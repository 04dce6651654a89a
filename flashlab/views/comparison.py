"""Compares algorithms on one problem: what each moves and computes, and how far it is from naive attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

import numpy as np

from flashlab.views import figures
from flashlab.views.progress import Progress, wrapping
from simulator.catalogue import names
from simulator.counts import Counts
from simulator.devices import Device
from simulator.dtypes import as_numpy
from simulator.errors import UsageError
from simulator.fields import flag, listed
from simulator.names import DeviceName
from simulator.operations.attention import ATTENTION, Reference, naive, problem_of
from simulator.operations.backward import BACKWARD
from simulator.problem import Masks, Problem, Tile
from simulator.program import Program

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

__all__ = ["COLUMNS", "Comparison", "Error", "Row", "compare", "error_of", "reference_of"]

COLUMNS = (
    "algorithm", "HBM read", "HBM written", "compulsory", "DRAM read (low to high)", "HBM peak", "SRAM peak",
    "matmul FLOPs", "other FLOPs", "exps", "FLOPs/byte", "error",
)  # fmt: skip
"""The columns of a row's `cells`: bytes requested from HBM, an estimate of DRAM's share, arithmetic, and the error."""


@dataclass(frozen=True, kw_only=True)
class Error:
    """How far a result is from naive attention in float64.

    `max` is the largest absolute difference, and `relative` the 2-norm of the difference over that of the reference.
    `lse` is the largest absolute difference of the log-sum-exp, or None if the run has none.
    """

    max: float
    relative: float
    lse: float | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One algorithm of a comparison. `target` is as it was given; `error` is None if only a formula was evaluated."""

    target: str | Program
    counts: Counts
    error: Error | None

    @property
    def algorithm(self) -> str:
        return self.counts.algorithm

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the keys of `Counts.to_dict`, and `error`."""
        return {**self.counts.to_dict(), "error": None if self.error is None else asdict(self.error)}

    def cells(self) -> tuple[str, ...]:
        """The row as text, one cell per column of `COLUMNS`."""
        c = self.counts
        low, estimate, high = (figures.nbytes(n) for n in (c.dram.low, c.dram.estimate, c.dram.high))
        return (
            self.algorithm, figures.nbytes(c.hbm.read), figures.nbytes(c.hbm.write), figures.nbytes(c.compulsory),
            f"{estimate} ({low} to {high})", figures.nbytes(c.hbm.peak), figures.nbytes(c.sram.peak),
            figures.count(c.flops.matmul), figures.count(c.flops.other), figures.count(c.exp), f"{c.intensity:.3g}",
            "" if self.error is None else f"{self.error.relative:.1e}",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """One row per algorithm. `print` and a notebook show a table, `plot` draws it, and `to_dict` returns plain data.

    >>> import flashlab as fl
    >>> tab = fl.compare(fl.sample(), algorithms=["flash1", "flash2"])
    >>> [(row.algorithm, row.counts.hbm.read, row.error.relative < 0.001) for row in tab.rows]
    [('flash1', 26738688, True), ('flash2', 5242880, True)]
    """

    problem: Problem
    device: Device
    tile: Tile | None
    lse: bool
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with the attributes' names as keys."""
        return {
            "problem": asdict(self.problem),
            "device": self.device.name,
            "tile": None if self.tile is None else str(self.tile),
            "lse": self.lse,
            "rows": [row.to_dict() for row in self.rows],
        }

    def plot(self, folder: str | Path | None = None) -> dict[str, Figure]:
        """Draw the figures and return them by name.

        They are `bytes` by tensor and level, `lengths` up to a million tokens, and `roofline`. With a `folder`, they
        are also written there, as `bytes.png` and so on.
        """
        from flashlab.views import plots

        counts = [row.counts for row in self.rows]
        figures = {
            "bytes": plots.bytes_by_tensor(counts),
            "lengths": plots.lengths(self.at_lengths(plots.LENGTHS)),
            "roofline": plots.roofline(counts),
        }
        if folder is not None:
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError("path", str(folder), f"a folder that can be created ({error.strerror})") from None
            for name, figure in figures.items():
                plots.save(figure, Path(folder) / f"{name}.png")
        return figures

    def at_lengths(self, lengths: Sequence[int]) -> list[Counts]:
        """Counts of the same heads at other lengths, by formula. Programs of your own have none and are left out, and so are
        algorithms at lengths that they don't take."""
        from simulator import count
        from simulator.catalogue import get

        problems = [self.problem.replace(lengths=None, len_q=n, len_kv=None) for n in lengths]
        return [
            count(row.target, problem, tile=self.tile, device=self.device, lse=self.lse)
            for row in self.rows
            if isinstance(row.target, str)
            for problem in problems
            if get(row.target).refusal(problem) is None
        ]

    def __str__(self) -> str:
        table = [COLUMNS, *(row.cells() for row in self.rows)]
        widths = [max(len(cells[i]) for cells in table) for i in range(len(COLUMNS))]
        return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(cells, widths, strict=True)) for cells in table)

    def __repr__(self) -> str:
        return f"<comparison of {', '.join(row.algorithm for row in self.rows)}: {figures.problem(self.problem)}>"

    def _repr_html_(self) -> str:
        from flashlab.views import sheets

        return sheets.of_comparison(self).html()


def compare(
    what: Problem | Iterable[Any],
    *,
    algorithms: Iterable[str | Program] | None = None,
    tile: Tile | tuple[int, int] | str | None = None,
    device: Device | DeviceName = "h100",
    lse: bool = False,
    backward: bool = False,
    progress: Progress = False,
    **masks: Unpack[Masks],
) -> Comparison:
    """Compare algorithms: by formula on a `Problem`, or by simulating them on arrays (q, k, v) of NumPy, CuPy, torch or JAX.

    `algorithms` are names or tile programs; the default is all that take the problem's dtype. Masks and the scale
    (`causal`, `window`, `scale`) go with arrays only, since a problem has its own. Inputs that flashlab loaded may say
    that they are causal. `progress=True` shows a bar where it takes over a second; a function wraps the algorithms, as `tqdm.tqdm`
    would. Raises `UsageError` for bad input, and
    its subclass `SramOverflow` for a tile that doesn't fit.

    `backward=True` compares backward passes. On arrays, the gradient of the output is random, and the error is that of dq, dk and
    dv together.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=2, len_q=1_000_000, head_dim=64, dtype="float16", causal=True)
    >>> tab = fl.compare(p, algorithms=["standard", "flash2"])
    >>> [row.counts.hbm.peak // 2**30 for row in tab.rows]  # GiB
    [11176, 0]
    """
    from simulator import count, simulate

    lse, wrap = flag("lse", lse), wrapping(progress, "algorithms")
    operation = BACKWARD if flag("backward", backward) else ATTENTION
    if lse and backward:
        raise UsageError("lse", True, "False for a backward pass, which is given it")
    if isinstance(algorithms, str | Program):
        algorithms = [algorithms]
    named = (
        None
        if algorithms is None
        else listed("algorithms", algorithms, "an algorithm, a list of them, or None for all")
    )
    asked = None if tile is None else Tile.parse(tile)
    where = Device.named(device)
    run_it: dict[str, Any] = {"tile": asked, "device": where, "lse": lse}
    if isinstance(what, Problem):
        if masks:
            raise UsageError(", ".join(masks), tuple(masks.values()), "none of them: the problem has its own")
        targets = names(what, operation) if named is None else named
        rows = [Row(target=t, counts=count(t, what, **run_it), error=None) for t in wrap(targets)]
        return Comparison(problem=what, device=where, tile=asked, lse=lse, rows=tuple(rows))
    try:
        q, k, v = what
    except (TypeError, ValueError):
        raise UsageError("what", type(what).__name__, "a Problem, or the arrays (q, k, v)") from None
    q, k, v = (as_numpy(name, x) for name, x in zip("qkv", (q, k, v), strict=True))
    masks.setdefault("causal", bool(getattr(what, "causal", None)))
    problem = problem_of(q, k, v, **masks)
    reference = reference_of(problem, {"q": q, "k": k, "v": v})
    targets = names(problem, operation) if named is None else named
    if backward:
        rows = _gradients(targets, problem, {"q": q, "k": k, "v": v}, reference, wrap, asked, where)
        return Comparison(problem=problem, device=where, tile=asked, lse=False, rows=tuple(rows))
    rows: list[Row] = []
    for target in wrap(targets):
        run = simulate(target, q, k, v, **masks, **run_it)
        error = None if reference is None else error_of(run.out, run.lse, reference)
        rows.append(Row(target=target, counts=run.counts, error=error))
    return Comparison(problem=problem, device=where, tile=asked, lse=lse, rows=tuple(rows))


def _gradients(
    targets: Iterable[Any], problem: Problem, arrays: Mapping[str, NDArray[Any]], forward: Reference | None, wrap: Any,
    tile: Tile | None, device: Device,
) -> list[Row]:  # fmt: skip
    """Rows of backward passes, which are given the rounded output of the float64 judge, and its LSE."""
    from simulator import simulate

    if forward is None:
        raise UsageError("what", figures.problem(problem), "fewer scores: naive attention would take too much")
    dout = cast("NDArray[Any]", np.random.default_rng(0).standard_normal(forward.out.shape, np.float32))
    storage = arrays["q"].dtype
    given: dict[str, Any] = {
        **arrays,
        "out": forward.out.astype(storage),
        "lse": forward.lse.astype(np.float32),
        "dout": dout.astype(storage),
    }
    truth = {operand.name: np.empty(operand.shape(problem)) for operand in BACKWARD.written(problem)}
    group = problem.queries_per_kv
    alone = problem.replace(batch=1, heads=group, kv_heads=1)
    for b, h in np.ndindex(problem.batch, problem.kv_heads):  # one after the other: the judge holds all scores
        place = {"batch": slice(b, b + 1), "kv_heads": slice(h, h + 1), "heads": slice(h * group, (h + 1) * group)}
        own = {name: BACKWARD.operand(name).cut(x, place) for name, x in given.items()}
        for name, x in BACKWARD.judge(alone, own).items():
            BACKWARD.operand(name).cut(truth[name], place)[...] = x
    exact = np.concatenate([x.ravel() for x in truth.values()])
    rows: list[Row] = []
    for target in wrap(targets):
        run = simulate(target, **given, **problem.masks, tile=tile, device=device)
        found = np.concatenate([run.outputs[name].ravel().astype(np.float64) for name in truth])
        rows.append(Row(target=target, counts=run.counts, error=error_of(found, None, Reference(exact, forward.lse))))
    return rows


MOST_SCORES = 2**26, 2**29
"""The most scores, per head and in all, for which the dense float64 judge runs. A head of 8192 x 8192 takes 2.5 GiB."""


def reference_of(problem: Problem, arrays: Mapping[str, NDArray[Any]]) -> Reference | None:
    """Naive attention in float64, one head after the other, or None where that would take too much memory or time."""
    p = problem
    scores = p.len_q * p.len_kv
    if scores > MOST_SCORES[0] or scores * p.batch * p.heads > MOST_SCORES[1]:
        return None
    out = np.empty((p.batch, p.heads, p.len_q, p.head_dim_v))
    lse = np.empty((p.batch, p.heads, p.len_q))
    for b, h in np.ndindex(p.batch, p.heads):
        places = {"batch": b, "heads": h, "kv_heads": h // p.queries_per_kv}
        head = {name: ATTENTION.operand(name).part(x, places) for name, x in arrays.items()}
        one = naive(**head, **p.masks)
        out[b, h], lse[b, h] = one.out[0, 0], one.lse[0, 0]
    return Reference(out, lse)


def error_of(out: NDArray[Any], lse: NDArray[Any] | None, reference: Reference) -> Error:
    """The distance of a result from the reference."""
    difference = np.asarray(out, np.float64) - reference.out
    norm = float(np.linalg.norm(difference))
    size = float(np.linalg.norm(reference.out))
    lse_error = None
    if lse is not None:
        same = lse == reference.lse  # -inf equals -inf in empty rows
        with np.errstate(invalid="ignore"):
            lse_error = float(np.where(same, 0, np.abs(lse - reference.lse)).max(initial=0))
    return Error(
        max=float(np.abs(difference).max(initial=0)),
        relative=norm / size if size else (norm and float("inf")),
        lse=lse_error,
    )
