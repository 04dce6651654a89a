"""Every seeded bug of flash3_paged's kernel is found on the emulator, by the check that is meant for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
import kernels_cu
from flashlab.run.emulated import emulate_problem
from simulator.operations.paged import PAGED
from tests.flashlab.emulator.test_paged import nhd
from tests.mutants import appending
from tests.mutants.backward import KernelMutant
from tests.simulator.test_paged import within
from tests.tiers import one_of_each

pytestmark = pytest.mark.compiler
ROW = fl.CATALOGUE["flash3_paged"]


def found(p: fl.Problem) -> set[str]:
    """What is wrong with a run on pools whose pages have a key behind the other, by the names of the checks."""
    arrays: Any = PAGED.draw(p, 1)
    run = emulate_problem(ROW, p, nhd(arrays), lse=True, tile=(64, 64))
    findings = {"misuse": run.findings or run.unwritten, "bytes": run.differences, "zeros": run.left}
    wrong = {name for name, lines in findings.items() if lines}
    return wrong if within(dict(run.outputs), p, arrays) else wrong | {"rule"}


@pytest.mark.parametrize("mutant", one_of_each(appending.KERNELS, lambda each: each.check, lambda each: each.mechanism))
def test_a_kernel_is_killed_by_its_check(mutant: KernelMutant, tmp_path: Path) -> None:
    with kernels_cu.sources_in(mutant.written(tmp_path)), np.errstate(all="ignore"):
        assert mutant.check in found(appending.problem(mutant.case))


@pytest.mark.parametrize("case", one_of_each(appending.CASES, lambda _: "one build"))
def test_the_real_kernel_passes(case: str) -> None:
    with np.errstate(invalid="ignore"):
        assert found(appending.problem(case)) == set()


def test_the_zoo_is_as_large_as_claimed() -> None:
    assert len({mutant.mechanism for mutant in appending.KERNELS}) == len(appending.KERNELS) >= 30
    assert {mutant.check for mutant in appending.KERNELS} == {"misuse", "bytes", "rule"}
