"""Every seeded bug in dropout fails the one check that is meant for it, on the emulator."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import flashlab as fl
import kernels_cu
from flashlab.verify import general
from flashlab.verify.adapter import Failure
from tests.mutants.backward import KernelMutant
from tests.mutants.dropout import FORWARD, GRADIENTS
from tests.mutants.scores import ScoreMutant
from tests.mutants.test_backward import problem
from tests.mutants.test_scores import performed
from tests.tiers import one_of_each, quick, those_in

TILE = (64, 32)
"""Of a backward pass: a warp has two pairs of fragments of queries, and others lie between them."""
TRIALS = sorted({(mutant.algorithm, mutant.check, mutant.case) for mutant in FORWARD})
MUTANTS = one_of_each(FORWARD, lambda each: each.algorithm, lambda each: each.name)
QUICK = {(mutant.algorithm, mutant.check, mutant.case) for mutant in quick(MUTANTS)} | {
    trial for trial in TRIALS if trial[0] == "flash2" and "causal, GQA" in trial[2]
}
"""Those of the mutants that are no long tests, and one whose heads and batch are several."""


def kills(mutant: KernelMutant) -> None:
    """Raises what the mutant's check raises."""
    row = fl.catalogue.get(mutant.algorithm)
    tile = None if row.arch else TILE  # Hopper's kernel has only one
    subject = general.subject(row, "emulator", device=None, tile=tile, framework=None)
    general.checks_of(row.operation)[mutant.check](subject, problem(mutant.case), 0)


@pytest.mark.alike("a-byte-that-equals-the-threshold-keeps-too", "odd-rows-drop-what-even-rows-do")
@pytest.mark.compiler
@pytest.mark.parametrize("mutant", MUTANTS)
def test_killed_by_its_trial(mutant: ScoreMutant, tmp_path: Path) -> None:
    with kernels_cu.sources_in(mutant.written(tmp_path)), np.errstate(all="ignore"):
        row = performed(mutant.algorithm, mutant.check, mutant.case)
    assert row.status == "failed", f"{mutant.mechanism} survives {mutant.check}, {mutant.case}"
    assert "raised" not in row.detail, f"a bug that crashes is no mutant: {row.detail}"


@pytest.mark.alike("flash2", "standard")
@pytest.mark.compiler
@pytest.mark.parametrize("trial", those_in(QUICK, TRIALS, "-".join))
def test_the_real_kernels_pass_these_trials(trial: tuple[str, str, str]) -> None:
    assert performed(*trial).status == "passed"


@pytest.mark.alike("dV of what is dropped, too")
@pytest.mark.compiler
@pytest.mark.parametrize("mutant", one_of_each(GRADIENTS, lambda each: each.check, lambda each: each.mechanism))
def test_a_gradient_is_killed_by_its_check(mutant: KernelMutant, tmp_path: Path) -> None:
    with kernels_cu.sources_in(mutant.written(tmp_path)), np.errstate(all="ignore"), pytest.raises(Failure):
        kills(mutant)


@pytest.mark.alike("key_sets")
@pytest.mark.compiler
@pytest.mark.parametrize(
    "mutant",
    {(each.algorithm, each.check, each.case): each for each in GRADIENTS}.values(),
    ids=lambda each: f"{each.algorithm}, {each.check}, {each.case}",
)
def test_the_real_gradients_pass_these_checks(mutant: KernelMutant) -> None:
    kills(mutant)


def test_the_zoo_is_as_large_as_claimed() -> None:
    mechanisms = Counter(mutant.mechanism for mutant in (*FORWARD, *GRADIENTS))
    assert len(mechanisms) == len(FORWARD) + len(GRADIENTS) >= 30, [m for m, n in mechanisms.items() if n > 1]
