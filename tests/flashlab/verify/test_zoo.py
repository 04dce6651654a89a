"""Every mechanism of the zoo is killed by the default battery, and the kernel without a fault passes it."""

from __future__ import annotations

import pytest

import flashlab as fl
from flashlab.verify import verify
from flashlab.verify.zoo import KINDS, Fault, tiled
from simulator.catalogue import CATALOGUE
from simulator.operations.attention import ATTENTION
from tests.tiers import one_of_each

FAULTS = [(kind, fault) for kind, faults in KINDS.items() for fault in faults]


def test_no_mechanism_is_there_twice() -> None:
    names = [fault for _, fault in FAULTS]
    assert len(names) == len(set(names)) >= 60


@pytest.mark.alike("no-maximum", "last-key-dropped", "LSE-to-base-2")
@pytest.mark.parametrize("kind", one_of_each(FAULTS, lambda each: each[0], lambda each: each[1].replace(" ", "-")))
def test_a_fault_is_killed(kind: tuple[str, Fault]) -> None:
    report = verify(fl.Adapter(tiled(kind[1]), lse="e", bitwise=True), dtypes=["float16"], examples=0)
    assert report.verdict == "failed", kind
    assert not any("raised" in row.detail for row in report.failed), report.failed[0].detail


@pytest.mark.parametrize(
    "dtype", ["float16", *(pytest.param(each, marks=pytest.mark.long) for each in ("float32", "bfloat16"))]
)
def test_the_kernel_without_a_fault_passes(dtype: str) -> None:
    report = verify(fl.Adapter(tiled(), lse="e", bitwise=True), dtypes=[dtype], examples=100)
    assert report.verdict == "passed", report.failed[:3]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_right_kernels_are_not_rejected(dtype: str) -> None:
    """3,400 random problems of each dtype, of one right kernel: over 10,000 in all."""
    report = verify(fl.Adapter(tiled(), lse="e"), dtypes=[dtype], checks=["search"], examples=3400)
    assert report.verdict == "passed" and int(report.rows[0].case.split()[0]) >= 3000, report


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name, row in CATALOGUE.items() if row.operation is ATTENTION])
def test_right_algorithms_are_not_rejected(name: str) -> None:
    """700 random problems of each algorithm and dtype, which tile, round and skip in their own ways: over 10,000 more."""
    for dtype in CATALOGUE[name].dtypes:
        report = verify(name, dtypes=[dtype], checks=["search"], examples=700, seed=3)
        assert report.verdict == "passed" and int(report.rows[0].case.split()[0]) >= 600, report
