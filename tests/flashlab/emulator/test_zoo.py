"""Every seeded fault is found by the sanitiser, or the check, that it belongs to, with its line; sound kernels have none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.emulator import Finding, Launched, Line
from flashlab.run.emulated import _compare
from flashlab.verify.rule import Judgement, expect, judge
from tests.flashlab.emulator.mutant import ALIGNED_SIZES, CHECKS, SIZES, Mutant, sound_job
from tests.flashlab.emulator.run import Job, Ran, array_of, emulate, plain, plain_job
from tests.flashlab.emulator.zoo import ZOO
from tests.patches import line_of
from tests.tiers import one_of_each

pytestmark = pytest.mark.compiler

Key = tuple[str, str]
SOUND = {(mutant.kernel, mutant.problem, mutant.sees == "plain"): mutant for mutant in ZOO}


def some(mutants: Iterable[Mutant], kind: Callable[[Mutant], object] = lambda mutant: mutant.sees) -> list[Any]:
    """Of each kind of finding one in each `make test`; the whole zoo is long."""
    return one_of_each(mutants, kind, lambda mutant: mutant.name)


@pytest.mark.parametrize("mutant", some(mutant for mutant in ZOO if mutant.sees not in CHECKS))
def test_found_by_its_sanitiser_at_its_line(mutant: Mutant) -> None:
    ran = _run(mutant)
    said = "\n".join(map(str, ran.findings)) or "nothing"
    assert {finding.kind for finding in ran.findings} == {mutant.sees, *mutant.also}, said
    assert any(_names(finding, mutant) for finding in ran.findings), said


def _run(mutant: Mutant) -> Ran:
    return emulate(mutant.job(), time_limit=0.3 if mutant.hangs else 20)


def _names(finding: Finding, mutant: Mutant) -> bool:
    """The finding is of the mutant's kind, and has its line, step, tensor, header line and other party."""
    return (
        finding.kind == mutant.sees
        and (finding.step, finding.tensor) == (mutant.step, mutant.tensor)
        and _is(finding.line, mutant, mutant.at)
        and (not mutant.other or _is(finding.other_line, mutant, mutant.other))
        and (not mutant.via or any(mutant.via in _text(line) for line in finding.via))
    )


def _is(line: Line | None, mutant: Mutant, code: str) -> bool:
    """The line is that of code that occurs once in the kernel as it was run."""
    assert line is not None
    path = Path(line.file)
    return path.stem == mutant.kernel and line.number == line_of(path.read_text(encoding="utf-8"), code)


def _text(line: Line) -> str:
    return Path(line.file).read_text(encoding="utf-8").splitlines()[line.number - 1]


@pytest.mark.parametrize("mutant", some(mutant for mutant in ZOO if mutant.sees in CHECKS))
def test_caught_by_its_check(mutant: Mutant) -> None:
    """By that check alone: nothing is misused, and the numbers are right unless they are what's wrong."""
    job = mutant.job()
    ran, sound = emulate(job), _sound(mutant)
    assert not ran.findings, "\n".join(map(str, ran.findings))
    assert _right(mutant, job, ran) == (mutant.sees != "numbers")
    CHECK[mutant.sees](mutant, ran.launched, sound.launched)


def _numbers(mutant: Mutant, launched: tuple[Launched, ...], sound: tuple[Launched, ...]) -> None:
    assert not _differences(mutant, launched)


def _bytes(mutant: Mutant, launched: tuple[Launched, ...], sound: tuple[Launched, ...]) -> None:
    assert not _differences(mutant, sound)
    assert any(
        f"step {mutant.step}," in line and f" of {mutant.tensor}:" in line for line in _differences(mutant, launched)
    )
    assert _totals(launched) != _totals(sound)


def _ledger(mutant: Mutant, launched: tuple[Launched, ...], sound: tuple[Launched, ...]) -> None:
    assert any(
        f"step {mutant.step}," in line and f" of {mutant.tensor}:" in line for line in _differences(mutant, launched)
    )
    assert _totals(launched) == _totals(sound)


def _wavefronts(mutant: Mutant, launched: tuple[Launched, ...], sound: tuple[Launched, ...]) -> None:
    def conflicts(x: tuple[Launched, ...]) -> Counter[Key]:
        return _sums(x, lambda row: row.wavefronts - row.ideal)

    assert conflicts(launched)[mutant.step, mutant.tensor] > conflicts(sound)[mutant.step, mutant.tensor]
    assert not conflicts(sound).total()
    assert _totals(launched) == _totals(sound)


def _sectors(mutant: Mutant, launched: tuple[Launched, ...], sound: tuple[Launched, ...]) -> None:
    found, ideal = (_sums(x, lambda row: row.sectors) for x in (launched, sound))
    assert found[mutant.step, mutant.tensor] > 1.5 * ideal[mutant.step, mutant.tensor]
    assert _totals(launched) == _totals(sound)


def _plain(mutant: Mutant, launched: tuple[Launched, ...], sound: tuple[Launched, ...]) -> None:
    assert any(x.plain for x in launched)
    assert not any(x.plain for x in sound)


