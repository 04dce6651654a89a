"""Is it right? `verify` holds every row to a rule against float64 attention, on edges, probes and random problems."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from flashlab.verify import general
from flashlab.verify.adapter import Adapter, Refused, Target, TileShape
from flashlab.verify.adapter import imported as load
from flashlab.verify.bench import Bench, Trial, own_judge
from flashlab.verify.cases import INPUTS, LAYOUTS, Case, random_cases, smaller_cases
from flashlab.verify.domain import Domain
from flashlab.verify.kernels import FileKernel, is_kernel, kernel, kernel_named
from flashlab.verify.outsiders import OUTSIDERS
from flashlab.verify.probes import CHECKS, QUICK
from flashlab.verify.raised import raised
from flashlab.verify.report import Failing, Report, Row
from flashlab.verify.rule import TEXT
from flashlab.verify.steps import Ended, Steps
from flashlab.verify.subject import Subject
from flashlab.verify.targets import BACKENDS, target_of
from simulator.devices import Device
from simulator.errors import Said, UsageError, among, unknown
from simulator.fields import flag, integer
from simulator.names import AnyBackend, DeviceName, DType
from simulator.operations.operation import Operation
from simulator.problem import DTYPES, ITEMSIZE, Problem, Tile

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = [
    "CHECKS",
    "INPUTS",
    "LAYOUTS",
    "OUTSIDERS",
    "QUICK",
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
CALL_SECONDS = 300.0
"""How long a call of a function in a process of its own may take: the first one may compile for a GPU."""
JUDGED = ("rule", "memory", "determinism", SEARCH, "misaligned")
"""The checks that hold a target to a judge, or to itself, and to no law of attention."""
_AGAIN = 10
"""How often the smallest failing case is run again: a race fails now and then."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `verify` is told beside the target."""

    backend: AnyBackend = "simulator"
    full: bool = False
    quick: bool = False
    seed: int | None = 0
    dtypes: Sequence[DType] | None = None
    checks: Sequence[str] | None = None
    examples: int | None = None
    device: DeviceName | None = None
    tile: TileShape = None
    framework: str | None = None
    judge: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        """Raises `UsageError`: what nobody can run is no verdict on the target."""
        among("backend", self.backend, BACKENDS)
        if flag("quick", self.quick) and self.full:
            raise UsageError("quick", self.quick, "False, since full is True")
        if self.seed is not None:
            integer("seed", self.seed, 0)
        if self.examples is not None:
            integer("examples", self.examples, 0)
        if self.device is not None:
            Device.named(self.device)
        if self.tile is not None:
            Tile.parse(self.tile)
        if self.judge is not None and not callable(self.judge):
            raise UsageError(
                "judge", self.judge, "a function (q, k, v, ...) of NumPy arrays that returns (out, lse), or out"
            )
        for name in ("dtypes", "checks"):  # frozen, and a name alone is a list of one
            object.__setattr__(self, name, _names(name, getattr(self, name)))


def _names(argument: str, value: Any) -> tuple[str, ...] | None:
    """One name or several as a tuple. Raises `UsageError` for what is neither."""
    if value is None or isinstance(value, str):
        return value if value is None else (value,)
    names: tuple[Any, ...] = (None,)
    with suppress(TypeError):
        names = tuple(value)
    if not all(isinstance(name, str) for name in names):
        raise UsageError(argument, value, "a name, or a list of names")
    return names


