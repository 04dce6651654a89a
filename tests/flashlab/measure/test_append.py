"""The clock of appends: its calls agree by the rule, its lengths are skewed, and what isn't there is one line."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from flashlab.measure import append, contenders, timing
from flashlab.measure.append import AGAINST, CELLS, Cell, Row
from simulator.errors import Unavailable, UsageError


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("flash3", Cell(batch=2, mean=40)),
        ("flash3", Cell(batch=2, mean=40, page_size=7)),
        ("paged", Cell(batch=2, mean=40, page_size=7)),
        ("flash3_paged", Cell(batch=2, mean=40, page_size=7)),
    ],
)
def test_a_call_keeps_the_rule(name: str, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    for attribute, value in (("HEADS", 2), ("KV_HEADS", 1), ("HEAD_DIM", 64), ("NEW", 33)):
        monkeypatch.setattr(append, attribute, value)
    monkeypatch.setattr(contenders, "DEVICE", "cpu")
    monkeypatch.setattr(contenders, "BACKEND", "emulator")
    batch = append.Batch(import_module("torch"), cell)
    out = batch.call(name)()
    batch.check(name, out)
    with pytest.raises(RuntimeError, match=f"{name} breaks the rule at Cell"):
        batch.check(name, 1.1 * out)


def test_lengths_are_skewed_and_have_their_mean() -> None:
    for cell in (*CELLS["flash3_paged"], *CELLS["flash3"]):
        cached = [keys - (append.NEW if cell.page_size else 0) for _, keys in cell.lengths]
        assert len(cached) == cell.batch and sum(cached) == cell.batch * cell.mean and min(cached) >= 1
        assert not cell.skewed or 2 * sorted(cached)[cell.batch // 2] < max(cached)
    assert append.lognormal(16, 100) == append.lognormal(16, 100) != append.lognormal(16, 100, seed=1)


def result(algorithm: str, **changes: Any) -> append.Appending:
    cell = CELLS[algorithm][0]
    took = {algorithm: 2000.0, **dict.fromkeys(AGAINST[algorithm], 2400.0)}
    row: dict[str, Any] = {
        **vars(cell), "longest": 29905, "flops": append.flops(cell), "microseconds": took, "rounds": 15, "failed": {},
        "ratios": {name: took[name] / 2000 for name in list(took)[1:]},
    }  # fmt: skip
    assert set(row) == set(Row.__dataclass_fields__)
    return append.KIND.schema.model_validate({"algorithm": algorithm, "rows": [{**row, **changes}]})


def test_a_table_has_what_was_measured() -> None:
    header, _, row = append.table(result("flash3_paged")).splitlines()
    assert header == (
        "| requests | new tokens | tokens | pages of | µs | TFLOP/s | × flash3 | × paged | × fa4 | × flashinfer |"
    )
    assert row == "| 16 | 512 | mean 8,192, longest 29,905 | 16 | 2,000 | 567 | 1.20 | 1.20 | 1.20 | 1.20 |"
    assert "| 8 | all | 2,048 | 2,000 |" in append.table(result("flash3"))
    failed: dict[str, Any] = {"ratios": {"flash3": 1.0}, "failed": {"fa4": "AssertionError: pages of 1"}}
    assert "× fa4" not in append.table(result("flash3_paged", **failed))
    assert append.headline(result("flash3")).endswith("TFLOP/s; 1.20 to 1.20 × fa4; 1.20 to 1.20 × flashinfer")


def test_a_peer_that_is_not_installed_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Any:
        raise Unavailable("flashinfer cannot be imported")

    monkeypatch.setattr(append, "_flashinfer", missing)
    monkeypatch.setattr(append, "_fa4", lambda: None)
    found, lines = append.chosen("flash3_paged", None)
    assert (found, lines) == (["flash3", "paged", "fa4"], ["not run: flashinfer (flashinfer cannot be imported)"])
    with pytest.raises(UsageError, match="against = 'cudnn': expected"):
        append.chosen("flash3", ["cudnn"])
    monkeypatch.setattr("sys.argv", ["append", "--algorithm", "flash3", "--against", "flashinfer"])
    assert append.main() == 2
    assert capsys.readouterr().err == "flashinfer cannot be imported\n"


def test_graphs_take_turns() -> None:
    played: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...
        def record(self) -> None: ...
        def synchronize(self) -> None: ...
        def elapsed_time(self, end: object) -> float:
            return 0.5 + len(played)

    def graph(name: str) -> Any:
        return SimpleNamespace(replay=lambda: played.append(name))

    times = timing.turns(SimpleNamespace(cuda=SimpleNamespace(Event=Event)), {name: graph(name) for name in "ab"}, 2)
    assert played == ["a", "b", "b", "a"] * 2 and {len(found) for found in times.values()} == {2}
    assert times["a"] == [1e3 * 5.5, 1e3 * 8.5]
