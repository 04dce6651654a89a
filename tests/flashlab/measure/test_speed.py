"""The benchmark's conventions are the field's, and what cannot be run is said."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashlab.measure import odd, peers, results, speed
from flashlab.measure.load import Held, Watch
from flashlab.measure.speed import BenchReport, Cell, Row, Yardstick
from simulator import Problem, naive, random_inputs
from simulator.catalogue import CATALOGUE
from simulator.errors import Unavailable, UsageError

FAKE_TORCH = SimpleNamespace(full_like=np.full_like, float16=None)
"""What of torch a check of outputs needs."""


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


def test_odd_cells_fill_no_tile_and_flash3_takes_them() -> None:
    cells = odd.cells()
    assert len(set(cells)) == 24 and cells == odd.cells() != odd.cells(seed=1)
    assert all(n % 64 and n >= 130 for cell in cells for n in (cell.length, cell.len_kv))
    assert {"bfloat16", "float16"} == {cell.dtype for cell in cells}
    assert {80, 96, 160, 192} <= {cell.head_dim for cell in cells}
    assert {1, 4, 8} == {cell.problem.queries_per_kv for cell in cells}
    assert {cell.heads for cell in cells} >= {1, 512} and any(cell.length > 65_000 for cell in cells)
    assert any(cell.length != cell.len_kv for cell in cells)
    for cell in cells:
        assert CATALOGUE["flash3"].refuses(cell.problem) is None
        p = cell.problem
        pairs = sum(len(p.keys_of_rows(i, i)) for i in range(cell.length))
        assert cell.flops == 4 * cell.batch * cell.heads * cell.head_dim * pairs


def test_odd_cells_of_a_backward_pass() -> None:
    """Each head dim full and causal, some ragged; where flash3_backward refuses one, another algorithm runs and is named."""
    cells = odd.backward_cells()
    assert len(set(cells)) == 12 and cells == odd.backward_cells() != odd.backward_cells(seed=1)
    assert {(cell.head_dim, cell.causal) for cell in cells} == {
        (d, c) for d in (64, 96, 128, 192) for c in (False, True)
    }
    ragged = [cell for cell in cells if cell.problem.ragged]
    assert {cell.head_dim for cell in ragged} == {64, 96, 128, 192}
    assert {4, 8} == {cell.problem.queries_per_kv for cell in cells}
    for cell in cells:
        p = cell.problem
        other = p.head_dim > 128
        assert cell.kernel("flash3_backward") == ("flash3_backward_wide" if other else "flash3_backward")
        assert cell.kernel("flash2_backward") == "flash2_backward" and cell.kernel("flash3") == "flash3"
        assert all(len(rows) % 64 and len(keys) % 64 for rows, keys in p.spans)
        pairs = sum(one.len_q * one.len_kv - cell.causal * one.len_q * (one.len_q - 1) // 2 for one in p.sequences)
        assert cell.flops == 4 * p.batch * p.heads * p.head_dim * pairs


@pytest.mark.parametrize("causal", [False, True])
def test_an_odd_cells_outputs_are_judged(causal: bool) -> None:
    """Heads that share a KV head, and more keys than queries."""
    p = Problem(batch=1, heads=4, kv_heads=2, len_q=70, len_kv=130, head_dim=16, dtype="float16", causal=causal)
    arrays = random_inputs(p)
    right = naive(*arrays, causal=causal).out.astype(np.float16)
    samples = speed._samples(p, arrays)
    assert 0 < speed._error(FAKE_TORCH, lambda: right, right, samples, False) <= 1
    assert speed._error(FAKE_TORCH, lambda: right[:, ::-1], right, samples, False) > 1


def test_rows_take_medians_of_rounds() -> None:
    cell = Cell("float16", 64, False, 1024)
    yardstick = Yardstick("float16", matmul=500.0, copy=4000.0)
    # one slow round of both kernels: a ratio of medians would be off, the median of ratios is not
    held = Held(0.5, ("power limit",))
    row = speed._row(
        cell, cell.flops, "sdpa-flash", [2.0, 40.0, 2.0], [1.0, 20.0, 1.0], yardstick, 0.3, True, 1500.0, held
    )
    assert row.ratio == 2.0
    assert row.milliseconds == 2.0
    assert row.tflops == pytest.approx(cell.flops / 2e-3 / 1e12)
    assert row.of_matmul == pytest.approx(row.tflops / 500)
    assert (row.queued, row.mhz, row.capped, row.reasons) == ("in a graph", 1500.0, 0.5, ("power limit",))
    ours = speed._row(cell, cell.flops, None, [1.0, 1.0], [1.0, 1.0], yardstick, 0.3, False, 1500.0, None)
    assert (ours.ratio, ours.queued, ours.capped) == (None, "by Python", None)


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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_outputs_are_judged_by_the_rule_of_verify(dtype: str, causal: bool) -> None:
    """Right ones pass in either layout. One wrong row in one head fails, and so does what was left unwritten."""
    p = Problem(batch=2, heads=2, len_q=300, head_dim=32, dtype=dtype, causal=causal)
    arrays = random_inputs(p)
    right = naive(*arrays, causal=causal).out.astype(arrays[0].dtype)
    samples = speed._samples(p, arrays)

    def error(out: Any, swapped: bool = False) -> float:
        return speed._error(FAKE_TORCH, lambda: out, out, samples, swapped)

    assert 0 < error(right) <= 1
    assert error(right.swapaxes(1, 2), swapped=True) == error(right)
    wrong = right.copy()
    wrong[-1, -1, -1] *= 1.05  # passes where 1e-2 is allowed
    assert np.allclose(wrong.astype(np.float64), right.astype(np.float64), atol=1e-2)
    assert error(wrong) > 1
    wrong[-1, -1, -1] = np.nan
    assert error(wrong) == np.inf


Peers = dict[str, float]
"""By name, what a peer's output is multiplied by."""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Row], list[str]]]:
    """Times a small cell without a GPU: what ran, and what was not run."""
    cell = Cell("float16", 128, True, 16384)
    small = cell.problem.replace(batch=1, heads=2, len_q=64, head_dim=16)
    arrays = random_inputs(small)
    right = naive(*arrays, causal=True).out.astype(np.float16)
    monkeypatch.setattr(Cell, "problem", small)
    monkeypatch.setattr(peers, "layout", lambda name: "bhsd")
    monkeypatch.setattr(speed._Forward, "ours", lambda *_: lambda: right)
    monkeypatch.setattr(speed, "clocks", lambda torch, calls, seconds: [1500.0 for _ in calls])

    def run(peers_: Peers, milliseconds: float = 1.0, graph: Callable[..., Any] | None = None) -> Any:
        monkeypatch.setattr(peers, "prepare", lambda name, *_, **__: lambda: right * np.float16(peers_[name]))
        monkeypatch.setattr(
            speed, "interleaved", lambda torch, calls, seconds, least=11: [[milliseconds] * 2 for _ in calls]
        )
        monkeypatch.setattr(speed, "captured", graph)
        drawn = iter(arrays)
        torch = SimpleNamespace(
            Generator=lambda device: SimpleNamespace(manual_seed=lambda seed: None),
            randn=lambda shape, **_: SimpleNamespace(to=lambda dtype: next(drawn)),
            **vars(FAKE_TORCH),
        )
        not_run: list[str] = []
        yardstick = Yardstick("float16", 500.0, 4000.0)
        return speed._bench_cell(torch, cell, "flash2", None, list(peers_), 0.1, yardstick, None, not_run), not_run

    return run