def verify(
    target: Any, backend: AnyBackend = "simulator", *, full: bool = False, quick: bool = False, seed: int | None = None,
    dtypes: Sequence[DType] | None = None, checks: Sequence[str] | None = None, examples: int | None = None,
    device: DeviceName | None = None, tile: TileShape = None, framework: str | None = None,
    judge: Callable[..., Any] | None = None, on_row: Callable[[Row], None] | None = None, progress: bool = False,
    isolate: bool = False, time_limit: float | None = None, adapt: Callable[[Any], Adapter] | None = None, **launch: Any,
) -> Report:  # fmt: skip
    """Check a target against float64 attention, hard.

    `target` is an algorithm's name, a tile program, the name of another library's kernel (in `OUTSIDERS`),
    "package:function", an `Adapter`, a callable, or a kernel of a CUDA source, "flash.cu:forward". That runs on the
    emulator, in a process of its own, and `launch` says how: the keywords of `fl.kernel`. Anything else of yours runs in
    this process, where it could change the judge itself. With `isolate` it runs in one of its own, too: the judge stays
    here, a call may take `time_limit` seconds (300), and what ends that process is a failed check. `adapt` makes an
    `Adapter` of the function there; then its own file can't say what it is for. Algorithms run on `backend`
    ("simulator", "gpu" or "emulator") with this `device` and `tile`. `full` adds long and wide problems, and on a GPU
    problems of over 2^31 elements. `quick` is for a first look, or for a program that asks often: the checks in `QUICK` in
    one dtype, on small problems, none random, unless you say otherwise. `checks` names some of `CHECKS` and "search" (None:
    all). `dtypes` are the storage dtypes (None: all but float8_e4m3fn, and only that for `flash3_fp8`). `examples` is how
    many random problems Hypothesis draws (0: none, and a failing problem isn't shrunk). `seed` is that of everything random
    (None: 0 in this process; in one of its own it is drawn after the target was loaded, and the report says it).
    `framework` is whose arrays a callable ("numpy" by default) or a GPU ("cupy" by default) is given. `on_row` is called
    with every row as soon as it is done, and `progress=True` shows how many are.

    A backward pass, or attention over pages, is verified by an `Adapter` with an `operation`, or under its name in `OUTSIDERS`.

    `judge` says what is right in the place of float64 attention: a function (q, k, v, ...) of NumPy arrays, with the keywords of
    a callable. It returns (out, lse), or out alone where the target returns no LSE. The rule allows what it does for attention of
    the same inputs, in proportion where the judge's rows are larger. Laws of attention are checked only where `checks` names
    them: the others are `JUDGED`.

    What the target does not support is listed as not run. An operation other than attention has checks of its own
    (`general.checks_of`), all short and none random: it takes neither `full` nor `examples`. Raises `UsageError` for bad
    input, and `Unavailable` for what is not installed.

    >>> import flashlab as fl
    >>> report = fl.verify("flash2", checks=["key_sets"], dtypes=["float16"])
    >>> report.verdict, len(report.rows)
    ('passed', 13)
    """
    if flag("progress", progress):
        from flashlab.views.progress import busy  # imported only to show, since it is slow to import

        with busy("checks") as tick:

            def done(row: Row) -> None:
                tick(row)
                if on_row:
                    on_row(row)

            return verify(
                target, backend, full=full, quick=quick, seed=seed, dtypes=dtypes, checks=checks, examples=examples, device=device,
                tile=tile, framework=framework, judge=judge, on_row=done, isolate=isolate, time_limit=time_limit, adapt=adapt,
                **launch,
            )  # fmt: skip
    apart = flag("isolate", isolate) or (isinstance(target, str) and is_kernel(target))
    options = Options(
        backend=backend, full=full, quick=quick, seed=0 if seed is None and not apart else seed, dtypes=dtypes,
        checks=checks, examples=examples, device=device, tile=tile, framework=framework, judge=judge,
    )  # fmt: skip
    if isinstance(target, str) and is_kernel(target):
        said = {"device": device, "time_limit": time_limit}
        found = kernel_named(target, launch | {name: value for name, value in said.items() if value is not None})
        from flashlab.verify.apart import verify_apart  # only where it is wanted: it needs processes

        return verify_apart(target, lambda: found, options, **found.limits(), on_row=on_row)
    if launch:
        own = [each.name for each in fields(Options)]
        for name in launch:
            if get_close_matches(name, own, n=1):
                raise unknown("keyword", name, own)
        raise UsageError(
            ", ".join(launch), Said(", ".join(map(str, launch.values()))), "nothing: only a .cu file is launched"
        )
    if isolate:
        return _isolated(target, options, on_row, CALL_SECONDS if time_limit is None else time_limit, adapt)
    if adapt is not None:
        raise UsageError("adapt", adapt, "None: an Adapter says the conventions of a function in this process")
    if time_limit is not None:
        raise UsageError("time_limit", time_limit, "None: only a process of its own can be stopped (isolate=True)")
    return verified(target, options, on_row, Steps())


