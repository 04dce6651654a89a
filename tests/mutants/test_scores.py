"""Every seeded bug in soft cap, sinks and ALiBi fails the one trial that is meant for it, on the emulator."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import flashlab as fl
import kernels_cu
from flashlab.verify import CHECKS, Row
from flashlab.verify.bench import Bench
from flashlab.verify.targets import target_of
from simulator.operations.attention import ATTENTION
from tests.mutants.scores import OF_ALIBI, OF_SINKS, SOFT_CAPS, ZOO, ScoreMutant
from tests.tiers import one_of_each

DTYPE = "float16"
TRIALS = sorted({(mutant.algorithm, mutant.check, mutant.case) for mutant in ZOO})


def performed(algorithm: str, check: str, case: str) -> Row:
    bench = Bench(target_of(algorithm, "emulator"), (DTYPE,), False, 0)
    (trial,) = (each for each in CHECKS[check](bench) if each.label == case)
    return bench.perform(check, trial)


def survives_the_usual_test(mutant: ScoreMutant) -> bool:
    """`allclose(1e-2)` on an aligned problem without a mask."""
    p = fl.Problem(batch=1, heads=1, len_q=128, head_dim=64, dtype=DTYPE, **mutant.aligned)
    arrays = ATTENTION.draw(p)
    out = fl.attention(**arrays, **p.masks, algorithm=mutant.algorithm, backend="emulator")
    return np.allclose(out.astype(np.float32), fl.naive(**arrays, **p.masks).out, rtol=1e-2, atol=1e-2)


@pytest.mark.alike(
    "soft-cap-bounds-products-before-they-are-scaled",
    "slope-of-the-KV-head",
    "sink-added-once-per-key-tile",
    "only-the-first-key-tile-is-bounded",
)
@pytest.mark.compiler
@pytest.mark.parametrize(
    "mutant", one_of_each(ZOO, lambda each: (each.algorithm, *each.aligned), lambda each: each.name)
)
def test_killed_by_its_trial(mutant: ScoreMutant, tmp_path: Path) -> None:
    with kernels_cu.sources_in(mutant.written(tmp_path)), np.errstate(all="ignore"):
        row = performed(mutant.algorithm, mutant.check, mutant.case)
        survives = survives_the_usual_test(mutant)
    assert row.status == "failed", f"{mutant.mechanism} survives {mutant.check}, {mutant.case}"
    assert "raised" not in row.detail, f"a bug that crashes is no mutant: {row.detail}"
    assert survives == mutant.blind


@pytest.mark.compiler
@pytest.mark.long
@pytest.mark.parametrize(("algorithm", "check", "case"), TRIALS)
def test_the_real_kernels_pass_these_trials(algorithm: str, check: str, case: str) -> None:
    assert performed(algorithm, check, case).status == "passed"


def test_the_zoo_is_as_large_as_claimed() -> None:
    mechanisms = Counter(mutant.mechanism for mutant in ZOO)
    assert len(mechanisms) == len(ZOO) >= 40, [m for m, n in mechanisms.items() if n > 1]
    assert 2 * sum(mutant.blind for mutant in ZOO) >= len(ZOO)
    assert min(map(len, (SOFT_CAPS, OF_SINKS, OF_ALIBI))) >= 10
    assert {"rule", "key_sets", "neutral", "extremes", "head_order"} <= {mutant.check for mutant in ZOO}
