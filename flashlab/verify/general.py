"""Verification of any operation: its judge and its bounds say what is right, and `fl.plan` runs it on each backend.

Attention has checks of its own (`probes`). An operation that brings only its own file is held to the checks here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from flashlab.verify import gradients, pages, shared
from flashlab.verify.adapter import Refused, in_words
from flashlab.verify.bench import Failure, stepped
from flashlab.verify.cases import describe, said
from flashlab.verify.memory import frame_named
from flashlab.verify.report import Row
from flashlab.verify.steps import Ended, Steps
from flashlab.verify.subject import Check, Subject, worst
from simulator import Device, Problem, Tile, catalogue, count, shape_run
from simulator.algorithm import Algorithm
from simulator.dtypes import Array, as_numpy
from simulator.errors import SramOverflow, Unavailable, UsageError
from simulator.names import AnyBackend, DeviceName
from simulator.operations.backward import BACKWARD
from simulator.operations.operation import Operation
from simulator.operations.paged import PAGED
from simulator.operations.problems import posed
from simulator.problem import FEATURES, FIELDS
from simulator.simulate import run_on_data


@dataclass(frozen=True, kw_only=True)
class Ours(Subject):
    """An algorithm on a backend."""

    row: Algorithm
    backend: AnyBackend
    device: Device
    tile: Tile | None

    def fit(self, problem: Problem) -> Problem:
        return self.row.support.fitted(problem)

    def refuses(self, problem: Problem) -> str | None:
        if self.backend == "simulator":
            return self.row.refuses(problem)
        error = self.row.refusal(problem, self.device, self.tile)
        if isinstance(error, Unavailable):
            raise error
        return None if error is None else str(error)

    def plan(self, problem: Problem) -> Any:
        """The plan that runs the problem on this backend."""
        from flashlab.run.plan import plan

        device = None if self.backend == "gpu" else self.device
        return plan(self.row.program, problem, backend=self.backend, tile=self.tile, lse=True, device=device)

    def run_on(self, problem: Problem, given: Mapping[str, Any]) -> dict[str, Array]:
        return {name: as_numpy(name, x) for name, x in self.plan(problem).run(given).items()}

    def check_bytes(self, problem: Problem, seed: int) -> None:
        """Raise `Failure` if the run on data, the run on shapes and the formula don't count the same bytes."""
        program = self.row.program
        where: dict[str, Any] = {"device": self.device, "tile": self.tile}
        ways = {"shapes": shape_run(program, problem, **where), "formula": count(program, problem, **where)}
        run = run_on_data(program, self.operation.draw(problem, seed), problem, **where)
        for name, counts in ways.items():
            if counts != run.counts:
                raise Failure(f"the {name} and the run on data count different bytes")

    def allocates(self, problem: Problem) -> Iterable[int]:
        counts = count(self.row.program, problem, device=self.device, tile=self.tile)
        return [spec.nbytes for spec in counts.tensors.values() if spec.role == "workspace"]


def subject(
    row: Algorithm, backend: AnyBackend, *, device: DeviceName | None, tile: Any, framework: str | None
) -> Ours:
    """An algorithm on a backend, given arrays of a framework. Raises `UsageError` and `Unavailable`."""
    if backend == "gpu":
        from flashlab.run.devices import current_device  # only where a kernel is launched

        if device is not None:
            raise UsageError("device", device, "None: backend 'gpu' runs on the current GPU")
        on = current_device()
    else:
        on = Device.named("h100" if device is None else device)
    frame = frame_named(framework or ("cupy" if backend == "gpu" else "numpy"))
    return Ours(
        name=row.name, operation=row.operation, atomics=row.atomics, frame=frame, row=row, backend=backend, device=on,
        tile=None if tile is None else Tile.parse(tile),
    )  # fmt: skip


def judged(row: Algorithm, problem: Problem, arrays: Mapping[str, Array], outputs: Mapping[str, Array]) -> float:
    """The worst error of an algorithm's outputs over what its operation's bound allows, as `worst` has it."""
    truth = row.operation.judge(problem, arrays)
    return worst(row.operation, (truth, row.operation.bounds(problem, arrays, truth)), outputs)


