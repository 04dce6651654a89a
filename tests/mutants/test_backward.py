"""Every seeded bug of the backward pass fails the check that is meant for it, on the simulator or the emulator."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
import kernels_cu
from flashlab.verify import general
from flashlab.verify.adapter import Failure
from flashlab.verify.subject import Subject
from simulator.operations.backward import BACKWARD
from tests.mutants import backward, backward_parts, backward_rungs
from tests.mutants.backward import PROGRAMS, SHAPES, KernelMutant
from tests.mutants.zoo import Mutant, mutated_program
from tests.tiers import one_of_each

KERNELS = [*backward.KERNELS, *backward_parts.KERNELS, *backward_rungs.KERNELS]
TILE = (32, 32)
"""Four warps, in a grid of two by two."""
FEW = replace(fl.DEVICES["h200"], name="two SMs of an H200", sms=2)
"""Persistent blocks take several tiles there, and draw them."""


def problem(case: str, head_dim: int = 64) -> fl.Problem:
    sizes: dict[str, Any] = {"batch": 1, "heads": 1, "head_dim": head_dim, "dtype": "float16"}
    return fl.Problem(**sizes | dict(SHAPES[case]))


def tile_of(target: Any) -> tuple[int, int] | None:
    """That tile, or the default of a kernel that has only one."""
    return None if fl.catalogue.get(target).arch else TILE


def part_of_an_h200(sms: int) -> fl.Device:
    """So many of its SMs, each as fast as there."""
    h200 = fl.DEVICES["h200"]
    return replace(h200, name=f"{sms} SMs of an H200", sms=sms, tensor_flops=h200.tensor_flops * sms / h200.sms)


def subject(target: Any, backend: str, device: fl.Device | None = None) -> Subject:
    row = fl.catalogue.get(target)
    return general.subject(row, backend, device=device, tile=tile_of(target), framework=None)


def kills(mutant: KernelMutant, time_limit: float = 4) -> None:
    """Raises what the mutant's check raises. Blocks that wait for ever are stopped after so many seconds of processor time."""
    p = problem(mutant.case, mutant.head_dim)
    if mutant.check in ("misuse", "bytes"):
        arrays: dict[str, Any] = BACKWARD.draw(p)
        few = part_of_an_h200(mutant.sms) if mutant.sms else FEW
        tile, device = tile_of(mutant.algorithm), few if fl.catalogue.get(mutant.algorithm).arch else "h100"
        run = fl.emulate(mutant.algorithm, **arrays, **p.masks, tile=tile, device=device, time_limit=time_limit)
        assert not mutant.sms or (run.counts.config is not None and run.counts.config.parts > 1)
        if mutant.check == "misuse":
            run.checked()
        elif run.differences:
            raise Failure(run.differences[0])
        return
    device = part_of_an_h200(mutant.sms) if mutant.sms else None
    general.checks_of(BACKWARD)[mutant.check](subject(mutant.algorithm, "emulator", device), p, 0)


@pytest.mark.compiler
@pytest.mark.parametrize("mutant", one_of_each(KERNELS, lambda each: each.check, lambda each: each.mechanism))
def test_a_kernel_is_killed_by_its_check(mutant: KernelMutant, tmp_path: Path) -> None:
    wanted = fl.EmulationError if mutant.check == "misuse" else Failure
    with kernels_cu.sources_in(mutant.written(tmp_path)), np.errstate(all="ignore"), pytest.raises(wanted):
        kills(mutant, 0.2 if mutant.hangs else 4)


@pytest.mark.alike("adjoint", "rule", "equal_keys", "key_sets", "key_order", "misuse", "bytes")
@pytest.mark.compiler
@pytest.mark.parametrize(
    "mutant", one_of_each(KERNELS, lambda each: each.check, lambda each: f"{each.check}, {each.case}")
)
def test_the_real_kernel_passes(mutant: KernelMutant) -> None:
    kills(mutant)


@pytest.mark.parametrize("mutant", one_of_each(PROGRAMS, lambda each: each.check, lambda each: each.mechanism))
def test_a_program_is_killed_by_its_check(mutant: Mutant) -> None:
    with mutated_program(mutant) as program, np.errstate(all="ignore"):
        report = fl.verify(program, checks=[mutant.check], dtypes=[mutant.dtype], tile=TILE)
    assert report.verdict == "failed", f"{mutant.mechanism} survives {mutant.check}"
    assert all("raised" not in row.detail for row in report.failed), "a bug that crashes is no mutant"


@pytest.mark.parametrize("mutant", [pytest.param(each, id=each.mechanism) for each in PROGRAMS])
def test_what_the_usual_test_says(mutant: Mutant) -> None:
    p = problem("aligned")
    arrays: dict[str, Any] = BACKWARD.draw(p)
    truth = BACKWARD.judge(p, arrays)
    with mutated_program(mutant) as program, np.errstate(all="ignore"):
        found = fl.simulate(program, **arrays, tile=TILE).outputs
    near = all(np.allclose(found[name].astype(np.float64), x, rtol=1e-2, atol=1e-2) for name, x in truth.items())
    assert near == mutant.blind


def test_the_zoo_is_as_large_as_claimed() -> None:
    mechanisms = Counter(mutant.mechanism for mutant in (*KERNELS, *PROGRAMS))
    assert len(mechanisms) == len(KERNELS) + len(PROGRAMS) >= 35, [m for m, n in mechanisms.items() if n > 1]
    checks = {mutant.check for mutant in (*KERNELS, *PROGRAMS)}
    assert checks >= {*general.checks_of(BACKWARD), "misuse", "bytes"} - {"determinism", "byte_counts"}
