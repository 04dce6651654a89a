"""Every seeded bug in the exact LSE fails the check that is meant for it, on the emulator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kernels_cu
from tests.mutants.eight_bit import EXACT_LSE
from tests.mutants.scores import ScoreMutant
from tests.mutants.test_scores import performed
from tests.tiers import one_of_each


@pytest.mark.compiler
@pytest.mark.parametrize("mutant", one_of_each(EXACT_LSE, lambda each: each.check, lambda each: each.mechanism))
def test_killed_by_its_trial(mutant: ScoreMutant, tmp_path: Path) -> None:
    with kernels_cu.sources_in(mutant.written(tmp_path)), np.errstate(all="ignore"):
        row = performed(mutant.algorithm, mutant.check, mutant.case)
    assert row.status == "failed", f"{mutant.mechanism} survives {mutant.check}, {mutant.case}"
    assert "raised" not in row.detail, f"a bug that crashes is no mutant: {row.detail}"


@pytest.mark.compiler
@pytest.mark.long
@pytest.mark.parametrize("case", sorted({mutant.case for mutant in EXACT_LSE}))
def test_the_real_kernel_passes_these_trials(case: str) -> None:
    assert performed("flash3_fp8", "exact_lse", case).status == "passed"
