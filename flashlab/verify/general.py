"""Verification of any operation: its judge and its bounds say what is right, and `fl.plan` runs it on each backend.

Attention has checks of its own (`probes`). An operation that brings only its own file is held to the checks here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashlab.verify.bench import Failure
from flashlab.verify.cases import describe
from flashlab.verify.report import Row
from simulator import Device, Problem, catalogue, count, shape_run
from simulator.catalogue import Algorithm
from simulator.dtypes import Array, as_numpy
from simulator.errors import SramOverflow, Unavailable, UsageError
from simulator.simulate import run_on_data


@dataclass(frozen=True)
class Subject:
    """An algorithm on a backend."""

    row: Algorithm
    backend: str
    device: str | None
    tile: Any

    def plan(self, problem: Problem) -> Any:
        """The plan that runs the problem on this backend."""
        from flashlab.run.plan import plan

        where = {} if self.backend == "gpu" else {"device": self.device}
        return plan(self.row.program, problem, backend=self.backend, tile=self.tile, lse=True, **where)

    def run(self, problem: Problem, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Run the problem and return its outputs as NumPy arrays. Raises `Failure` if an input was changed."""
        kept = {name: x.copy() for name, x in arrays.items()}
        given: Mapping[str, Any] = arrays
        if self.backend == "gpu":
            from flashlab.run.host import from_numpy  # only where it runs

            given = {name: from_numpy(x, "cupy") for name, x in arrays.items()}
        outputs = {name: as_numpy(name, x) for name, x in self.plan(problem).run(given).items()}
        for name, x in given.items():
            if as_numpy(name, x).tobytes() != kept[name].tobytes():
                raise Failure(f"{name}: it was changed")
        return outputs


def judged(row: Algorithm, problem: Problem, arrays: Mapping[str, Array], outputs: Mapping[str, Array]) -> float:
    """The worst error over what the operation's bound allows. Where bounds are per row, the error is the row's 2-norm.

    Raises `Failure` over 1, and for an output that is missing or has another shape.
    """
    truth = row.operation.judge(problem, arrays)
    bounds, worst = row.operation.bounds(problem, arrays, truth), 0.0
    for name, exact in truth.items():
        if name not in outputs:
            raise Failure(f"{name} is missing")
        got = np.asarray(outputs[name], np.float64)
        if got.shape != exact.shape:
            raise Failure(f"{name} has the shape {got.shape}, expected {exact.shape}")
        same = (got == exact) | (np.isneginf(got) & np.isneginf(exact))
        with np.errstate(invalid="ignore"):
            error = np.where(same, 0.0, np.abs(got - exact))
        if bounds[name].ndim < error.ndim:
            error = np.linalg.norm(error, axis=-1)
        ratio = np.where(np.isnan(error), np.inf, error) / np.maximum(bounds[name], 1e-300)
        if ratio.size and ratio.max() > 1:
            where = tuple(int(n) for n in np.unravel_index(int(ratio.argmax()), ratio.shape))
            raise Failure(f"{name} at {where} is off by {ratio.max():.3g} x its bound")
        worst = max(worst, float(ratio.max(initial=0.0)))
    return worst


def _rule(subject: Subject, p: Problem, seed: int) -> float:
    """Every output must lie within its bound, on inputs of each kind."""
    worst = 0.0
    for kind in subject.row.operation.kinds:
        arrays = subject.row.operation.draw(p, seed, kind)
        worst = max(worst, judged(subject.row, p, arrays, subject.run(p, arrays)))
    return worst


def _determinism(subject: Subject, p: Problem, seed: int) -> None:
    """A second run must give the same bits."""
    arrays = subject.row.operation.draw(p, seed)
    first, second = subject.run(p, arrays), subject.run(p, arrays)
    for name, x in first.items():
        if x.tobytes() != second[name].tobytes():
            raise Failure(f"{name} of run 2 differs from run 1")


def _byte_counts(subject: Subject, p: Problem, seed: int) -> None:
    """The run on data, the run on shapes and the formula must count the same bytes."""
    where: dict[str, Any] = {"device": subject.device or "h100", "tile": subject.tile}
    ways = {"shapes": shape_run(subject.row.program, p, **where), "formula": count(subject.row.program, p, **where)}
    arrays, on = subject.row.operation.draw(p, seed), Device.named(subject.device or "h100")
    run = run_on_data(subject.row.program, arrays, p, tile=subject.tile, device=on)
    for name, counts in ways.items():
        if counts != run.counts:
            raise Failure(f"the {name} and the run on data count different bytes")


Check = Callable[[Subject, Problem, int], float | None]
CHECKS: Mapping[str, Check] = {"rule": _rule, "determinism": _determinism, "byte_counts": _byte_counts}
"""The checks of any operation, by name."""


def rows(
    row: Algorithm,
    backend: str,
    *,
    dtypes: Sequence[str] | None,
    checks: Sequence[str] | None,
    seed: int,
    device: str | None,
    tile: Any,
) -> Iterator[Row]:
    """Run the checks: one row of the report per check, dtype and shape."""
    subject = Subject(row, backend, device, tile)
    for name, check in CHECKS.items():
        if (checks is not None and name not in checks) or (name == "byte_counts" and backend != "simulator"):
            continue
        for dtype in dtypes or row.support.dtypes:
            for word, changes in row.operation.shapes.items():
                base: dict[str, Any] = {"batch": 1, "heads": 1, "head_dim": 64, "dtype": dtype}
                problem = Problem(**base | dict(changes))
                yield _performed(subject, name, check, word, problem, seed)


def _performed(subject: Subject, name: str, check: Check, word: str, problem: Problem, seed: int) -> Row:
    begun = time.perf_counter()
    found = Row(check=name, case=word, problem=describe(problem), dtype=problem.dtype, status="passed")
    try:
        if reason := subject.row.refuses(problem) if subject.row.kernels else None:
            found = replace(found, status="not run", detail=reason)
        else:
            found = replace(found, worst=check(subject, problem, seed))
    except Failure as failure:
        found = replace(found, status="failed", detail=str(failure))
    except (SramOverflow, UsageError) as refusal:
        found = replace(found, status="not run", detail=str(refusal))
    except Unavailable:
        raise
    except Exception as error:  # whatever it raises is a finding, no crash of ours
        found = replace(found, status="failed", detail=f"raised {type(error).__name__}: {error}"[:300])
    return replace(found, seconds=time.perf_counter() - begun)


def subject_of(target: Any) -> Algorithm | None:
    """The catalogue's row of a target whose operation isn't attention, or None for any other target."""
    from simulator import Program
    from simulator.operations.attention import ATTENTION

    named = isinstance(target, str) and target in catalogue.CATALOGUE
    if not named and not isinstance(target, Program):
        return None
    found = catalogue.get(target)
    return None if found.operation is ATTENTION else found
