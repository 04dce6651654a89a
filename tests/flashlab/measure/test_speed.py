"""The benchmark's conventions are the field's, and what cannot be run is said."""

from __future__ import annotations

import json

import pytest

from flashlab.measure import peers, speed
from flashlab.measure.speed import BenchReport, Cell, Row, Yardstick
from simulator.errors import Unavailable, UsageError


def test_cells_are_the_fields() -> None:
    cells = speed.cells()
    assert len(cells) == 24
    for cell in cells:
        p = cell.problem
        assert p.batch * p.len_q == 16384
        assert p.heads * p.head_dim == 2048


def test_flops_are_by_the_fields_convention() -> None:
    full, causal = Cell("bfloat16", 64, False, 4096), Cell("bfloat16", 64, True, 4096)
    assert full.flops == 4 * 4096**2 * 64 * 32 * 4
    assert causal.flops == full.flops / 2


def test_rows_take_medians_of_rounds() -> None:
    cell = Cell("float16", 64, False, 1024)
    yardstick = Yardstick("float16", matmul=500.0, copy=4000.0)
    # one slow round of both kernels: a ratio of medians would be off, the median of ratios is not
    row = speed._row(cell, "sdpa-flash", [2.0, 40.0, 2.0], [1.0, 20.0, 1.0], yardstick, 0.3)
    assert row.ratio == 2.0
    assert row.milliseconds == 2.0
    assert row.tflops == pytest.approx(cell.flops / 2e-3 / 1e12)
    assert row.of_matmul == pytest.approx(row.tflops / 500)
    assert speed._row(cell, None, [1.0, 1.0], [1.0, 1.0], yardstick, 0.3).ratio is None


def test_a_report_is_json_prints_and_fails_on_a_wrong_result(capsys: pytest.CaptureFixture[str]) -> None:
    ours = Row("float16", 64, False, 1024, None, 1.0, 300.0, 0.5, None, None, 0.3, 11)
    theirs = Row("float16", 64, False, 1024, "sdpa-flash", 1.2, 250.0, 0.4, 1.2, (1.1, 1.3), 0.3, 11)
    report = BenchReport("flash2", "NVIDIA H200", (Yardstick("float16", 700.0, 4200.0),), (ours, theirs), ("fa4: no",))
    assert report.passed
    assert json.loads(json.dumps(report.to_dict()))["rows"][1]["ratio"] == 1.2
    report.print()
    printed = capsys.readouterr().out
    assert "1.200" in printed
    assert "not run: fa4: no" in printed
    assert not BenchReport("flash2", "", (), (), ()).passed
    wrong = Row("float16", 64, False, 1024, None, 1.0, 300.0, 0.5, None, None, 1.5, 11)
    assert not BenchReport("flash2", "", (), (wrong,), ()).passed


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match="did you mean sdpa-flash"):
        peers.layout("sdpa-flsh")
    with pytest.raises(UsageError, match="algorithm"):
        speed.run("flash9")


@pytest.mark.gpu
def test_a_small_benchmark_runs_and_an_absent_peer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        if name == "fa4":
            raise Unavailable("flash_attn.cute cannot be imported")
        return "bhsd"

    monkeypatch.setattr(peers, "layout", absent)
    cells = [Cell("float16", 64, True, 1024)]
    try:
        report = speed.run("flash2", ["sdpa-flash", "fa4"], cells=cells, seconds=0.1)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert report.passed
    assert [row.peer for row in report.rows] == [None, "sdpa-flash"]
    assert report.not_run == ("fa4: flash_attn.cute cannot be imported",)


def test_8_bits_have_a_command_of_their_own() -> None:
    with pytest.raises(UsageError, match="^algorithm = 'flash3_fp8'.*flashlab fp8"):
        speed.run("flash3_fp8")