def _isolated(
    target: Any,
    options: Options,
    on_row: Callable[[Row], None] | None,
    seconds: float,
    adapt: Callable[[Any], Adapter] | None,
) -> Report:
    """`verify` for a target in a process of its own. Raises `UsageError` for what is our own."""
    from flashlab.verify.apart import loaded, verify_apart

    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError("time_limit", seconds, "seconds, at least 0 (0: never stopped)")
    if adapt is not None and not callable(adapt):  # pyright: ignore[reportUnnecessaryComparison]
        raise UsageError("adapt", adapt, "a function that returns an Adapter of the function that it is given")
    said = target
    if isinstance(target, Adapter) and not isinstance(target.fn, FileKernel):  # its conventions stay here
        target, adapt = said.fn, lambda fn: replace(said, fn=fn)
    name, load = loaded(target)

    def refuse() -> None:
        if adapt is not None:
            raise UsageError("target", Said(name), "a function without conventions of its own: adapt says them")

    return verify_apart(name, load, options, seconds=seconds or math.inf, on_row=on_row, adapt=adapt, refuse=refuse)


def verified(target: Any, options: Options, on_row: Callable[[Row], None] | None, steps: Steps) -> Report:
    """`verify` for a target that is no kernel by its name, step by step. It may be one that is made already."""
    from flashlab.verify import foreign  # only where something is verified

    o = options
    row = target.row if isinstance(target, general.Ours) else general.row_of(target)
    if row is not None:
        _check_general(row.operation, o)
        kinds = _checked_dtypes(o.dtypes, row.dtypes, row.dtypes)
        subject = target
        if not isinstance(target, general.Ours):
            subject = general.subject(row, o.backend, device=o.device, tile=o.tile, framework=o.framework)
        return _general(subject, kinds, o, on_row, steps)
    if (adapter := foreign.adapted(target)) is not None:
        subject = foreign.foreign(adapter, steps)
        _check_general(subject.operation, o)
        kinds = _checked_dtypes(o.dtypes, adapter.domain.dtypes or DTYPES, adapter.domain.dtypes or DTYPES)
        subject.probe(kinds)
        found = _general(subject, kinds, o, on_row, steps)
        checked = adapter.operation != "paged" or adapter.lse is not None  # a backward pass has no LSE of its own
        return replace(found, domain=subject.target.domain.words, place=subject.target.place(), lse_checked=checked)
    every = QUICK if o.quick else [*list(CHECKS)[:-1], SEARCH, *list(CHECKS)[-1:]]
    usual = every if o.judge is None else [name for name in every if name in JUDGED]
    chosen = usual if o.checks is None else list(o.checks)
    for name in chosen:
        if name != SEARCH and name not in CHECKS:
            raise unknown("checks", name, [*CHECKS, SEARCH])
    wanted = target_of(target, o.backend, device=o.device, tile=o.tile, framework=o.framework)
    wanted.check_options()
    dtypes = _checked_dtypes(
        o.dtypes, wanted.dtypes[:1] if o.quick else wanted.dtypes, wanted.domain.dtypes or ITEMSIZE
    )
    bench = Bench(wanted, dtypes, o.full, o.seed or 0, steps, o.quick, own_judge(o.judge, wanted))
    bench.probe()
    bench.probe_judge()
    begun, rows, failing = time.perf_counter(), list[Row](), None
    failures = list[tuple[Trial, Row]]()
    count = o.examples if o.examples is not None else 0 if o.quick else (2000 if o.full else wanted.examples)

    def done(row: Row) -> None:
        rows.append(row)
        if on_row:
            on_row(row)

    def first() -> tuple[Trial, Row]:
        """The first failure in numbers, or else the first that isn't of a kind that always raises the same."""
        of_kinds = {id(row) for kind in raised(rows) for row in kind.rows}

        def rank(found: tuple[Trial, Row]) -> tuple[bool, bool]:
            return id(found[1]) in of_kinds, found[1].detail.startswith("raised ")

        return min(failures, key=rank)

    for name in chosen:
        if name == SEARCH and count:
            narrow = _narrowed(wanted.domain, rows) if wanted.backend == "callable" else None
            row, found = _search(bench, count, narrow, any_tile=o.tile is None)
            done(row)
            failing = found and _failing(bench, found, row)
        for trial in CHECKS[name](bench) if name in CHECKS else ():
            done(bench.perform(name, trial))
            if rows[-1].status == "failed":
                failures.append((trial, rows[-1]))
    if failing is None and failures:
        trial, row = first()
        found = None
        if trial.case and count and not row.ended:
            found = _find(bench, smaller_cases(trial.case).map(wanted.domain.fit_case), 200).failing
        smaller, before = (_one(bench, found[0]), found[1]) if found else (trial, row), trial.case
        if trial.case is None and not row.ended and not o.quick:
            smaller, before = _by_the_rule(bench, trial, row) or smaller, Case(problem=trial.problem, seed=bench.seed)
        failing = _failing(bench, *smaller, before)
    return Report(
        target=wanted.name,
        backend=wanted.backend,
        rule=TEXT,
        seed=o.seed or 0,
        full=o.full,
        lse_checked=wanted.lse,
        seconds=time.perf_counter() - begun,
        rows=rows,
        failing=failing,
        domain=wanted.domain.words,
        place=wanted.place(),
    )


