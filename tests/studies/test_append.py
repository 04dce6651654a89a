"""The clock of appends: its calls agree by the rule, its lengths are skewed, and what isn't there is one line."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from flashlab.measure import timing
from simulator.errors import UsageError
from studies import contenders, timed
from studies.contenders import AGAINST, APPENDED, Append


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("flash3", Append(batch=2, mean=40)),
        ("flash3", Append(batch=2, mean=40, page_size=7)),
        ("paged", Append(batch=2, mean=40, page_size=7)),
        ("flash3_paged", Append(batch=2, mean=40, page_size=7)),
    ],
)
def test_a_call_keeps_the_rule(name: str, cell: Append, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"HEADS": 2, "KV_HEADS": 1, "HEAD_DIM": 64, "NEW": 33, "DEVICE": "cpu", "BACKEND": "emulator"}
    for attribute, value in changes.items():
        monkeypatch.setattr(contenders, attribute, value)
    batch = contenders.Batch(import_module("torch"), cell)
    out = batch.call(name)()
    batch.check(name, out)
    with pytest.raises(RuntimeError, match=f"{name} breaks the rule at Append"):
        batch.check(name, 1.1 * out)


def test_lengths_are_skewed_and_have_their_mean() -> None:
    for cell in (*APPENDED["flash3_paged"], *APPENDED["flash3"]):
        cached = [keys - (contenders.NEW if cell.page_size else 0) for _, keys in cell.lengths]
        assert len(cached) == cell.batch and sum(cached) == cell.batch * cell.mean and min(cached) >= 1
        assert not cell.skewed or 2 * sorted(cached)[cell.batch // 2] < max(cached)
    assert Append(batch=8, mean=2048, skewed=False).work == 4 * 128 * 32 * 8 * 2048**2 // 2
    lengths = contenders.lognormal(16, 8192)
    assert (sum(lengths), min(lengths), max(lengths)) == (16 * 8192, 666, 29393)
    assert contenders.lognormal(16, 100) == contenders.lognormal(16, 100) != contenders.lognormal(16, 100, seed=1)


def result(algorithm: str, **changes: Any) -> Any:
    cell = APPENDED[algorithm][0]
    took = {algorithm: 2000.0, **dict.fromkeys(AGAINST[algorithm], 2400.0)}
    row: dict[str, Any] = {
        **cell.model_dump(), "longest": 29905, "flops": cell.work, "microseconds": took, "rounds": 15, "failed": {},
        "ratios": {name: took[name] / 2000 for name in list(took)[1:]},
    }  # fmt: skip
    assert set(row) == set(timed.APPENDED_ROW.model_fields)
    return timed.APPEND.schema.model_validate({"algorithm": algorithm, "rows": [{**row, **changes}]})


def test_a_table_has_what_was_measured() -> None:
    header, _, row = timed.APPEND.table(result("flash3_paged")).splitlines()
    assert header == (
        "| requests | new tokens | tokens | pages of | µs | TFLOP/s | × flash3 | × paged | × fa4 | × flashinfer |"
    )
    assert row == "| 16 | 512 | mean 8,192, longest 29,905 | 16 | 2,000 | 567 | 1.20 | 1.20 | 1.20 | 1.20 |"
    assert "| 8 | all | 2,048 | 2,000 |" in timed.APPEND.table(result("flash3"))
    failed: dict[str, Any] = {"ratios": {"flash3": 1.0}, "failed": {"fa4": "AssertionError: pages of 1"}}
    assert "× fa4" not in timed.APPEND.table(result("flash3_paged", **failed))
    assert timed.APPEND.headline(result("flash3")).endswith("TFLOP/s; 1.20 to 1.20 × fa4; 1.20 to 1.20 × flashinfer")


def test_peers_are_those_of_the_algorithm() -> None:
    assert contenders.check("flash3_paged", None) == AGAINST["flash3_paged"]
    assert contenders.check("flash3", ["fa4"]) == ["fa4"]
    with pytest.raises(UsageError, match="against = 'cudnn': expected"):
        contenders.check("flash3", ["cudnn"])
    with pytest.raises(UsageError, match="algorithm = 'flash4': expected"):
        contenders.check("flash4", None)


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