def _rule(subject: Subject, p: Problem, seed: int) -> float:
    """Every output must lie within its bound, on inputs of each kind."""
    most = 0.0
    for kind in subject.operation.kinds:
        arrays = subject.operation.draw(p, seed, kind)
        try:
            most = max(most, worst(subject.operation, subject.expect(p, arrays), subject.run(p, arrays)))
        except Failure as failure:
            raise Failure(f"{kind} inputs: {failure}") from None
    return most


def _determinism(subject: Subject, p: Problem, seed: int) -> None:
    """A second run must give the same bits, but for what atomics add up."""
    arrays = subject.operation.draw(p, seed)
    first, second = subject.run(p, arrays), subject.run(p, arrays)
    for name, x in first.items():
        if name not in subject.atomics and x.tobytes() != second[name].tobytes():
            raise Failure(f"{name} of run 2 differs from run 1")


def _byte_counts(subject: Subject, p: Problem, seed: int) -> None:
    """The run on data, the run on shapes and the formula must count the same bytes."""
    assert isinstance(subject, Ours)  # nobody counts others
    subject.check_bytes(p, seed)


CHECKS: Mapping[str, Check] = {"rule": _rule, "determinism": _determinism, "byte_counts": _byte_counts}
"""The checks of any operation, by name."""
PROBES: Mapping[str, Mapping[str, Check]] = {
    "gradients": gradients.CHECKS,
    "pages": pages.CHECKS,
    "prefix": shared.CHECKS,
}
"""The probes that `Operation.probes` may name."""


def checks_of(operation: Operation) -> Mapping[str, Check]:
    """The checks of an operation: those of any, and its own probes."""
    own = operation.probes
    return {**CHECKS, **(PROBES[own] if isinstance(own, str) else own)}


def rows(
    subject: Subject, *, dtypes: Sequence[str], checks: Sequence[str] | None, seed: int, steps: Steps
) -> Iterator[tuple[Row, Problem]]:
    """Run the checks (None: all): one row of the report per check, dtype and shape, and its problem."""
    operation = subject.operation
    for name, check in checks_of(operation).items():
        simulated = subject.backend == "simulator"
        # the counts are the tile program's: kernels have none of their own here. And its products are NumPy's, which may sum up
        # otherwise where a tile has other rows
        elsewhere = (check is _byte_counts and not simulated) or (check is shared.requests and simulated)
        # a probe with the name of a mask is for those that know it
        elsewhere |= name in FEATURES and isinstance(subject, Ours) and name not in subject.row.support.masks
        if (checks is not None and name not in checks) or elsewhere:
            continue
        for dtype in dtypes:
            taken = set[Problem]()
            for label, shape in posed(operation.shapes, dtype):
                sizes: dict[str, Any] = {"batch": 1, "heads": 1, "head_dim": 64, "dtype": dtype}
                wanted = Problem(**sizes | dict(shape))
                p = subject.fit(wanted)
                if p != wanted and p in taken:  # it would be run twice
                    continue
                taken.add(p)
                row = Row(check=name, case=said(label, wanted, p), problem=describe(p), dtype=dtype, status="passed")
                yield stepped(steps, partial(_performed, row, subject, check, p, seed), row), p


def _performed(row: Row, subject: Subject, check: Check, problem: Problem, seed: int) -> Row:
    begun, found = time.perf_counter(), row
    try:
        if reason := subject.refuses(problem):
            found = replace(found, status="not run", detail=reason)
        else:
            found = replace(found, worst=check(subject, problem, seed))
    except Failure as failure:
        found = replace(found, status="failed", detail=str(failure))
    except (SramOverflow, UsageError, Refused) as refusal:
        found = replace(found, status="not run", detail=str(refusal))
    except (Ended, Unavailable):
        raise
    except (Exception, SystemExit) as error:  # whatever it raises is a finding, no crash of ours
        found = replace(found, status="failed", detail=in_words(error))
    return replace(found, seconds=time.perf_counter() - begun)


