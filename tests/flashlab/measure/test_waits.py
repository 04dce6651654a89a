"""What launches wait for: the questions are asked of the right launches, and the answers follow ncu's page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashlab.measure import ncu, results, waits
from flashlab.measure.profile import ACTIVE, CLOCKS, DURATION, UNITS

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active"


def launch(kernel: str, **states: float) -> ncu.Measured:
    """One of ncu's launches: 2 ms, 1,000 clocks, every unit busy for a tenth of them."""
    values = {f"{name}.avg.pct_of_peak_sustained_elapsed": 10.0 for name in UNITS.values()}
    values |= {CLOCKS: 1000.0, ACTIVE: 500.0, DURATION: 2e6}
    values |= {"sm__warps_active.avg.pct_of_peak_sustained_active": 6.25, "lts__t_sector_hit_rate.pct": 90.0}
    values |= {"smsp__sass_data_bytes_mem_global_op_ld.sum": 100.0, "smsp__sass_data_bytes_mem_global_op_st.sum": 10.0}
    values |= {"dram__bytes_read.sum": 40.0, "smsp__inst_executed.sum": 7.0}
    return ncu.Measured(kernel, values | {f"{STALL.format(name)}.ratio": x for name, x in states.items()})


def test_all_algorithms_meet_in_every_cell_and_heads_reach_past_the_sms():
    chosen = waits.cases()
    beside = {(c.problem, c.algorithm) for c in chosen if c.problem.batch > 1}
    assert len(beside) == 3 * len({problem for problem, _ in beside})
    alone = {
        name: [c.problem.heads for c in chosen if c.problem.batch == 1 and c.algorithm == name]
        for name in waits.ALGORITHMS
    }
    assert alone["flash1"] == alone["standard"] == sorted(waits.HEADS) and not alone["flash2"]
    assert waits.HEADS[0] == 1 and waits.HEADS[-1] > 132


def test_a_warp_s_clocks_are_shared_out():
    found = waits.row(waits.cases()[1], launch("flash1", barrier=3, selected=1, long_scoreboard=4, membar=0))
    assert found["states"] == {"long_scoreboard": 0.5, "barrier": 0.375, "selected": 0.125}
    assert (found["requested"], found["dram"], found["active"], found["milliseconds"]) == (110, 40, 0.5, 2)
    assert found["busy"]["dram"] == 0.1
    waits.Row.model_validate(found)


def test_samples_that_were_not_issued_are_no_second_count():
    assert waits.STALL.fullmatch(STALL.format("gmma"))
    assert not waits.STALL.fullmatch(STALL.format("barrier_not_issued"))


def measured(monkeypatch: pytest.MonkeyPatch, entries: list[str]) -> dict[str, Any]:
    def nothing(*_: object, **__: object) -> str:
        return ""

    def launches(_: str) -> list[ncu.Measured]:
        return [launch(entry, barrier=3, selected=1) for entry in entries]

    def known() -> frozenset[str]:
        return frozenset({STALL.format("barrier"), "dram__bytes_read"})

    monkeypatch.setattr(waits.workload, "warm", nothing)
    monkeypatch.setattr(ncu, "known", known)
    monkeypatch.setattr(ncu, "profile", nothing)
    monkeypatch.setattr(ncu, "parse", launches)
    return waits.measure()


def test_launches_belong_to_their_cases(monkeypatch: pytest.MonkeyPatch):
    entries = [entry for case in waits.cases() for entry in case.entries]
    data = waits.Waits.model_validate(measured(monkeypatch, entries))
    assert [row.launch for row in data.rows] == entries
    assert {row.algorithm for row in data.rows if row.launch.startswith("standard")} == {"standard"}
    assert "0.3 times as long" in waits.headline(data)  # one launch of three; so the sum over launches is taken
    assert waits.table(data).count("\n") == len(entries) + 1
    with pytest.raises(RuntimeError, match=f"ncu saw {len(entries) - 1} launches, expected {len(entries)}"):
        measured(monkeypatch, entries[:-1])


def test_the_command_writes_a_file_that_the_lessons_find(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    data = measured(monkeypatch, [entry for case in waits.cases() for entry in case.entries])
    monkeypatch.setattr(waits, "measure", lambda: data)
    waits.main(["--out", str(tmp_path)])
    found = results.latest("waits", tmp_path, algorithm="flash1")
    assert found is not None and found.subject == "fewer-bytes" and waits.KIND.claim(found)