def _checked_dtypes(
    dtypes: Sequence[DType] | None, default: tuple[DType, ...], accepted: Collection[str]
) -> tuple[DType, ...]:
    """The dtypes to check in: those asked for, or else the default. Raises `UsageError` for one that isn't accepted."""
    if dtypes is None:
        if not default:  # a kernel's pointers have one, and a wrong one would be misread
            raise UsageError("dtypes", None, 'the kernel\'s, as in ["float16"] or Domain(dtype="float16")')
        return default
    found = tuple(dtypes)
    for dtype in found:
        if dtype not in accepted:
            raise unknown("dtypes", dtype, accepted)
    if not found:
        raise UsageError("dtypes", dtypes, f"at least one of {', '.join(accepted)}")
    return found


def _check_general(operation: Operation, options: Options) -> None:
    """Raises `UsageError` for what an operation that isn't attention has not."""
    o = options
    if o.quick:
        raise UsageError("quick", o.quick, f"False: {operation.name} has only short problems")
    if o.judge is not None:
        raise UsageError("judge", Said(getattr(o.judge, "__name__", "it")), f"None: {operation.name} has its own")
    if o.full:
        raise UsageError("full", o.full, f"False: {operation.name} has no long or wide problems")
    if o.examples:
        raise UsageError("examples", o.examples, f"None or 0: {operation.name} has no random problems")
    for name in o.checks or ():
        if name not in general.checks_of(operation):
            raise unknown("checks", name, general.checks_of(operation))


def _general(
    subject: Subject,
    dtypes: Sequence[DType],
    options: Options,
    on_row: Callable[[Row], None] | None,
    steps: Steps,
) -> Report:
    """The report on an operation that isn't attention."""
    o, begun, found, failures = options, time.perf_counter(), list[Row](), list[tuple[Row, Problem]]()
    for each, problem in general.rows(subject, dtypes=dtypes, checks=o.checks, seed=o.seed or 0, steps=steps):
        found.append(each)
        if each.status == "failed":
            failures.append((each, problem))
        if on_row:
            on_row(each)
    return Report(
        target=subject.name,
        backend=subject.backend,
        rule=f"each row within the bound of {subject.operation.name}",
        seed=o.seed or 0,
        full=False,
        lse_checked=True,
        seconds=time.perf_counter() - begun,
        rows=found,
        failing=_general_failing(subject, failures, o, steps) if failures else None,
    )


