"""Every seeded bug of the rungs below flash_decoding and paged is found on the emulator, by the check that is meant for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
import kernels_cu
from flashlab.run.emulated import emulate_problem
from tests.mutants.backward import KernelMutant
from tests.mutants.decoding_rungs import KERNELS, TAKES, problem
from tests.tiers import one_of_each

pytestmark = pytest.mark.compiler
CASES = [(name, case) for name, cases in TAKES.items() for case in cases]


def found(algorithm: str, case: str) -> set[str]:
    """What is wrong with a run, by the names of the checks."""
    p, row = problem(case), fl.CATALOGUE[algorithm]
    arrays: Any = row.operation.draw(p, 1)
    run = emulate_problem(row, p, arrays, lse=True)
    wrong = {name for name, lines in (("misuse", run.findings or run.unwritten), ("bytes", run.differences)) if lines}
    truth = row.operation.judge(p, arrays)
    bounds = row.operation.bounds(p, arrays, truth)
    empty = np.isneginf(truth["lse"])
    off = {
        "out": np.linalg.norm(run.out.astype(np.float64) - truth["out"], axis=-1),
        "lse": np.where(empty, np.where(run.lse == truth["lse"], 0, np.inf), np.abs(run.lse - truth["lse"])),
    }
    return wrong | {"rule" for name in off if not (off[name] <= bounds[name]).all()}


@pytest.mark.parametrize("mutant", one_of_each(KERNELS, lambda each: each.algorithm, lambda each: each.mechanism))
def test_a_kernel_is_killed_by_its_check(mutant: KernelMutant, tmp_path: Path) -> None:
    with kernels_cu.sources_in(mutant.written(tmp_path)), np.errstate(all="ignore"):
        assert mutant.check in found(mutant.algorithm, mutant.case)


@pytest.mark.parametrize("of", one_of_each(CASES, lambda of: of[0], "-".join))
def test_the_real_kernel_passes(of: tuple[str, str]) -> None:
    """A mutant's death says something if the real kernel passes the same case."""
    with np.errstate(invalid="ignore"):
        assert found(*of) == set()


def test_the_zoo_is_as_large_as_claimed() -> None:
    assert len({mutant.mechanism for mutant in KERNELS}) == len(KERNELS)
    assert all(sum(mutant.algorithm == name for mutant in KERNELS) >= 10 for name in TAKES)
    assert all(mutant.case in TAKES[mutant.algorithm] for mutant in KERNELS)
