"""Every seeded bug of cascade's kernels is found on the emulator, by the check that is meant for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
import kernels_cu
from flashlab.run.emulated import emulate_problem
from flashlab.verify.shared import some_of
from simulator.operations.cascade import CASCADE
from tests.mutants.backward import KernelMutant
from tests.mutants.cascade import CASES, KERNELS, TILES, problem
from tests.simulator.test_latent import within
from tests.tiers import one_of_each

pytestmark = pytest.mark.compiler
ROW = fl.CATALOGUE["cascade"]


def found(case: str) -> set[str]:
    """What is wrong with a run, by the names of the checks."""
    p = problem(case)
    arrays: Any = CASCADE.draw(p, 1)
    tile = TILES.get(case, (32, 32))
    run = emulate_problem(ROW, p, arrays, lse=True, tile=tile)
    alone = emulate_problem(ROW, *some_of(p, arrays, [1]), lse=True, tile=tile)
    same = all(x[1:2].tobytes() == alone.outputs[name].tobytes() for name, x in run.outputs.items())
    findings = {"misuse": run.findings or run.unwritten, "bytes": run.differences, "requests": not same}
    wrong = {name for name, lines in findings.items() if lines}
    return wrong if within(CASCADE, run.outputs, p, arrays) else wrong | {"rule"}


@pytest.mark.parametrize("mutant", one_of_each(KERNELS, lambda each: each.check, lambda each: each.mechanism))
def test_a_kernel_is_killed_by_its_check(mutant: KernelMutant, tmp_path: Path) -> None:
    with kernels_cu.sources_in(mutant.written(tmp_path)), np.errstate(all="ignore"):
        assert mutant.check in found(mutant.case)


@pytest.mark.parametrize("case", one_of_each(CASES, lambda _: None))
def test_the_real_kernel_passes(case: str) -> None:
    assert found(case) == set()


def test_the_zoo_is_as_large_as_claimed() -> None:
    assert len({mutant.mechanism for mutant in KERNELS}) == len(KERNELS) >= 30
    assert {mutant.check for mutant in KERNELS} == {"misuse", "bytes", "rule", "requests"}
