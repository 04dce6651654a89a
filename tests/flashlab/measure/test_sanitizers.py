"""Sanitizers: what the tools print is read right, silence is no health, and every tool sees its planted fault."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from flashlab.measure import sanitizers
from flashlab.measure.sanitizers import FAULTS, TOOLS, Findings, Row, SanitizersReport
from simulator.catalogue import CATALOGUE, with_kernels
from simulator.errors import Unavailable

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at planted+0x40
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f0000001000 is out of bounds
=========
launched 1 fault
========= ERROR SUMMARY: 64 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at flash2(Tensor, Tensor)+0x210
=========     and Read access at flash2(Tensor, Tensor)+0x300 [960 hazards]
=========
launched 1 cases
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_findings_are_counted_and_named() -> None:
    assert sanitizers.parse(MEMCHECK) == Findings(64, ("planted",), "Invalid __global__ write of size 4 bytes")
    found = sanitizers.parse(RACECHECK)
    assert (found.number, found.kernels) == (1, ("flash2",))
    assert found.first.startswith("Error: Race reported")


@pytest.mark.parametrize(
    ("printed", "number"),
    [
        ("launched 3 cases\n========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\nlaunched 3 cases\n", 0),
        # it ended well but never ran the kernels; and it never came to its summary
        ("========= ERROR SUMMARY: 0 errors\n", None),
        ("launched 3 cases\n", None),
        ("", None),
    ],
)
def test_silence_is_no_health(printed: str, number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(stdout=printed, stderr="", returncode=0)
    monkeypatch.setattr(sanitizers.subprocess, "run", lambda *_, **__: done)
    assert sanitizers._findings("compute-sanitizer", "memcheck", ["python"], 10).number == number


def test_a_program_that_hangs_is_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("compute-sanitizer", timeout)

    monkeypatch.setattr(sanitizers.subprocess, "run", hang)
    assert sanitizers._findings("compute-sanitizer", "memcheck", [], 20) == Findings(None, (), "not done within 20 s")


def test_a_missed_fault_or_an_unfinished_run_fails_the_report() -> None:
    clean = Row("memcheck", "flash2", 4, 0, "clean")
    assert SanitizersReport("h200", (clean,)).passed
    assert not SanitizersReport("h200", ()).passed
    for verdict in ("FINDINGS", "MISSED", "not finished"):
        bad = Row("racecheck", "missing-barrier", 1, None, verdict)
        assert not SanitizersReport("h200", (clean, bad)).passed


def test_a_report_is_json_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    rows = (Row("memcheck", "flash2", 12, 0, "clean"), Row("racecheck", "missing-barrier", 1, 3, "found"))
    report = SanitizersReport("h200", rows)
    said = json.loads(json.dumps(report.to_dict()))
    assert said["summary"] == {
        "tools": ["memcheck", "racecheck"],
        "runs": 12,
        "findings": 0,
        "unfinished": 0,
        "faults": 1,
        "faults_found": 1,
    }
    report.print()
    assert "passed" in capsys.readouterr().out


def test_every_tool_has_a_fault_to_find_and_the_grid_has_every_edge() -> None:
    assert {fault.tool for fault in FAULTS.values()} == set(TOOLS)
    grid = sanitizers.grid()
    assert {case.algorithm for case in grid} == set(with_kernels())
    for algorithm in with_kernels():
        dtypes = {case.problem.dtype for case in grid if case.algorithm == algorithm}
        assert dtypes == set(CATALOGUE[algorithm].dtypes)


def test_no_compute_sanitizer_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Unavailable, match="install the CUDA toolkit"):
        sanitizers.run()


@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS)
def test_the_tool_finds_the_planted_fault(fault: str) -> None:
    try:
        program = sanitizers.program()
    except Unavailable as reason:
        pytest.skip(str(reason))
    command = [sys.executable, "-m", "flashlab.measure.sanitizers", fault]
    found = sanitizers._findings(program, FAULTS[fault].tool, command, 300)
    assert found.number, found
