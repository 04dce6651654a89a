"""Sanitizers: what the tools print is read right, silence is no health, and every tool sees its planted fault."""

from __future__ import annotations

import json
import stat
import sys
import time
from pathlib import Path

import pytest

import flashlab as fl
from flashlab.measure import sanitizers
from flashlab.measure.planted import CONTROLS, FAULTS
from flashlab.measure.sanitizers import OPTIONS, TOOLS, Findings, Ran, Row, SanitizersReport
from simulator import DEVICES
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


OF_A_TEMPLATE = """\
========= COMPUTE-SANITIZER
========= Warning: Potential WAW hazard detected at __shared__ 0x0 in block (0,0,0) :
=========     Write Thread (0,0,0) at void space::sums<(int)128, (bool)1>(float *, const float *)+0x110 in sums.cu:651
=========     Write Thread (31,0,0) at void space::sums<(int)128, (bool)1>(float *, const float *)+0x1f0 in /a/b-c/sums.cu:659
=========     Current Value : 0, Incoming Value : 1
=========
========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)
"""


def test_findings_are_counted_and_named() -> None:
    assert sanitizers.parse(MEMCHECK) == Findings(64, ("planted",), "Invalid __global__ write of size 4 bytes")
    found = sanitizers.parse(RACECHECK)
    assert (found.number, found.kernels, found.warnings, found.places) == (1, ("flash2",), 0, ())
    assert found.first.startswith("Error: Race reported")
    found = sanitizers.parse(OF_A_TEMPLATE)
    assert (found.number, found.warnings, found.kernels) == (3, 2, ("space::sums",))
    assert found.places == ("sums.cu:651", "sums.cu:659")


def test_errors_that_were_not_printed_are_counted_once() -> None:
    more = "========= ERROR SUMMARY: 924 errors were not printed. Use --print-limit option to adjust the number\n"
    text = MEMCHECK.replace("64 errors", "1024 errors") + more
    assert sanitizers.parse(text).number == 1024


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
    monkeypatch.setattr(sanitizers, "limited", lambda *_: Ran(printed, False, 1.0))
    assert sanitizers.findings("compute-sanitizer", "memcheck", ["python"], 10).number == number


def test_a_program_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = (
        "========= COMPUTE-SANITIZER\nTraceback\nUnavailable: no GPU\n========= Target application returned an error\n"
    )
    monkeypatch.setattr(sanitizers, "limited", lambda *_: Ran(printed, False, 1.0))
    found = sanitizers.findings("compute-sanitizer", "memcheck", ["python"], 10)
    assert found == Findings(None, (), "Unavailable: no GPU")


def test_a_program_that_hangs_is_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizers, "limited", lambda *_: Ran(RACECHECK, True, 20.0))
    assert sanitizers.findings("compute-sanitizer", "memcheck", [], 20) == Findings(None, (), "not done within 20 s")


def test_what_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    program, mark = tmp_path / "program", tmp_path / "alive"
    program.write_text(f"#!/bin/sh\necho '========= Barrier error'\n(sleep 1; touch {mark}) &\nsleep 60\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    ran = sanitizers.limited([str(program)], 0.5)
    assert ran.killed
    assert ran.text.startswith("========= Barrier error")
    time.sleep(1)
    assert not mark.exists()


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
        "controls": 0,
        "controls_reported": 0,
    }
    report.print()
    assert "passed" in capsys.readouterr().out


def test_every_tool_has_a_fault_to_find_and_the_grid_has_every_edge() -> None:
    assert {fault.tool for fault in FAULTS.values()} == set(TOOLS) == set(OPTIONS)
    grid = sanitizers.grid()
    assert {case.algorithm for case in grid} == set(with_kernels())
    for algorithm in with_kernels():
        dtypes = {case.problem.dtype for case in grid if case.algorithm == algorithm}
        assert dtypes == set(CATALOGUE[algorithm].dtypes)


