"""Every seeded bug of flash_decoding's kernel is found on the emulator, by the check that is meant for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
import kernels_cu
from flashlab.run.emulated import emulate_problem
from tests.mutants.backward import KernelMutant
from tests.mutants.decoding import CASES, KERNELS, problem
from tests.tiers import one_of_each, quick, those_in

pytestmark = pytest.mark.compiler
TILE = (16, 32)
"""Two warps, and chunks of 128 keys."""


def found(case: str, workers: int | None = None) -> set[str]:
    """What is wrong with a run, by the names of the checks. A single worker takes blocks in their order, whatever else goes on."""
    p = problem(case)
    row = fl.CATALOGUE["paged" if p.page_size else "flash_decoding"]
    arrays: Any = row.operation.draw(p, 1)
    run = emulate_problem(row, p, arrays, lse=True, tile=TILE, workers=workers)
    wrong = {
        name
        for name, lines in (("misuse", run.findings or run.unwritten), ("bytes", run.differences), ("zeros", run.left))
        if lines
    }
    truth = row.operation.judge(p, arrays)
    bounds = row.operation.bounds(p, arrays, truth)
    off = {
        "out": np.linalg.norm(run.out.astype(np.float64) - truth["out"], axis=-1),
        "lse": np.abs(run.lse - truth["lse"]),
    }
    empty = np.isneginf(truth["lse"])
    off["lse"] = np.where(empty, np.where(run.lse == truth["lse"], 0, np.inf), off["lse"])
    return wrong | {"rule" for name in off if not (off[name] <= bounds[name]).all()}


MUTANTS = one_of_each(KERNELS, lambda each: (each.algorithm, each.check), lambda each: each.mechanism)


@pytest.mark.alike(
    "the keys of the first sequence",
    "where a sequence ends as its length",
    "each sequence's queries a row further",
    "a counter that isn't set back",
    "the rest of a page read",
)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_kernel_is_killed_by_its_check(mutant: KernelMutant, tmp_path: Path) -> None:
    with kernels_cu.sources_in(mutant.written(tmp_path)), np.errstate(all="ignore"):
        assert mutant.check in found(mutant.case, workers=1)


QUICK = {mutant.case for mutant in quick(MUTANTS)} | {"two levels", "sinks", "soft cap", "e4m3", "quantized pages"}
"""A mutant's death says something if the real kernel passes the same case. The others are one of each of their kinds."""


@pytest.mark.alike("quantized pages", "sequences")
@pytest.mark.parametrize("case", those_in(QUICK, CASES))
def test_the_real_kernel_passes(case: str) -> None:
    with np.errstate(invalid="ignore"):
        assert found(case) == set()


def test_the_zoo_is_as_large_as_claimed() -> None:
    assert len({mutant.mechanism for mutant in KERNELS}) == len(KERNELS) >= 100
    assert {mutant.check for mutant in KERNELS} == {"misuse", "bytes", "zeros", "rule"}
