"""What doesn't fit into the machine's memory is refused before it is allocated, by an estimate that is near the truth."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.player.page import page_bytes
from simulator import memory
from simulator.operations.attention import ATTENTION
from simulator.simulate import trace_size
from tests.flashlab.cli.typed import run
from tests.work import peak_bytes

SHAPES: dict[str, dict[str, Any]] = {
    "square": {"heads": 2, "len_q": 900},
    "causal": {"heads": 1, "len_q": 1500, "causal": True},
    "GQA, long rows": {"heads": 4, "kv_heads": 2, "len_q": 128, "len_kv": 3000},
    "scores changed": {"heads": 2, "len_q": 900, "soft_cap": 5.0, "sinks": True, "alibi": True},
    "mask, float32": {"heads": 2, "len_q": 800, "mask": "dense", "dtype": "float32"},
}


def problem(**fields: Any) -> fl.Problem:
    return fl.Problem(**{"batch": 1, "heads": 1, "head_dim": 64, "dtype": "float16", **fields})


@pytest.fixture
def estimates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What was asked for, by every look at the memory."""
    asked: list[int] = []

    def noted(what: str, nbytes: int) -> None:
        if not what.startswith("out of "):  # the whole run's estimate has it
            asked.append(nbytes)

    for module in ("simulator.simulate", "simulator.machine", "simulator.operations.attention"):
        monkeypatch.setattr(importlib.import_module(module), "check_memory", noted)
    return asked


@pytest.mark.parametrize("shape", SHAPES)
def test_the_estimate_of_naive_is_near_the_peak(shape: str, estimates: list[int]) -> None:
    p = problem(**SHAPES[shape])
    arrays = ATTENTION.draw(p)
    peak = peak_bytes(lambda: fl.naive(**arrays, **p.masks))
    assert peak / 1.5 < sum(estimates) < 1.5 * peak


@pytest.mark.parametrize(("algorithm", "length"), [("standard", 1500), ("flash1", 600)])
def test_the_estimate_of_a_run_is_near_the_peak(algorithm: str, length: int, estimates: list[int]) -> None:
    p = problem(heads=8, len_q=length)
    arrays = ATTENTION.draw(p)
    fl.simulate(algorithm, **arrays)
    estimates.clear()
    peak = peak_bytes(lambda: fl.simulate(algorithm, **arrays))
    assert peak / 1.5 < sum(estimates) < 1.5 * peak


def test_what_does_not_fit_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free", lambda: 100 << 20)
    q = np.zeros((1, 1, 6000, 16), np.float32)
    for refused in (lambda: fl.naive(q, q, q), lambda: fl.simulate("standard", q, q, q)):

        def call(refused: Any = refused) -> None:
            with pytest.raises(
                fl.UsageError, match=r"^memory = .*[GM]iB: expected at most the 100 MiB that are free here$"
            ):
                refused()

        assert peak_bytes(call) < 10 << 20
    with pytest.raises(MemoryError, match="^memory = random inputs"):
        fl.random_inputs(problem(len_q=10**9))
    assert fl.simulate("flash2", q[:, :, :100], q, q).out.shape == (1, 1, 100, 16)


def test_a_nan_takes_no_more_memory_than_a_number() -> None:
    p = problem(len_q=600)
    q, k, v = fl.random_inputs(p)
    plain = peak_bytes(lambda: fl.naive(q, k, v))
    v[0, 0, 7, 3], v[0, 0, 599, 1] = np.nan, np.inf
    assert peak_bytes(lambda: fl.naive(q, k, v, causal=True)) < 2 * plain
    np.testing.assert_allclose(
        fl.naive(q, k, v, causal=True).out, fl.naive_loop(q, k, v, causal=True).out, rtol=1e-9, atol=1e-12
    )


def test_the_limit_of_a_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 2 of control groups, two deep; what a group keeps of files is free."""
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    (tmp_path / "self" / "cgroup").write_text("0::/a/b\n1:cpu:/\n")
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "groups")
    assert memory.free() == 8000 * 1024
    for group, limit in (("a", "5000000"), ("a/b", "max")):
        folder = tmp_path / "groups" / group
        folder.mkdir(parents=True)
        for name, text in (
            ("memory.max", limit),
            ("memory.current", "2000000"),
            ("memory.stat", "inactive_file 500000\n"),
        ):
            (folder / name).write_text(text)
    assert memory.free() == 3_500_000
    (tmp_path / "meminfo").write_text("nothing\n")
    assert memory.free() is None


@pytest.mark.alike("flash2-300-16-True", "standard-300-16-False", "flash1-200-16-True")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("algorithm", "length", "side"),
    [("flash2", 300, 16), ("standard", 300, 16), ("flash1", 200, 16), ("flash2", 1000, 64)],
)
def test_the_estimate_of_a_trace_is_near_the_peak(algorithm: str, length: int, side: int, causal: bool) -> None:
    p = problem(len_q=length, causal=causal)
    arrays = ATTENTION.draw(p)
    steps, kept = trace_size(fl.catalogue.get(algorithm).program, p, tile=(side, side), device=fl.DEVICES["h100"])
    runs: list[fl.Run] = []

    def call() -> None:
        runs.append(fl.simulate(algorithm, **arrays, **p.masks, tile=(side, side), trace=(0, 0)))

    call()
    peak = peak_bytes(call)
    assert runs[0].trace is not None and len(runs[0].trace.events) == steps
    assert peak / 1.5 < kept < 1.5 * peak


@pytest.mark.long
@pytest.mark.parametrize(("algorithm", "length"), [("flash2", 1500), ("standard", 1500)])
def test_the_estimate_of_a_page_is_near_the_peak(algorithm: str, length: int) -> None:
    p = problem(len_q=length)
    run = fl.simulate(algorithm, **ATTENTION.draw(p), tile=(16, 16), trace=(0, 0))
    assert run.trace is not None
    estimate, peak = page_bytes(len(run.trace.events)), peak_bytes(lambda: fl.player(run).html())
    assert peak / 1.5 < estimate < 1.5 * peak


@pytest.mark.long
def test_a_trace_that_does_not_fit_is_refused_beforehand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    p = problem(len_q=8192)
    arrays = ATTENTION.draw(p)
    monkeypatch.setattr(memory, "free", lambda: 1 << 30)

    def call() -> None:
        with pytest.raises(fl.UsageError, match=r"^memory = a trace of 1,837,056 steps, [0-9.]+ GiB: expected at most"):
            fl.simulate("flash2", **arrays, tile=(16, 16), trace=(0, 0))

    assert peak_bytes(call) < 100 << 20
    words = ["trace", "flash2", "--len-q", "8192", "--tile", "16x16", "--html", str(tmp_path / "page.html")]
    ended = run(*words, code=2)
    assert "memory = a page of " in ended.stderr and not list(tmp_path.iterdir())
