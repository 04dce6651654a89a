"""The papers count elements; head dims that are multiples of 8, no masks, lengths that tiles divide."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from simulator import Problem

dims = st.sampled_from([8, 16, 64, 128])
lengths = st.sampled_from([128, 256, 512])


def problem(n: int, d: int) -> Problem:
    return Problem(batch=1, heads=1, len_q=n, head_dim=d, dtype="float32")


@given(lengths, dims)
def test_standard_compulsory(n: int, d: int) -> None:
    """FA1, Algorithm 0: 4N^2 + 4Nd, each launch reading its operands once."""
    assert fl.count("standard", problem(n, d)).compulsory == 4 * (4 * n * n + 4 * n * d)


@given(lengths, dims)
def test_standard_requests_operands_once_a_tile(n: int, d: int) -> None:
    """A tiled matmul requests its operands once per row or column of tiles: what the blogs forget."""
    tiles = n // 64
    scores, softmax, output = fl.count("standard", problem(n, d), tile=(64, 64)).launches
    assert scores.bytes("hbm.read") == 4 * 2 * n * d * tiles
    assert softmax.bytes("hbm.read") == 4 * 3 * n * n
    assert output.bytes("hbm.read") == 4 * (n * n + n * d * tiles)


@given(lengths, dims, st.sampled_from([(16, 64), (64, 64), (32, 128)]))
def test_flash1_requested(n: int, d: int, tile: tuple[int, int]) -> None:
    """FA1, Algorithm 1: 2Nd + 3Nd Tc + 4N Tc, plus the initial Nd + 2N."""
    tc = n // tile[1]
    c = fl.count("flash1", problem(n, d), tile=tile, device="b200")
    assert c.hbm.read + c.hbm.write == 4 * (2 * n * d + 3 * n * d * tc + 4 * n * tc + n * d + 2 * n)


@given(lengths, dims, st.sampled_from([(64, 64), (128, 64), (128, 128)]))
def test_flash2_requested(n: int, d: int, tile: tuple[int, int]) -> None:
    """FA2, Algorithm 1: 2Nd + 2Nd Tr + N."""
    tr = n // tile[0]
    c = fl.count("flash2", problem(n, d), tile=tile, device="b200")
    assert c.hbm.read + c.hbm.write == 4 * (2 * n * d + 2 * n * d * tr + n)


@given(lengths, dims)
def test_standard_backward_compulsory(n: int, d: int) -> None:
    """FA1, Algorithm 3: 7N^2 + 8Nd. Before it P is computed again, and dS takes its D from dO and O, which read 2Nd."""
    c = fl.count("standard_backward", problem(n, d))
    again = c.launches[0]
    first = sum(c.distinct(again, way) for way in ("read", "write"))
    assert first == 4 * (n * n + 2 * n * d + n)
    assert c.compulsory - first == 4 * (7 * n * n + 8 * n * d + 2 * n * d)


@given(lengths, dims, st.sampled_from([(16, 64), (64, 64), (32, 128)]))
def test_flash1_backward_requested(n: int, d: int, tile: tuple[int, int]) -> None:
    """FA1, Algorithm 4: 4Nd + 5Nd Tc, plus the initial 3Nd. Of its 2N Tc for l and m, one LSE stands for both, and each warp along
    the keys reads it."""
    tc, along = n // tile[1], min(tile) // 16
    c = fl.count("flash1_backward", problem(n, d), tile=tile, device="b200")
    assert c.by_tensor["lse"].hbm_read == 4 * along * n * tc
    assert c.hbm.read + c.hbm.write == 4 * (4 * n * d + 5 * n * d * tc + along * n * tc + 3 * n * d)


@given(lengths, dims, st.sampled_from([(16, 64), (64, 64), (64, 32)]))
def test_flash2_backward_requested(n: int, d: int, tile: tuple[int, int]) -> None:
    """FA2, Algorithm 2: 2Nd + Tc (2Nd + 2N) read, Tc Nd added, 2Nd written; L and D by each warp along the keys. Before it 2Nd
    for D, which is N, and Nd zeros; after it Nd and Nd. Where dQ is added up, d is rounded up to whole accumulators."""
    tc, along, whole = n // tile[1], min(tile) // 16, -(-d // 16) * 16
    before, main, after = fl.count("flash2_backward", problem(n, d), tile=tile, device="b200").launches
    assert main.bytes("hbm.read") == 4 * (2 * n * d + tc * (2 * n * d + along * 2 * n))
    assert main.bytes("hbm.atomic") == 4 * tc * n * whole and main.bytes("hbm.write") == 4 * 2 * n * d
    assert (before.bytes("hbm.read"), before.bytes("hbm.write")) == (4 * 2 * n * d, 4 * (n + n * whole))
    assert (after.bytes("hbm.read"), after.bytes("hbm.write")) == (4 * n * whole, 4 * n * d)


@pytest.mark.parametrize(("name", "per_element"), [("softmax_naive", 3), ("softmax_safe", 4), ("softmax_online", 3)])
@given(n=st.integers(1, 300).map(lambda x: 4 * x))
def test_softmax_of_a_vector(name: str, per_element: int, n: int) -> None:
    """1805.02867, table: memory accesses per element."""
    c = fl.count(name, length=n, dtype="float32")
    assert c.hbm.read + c.hbm.write == 4 * per_element * n


def test_split_k_against_split_q() -> None:
    """Why FA2 swapped the split: the bytes through SRAM per tile, at one tile and problem."""
    p = Problem(batch=1, heads=1, len_q=512, head_dim=64, dtype="float16")
    flash1, flash2 = (fl.count(name, p, tile=(64, 64)) for name in ("flash1", "flash2"))
    assert flash2.by_tensor["k"].sram_read == 4 * flash1.by_tensor["k"].sram_read
    assert flash1.by_tensor["q"].sram_read == 4 * 64 * (64 * 64 * 2)  # every warp reads all of Q_i, 8 x 8 tiles
    exchanged = [flash1.by_tensor[name] for name in ("row_max", "row_sum", "partial_o")]
    assert sum(x.sram_read + x.sram_write for x in exchanged) > flash2.sram.read + flash2.sram.write


@given(st.sampled_from([1024, 4096, 16384]))
def test_memory_footprint(n: int) -> None:
    """O(N^2) against O(N): allocated bytes."""
    double = {
        name: fl.count(name, problem(2 * n, 64)).hbm.peak / fl.count(name, problem(n, 64)).hbm.peak
        for name in ("standard", "flash1", "flash2")
    }
    assert double["flash1"] == double["flash2"] == 2
    assert double["standard"] > 3.5


def test_theorem_2_more_sram_fewer_bytes() -> None:
    """FA1, theorem 2: HBM accesses fall as N^2 d^2 / M, here with Bc as M grows."""
    p = Problem(batch=1, heads=1, len_q=4096, head_dim=64, dtype="float16")
    moved = [fl.count("flash1", p, tile=(16, cols), device="b200").hbm.read for cols in (64, 128, 256)]
    assert moved[0] > 1.9 * moved[1] > 3.5 * moved[2]
