"""Every seeded bug in a tile program is killed by the check meant for it; the usual test would let most of them pass."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import flashlab as fl
from flashlab.verify import verify
from tests.mutants.kernels import KERNELS
from tests.mutants.programs import BYTES, PROGRAMS
from tests.mutants.zoo import Mutant, mutated_program
from tests.tiers import one_of_each

ZOO = [*PROGRAMS, *BYTES, *KERNELS]
ALIGNED = {"batch": 1, "heads": 1, "len_q": 128, "head_dim": 64}
RAGGED = fl.Problem(batch=1, heads=2, len_q=150, head_dim=40, dtype="float16", causal=True)


def named(mutants: list[Mutant]) -> list[object]:
    return [pytest.param(mutant, id=mutant.name) for mutant in mutants]


@pytest.mark.parametrize("mutant", one_of_each(PROGRAMS, lambda each: each.check, lambda each: each.name))
def test_killed_by_its_check(mutant: Mutant) -> None:
    with mutated_program(mutant) as program, np.errstate(all="ignore"):
        report = verify(program, checks=[mutant.check], dtypes=[mutant.dtype], examples=0)
    assert report.verdict == "failed", f"{mutant.mechanism} survives {mutant.check}"
    assert report.failing
    assert all("raised" not in row.detail for row in report.failed), "a bug that crashes is no mutant"


@pytest.mark.parametrize("mutant", named([*PROGRAMS, *BYTES]))
def test_what_the_usual_test_says(mutant: Mutant) -> None:
    problem = fl.Problem(**ALIGNED, dtype=mutant.dtype)
    q, k, v = fl.random_inputs(problem, seed=0)
    with mutated_program(mutant) as program, np.errstate(all="ignore"):
        out = fl.simulate(program, q, k, v, tile=(64, 64)).out
    assert np.allclose(out.astype(np.float32), fl.naive(q, k, v).out, rtol=1e-2, atol=1e-2) == mutant.blind


@pytest.mark.parametrize("mutant", named(BYTES))
def test_the_formula_finds_wrong_bytes(mutant: Mutant) -> None:
    formula = fl.CATALOGUE[mutant.algorithm].formula
    assert formula
    fl.check_formula(mutant.algorithm, formula, RAGGED, tile=(32, 32))
    with mutated_program(mutant) as program, pytest.raises(fl.UsageError, match="formula"):
        fl.check_formula(program, formula, RAGGED, tile=(32, 32))


def test_the_zoo_is_as_large_as_claimed() -> None:
    mechanisms = Counter(mutant.mechanism for mutant in ZOO)
    assert len(mechanisms) == len(ZOO) >= 25, [m for m, n in mechanisms.items() if n > 1]
    assert 2 * sum(mutant.blind for mutant in ZOO) >= len(ZOO)
    assert {"rule", "key_sets", "hidden_keys", "memory", "split", "gqa", "prefix", "batch"} <= {m.check for m in ZOO}
