"""Seeded bugs in the .cu files: each compiles, and on a GPU each is killed by the check meant for it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import flashlab as fl
import kernels_cu
from flashlab.run import nvrtc
from flashlab.verify import verify
from tests.mutants.kernels import KERNELS
from tests.mutants.zoo import ROOT, Mutant

MUTANTS = [pytest.param(mutant, id=mutant.name) for mutant in KERNELS]


@pytest.fixture
def sources(mutant: Mutant, tmp_path: Path) -> Iterator[Path]:
    """The kernels with the bug among them, in place of the real ones."""
    folder = tmp_path / "kernels_cu"
    shutil.copytree(ROOT / "kernels_cu", folder)
    (tmp_path / mutant.file).write_text(mutant.source, encoding="utf-8")
    _forget()
    with kernels_cu.sources_in(folder):
        yield folder
    _forget()


def _forget() -> None:
    """The launcher keeps what it compiled: by the headers, not by the .cu."""
    from flashlab.run import facade, kernels

    kernels._compiled.cache_clear()
    facade._plan.cache_clear()
    facade._warm.clear()


@pytest.mark.alike(4)
@pytest.mark.nvrtc
@pytest.mark.parametrize("mutant", MUTANTS)
def test_compiles(mutant: Mutant, sources: Path) -> None:
    problem = fl.Problem(batch=1, heads=1, len_q=128, head_dim=64, dtype=mutant.dtype)
    config = fl.count(mutant.algorithm, problem).config
    assert config
    for source in {kernel.source for kernel in fl.CATALOGUE[mutant.algorithm].launched(problem)}:
        nvrtc.compile_kernel(source, nvrtc.defines(config, problem.dtype, 64), arch="compute_80")


@pytest.mark.gpu
@pytest.mark.parametrize("mutant", MUTANTS)
def test_killed_by_its_check(mutant: Mutant, sources: Path) -> None:
    report = verify(
        mutant.algorithm, "gpu", checks=[mutant.check], dtypes=[mutant.dtype], full=mutant.check == "huge", examples=0
    )
    assert report.verdict == "failed", f"{mutant.mechanism} survives {mutant.check}"
    assert all("raised" not in row.detail for row in report.failed), "a bug that crashes is no mutant"


@pytest.mark.gpu
@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_the_usual_test_says(mutant: Mutant, sources: Path) -> None:
    import cupy

    problem = fl.Problem(batch=1, heads=1, len_q=128, head_dim=64, dtype=mutant.dtype)
    q, k, v = fl.random_inputs(problem, seed=0)
    out = fl.attention(*(cupy.asarray(x) for x in (q, k, v)), algorithm=mutant.algorithm)
    near = np.allclose(cupy.asnumpy(out).astype(np.float32), fl.naive(q, k, v).out, rtol=1e-2, atol=1e-2)
    assert near or not mutant.blind, "fewer survive the usual test than claimed"