def _general_failing(
    subject: Subject, failures: Sequence[tuple[Row, Problem]], options: Options, steps: Steps
) -> Failing | None:
    """What fails in the smallest problem of an operation that isn't attention. The rule comes first, and exceptions last."""

    def rank(found: tuple[Row, Problem]) -> tuple[bool, bool, bool]:
        row, _ = found
        return row.ended, row.detail.startswith("raised "), row.check != "rule"

    row, problem = min(failures, key=rank)
    message, cause, least = f"{row.check}: {row.detail}", "", problem
    if not row.ended:
        with suppress(Ended, Refused):
            least, small = steps.step(lambda: general.smallest(subject, problem, row.check, options.seed or 0))
            message = f"{row.check}, {small.problem}: {small.detail}"
            dtype = [p for _, p in failures if p.dtype == problem.dtype]
            others = list(dict.fromkeys([problem, *dtype[:4], *_of_shapes(subject, problem.dtype)]))
            cause = steps.step(lambda: general.likely(subject, least, others, options.seed or 0))
    named = getattr(subject, "target", None)
    call = f'run_case({{}}, {Case(problem=least, seed=options.seed or 0).source}{{}}, check="{row.check}")'
    if named is not None:
        return Failing(message=message, python=_python(named, call), likely=cause)
    where = "".join(
        f", {name}={value!r}"
        for name, value in (("backend", options.backend), ("device", options.device))
        if value is not None
    )
    lines = ["import flashlab as fl", "from flashlab.verify import Case, run_case", ""]
    return Failing(
        message=message, python="\n".join([*lines, f"print({call.format(repr(subject.name), where)})"]), likely=cause
    )


def _of_shapes(subject: Subject, dtype: str) -> list[Problem]:
    """A few problems of an operation that show a mistake's traits apart: the first of its shapes that the subject takes."""
    sizes: dict[str, Any] = {"batch": 1, "heads": 1, "head_dim": 64, "dtype": dtype}
    every = (subject.fit(Problem(**sizes | dict(shape))) for shape in subject.operation.shapes.values())
    return [p for p in every if subject.refuses(p) is None][:6]


def _subject(
    target: Any,
    backend: AnyBackend,
    device: DeviceName | None = None,
    tile: TileShape = None,
    framework: str | None = None,
) -> Subject | None:
    """The subject of a target whose operation isn't attention, or None for any other target."""
    from flashlab.verify import foreign

    if (row := general.row_of(target)) is not None:
        return general.subject(row, backend, device=device, tile=tile, framework=framework)
    adapter = foreign.adapted(target)
    return None if adapter is None else foreign.foreign(adapter, Steps())


def run_case(target: Any, case: Case, backend: AnyBackend = "simulator", *, check: str = "rule", **options: Any) -> Row:
    """Judge one case by the rule, and return its row. The Python in a failing report calls this.

    `target`, `backend` and `options` are those of `verify`. `check` is another check of an operation that isn't attention. Of such
    an operation the rule is for inputs of all kinds.

    >>> import flashlab as fl
    >>> from flashlab.verify import Case, run_case
    >>> case = Case(problem=fl.Problem(batch=1, heads=1, len_q=5, head_dim=16, dtype="float16", causal=True))
    >>> run_case("flash2", case).status
    'passed'
    """
    subject = _subject(target, backend, **options)
    known = ("rule",) if subject is None else general.checks_of(subject.operation)
    if check not in known:
        raise unknown("check", check, known)
    if subject is not None:
        return general.run_problem(subject, case.problem, check, case.seed)
    bench = Bench(target_of(target, backend, **options), (case.problem.dtype,), False, case.seed)
    return bench.perform("rule", _one(bench, case))


class Found(NamedTuple):
    """The smallest failing case that was found and its row (or None), how many cases were tried, and the worst ratio."""

    failing: tuple[Case, Row] | None
    tried: int
    worst: float