def run_problem(subject: Subject, problem: Problem, check: str, seed: int) -> Row:
    """A check of one problem, as a row of a report."""
    row = Row(check=check, case="one problem", problem=describe(problem), dtype=problem.dtype, status="passed")
    return _performed(row, subject, checks_of(subject.operation)[check], problem, seed)


MOST_TRIED = 60
"""How many smaller problems are tried where one fails."""


def smallest(subject: Subject, problem: Problem, check: str, seed: int) -> tuple[Problem, Row]:
    """The smallest problem that was found to fail a check, beginning with one that does, and its row. A smaller one that raises
    fails otherwise."""
    return shrunk(problem, subject.fit, lambda p: run_problem(subject, p, check, seed))


def shrunk(problem: Problem, fit: Callable[[Problem], Problem], run: Callable[[Problem], Row]) -> tuple[Problem, Row]:
    """The smallest problem that was found to fail, and its row: the problem itself, if it is no failure."""
    found, row, tried = problem, run(problem), set[Problem]()
    again = row.status == "failed"
    while again:
        again = False
        for p in map(fit, _smaller(found)):
            if p in tried or p == found:
                continue
            if len(tried) >= MOST_TRIED:
                return found, row
            tried.add(p)
            other = run(p)
            if other.status == "failed" and _kind(other) == _kind(row):
                found, row, again = p, other, True
                break
    return found, row


def _kind(row: Row) -> tuple[Any, ...]:
    """What is alike where a smaller problem fails for the same reason: whether it raises, and the line that is to blame."""
    return row.detail.startswith("raised "), row.place


def _smaller(p: Problem) -> Iterator[Problem]:
    """Problems with less of something, the simplest first."""
    changes = list[dict[str, Any]]()
    for name in FEATURES:
        if name in p.applied and name not in ("lengths", "page_size"):
            changes.append({name: FIELDS[name].default})
    if p.lengths is not None:
        whole: dict[str, Any] = {"len_q": None, "len_kv": None}
        lengths = [(len(rows), len(keys)) for rows, keys in p.spans]
        if len(lengths) > 1:
            changes += [{**whole, "lengths": lengths[:i] + lengths[i + 1 :]} for i in range(len(lengths))]
        changes += [{**whole, "lengths": [(-(-n // k), -(-m // k)) for n, m in lengths]} for k in (8, 2)]
    else:
        changes += [{name: n} for name in ("len_q", "len_kv") for n in _less(getattr(p, name))]
    changes += [{"batch": 1}] if p.batch > 1 else []
    if p.kv_heads > 1:
        changes.append({"heads": p.queries_per_kv, "kv_heads": 1})
    if p.queries_per_kv > 1:
        changes.append({"heads": p.kv_heads, "kv_heads": p.kv_heads})
    changes += [{"head_dim": n} for n in _less(p.head_dim) if n >= 8]
    for change in changes:
        with suppress(UsageError):
            yield p.replace(**change)


def _less(n: int) -> list[int]:
    """Smaller numbers, the smallest first."""
    return [m for m in dict.fromkeys((1, 2, n // 8, n // 4, n // 2, n - 1)) if 0 < m < n]


def likely(subject: Subject, failing: Problem, others: Sequence[Problem], seed: int) -> str:
    """The mistake that explains what fails, if it is known."""
    if subject.operation is BACKWARD:
        from flashlab.verify import gradient_mistakes  # only where something is wrong

        return gradient_mistakes.likely(subject, failing, others, seed)
    if subject.operation is PAGED:
        from flashlab.verify import page_mistakes

        return page_mistakes.likely(subject, failing, others, seed)
    return ""


def row_of(target: Any) -> Algorithm | None:
    """The catalogue's row of a target whose operation isn't attention, or None for any other target."""
    from simulator import Program
    from simulator.operations.attention import ATTENTION

    named = isinstance(target, str) and target in catalogue.CATALOGUE
    if not named and not isinstance(target, Program):
        return None
    found = catalogue.get(target)
    return None if found.operation is ATTENTION else found