CHECK = {
    "numbers": _numbers,
    "bytes": _bytes,
    "ledger": _ledger,
    "wavefronts": _wavefronts,
    "sectors": _sectors,
    "plain": _plain,
}


def _sums(launched: tuple[Launched, ...], quantity: Callable[[Any], int]) -> Counter[Key]:
    sums: Counter[Key] = Counter()
    for row in (row for x in launched for row in x.moved):
        sums[row.step, row.tensor] += quantity(row)
    return sums


def _totals(launched: tuple[Launched, ...]) -> Counter[Key]:
    """Bytes by tensor and direction, whatever the step."""
    sums: Counter[Key] = Counter()
    for row in (row for x in launched for row in x.moved):
        sums[row.tensor, row.what] += row.bytes
    return sums


def _differences(mutant: Mutant, launched: tuple[Launched, ...]) -> list[str]:
    """Where the bytes by step and tensor aren't the formula's."""
    counts = mutant.counts()
    kernels = fl.CATALOGUE[counts.algorithm].launched(counts.problem, counts.config)
    each = zip(launched, counts.launches, kernels, strict=True)
    return [line for x, formula, kernel in each for line in _compare(x, formula, kernel)]


@pytest.mark.alike(
    "masked-tiles-not-skipped",
    "flag-that-nobody-sets",
    "columns-written-where-rows-should-be",
    "zeroed-by-one-block-while-others-add",
    "shuffles-mask-lacks-the-lane",
)
@pytest.mark.parametrize("mutant", some(SOUND.values(), lambda mutant: mutant.kernel))
def test_sound_kernels_have_no_findings(mutant: Mutant) -> None:
    """On every problem on which a mutant of theirs has one."""
    ran = _sound(mutant)
    assert not ran.findings, "\n".join(map(str, ran.findings))
    assert _right(mutant, sound_job(mutant), ran)
    if not mutant.is_plain:
        assert not _differences(mutant, ran.launched)


def test_lanes_that_took_another_branch_are_not_active() -> None:
    ran = emulate(plain_job("aggregate", 256))
    assert not ran.findings
    assert np.array_equal(ran.arrays["count"].view("i4"), plain("aggregate", 256).results["count"])


@cache
def _sound_of(kernel: str, problem: fl.Problem, watch: bool) -> Ran:
    return emulate(sound_job(SOUND[kernel, problem, watch]))


def _sound(mutant: Mutant) -> Ran:
    return _sound_of(mutant.kernel, mutant.problem, mutant.sees == "plain")


def _right(mutant: Mutant, job: Job, ran: Ran) -> bool:
    """The numbers pass: by the rule, or, of a plain kernel's sums, to a few units in the last place."""
    if mutant.is_plain:
        return _near(plain(mutant.kernel, SIZES[mutant.kernel]).results, ran, 1e-5)
    return _judged(mutant.problem, job, ran).passed


def _judged(problem: fl.Problem, job: Job, ran: Ran) -> Judgement:
    expected = expect(problem, *fl.random_inputs(problem, seed=0))
    return judge(expected, array_of(ran, job, "out", problem), array_of(ran, job, "lse", problem))


def _near(results: Any, ran: Ran, tolerance: float) -> bool:
    return all(
        np.allclose(ran.arrays[name].view(wanted.dtype), wanted, rtol=tolerance, atol=tolerance)
        for name, wanted in results.items()
    )


@pytest.mark.alike("input-written", "barrier-after-a-copy-removed")
@pytest.mark.parametrize("mutant", some(ZOO, lambda mutant: (mutant.blind, mutant.is_plain, mutant.hangs)))
def test_what_the_usual_test_says(mutant: Mutant) -> None:
    """`allclose(1e-2)` on an aligned problem, run without the sanitisers: would the numbers alone have given it away?"""
    assert _survives(mutant) == mutant.blind


def _survives(mutant: Mutant) -> bool:
    job = mutant.job(aligned=True)
    ran = emulate(job, sanitize=False, time_limit=0.3 if mutant.hangs else 20, workers=1)
    if mutant.hangs and ran.findings:
        return False
    if mutant.is_plain:
        return _near(plain(mutant.kernel, ALIGNED_SIZES[mutant.kernel]).results, ran, 1e-2)
    problem = mutant.aligned
    wanted = fl.naive(*fl.random_inputs(problem, seed=0)).out
    return np.allclose(array_of(ran, job, "out", problem).astype(np.float32), wanted, rtol=1e-2, atol=1e-2)


def test_the_zoo_is_as_large_as_claimed() -> None:
    mechanisms = Counter(mutant.mechanism for mutant in ZOO)
    assert len(mechanisms) == len(ZOO) >= 40, [m for m, n in mechanisms.items() if n > 1]
    assert 2 * sum(mutant.blind for mutant in ZOO) >= len(ZOO)
    kinds = {
        "race", "race between blocks", "wait forgotten", "out of bounds", "misaligned", "uninitialised", "input written",
        "divergent collective", "barrier", "deadlock",
    }  # fmt: skip
    assert {mutant.sees for mutant in ZOO} == {*kinds, *CHECKS}
