"""The machine itself: SRAM limits, what a program may do, traces, one's own programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from simulator import Device, Problem, SramOverflow, Trace, UsageError
from tests.simulator.problems import ALGORITHMS, taken_by, zeros
from tests.tiers import examples

P = Problem(batch=2, heads=4, kv_heads=2, len_q=70, head_dim=40, dtype="float16", causal=True)


def test_sram_overflow_names_tile_and_bytes() -> None:
    with pytest.raises(
        SramOverflow, match=r"tile = '256x256': expected a smaller tile: this one needs [\d,]+ bytes .* t4 has 65,536"
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
        return zeros(m, problem, tile)

    assert fl.count(frugal, P).sram.peak == 64 * 64 * 4 + 16 * 48 * 2


def test_split_says_who_reads() -> None:
    @fl.program
    def product(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        for block in m.launch("product", warps=4):
            block.step("s")
            q_i, k_j = block.load(q, 0, 64), block.load(k, 0, 32)
            block.matmul(q_i, k_j.T, split=("none", "rows"))
        return zeros(m, problem, tile)

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

    with pytest.raises(UsageError, match="only counted loads reach values"):
        fl.simulate(cheat, *fl.random_inputs(P))


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


@examples(30)
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
        return zeros(m, problem, tile)

    p = Problem(batch=1, heads=1, len_q=n, head_dim=8, dtype="float32")
    reached = min(n, max(rows, -(-min(n, rows) // shift) * shift))
    assert fl.count(overlapping, p).compulsory_read == reached * 32


@fl.program
def split_keys(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
    """Decoding in outline: the query heads of a group are rows of one tile, three splits share the keys, a second launch merges."""
    splits, group, last = 3, problem.queries_per_kv, problem.key_tiles(tile)
    share = -(-last // splits)
    q, out, lse = m.packed(q), m.packed(m.output("out")), m.packed(m.output("lse"))
    partial = m.packed(m.workspace("partial", v.cols, axes={"splits": splits}))
    partial_lse = m.workspace("partial_lse", 1, rows=q.rows, of=q, vector=True, axes={"splits": splits})
    rows = -(-q.rows // tile.rows)

    def keys(i: int, j: int) -> range:
        return range(j * share, min((j + 1) * share, last))

    for block in m.launch("split", rows=rows, cols=splits, walk=keys, of=q, warps=4):
        block.step("load_q")
        q_i = block.load(q, block.i, tile.rows)
        m_i, l_i, acc = (block.full(tile.rows, n, x) for n, x in ((1, -np.inf), (1, 0.0), (v.cols, 0.0)))
        for j in block.walk:
            block.step("scores")
            s = block.matmul(q_i, block.load(k, j, tile.cols).T, split=("rows", "none"), scale=problem.scale)
            s = block.mask(s, block.i, j, group=group)
            m_new = block.maximum(m_i, s.max())
            p, alpha = block.exp(s - m_new.finite()), block.exp(m_i - m_new.finite())
            block.step("output")
            l_i, m_i = l_i * alpha + p.sum(), m_new
            acc = block.matmul(p, block.load(v, j, tile.cols), split=("rows", "none"), acc=acc * alpha)
        block.step("store")
        block.store(partial.at(splits=block.j), acc / l_i.nonzero(), block.i, tile.rows)
        block.store(partial_lse.at(splits=block.j), m_i + block.log(l_i), block.i, tile.rows)
    for block in m.launch("merge", rows=rows, of=q, warps=4):
        block.step("merge")
        parts = [block.fetch(partial_lse.at(splits=n), block.i, tile.rows) for n in range(splits)]
        top = block.maximum(block.maximum(parts[0], parts[1]), parts[2]).finite()
        weights = [block.exp(part - top) for part in parts]
        total = (weights[0] + weights[1]) + weights[2]
        acc = block.full(tile.rows, v.cols, 0.0)
        for n, weight in enumerate(weights):
            acc = acc + block.fetch(partial.at(splits=n), block.i, tile.rows) * weight
        block.store(out, acc / total.nonzero(), block.i, tile.rows)
        block.store(lse, top + block.log(total), block.i, tile.rows)
    return m.output("out"), m.output("lse")


@examples(25)
@given(
    st.integers(1, 2), st.integers(1, 2), st.integers(1, 3), st.integers(1, 40), st.integers(1, 70),
    st.booleans(), st.sampled_from([(16, 16), (32, 16)]),
)  # fmt: skip
def test_packed_heads_and_splits(
    batch: int, kv_heads: int, group: int, len_q: int, len_kv: int, causal: bool, tile: tuple[int, int]
) -> None:
    """What decoding asks of the machine: a group's heads as rows, splits of the keys, planes of a workspace, a merge."""
    p = Problem(
        batch=batch, heads=kv_heads * group, kv_heads=kv_heads, len_q=len_q, len_kv=len_kv, head_dim=8, dtype="float32",
        causal=causal,
    )  # fmt: skip
    q, k, v = fl.random_inputs(p)
    run, truth = fl.simulate(split_keys, q, k, v, causal=causal, tile=tile, lse=True), fl.naive(q, k, v, causal=causal)
    np.testing.assert_allclose(run.out, truth.out, atol=2e-6)
    np.testing.assert_allclose(run.lse, truth.lse, atol=2e-6)
    counts = fl.count(split_keys, p, tile=tile, lse=True)
    assert run.counts.to_dict() == counts.to_dict()
    tiles = -(-len_q * group // tile[0])  # every row tile of a group reads each key once, whichever split has it
    assert counts.by_tensor["k"].hbm_read == counts.by_tensor["v"].hbm_read == batch * kv_heads * tiles * len_kv * 32
    assert counts.by_tensor["q"].hbm_read == 3 * q.nbytes
    assert counts.by_tensor["partial"].hbm_write == counts.by_tensor["partial"].hbm_read == 3 * q.nbytes
    assert counts.by_tensor["partial_lse"].hbm_write == 3 * batch * p.heads * len_q * 4
    merged = 3 * batch * p.heads * len_q * (32 + 4)  # what the second launch reads of the first
    assert counts.compulsory_read == q.nbytes + k.nbytes + v.nbytes + merged


def test_a_walk_of_two_arguments_is_each_blocks_own() -> None:
    p = Problem(batch=1, heads=1, len_q=32, len_kv=96, head_dim=8, dtype="float32")
    seen: list[tuple[int, ...]] = []

    @fl.program
    def walker(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        for block in m.launch("walk", rows=2, cols=2, walk=lambda i, j: range(i, i + j + 1), warps=4):
            block.step("walk")
            seen.extend((int(i), block.j, *block.walk) for i in block.i)
        return zeros(m, problem, tile)

    fl.count(walker, p, tile=(16, 16))
    assert sorted(seen) == [(0, 0, 0), (0, 1, 0, 1), (1, 0, 1), (1, 1, 1, 2)]


def test_blocks_in_lockstep_that_add_to_the_same_rows_add_up() -> None:
    """Six blocks of each of two query heads, one after another on a GPU, all at once here: nothing is lost."""

    @fl.program
    def column_sums(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        out, total = m.output("out"), m.workspace("total", v.cols, rows=16, of=v)
        for block in m.launch("zero", warps=4, of=v):
            block.step("zero")
            block.store(total, block.full(16, v.cols, 0.0), 0, 16)
        for block in m.launch("add", rows=6, warps=4):
            block.step("add")
            block.atomic_add(total, block.fetch(q, block.i, 16), 0, 16)
        for block in m.launch("store", rows=6, warps=4):
            block.step("store")
            block.store(out, block.fetch(total, 0, 16), block.i, 16)
        return out

    p = Problem(batch=2, heads=4, kv_heads=2, len_q=96, head_dim=8, dtype="float32")
    q, k, v = fl.random_inputs(p)
    run = fl.simulate(column_sums, q, k, v, tile=(16, 16))
    expected = q.reshape(2, 2, 2, 6, 16, 8).sum((2, 3))  # of batches and KV heads
    np.testing.assert_allclose(run.out[:, ::2, :16], expected, atol=1e-5)
    np.testing.assert_array_equal(run.out[:, 1::2, -16:], run.out[:, ::2, :16])
    assert run.counts.hbm.atomic == fl.count(column_sums, p, tile=(16, 16)).hbm.atomic == q.nbytes


def test_handles_that_do_not_fit_are_refused() -> None:
    @fl.program
    def planes(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        partial = m.workspace("partial", 8, axes={"splits": 2})
        with pytest.raises(UsageError, match="splits = 2: expected an integer from 0 to 1"):
            partial.at(splits=2)
        with pytest.raises(UsageError, match="expected the axes of partial: splits"):
            partial.at(parts=0)
        with pytest.raises(UsageError, match="expected q as it was before its heads were packed"):
            m.packed(q).head(0)
        with pytest.raises(UsageError, match="expected q as it was before its heads were packed"):
            m.packed(m.packed(q))
        return zeros(m, problem, tile)

    fl.count(planes, P)
