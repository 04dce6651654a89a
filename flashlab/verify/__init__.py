"""Is it right? `verify` holds every row to a rule against float64 attention, on edges, probes and random problems."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashlab.verify import general
from flashlab.verify.adapter import Adapter, Target, TileShape
from flashlab.verify.adapter import imported as load
from flashlab.verify.bench import Bench, Trial
from flashlab.verify.cases import INPUTS, LAYOUTS, Case, random_cases, smaller_cases
from flashlab.verify.domain import Domain
from flashlab.verify.kernels import FileKernel, is_kernel, kernel, kernel_named
from flashlab.verify.mistakes import likely
from flashlab.verify.outsiders import OUTSIDERS
from flashlab.verify.probes import CHECKS
from flashlab.verify.report import Failing, Report, Row
from flashlab.verify.rule import TEXT
from flashlab.verify.targets import target_of
from simulator.catalogue import Algorithm
from simulator.errors import Said, UsageError, unknown
from simulator.problem import ITEMSIZE

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = [
    "CHECKS",
    "INPUTS",
    "LAYOUTS",
    "OUTSIDERS",
    "Adapter",
    "Case",
    "Domain",
    "Failing",
    "FileKernel",
    "Report",
    "Row",
    "kernel",
    "load",
    "run_case",
    "verify",
]

SEARCH = "search"
"""The name of the check in which Hypothesis looks for failing problems of its own."""


def verify(
    target: Any, backend: str = "simulator", *, full: bool = False, seed: int = 0, dtypes: Sequence[str] | None = None,
    checks: Sequence[str] | None = None, examples: int | None = None, device: str | None = None,
    tile: TileShape = None, framework: str | None = None, on_row: Callable[[Row], None] | None = None, **launch: Any,
) -> Report:  # fmt: skip
    """Check a target against float64 attention, hard.

    `target` is an algorithm's name, a tile program, the name of another library's kernel (in `OUTSIDERS`),
    "package:function", an `Adapter`, a callable, or a kernel of a CUDA source, "flash.cu:forward". That runs on the
    emulator, and `launch` says how: the keywords of `fl.kernel`. Algorithms run on `backend` ("simulator", "gpu" or
    "emulator") with this `device` and `tile`. `full` adds long and wide problems, and on a GPU problems of over 2^31
    elements. `checks` names some of `CHECKS` and "search" (None: all). `dtypes` are the storage dtypes (None: all but
    float8_e4m3fn, and only that for `flash3_fp8`). `examples` is how many random problems Hypothesis draws (0: none,
    and a failing problem isn't shrunk). `framework` is whose arrays a callable ("numpy" by default) or a GPU ("cupy" by
    default) is given. `on_row` is called with every row as soon as it is done.

    What the target does not support is listed as not run. An operation other than attention has checks of its own
    (`general.CHECKS`), all short and none random: it takes neither `full` nor `examples`. Raises `UsageError` for bad
    input, and `Unavailable` for what is not installed.

    >>> import flashlab as fl
    >>> report = fl.verify("flash2", checks=["key_sets"], dtypes=["float16"])
    >>> report.verdict, len(report.rows)
    ('passed', 13)
    """
    if (row := general.subject_of(target)) is not None:
        if full:
            raise UsageError("full", full, f"False: {row.operation.name} has no long or wide problems")
        if examples:
            raise UsageError("examples", examples, f"None or 0: {row.operation.name} has no random problems")
        return _general(row, backend, dtypes, checks, seed, device, tile, framework, on_row)
    chosen = [*list(CHECKS)[:-1], SEARCH, *list(CHECKS)[-1:]] if checks is None else list(checks)
    for name in chosen:
        if name != SEARCH and name not in CHECKS:
            raise unknown("checks", name, [*CHECKS, SEARCH])
    if isinstance(target, str) and is_kernel(target):
        target = kernel_named(target, {**launch, **({"device": device} if device else {})})
    elif launch:
        raise UsageError(
            ", ".join(launch), Said(", ".join(map(str, launch.values()))), "nothing: only a .cu file is launched"
        )
    wanted = target_of(target, backend, device=device, tile=tile, framework=framework)
    if examples is not None and examples < 0:
        raise UsageError("examples", examples, "an integer of at least 0")
    bench = Bench(wanted, _checked_dtypes(dtypes, wanted.dtypes, wanted.domain.dtypes or ITEMSIZE), full, seed)
    bench.probe()
    begun, rows, failing = time.perf_counter(), list[Row](), None
    first: tuple[str, Trial] | None = None
    count = examples if examples is not None else (2000 if full else wanted.examples)

    def done(row: Row) -> None:
        rows.append(row)
        if on_row:
            on_row(row)

    for name in chosen:
        if name == SEARCH and count:
            row, found = _search(bench, count, any_tile=tile is None)
            done(row)
            failing = found and _failing(bench, SEARCH, found)
        for trial in CHECKS[name](bench) if name in CHECKS else ():
            done(bench.perform(name, trial))
            if rows[-1].status == "failed" and first is None:
                first = name, trial
    if failing is None and first is not None:
        name, trial = first
        smaller = (
            _find(bench, smaller_cases(trial.case).map(wanted.domain.fit_case), 200)[0]
            if trial.case and count
            else None
        )
        failing = _failing(bench, name, _one(bench, smaller) if smaller else trial, trial.case)
    return Report(
        target=wanted.name,
        backend=wanted.backend,
        rule=TEXT,
        seed=seed,
        full=full,
        lse_checked=wanted.lse,
        seconds=time.perf_counter() - begun,
        rows=rows,
        failing=failing,
        domain=wanted.domain.words,
        place=wanted.place(),
    )


def _checked_dtypes(
    dtypes: Sequence[str] | None, default: tuple[str, ...], accepted: Collection[str]
) -> tuple[str, ...]:
    """The dtypes to check in: those asked for, or else the default. Raises `UsageError` for one that isn't accepted."""
    if dtypes is None:
        if not default:  # a kernel's pointers have one, and a wrong one would be misread
            raise UsageError("dtypes", None, 'the kernel\'s, as in ["float16"] or Domain(dtype="float16")')
        return default
    found = (dtypes,) if isinstance(dtypes, str) else tuple(dtypes)
    for dtype in found:
        if dtype not in accepted:
            raise unknown("dtypes", dtype, accepted)
    if not found:
        raise UsageError("dtypes", dtypes, f"at least one of {', '.join(accepted)}")
    return found


