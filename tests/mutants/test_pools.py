"""Every seeded bug of append_kv and copy_pages is found on the emulator, by the check that is meant for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import flashlab as fl
import kernels_cu
from flashlab.run.emulated import emulate_problem
from flashlab.verify.bench import Failure
from flashlab.verify.general import judged
from tests.mutants import pools
from tests.mutants.backward import KernelMutant
from tests.tiers import one_of_each

pytestmark = pytest.mark.compiler


def found(algorithm: str, case: str) -> set[str]:
    """What is wrong with a run, by the names of the checks."""
    row, p = fl.CATALOGUE[algorithm], pools.problem(case)
    kinds = ["sizes"] if p.quantized and "sizes" in row.operation.kinds else ["normal"]
    wrong = set[str]()
    for kind in kinds:
        arrays = pools.changed(case, dict(row.operation.draw(p, 1, kind)))
        run = emulate_problem(row, p, arrays)
        wrong |= {name for name, lines in {"misuse": run.findings, "bytes": run.differences}.items() if lines}
        try:
            judged(row, p, arrays, run.outputs)
        except Failure:
            wrong.add("rule")
    return wrong


@pytest.mark.parametrize(
    "mutant", one_of_each(pools.KERNELS, lambda each: each.algorithm + each.check, lambda each: each.mechanism)
)
def test_a_kernel_is_killed_by_its_check(mutant: KernelMutant, tmp_path: Path) -> None:
    with kernels_cu.sources_in(mutant.written(tmp_path)), np.errstate(all="ignore"):
        assert mutant.check in found(mutant.algorithm, mutant.case)


@pytest.mark.parametrize("case", one_of_each(pools.CASES, lambda _: "one build"))
def test_the_real_kernel_passes(case: str) -> None:
    algorithm = "copy_pages" if "copies" in case else "append_kv"
    with np.errstate(all="ignore"):
        assert found(algorithm, case) == set()


def test_the_zoo_is_as_large_as_claimed() -> None:
    assert len({mutant.mechanism for mutant in pools.KERNELS}) == len(pools.KERNELS) >= 30
    assert {mutant.check for mutant in pools.KERNELS} == {"misuse", "bytes", "rule"}