def _find(bench: Bench, cases: SearchStrategy[Case], examples: int) -> Found:
    """Look for the smallest failing case with Hypothesis."""
    import hypothesis  # only for a search: it costs import time
    from hypothesis.errors import NoSuchExample

    # Hypothesis runs a case again, and relies on it that it fails again. Equal problems that are said otherwise are others here
    failed: dict[str, Row] = {}
    tried, worst = 0, 0.0

    def fails(case: Case) -> bool:
        nonlocal tried, worst
        if case.source in failed:
            return True
        if any(row.ended for row in failed.values()):  # a smaller one would end the process, too
            return False
        row = bench.perform(SEARCH, _one(bench, case))
        tried += row.status != "not run"
        worst = max(worst, row.worst or 0.0)
        if row.status == "failed":
            failed[case.source] = row
        return case.source in failed

    quiet = hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
    )
    try:
        case = hypothesis.find(cases, fails, settings=quiet, random=random.Random(bench.seed))
        return Found((case, failed[case.source]), tried, worst)
    except NoSuchExample:
        return Found(None, tried, worst)


def _narrowed(domain: Domain, rows: Sequence[Row]) -> Domain:
    """The domain without the kinds that a function raises the same exception for: a search would find nothing else."""
    changes = [found.kind.domain for found in raised(rows)]
    return replace(domain, **{name: value for each in changes for name, value in each.items()})


def _search(bench: Bench, examples: int, domain: Domain | None = None, *, any_tile: bool) -> tuple[Row, Trial | None]:
    """Try random problems of a domain (None: the target's own).

    Returns the report's row, and a trial of the smallest problem that fails, if one does.
    """
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
    ).map((domain or target.domain).fit_case)
    found = _find(bench, cases, examples)
    if found.failing:
        case, row = found.failing
        return replace(row, case="smallest failing", seconds=time.perf_counter() - begun), _one(bench, case)
    return Row(
        check=SEARCH,
        case=f"{found.tried} random problems",
        problem="",
        dtype=", ".join(bench.dtypes),
        worst=found.worst,
        status="passed" if found.tried else "not run",
        detail="" if found.tried else bench.steps.over or "none of them is supported",
        seconds=time.perf_counter() - begun,
    ), None


def _by_the_rule(bench: Bench, trial: Trial, failed: Row) -> tuple[Trial, Row] | None:
    """The smallest case of a trial's kind that fails by the rule, and its row; None if the trial's problem doesn't, or fails at
    another line."""

    def case(problem: Problem) -> Case:
        return Case(problem=problem, seed=bench.seed)

    with suppress(Ended, Refused):
        fit, one = bench.target.domain.fit, partial(_one, bench)
        problem, row = general.shrunk(trial.problem, fit, lambda p: bench.perform("rule", one(case(p))))
        if row.status == "failed" and not row.ended and row.place == failed.place:
            return one(case(problem)), row
    return None


def _one(bench: Bench, case: Case) -> Trial:
    return Trial("one case", case.problem, lambda: bench.judge_case(case), case)


def _failing(bench: Bench, trial: Trial, row: Row, before: Case | None = None) -> Failing:
    """What fails in a trial, with Python that shows it and the likely mistake. `before` is the case before it shrank."""
    name, message, cause = row.check, row.detail, ""
    if not row.ended and not bench.quick:
        case, others = trial.case or Case(problem=trial.problem, seed=bench.seed), [before] if before else []
        from flashlab.verify.mistakes import likely  # only where something is wrong

        with suppress(Ended, Refused):
            cause = "" if bench.judged else bench.steps.step(lambda: likely(bench, case, others))
    if trial.case and not row.ended:
        message += _rate(bench, trial)
    if trial.case:
        python = _python(bench.target, f"run_case({{}}, {trial.case.source}{{}})")
        return Failing(message=message, python=python, likely=cause)
    call = f'fl.verify({{}}{{}}, checks=["{name}"], dtypes=["{trial.problem.dtype}"], seed={bench.seed}).print()'
    return Failing(message=f"{name}, {trial.label}: {message}", python=_python(bench.target, call), likely=cause)


def _rate(bench: Bench, trial: Trial) -> str:
    """Words for a failure that comes and goes: in how many of some further runs the same case failed. None if in all."""
    failed = 0
    for _ in range(_AGAIN):
        row = bench.perform(SEARCH, trial)
        if row.status == "not run":
            return ""
        failed += row.status == "failed"
    return "" if failed == _AGAIN else f"; run {_AGAIN} times more, the same case failed {failed} times"


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