def _general(
    row: Algorithm,
    backend: str,
    dtypes: Sequence[str] | None,
    checks: Sequence[str] | None,
    seed: int,
    device: str | None,
    tile: TileShape,
    framework: str | None,
    on_row: Callable[[Row], None] | None,
) -> Report:
    """The report on an operation that isn't attention."""
    if backend not in ("simulator", "emulator", "gpu"):
        raise unknown("backend", backend, ("simulator", "emulator", "gpu"))
    for name in checks or ():
        if name not in general.CHECKS:
            raise unknown("checks", name, general.CHECKS)
    begun, found = time.perf_counter(), list[Row]()
    kinds = _checked_dtypes(dtypes, row.dtypes, row.dtypes)
    subject = general.subject(row, backend, device=device, tile=tile, framework=framework)
    for each in general.rows(subject, dtypes=kinds, checks=checks, seed=seed):
        found.append(each)
        if on_row:
            on_row(each)
    return Report(
        target=row.name,
        backend=backend,
        rule=f"each row within the bound of {row.operation.name}",
        seed=seed,
        full=False,
        lse_checked=True,
        seconds=time.perf_counter() - begun,
        rows=found,
    )


def run_case(target: Any, case: Case, backend: str = "simulator", **options: Any) -> Row:
    """Judge one case by the rule, and return its row. The Python in a failing report calls this.

    `target`, `backend` and `options` are those of `verify`.

    >>> import flashlab as fl
    >>> from flashlab.verify import Case, run_case
    >>> case = Case(problem=fl.Problem(batch=1, heads=1, len_q=5, head_dim=16, dtype="float16", causal=True))
    >>> run_case("flash2", case).status
    'passed'
    """
    bench = Bench(target_of(target, backend, **options), (case.problem.dtype,), False, case.seed)
    return bench.perform("rule", _one(bench, case))


