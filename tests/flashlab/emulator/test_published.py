"""The faults in published kernels, where somebody has checkouts of them: set FLASHLAB_CHECKOUTS to the folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.flashlab.emulator.published import MISSED, Fault, faulty, run, table

CHECKOUTS = os.environ.get("FLASHLAB_CHECKOUTS")
LAUNCHES, FAULTS = table()
ON_CHECKOUTS = (
    pytest.mark.long,
    pytest.mark.compiler,
    pytest.mark.skipif(CHECKOUTS is None, reason="FLASHLAB_CHECKOUTS names no folder of checkouts"),
)


def folder() -> Path:
    assert CHECKOUTS is not None
    return Path(CHECKOUTS)


def test_the_table_holds_together() -> None:
    assert len(FAULTS) >= 100 and len(MISSED) <= 0.03 * len(FAULTS)
    assert MISSED.keys() <= {(fault.launch, fault.line) for fault in FAULTS}
    assert len({(fault.launch, fault.line, fault.put) for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert fault.launch in LAUNCHES and fault.kinds and fault.lines
        assert fault.cut or fault.put, "an edit that changes nothing"


@pytest.mark.parametrize("launch", [pytest.param(name, marks=ON_CHECKOUTS) for name in LAUNCHES])
def test_the_original_has_no_finding(launch: str) -> None:
    assert run(LAUNCHES[launch], folder()) == ()


def marks(fault: Fault) -> list[pytest.MarkDecorator]:
    missed = MISSED.get((fault.launch, fault.line))
    return [*ON_CHECKOUTS, *([pytest.mark.xfail(reason=missed, strict=False)] if missed else [])]


@pytest.mark.parametrize("i", [pytest.param(i, marks=marks(fault)) for i, fault in enumerate(FAULTS)])
def test_a_fault_is_found_at_its_line(i: int) -> None:
    findings = faulty(FAULTS[i], LAUNCHES, folder())
    assert FAULTS[i].found_in(findings), "; ".join(map(str, findings)) or "nothing"