@pytest.mark.parametrize("algorithm", with_kernels())
def test_the_grid_asks_an_algorithm_for_what_it_knows_and_for_nothing_else(algorithm: str) -> None:
    row, grid = CATALOGUE[algorithm], sanitizers.grid([algorithm])
    for case in grid:
        row.check(case.problem, DEVICES["h200"])
        assert fl.count(algorithm, case.problem, device="h200").hbm.read > 0
    asked = {name for case in grid for name in case.problem.applied}
    if row.operation.in_place:  # it sees no pairs
        assert {"k_scale", "v_scale"} <= asked and len({case.name for case in grid}) == len(grid) >= 4
        return
    assert {"causal", "window", "sinks", "lengths", "mask"} & set(row.support.masks) <= asked
    assert len({case.name for case in grid}) == len(grid) >= 4
    assert row.operation.in_pages == any(
        len(case.problem.lengths or ()) > 1 and case.problem.page_size for case in grid
    )
    assert row.operation.shares_prefix == any(case.problem.len_prefix == 2100 for case in grid)


def test_no_compute_sanitizer_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Unavailable, match="install the CUDA toolkit"):
        sanitizers.run()


@pytest.mark.alike(1)
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("control", "line"), [("barrier-arrive", "barrier.arrive 1"), ("mbarrier-of-a-warp", "__syncwarp()")]
)
def test_a_control_is_right_and_no_longer_without_the_line_that_orders(control: str, line: str, tmp_path: Path) -> None:
    each, path = CONTROLS[control], tmp_path / "control.cu"
    path.write_text(each.source)

    def run() -> fl.FileRun:
        x = fl.Empty((each.words,))
        return fl.emulate_file(path, {"x": x}, grid=1, block=each.threads, time_limit=5)

    assert run().passed
    assert run().arrays["x"].tolist() == [*range(each.words - 1, -1, -1)]
    word = "s[threadIdx.x] = threadIdx.x;"
    path.write_text(
        each.source.replace(word, "").replace("} else", f"{word} }} else")
    )  # it comes when all have arrived
    assert "race" in str(run())
    ordered = next(code for code in each.source.splitlines() if line in code)
    path.write_text(each.source.replace(ordered, ""))
    assert not run().passed
    assert {x.tool for x in CONTROLS.values()} == {"racecheck"}


@pytest.mark.parametrize(
    ("found", "verdict", "passed"),
    [
        (Findings(3, ("control",), "Error: Race reported"), "reported", True),
        (Findings(0, (), ""), "silent", True),
        (Findings(3, ("control",), "Error: Race reported", ended=False), "not finished", False),  # its words were wrong
        (Findings(None, (), "no output"), "not finished", False),
    ],
)
def test_a_control_is_reported_or_silent_and_must_end(
    found: Findings, verdict: str, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanitizers, "program", lambda: "compute-sanitizer")
    monkeypatch.setattr("flashlab.run.devices.current_device", lambda: DEVICES["h200"])
    monkeypatch.setattr(sanitizers, "FAULTS", {})
    monkeypatch.setattr(sanitizers, "findings", lambda *_: found)
    report = sanitizers.run([], tools=["racecheck"])
    assert {(row.target, row.verdict) for row in report.rows} == {(name, verdict) for name in CONTROLS}
    assert (report.passed, report.algorithms) == (passed, [])
    assert report.summary["controls"] == len(CONTROLS)
    assert report.summary["controls_reported"] == (len(CONTROLS) if verdict == "reported" else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS)
def test_the_tool_finds_the_planted_fault(fault: str) -> None:
    try:
        program = sanitizers.program()
    except Unavailable as reason:
        pytest.skip(str(reason))
    command = [sys.executable, "-m", "flashlab.measure.planted", fault]
    found = sanitizers.findings(program, FAULTS[fault].tool, command, 300)
    assert found.number, found


@pytest.mark.gpu
@pytest.mark.parametrize("control", CONTROLS)
def test_the_tool_reports_the_control(control: str) -> None:
    try:
        program = sanitizers.program()
    except Unavailable as reason:
        pytest.skip(str(reason))
    found = sanitizers.findings(
        program, CONTROLS[control].tool, [sys.executable, "-m", "flashlab.measure.planted", control], 300
    )
    assert found.number, found
    assert found.ended, found
