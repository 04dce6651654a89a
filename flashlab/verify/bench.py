"""The test bench runs a target on arrays whose memory the bench owns, and turns checks into rows of a report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from flashlab.verify.adapter import Adapter, CallableTarget, Failure, Refused, Target, in_words
from flashlab.verify.cases import Case, describe, said
from flashlab.verify.memory import Placed, place
from flashlab.verify.report import Row
from flashlab.verify.rule import Expected, Judgement, bottom_right, expect, judge, reference
from flashlab.verify.steps import Ended, Steps
from simulator import Problem, Scales
from simulator.dtypes import Array, numpy_dtype
from simulator.errors import Said, Unavailable, UsageError
from simulator.names import DType
from simulator.operations.attention import ATTENTION, SCORE
from simulator.problem import SCORES

ORACLES_AGREE = 1e-12
"""How far two float64 oracles may be apart, times the largest score if over 1. They differ only in the order of
sums."""
Arrays = Mapping[str, Any]
"""NumPy arrays by the names of their operands."""
MOST_LARGER = 1e6
"""By how much more than attention's a row of a judge may be, for which the rule grows."""
DENSE_LIMIT = 1 << 17
"""The most (query, key) pairs, over batch and heads, for which the loop over queries is run as a second oracle."""


class Result(NamedTuple):
    """What a target returned, as NumPy arrays. `lse` is in natural logarithms, or None if the target returns none."""

    out: Array
    lse: Array | None

    def same_bits(self, other: Result) -> bool:
        """True if both are equal to the last bit. A NaN equals only a NaN of the same bits."""
        pairs = [(self.out, other.out)]
        if self.lse is not None and other.lse is not None:
            pairs.append((self.lse, other.lse))
        return all(a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


@dataclass(frozen=True)
class Trial:
    """One row of a check, to be run. `body` raises `Failure` or returns the error over the limit (None: it has
    none)."""

    label: str
    problem: Problem
    body: Callable[[], float | None]
    case: Case | None = None


@dataclass(frozen=True)
class Bench:
    """A target, and what the checks run it on."""

    target: Target
    dtypes: tuple[DType, ...]
    full: bool
    seed: int
    steps: Steps = field(default_factory=Steps)
    quick: bool = False
    """Is it enough to look at small problems, and to trust the judge?"""
    judged: Target | None = None
    """What says the truth in the place of attention in float64."""

    def does(self, problem: Problem) -> bool:
        """Does the target take this problem?"""
        return self.target.refuses(problem) is None

    def probe(self) -> None:
        """Call an outsider's function once per dtype. Raises `UsageError` if it refuses its arguments, whatever they hold."""
        if isinstance(target := self.target, CallableTarget):
            for dtype in self.dtypes:
                with suppress(Ended, Refused):
                    self.steps.step(lambda dtype=dtype: self._probe(target, dtype))

    def _probe(self, target: CallableTarget, dtype: DType) -> None:
        for causal in (False, True):
            p = target.domain.fit(Problem(batch=1, heads=2, len_q=16, head_dim=64, dtype=dtype, causal=causal))
            if not target.refuses(p):
                break
        else:
            return  # it does neither: the rows will say why
        try:
            self.call(p, {name: target.frame.put(x) for name, x in self.draw(p).items()})
        except (Ended, UsageError, Unavailable):
            raise
        except (Exception, SystemExit) as error:
            if (refusal := target.argument_error(p, error)) is not None:
                raise refusal from None

    def probe_judge(self) -> None:
        """Call a judge of the user's once. Raises `UsageError` if it can't judge."""
        judge = self.judged
        if isinstance(judge, CallableTarget):
            p = self.target.domain.fit(Problem(batch=1, heads=2, len_q=16, head_dim=64, dtype=self.dtypes[0]))
            try:
                self._by_the_judge(judge, p, self.draw(p))
            except (UsageError, Unavailable):
                raise
            except Exception as error:
                raise judge.argument_error(p, error) or UsageError(
                    "judge", Said(judge.name), f"no error: {error}"
                ) from None

    def draw(self, problem: Problem, inputs: str = "normal") -> dict[str, Any]:
        """A problem's operands by name, with values of a kind in `INPUTS`."""
        return ATTENTION.draw(problem, self.seed, inputs)

    def call(self, problem: Problem, arrays: Mapping[str, Any], **more: Any) -> tuple[Any, Any]:
        """(out, lse) of the target, for operands of its framework by name."""
        with self.steps.call():
            return self.target.call(problem, arrays, **more)

    def run(
        self, problem: Problem, arrays: Arrays, *, layout: str = "plain", garbage: float = math.nan,
        tile: tuple[int, int] | None = None, out: bool = False, scales: Scales | None = None,
        within: dict[str, Placed] | None = None,
    ) -> Result:  # fmt: skip
        """Run the target on a problem's operands.

        With `within`, they go into the same memory as those of an earlier run of the problem with this dictionary.

        Every buffer has guard bands of `garbage`. These and the inputs must be unchanged afterwards, or `Failure` is
        raised. With `out`, the target writes into a buffer of ours, which is full of garbage before the launch.
        """
        frame = self.target.frame
        placed = {name: place(frame, x, layout, garbage) for name, x in arrays.items()}
        if within is not None:
            for name, x in placed.items():
                placed[name] = within[name].refilled(x) if name in within else x
            within.update(placed)
        mine: Placed | None = None
        if out:
            shape = (problem.batch, problem.heads, problem.len_q, problem.head_dim_v)
            mine = place(frame, np.full(shape, garbage, numpy_dtype(problem.out_dtype)), layout, garbage)
        got, lse = self.call(
            problem,
            {name: x.view for name, x in placed.items()},
            out=None if mine is None else mine.view,
            tile=tile,
            scales=None if scales is None else Scales(*(frame.put(x.reshape(-1)).reshape(x.shape) for x in scales)),
        )
        result = self._result(got if mine is None else mine.view, lse)
        for name, buffer in placed.items():
            if harm := buffer.harm():
                raise Failure(f"{name}: {harm}")
        if mine is not None and (harm := mine.harm(written=True)):
            raise Failure(f"out: {harm}")
        return result

    def expect(self, problem: Problem, arrays: Arrays) -> Expected:
        """The truth for these inputs, by the target's convention for causal masks, or by a judge of the user's."""
        if self.judged is not None:
            return self._by_the_judge(self.judged, problem, arrays)
        return expect(problem, **arrays, align=self.target.align)

    def judge_case(self, case: Case) -> float:
        """Hold one case to the rule, by two oracles that share no mask code. Returns the worst error over its limit."""
        p, arrays = case.problem, case.arrays()
        if p.dropout and isinstance(self.target, CallableTarget):
            from flashlab.verify.dropout import obeyed  # which imports this module

            return obeyed(self, p)
        expected = self.expect(p, arrays)
        if not self.quick and pairs_of(p) <= DENSE_LIMIT:
            self.check_oracles(p, arrays, expected)
        result = self.run(p, arrays, layout=case.layout, tile=case.tile)
        return held(judge(expected, result.out, result.lse)).worst

    def _by_the_judge(self, judge: Target, problem: Problem, arrays: Arrays) -> Expected:
        out, lse = judge.call(problem, {name: x.copy() for name, x in arrays.items()})
        found = {"out": np.asarray(out, np.float64)}
        found["lse"] = np.zeros(found["out"].shape[:3]) if lse is None else np.asarray(lse, np.float64)
        shape = (problem.batch, problem.heads, problem.len_q, problem.head_dim_v)
        if found["out"].shape != shape or found["lse"].shape != shape[:3]:
            got = tuple(x.shape for x in found.values())
            raise UsageError("judge", Said(str(got)), f"a function that returns arrays {shape} and {shape[:3]}")
        # the rule of attention of these inputs, in proportion where the judge's rows are larger
        usual = expect(problem, **arrays, align=self.target.align)
        sizes = [np.linalg.norm(x, axis=-1) for x in (found["out"], usual.out)]
        larger = np.clip(sizes[0] / np.maximum(sizes[1], 1e-30), 1.0, MOST_LARGER)
        return Expected(found["out"], found["lse"], larger * usual.out_tolerance, usual.lse_tolerance)

    def check_oracles(self, problem: Problem, arrays: Arrays, expected: Expected) -> None:
        """Raise `Failure` if the dense reference and the loop over queries disagree. A judge of the user's is alone."""
        if self.judged is not None:
            return
        loop = reference(problem, **arrays, align=self.target.align, loop=True)
        close = ORACLES_AGREE * float(np.maximum(1.0, expected.lse_tolerance / SCORE[problem.dtype]).max(initial=1.0))
        for name, a, b in (("out", expected.out, loop.out), ("LSE", expected.lse, loop.lse)):
            if not np.isclose(a, b, rtol=close, atol=close).all():
                raise Failure(f"the oracles disagree about {name}: this is the verifier's own fault")

    def _result(self, out: object, lse: object) -> Result:
        frame, target = self.target.frame, self.target
        values = None if lse is None else np.asarray(frame.get(lse), np.float32)
        if values is not None and isinstance(target, CallableTarget):
            values = target.natural(values)
        return Result(frame.get(out), values)

    def perform(self, check: str, trial: Trial) -> Row:
        """Run a trial and return its row of the report."""
        row = Row(
            check=check, case=trial.label, problem=describe(trial.problem), dtype=trial.problem.dtype, status="passed"
        )
        return stepped(self.steps, lambda: self._performed(row, trial), row)

    def _performed(self, row: Row, trial: Trial) -> Row:
        begun = time.perf_counter()
        try:
            if reason := self.target.refuses(trial.problem):
                raise Refused(reason)
            row = replace(row, worst=trial.body())
        except Failure as failure:
            row = replace(row, status="failed", detail=str(failure), place=failure.place)
        except Refused as reason:
            row = replace(row, status="not run", detail=str(reason))
        except (Ended, Unavailable):
            raise
        except (Exception, SystemExit) as error:  # whatever the target raises is a finding, no crash of ours
            row = replace(row, status="failed", detail=in_words(error))
        return replace(row, seconds=time.perf_counter() - begun)


def pairs_of(p: Problem) -> int:
    """The (query, key) pairs of a problem, over batch and heads."""
    return p.len_q * p.len_kv * p.batch * p.heads


def own_judge(judge: Callable[..., Any] | None, target: Target) -> Target | None:
    """A judge of the user's, called like a function that is verified. Raises `UsageError` for one that takes other arguments."""
    if judge is None:
        return None
    name = getattr(judge, "__name__", "judge")
    return CallableTarget(Adapter(judge, lse="e" if target.lse else None, causal=target.align, name=name))


def stepped(steps: Steps, body: Callable[[], Row], row: Row) -> Row:
    """The row that a step returns, or else what becomes of `row`."""
    try:
        return steps.step(body)
    except Ended as ended:
        return replace(row, status="failed", detail=ended.message, place=ended.place, ended=True)
    except Refused as reason:
        return replace(row, status="not run", detail=str(reason))


def fitted(
    bench: Bench,
    word: str,
    p: Problem,
    body: Callable[[Bench, Problem], float | None],
    keeps: Callable[[Problem], object] = lambda _: True,
) -> Trial:
    """A trial of the nearest problem in the domain, or one that isn't run if that doesn't keep what the check needs."""
    inside = bench.target.domain.fit(p)
    if keeps_scores(inside, p) and keeps(inside):
        return Trial(said(word, p, inside), inside, lambda: body(bench, inside))
    return Trial(word, p, no_such_problem)


def keeps_scores(inside: Problem, wanted: Problem) -> bool:
    """Has a problem that was moved into a domain still something of what changes the wanted one's scores, if anything does?"""
    asked = [name for name in SCORES if name in wanted.applied]
    return not asked or any(name in inside.applied for name in asked)


def no_such_problem() -> None:
    """The body of a trial that isn't run."""
    raise Refused("its domain has no such problem")


def held(judgement: Judgement) -> Judgement:
    """Return the judgement if it passed, or raise `Failure`."""
    if judgement.message:
        raise Failure(judgement.message)
    return judgement


def near(a: Result, b: Result, expected: Expected, *, factor: float = 2.0, what: str) -> float:
    """Hold two results to `factor` times the rule of each other: each of them may be off by the rule once.

    Returns the worst row's difference over that limit, and raises `Failure` over 1.
    """
    with np.errstate(invalid="ignore"):
        ratios = np.linalg.norm(a.out.astype(np.float64) - b.out.astype(np.float64), axis=-1) / (
            factor * expected.out_tolerance
        )
    worst = float(np.where(np.isnan(ratios), np.inf, ratios).max(initial=0.0))
    if worst > 1:
        raise Failure(f"{what}: out differs by {worst:.3g} x what rounding explains")
    if a.lse is not None and b.lse is not None:
        with np.errstate(invalid="ignore"):
            off = np.where(a.lse == b.lse, 0.0, np.abs(a.lse.astype(np.float64) - b.lse)) / (
                factor * expected.lse_tolerance
            )
        worst_lse = float(np.where(np.isnan(off), np.inf, off).max(initial=0.0))
        if worst_lse > 1:
            raise Failure(f"{what}: the LSE differs by {worst_lse:.3g} x what rounding explains")
        worst = max(worst, worst_lse)
    return worst


def visible(problem: Problem, target: Target) -> Array:
    """Which keys each query sees, by the target's convention: booleans (len_q, len_kv)."""
    p = bottom_right(problem, target.align)
    seen = np.zeros((problem.len_q, problem.len_kv), bool)
    for row in range(p.len_q):
        keys = p.visible_keys(row)
        seen[row, keys.start : keys.stop] = True
    return seen
