"""The machine itself: SRAM limits, what a program may do, traces, one's own programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashlab as fl
from simulator import Device, Problem, SramOverflow, Trace, UsageError
from tests.simulator.problems import ALGORITHMS, taken_by

P = Problem(batch=2, heads=4, kv_heads=2, len_q=70, head_dim=40, dtype="float16", causal=True)


def test_sram_overflow_names_tile_and_bytes() -> None:
    with pytest.raises(
        SramOverflow, match=r"tile = '256x256': expected a smaller tile, this one needs [\d,]+ bytes .* t4 has 65,536"
    ):
        fl.count("flash2", P.replace(head_dim=128), tile=(256, 256), device="t4")


def test_a_program_cannot_outgrow_sram_by_any_route() -> None:
    @fl.program
    def greedy(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        out = m.output("out")
        for block in m.launch("greedy", warps=1):
            for n in range(10):
                block.step(f"s{n}")
                block.alloc(f"buffer{n}", 64, 128)
        return out

    small = Device.named("a100").replace(name="small", sram_per_block=200_000)
    with pytest.raises(SramOverflow, match=r"needs 229,376 bytes .* small has 200,000"):
        fl.count(greedy, P, device=small)


def test_freed_and_reused_buffers_do_not_count_twice() -> None:
    @fl.program
    def frugal(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        for block in m.launch("frugal", warps=2):
            block.step("a")
            block.free(block.alloc("x", 64, 64))
            block.alloc("y", 64, 64)
            block.load(k, 0, 16)
            block.load(k, 1, 16)
        return m.output("out")

    assert fl.count(frugal, P).sram.peak == 64 * 64 * 4 + 16 * 48 * 2


def test_split_says_who_reads() -> None:
    @fl.program
    def product(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        for block in m.launch("product", warps=4):
            block.step("s")
            q_i, k_j = block.load(q, 0, 64), block.load(k, 0, 32)
            block.matmul(q_i, k_j.T, split=("none", "rows"))
        return m.output("out")

    c = fl.count(product, Problem(batch=1, heads=1, len_q=64, head_dim=64, dtype="float16"))
    assert c.by_tensor["q"].sram_read == 4 * 64 * 64 * 2
    assert c.by_tensor["k"].sram_read == 32 * 64 * 2


def test_atomics_count_and_add() -> None:
    @fl.program
    def column_sums(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        out, total = m.output("out"), m.workspace("total", v.cols)
        for block in m.launch("add", warps=4):
            block.step("zero")
            block.store(total, block.full(tile.rows, v.cols, 0.0), 0, tile.rows)
            block.step("add")
            for j in range(problem.key_tiles(tile)):
                block.atomic_add(total, block.fetch(v, j, tile.cols), 0, tile.rows)
            block.step("store")
            block.store(out, block.fetch(total, 0, tile.rows), 0, tile.rows)
        return out

    p = Problem(batch=1, heads=1, len_q=16, len_kv=32, head_dim=8, dtype="float32")
    q, k, v = fl.random_inputs(p)
    run = fl.simulate(column_sums, q, k, v, tile=(16, 16))
    np.testing.assert_allclose(run.out[0, 0], v[0, 0, :16] + v[0, 0, 16:], rtol=1e-6)
    assert run.counts.hbm.atomic == 2 * 16 * 8 * 4


def test_hbm_values_are_out_of_reach() -> None:
    @fl.program
    def cheat(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        np.asarray(q)

    with pytest.raises(UsageError, match="reached through counted loads"):
        fl.simulate(cheat, *fl.random_inputs(P))


def test_a_forgotten_store_shows_as_nan() -> None:
    @fl.program
    def forgetful(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        out = m.output("out")
        for block in m.launch("forgetful", rows=1, warps=4):
            block.step("store")
            block.store(out, block.full(32, v.cols, 1.0), block.i, 32)
        return out

    out = fl.simulate(forgetful, *fl.random_inputs(P)).out
    assert (out[:, :, :32] == 1).all()
    assert np.isnan(out[:, :, 32:]).all()


def test_a_program_that_returns_something_else_is_told() -> None:
    @fl.program
    def nothing(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        return 3

    with pytest.raises(UsageError, match="return value of nothing = 3"):
        fl.count(nothing, P)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("causal", [False, True])
def test_trace_bytes_add_up_and_survive_json(algorithm: str, causal: bool, tmp_path: Path) -> None:
    """The trace of one head holds exactly that head's ledger, and JSON gives back the same trace."""
    p = taken_by(algorithm, P.replace(causal=causal))
    q, k, v = fl.random_inputs(p)
    run = fl.simulate(algorithm, q, k, v, causal=causal, tile=(32, 16), lse=True, trace=(1, 3))
    assert run.trace is not None
    one = fl.count(algorithm, p.replace(batch=1, heads=1, kv_heads=None), tile=(32, 16), lse=True)
    traced: dict[tuple[str, str, str], int] = {}
    for event in run.trace.events:
        for transfer in event.transfers:
            for what, n in transfer.nbytes.items():
                key = (event.step, transfer.tensor, what)
                traced[key] = traced.get(key, 0) + n
    ledger: dict[tuple[str, str, str], int] = {}
    for launch in one.launches:
        for entry, n in launch.ledger.items():
            ledger[tuple(entry)] = ledger.get(tuple(entry), 0) + n
    assert traced == ledger
    assert max(sum(e.sram.values()) for e in run.trace.events) == one.sram.peak

    path = tmp_path / "trace.json"
    path.write_text(run.trace.to_json())
    again = Trace.load(path)
    assert json.dumps(again.to_dict()) == json.dumps(run.trace.to_dict())


def test_trace_values_are_the_algorithms_state() -> None:
    """The last values of l, m and acc in a trace are those of the traced head's result."""
    q, k, v = fl.random_inputs(P)
    run = fl.simulate("flash2", q, k, v, causal=True, tile=(32, 16), lse=True, trace=(1, 3))
    assert run.trace is not None and run.lse is not None
    last = {}
    for event in run.trace.events:
        assert event.line > 0
        if event.block == (1, 0):
            last.update(event.values)
    rows = slice(32, 64)
    np.testing.assert_array_equal(last["acc"].astype(np.float16), run.out[1, 3, rows])
    np.testing.assert_allclose((last["m_i"] + np.log(last["l_i"]))[:, 0], run.lse[1, 3, rows], rtol=1e-6)
    assert "flash2" in run.trace.sources["flash2"][1]


def test_trace_out_of_range() -> None:
    with pytest.raises(UsageError, match=r"trace = \(0, 9\): expected \(batch, head\) under \(2, 4\)"):
        fl.simulate("flash2", *fl.random_inputs(P), trace=(0, 9))


@settings(max_examples=30)
@given(st.integers(1, 300), st.integers(1, 100), st.integers(1, 64))
def test_distinct_bytes_of_overlapping_tiles(n: int, rows: int, shift: int) -> None:
    """Each byte once, however often and in whatever pieces it is requested."""

    @fl.program
    def overlapping(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        for block in m.launch("overlapping", warps=1):
            block.step("s")
            for height in (rows, shift):
                for i in range(-(-min(n, rows) // height)):
                    block.fetch(k, i, height)
        return m.output("out")

    p = Problem(batch=1, heads=1, len_q=n, head_dim=8, dtype="float32")
    reached = min(n, max(rows, -(-min(n, rows) // shift) * shift))
    assert fl.count(overlapping, p).compulsory_read == reached * 32
