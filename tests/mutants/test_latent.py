"""Every seeded bug of mla's kernels is found on the emulator, by the check that is meant for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
import kernels_cu
from flashlab.run.emulated import emulate_problem
from tests.mutants import latent, latent_hopper
from tests.mutants.backward import KernelMutant
from tests.simulator.test_latent import within
from tests.tiers import one_of_each, quick, those_in

pytestmark = pytest.mark.compiler
TILE = (16, 32)
CHECKS = {"misuse", "bytes", "zeros", "rule"}


def found(algorithm: str, p: fl.Problem, workers: int | None = None) -> set[str]:
    """What is wrong with a run, by the names of the checks. A single worker takes blocks in their order, whatever else goes on."""
    row = fl.CATALOGUE[algorithm]
    arrays: Any = row.operation.draw(p, 1)
    run = emulate_problem(row, p, arrays, lse=True, tile=None if row.arch else TILE, workers=workers)
    findings = {"misuse": run.findings or run.unwritten, "bytes": run.differences, "zeros": run.left}
    wrong = {name for name, lines in findings.items() if lines}
    return wrong if within(row.operation, run.outputs, p, arrays) else wrong | {"rule"}


def some(kernels: Sequence[KernelMutant]) -> Any:
    return one_of_each(kernels, lambda each: (each.algorithm, each.check), lambda each: each.mechanism)


MUTANTS, HOPPER_MUTANTS = some(latent.KERNELS), some(latent_hopper.KERNELS)


def cases(parameters: Sequence[Any], whole: Iterable[str]) -> Any:
    """Those of the mutants that are no long tests: a death says something if the real kernel passes the same case.

    The others are one of each of their kinds."""
    return those_in({mutant.case for mutant in quick(parameters)} | {"sinks of chunks", "sequences"}, whole)


@pytest.mark.alike(
    "values that begin with the RoPE part",
    "a latent tile loaded twice, as K and as V",
    "the tile before serves as V",
    "the last one too early",
    "pages of the first request",
)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_kernel_is_killed_by_its_check(mutant: KernelMutant, tmp_path: Path) -> None:
    with kernels_cu.sources_in(mutant.written(tmp_path)), np.errstate(all="ignore"):
        assert mutant.check in found(mutant.algorithm, latent.problem(mutant.case), workers=1)


@pytest.mark.alike("a quarter of the columns without scores", "copies that nobody waited for")
@pytest.mark.parametrize("mutant", HOPPER_MUTANTS)
def test_a_hopper_kernel_is_killed_by_its_check(mutant: KernelMutant, tmp_path: Path) -> None:
    with kernels_cu.sources_in(mutant.written(tmp_path)), np.errstate(all="ignore"):
        assert mutant.check in found(mutant.algorithm, latent_hopper.problem(mutant.case), workers=1)


@pytest.mark.alike("pages")
@pytest.mark.parametrize("case", cases(MUTANTS, latent.CASES))
def test_the_real_kernel_passes(case: str) -> None:
    p = latent.problem(case)
    with np.errstate(invalid="ignore"):
        assert found("mla_paged" if p.page_size else "mla", p) == set()


@pytest.mark.alike("pages")
@pytest.mark.parametrize("case", cases(HOPPER_MUTANTS, latent_hopper.CASES))
def test_the_real_hopper_kernel_passes(case: str) -> None:
    p = latent_hopper.problem(case)
    with np.errstate(invalid="ignore"):
        assert found("mla_hopper_paged" if p.page_size else "mla_hopper", p) == set()


def test_the_zoos_are_as_large_as_claimed() -> None:
    for kernels, least, checks in ((latent.KERNELS, 32, CHECKS), (latent_hopper.KERNELS, 40, CHECKS - {"zeros"})):
        assert len({mutant.mechanism for mutant in kernels}) == len(kernels) >= least
        assert {mutant.check for mutant in kernels} == checks