def _find(bench: Bench, cases: SearchStrategy[Case], examples: int) -> tuple[Case | None, int, float]:
    """The smallest failing case that Hypothesis finds (or None), how many cases were tried, and the worst ratio."""
    import hypothesis  # only for a search: it costs import time
    from hypothesis.errors import NoSuchExample

    tried, worst = 0, 0.0

    def fails(case: Case) -> bool:
        nonlocal tried, worst
        row = bench.perform(SEARCH, _one(bench, case))
        tried += row.status != "not run"
        worst = max(worst, row.worst or 0.0)
        return row.status == "failed"

    quiet = hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
    )
    try:
        return hypothesis.find(cases, fails, settings=quiet, random=random.Random(bench.seed)), tried, worst
    except NoSuchExample:
        return None, tried, worst


def _search(bench: Bench, examples: int, *, any_tile: bool) -> tuple[Row, Trial | None]:
    """Try random problems. Returns the report's row, and a trial of the smallest problem that fails, if one does."""
    target, begun = bench.target, time.perf_counter()
    tiles = target.tiles if any_tile else (None,)
    cases = random_cases(
        bench.dtypes,
        longest=target.longest,
        head_dims=target.head_dims,
        tiles=tiles,
        layouts=target.layouts,
        scales=target.scales,
        scores=target.scores,
    ).map(target.domain.fit_case)
    case, tried, worst = _find(bench, cases, examples)
    if case is not None:
        trial = _one(bench, case)
        return replace(
            bench.perform(SEARCH, trial), case="smallest failing", seconds=time.perf_counter() - begun
        ), trial
    return Row(
        check=SEARCH,
        case=f"{tried} random problems",
        problem="",
        dtype=", ".join(bench.dtypes),
        worst=worst,
        status="passed" if tried else "not run",
        detail="" if tried else "none of them is supported",
        seconds=time.perf_counter() - begun,
    ), None


def _one(bench: Bench, case: Case) -> Trial:
    return Trial("one case", case.problem, lambda: bench.judge_case(case), case)


def _failing(bench: Bench, name: str, trial: Trial, before: Case | None = None) -> Failing:
    """What fails in a trial, with Python that shows it and the likely mistake. `before` is the case before it shrank."""
    message = bench.perform(name, trial).detail
    cause = likely(bench, trial.case or Case(problem=trial.problem, seed=bench.seed), [before] if before else [])
    if trial.case:
        python = _python(bench.target, f"run_case({{}}, {trial.case.source}{{}})")
        return Failing(message=message, python=python, likely=cause)
    call = f'fl.verify({{}}{{}}, checks=["{name}"], dtypes=["{trial.problem.dtype}"], seed={bench.seed}).print()'
    return Failing(message=f"{name}, {trial.label}: {message}", python=_python(bench.target, call), likely=cause)


def _python(target: Target, call: str) -> str:
    """A program that shows the failure. `call` has two places for `str.format`: the target and its options."""
    named = target.source()
    options = "".join(f", {name}={value!r}" for name, value in target.options().items())
    shown = call.format(named or "target", options)
    used = [name for name in ("Case", "load", "run_case") if f"{name}(" in shown]
    lines = ["import flashlab as fl", *([f"from flashlab.verify import {', '.join(used)}"] if used else []), ""]
    if named is None:
        lines += [f"target = ...  # {target.name}, as it was given to verify", ""]
    return "\n".join([*lines, shown if shown.endswith(".print()") else f"print({shown})"])