def test_a_peer_whose_output_is_wrong_is_not_timed(bench: Callable[..., tuple[list[Row], list[str]]]) -> None:
    rows, not_run = bench({"right": 1.0, "wrong": 1.02})
    assert [row.peer for row in rows] == [None, "right"]
    assert all(0 < row.error <= 1 for row in rows)
    (said,) = not_run
    assert said.startswith("wrong, float16 × 128 causal 16384: the result is wrong (")


def test_short_cells_run_in_graphs_but_for_what_cannot(bench: Callable[..., tuple[list[Row], list[str]]]) -> None:
    """One peer can't be captured, and a replay of another has a wrong result: both are queued by Python, and say so."""

    def counted(torch: Any, calls: list[Callable[[], Any]]) -> tuple[Any, list[Any]]:
        number.append(1)
        if len(number) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return SimpleNamespace(replay=lambda: None), [calls[0]() * np.float16(1.02 if len(number) == 3 else 1)]

    number: list[int] = []
    rows, not_run = bench({"uncapturable": 1.0, "wrong in a graph": 1.0, "fine": 1.0}, speed.SHORT / 2, counted)
    assert not not_run
    assert {row.peer: row.queued for row in rows} == {
        None: "in a graph", "uncapturable": "by Python", "wrong in a graph": "by Python", "fine": "in a graph"
    }  # fmt: skip
    number.clear()
    rows, _ = bench({"fine": 1.0}, speed.SHORT * 2, counted)
    assert not number and {row.queued for row in rows} == {"by Python"}


def test_what_holds_the_clock_down_is_seen_while_calls_run() -> None:
    """The share is that of the driver's counter of seconds, and every reason that was seen once is named once."""
    bits, counter = iter([0x1, 0x4, 0x20 | 0x40]), iter([10.0, 10.0])
    looked = threading.Event()

    class Fake:
        def capped(self) -> float:
            return next(counter)

        def reasons(self) -> int:
            seen = next(bits, None)
            if seen is None:
                looked.set()
            return seen or 0

    fake: Any = Fake()
    with Watch(fake) as watch:
        assert looked.wait(10)
    assert watch.held == Held(0.0, ("power limit", "temperature"))
    counter = iter([10.0, 1e9])
    with Watch(fake) as watch:
        pass
    assert watch.held == Held(1.0, ())


def test_results_from_before_graphs_and_clocks_are_read() -> None:
    old = results.load("docs/results/bench/flash2_h200_2026-11-21.jsonl")
    row = speed.BENCH.data(old).rows[0]
    assert (row.queued, row.mhz, row.capped, row.reasons) == ("by Python", None, None, ())
    assert " |  |  |" in speed.BENCH.markdown(old)  # nobody knows their clock


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
