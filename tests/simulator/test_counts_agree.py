"""Data run = shape-only run = formula, to the byte, for every entry of the ledger."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from simulator import Device, Problem, SramOverflow, Tile
from simulator.counts import Book
from simulator.formulas.walk import floor_sum, walk
from simulator.operations.attention import ATTENTION
from simulator.operations.softmax import SOFTMAX, vector_problem
from tests.simulator.problems import ALGORITHMS, ROOMY, devices, kernel_tiles, problems, scores, taken_by, tiles
from tests.tiers import examples
from tests.work import calls


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@examples(150)
@given(problem=problems(scores=scores), tile=tiles | kernel_tiles, device=devices, lse=st.booleans())
def test_formula_equals_shape_run(algorithm: str, problem: Problem, tile: Tile, device: Device, lse: bool) -> None:
    problem = taken_by(algorithm, problem)
    try:
        counted = fl.shape_run(algorithm, problem, tile=tile, device=device, lse=lse)
    except SramOverflow:
        with pytest.raises(SramOverflow):
            fl.count(algorithm, problem, tile=tile, device=device, lse=lse)
        return
    formula = fl.count(algorithm, problem, tile=tile, device=device, lse=lse)
    assert formula == counted
    assert formula.by_tensor == counted.by_tensor
    assert formula.compulsory_read <= formula.hbm.read
    assert counted.sram.peak <= device.sram_per_block


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@examples(40)
@given(
    problem=problems(longest=100, scores=scores), tile=tiles | kernel_tiles, lse=st.booleans(), seed=st.integers(0, 3)
)
def test_data_run_equals_formula(algorithm: str, problem: Problem, tile: Tile, lse: bool, seed: int) -> None:
    problem = taken_by(algorithm, problem)
    arrays = ATTENTION.draw(problem, seed)
    run = fl.simulate(algorithm, **arrays, **problem.masks, tile=tile, device=ROOMY, lse=lse)
    assert run.counts.problem == problem
    expected = fl.count(algorithm, problem, tile=tile, device=ROOMY, lse=lse)
    assert run.counts == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("heads", [{"batch": 1, "heads": 6, "kv_heads": 3}, {"batch": 3, "heads": 2, "kv_heads": 1}])
def test_heads_shared_out_among_cores_add_up(
    algorithm: str, heads: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three threads, each with a machine of its own: the counts and the numbers of one."""
    p = taken_by(algorithm, Problem(**heads, len_q=640, len_kv=700, head_dim=24, dtype="float16", causal=True))
    q, k, v = fl.random_inputs(p)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    parted = fl.simulate(algorithm, q, k, v, causal=True, lse=True)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    whole = fl.simulate(algorithm, q, k, v, causal=True, lse=True)
    assert parted.counts == whole.counts == fl.count(algorithm, p, lse=True)
    assert parted.lse is not None and whole.lse is not None
    np.testing.assert_allclose(parted.lse, whole.lse, rtol=1e-6)
    np.testing.assert_allclose(parted.out.astype(np.float32), whole.out.astype(np.float32), atol=1e-3)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@examples(60)
@given(problem=problems(scores=scores), device=devices)
def test_default_tile_fits_every_device(algorithm: str, problem: Problem, device: Device) -> None:
    problem = taken_by(algorithm, problem)
    try:
        counted = fl.shape_run(algorithm, problem, device=device)
    except SramOverflow:  # 64 rows of float32 on a small GPU: Hopper's kernels don't run there
        assert fl.CATALOGUE[algorithm].refuses(problem, device)
        return
    assert counted == fl.count(algorithm, problem, device=device)


@given(st.integers(0, 50), st.integers(1, 40), st.integers(-40, 40), st.integers(-300, 300))
def test_floor_sum(n: int, m: int, a: int, b: int) -> None:
    assert floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))


@examples(500)
@given(problem=problems(longest=200), tile=tiles)
def test_walk_equals_a_loop_over_row_tiles(problem: Problem, tile: Tile) -> None:
    ranges = [problem.tiles_of_row(i, tile) for i in range(problem.row_tiles(tile))]
    visited = {j for r in ranges for j in r}

    def keys(j: int) -> int:
        return min((j + 1) * tile.cols, problem.len_kv) - j * tile.cols

    assert walk(problem, tile) == (
        sum(map(len, ranges)),
        sum(keys(j) for r in ranges for j in r),
        sum(map(keys, visited)),
        sum(bool(r) and r.stop == problem.key_tiles(tile) for r in ranges),
    )


@examples(200)
@given(problem=problems(longest=90), tile=tiles)
def test_tiles_of_row_are_those_with_a_visible_pair(problem: Problem, tile: Tile) -> None:
    """Against the definition of the mask, pair by pair."""
    p = problem

    def visible(i: int, j: int) -> bool:
        distance = j - (i + p.len_kv - p.len_q)
        left, right = p.window or (None, None)
        right = 0 if p.causal else right
        return (left is None or distance >= -left) and (right is None or distance <= right)

    for t in range(p.row_tiles(tile)):
        rows = range(t * tile.rows, min((t + 1) * tile.rows, p.len_q))
        expected = {j // tile.cols for i in rows for j in range(p.len_kv) if visible(i, j)}
        assert set(p.tiles_of_row(t, tile)) == expected


def test_formula_at_ten_million_tokens_is_no_more_work_and_exact_in_the_large() -> None:
    p = Problem(batch=1, heads=1, len_q=10**7, head_dim=64, dtype="float16", causal=True)
    c = fl.count("flash2", p, tile=(128, 128))
    small, large = (calls(lambda n=n: fl.count("flash2", p.replace(len_q=n), tile=(128, 128))) for n in (10**4, 10**7))
    assert small == large
    tiles_a_side = 10**7 // 128
    assert c.flops.matmul == tiles_a_side * (tiles_a_side + 1) // 2 * 128 * 128 * 64 * 4


@pytest.mark.parametrize("what", ["hbm_read", "sram_write"])
def test_a_formula_off_by_one_row_is_named(what: str) -> None:
    """Seeded bug: 128 bytes too many in one step."""
    p = Problem(batch=1, heads=2, len_q=100, head_dim=64, dtype="float16")
    right = fl.catalogue.get("flash2").formula
    assert right is not None

    def wrong(book: Book, *args: object, **kwargs: object) -> None:
        right(book, *args, **kwargs)
        book.add("load_k", "k", **{what: 128})

    fl.check_formula("flash2", right, p)
    with pytest.raises(fl.UsageError, match=rf"flash2: load_k, k, {what.replace('_', '.')}"):
        fl.check_formula("flash2", wrong, p)


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("hbm", lambda book: book.add("load_k", "k", hbm_read=128), "flash2: load_k, k, hbm.read"),
        ("hbm", lambda book: book.distinct("k", "read", 128), r"flash2: distinct bytes of k, read \(book.distinct\)"),
        ("sram", lambda book: book.add("load_k", "k", sram_write=128), "flash2: load_k, k, sram.write"),
        ("sram", lambda book: setattr(book.page, "sram_peak", 1), "flash2: sram_peak"),
        ("flops", lambda book: book.compute(exp=1), "flash2: exp"),
        ("flops", lambda book: book.compute(other=1), "flash2: flops_other"),
        (None, lambda book: setattr(book.page, "warps", 1), "flash2: warps"),
    ],
)
def test_a_formula_may_be_proved_in_parts(part: str | None, change: Any, says: str) -> None:
    """A part that is wrong is found by it and by all, and not by the others."""
    p = Problem(batch=1, heads=2, len_q=100, head_dim=64, dtype="float16")
    right = fl.catalogue.get("flash2").formula
    assert right is not None

    def wrong(book: Book, *args: object, **kwargs: object) -> None:
        right(book, *args, **kwargs)
        change(book)

    for only in ("hbm", "sram", "flops", None):
        if only in (part, None):
            with pytest.raises(fl.UsageError, match=rf"^formula, {says} = "):
                fl.check_formula("flash2", wrong, p, only=only)
        else:
            fl.check_formula("flash2", wrong, p, only=only)
    with pytest.raises(fl.UsageError, match="^only = 'dram': expected one of hbm, sram, flops"):
        fl.check_formula("flash2", right, p, only="dram")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", fl.catalogue.of(SOFTMAX))
@given(length=st.integers(1, 700), tile=st.integers(1, 200), dtype=st.sampled_from(["float32", "float16"]))
@examples(10)
def test_softmax_of_a_vector(name: str, length: int, tile: int, dtype: str) -> None:
    formula = fl.CATALOGUE[name].formula
    assert formula is not None
    fl.check_formula(name, formula, vector_problem(length, dtype), tile=(1, tile))


@pytest.mark.parametrize("name", fl.catalogue.of(SOFTMAX))
def test_softmax_of_a_vector_has_one_default_tile(name: str) -> None:
    x = np.arange(65, dtype=np.float32).reshape(1, -1)
    assert fl.count(name, length=65) == fl.simulate(name, x).counts == fl.softmax(name, x[0]).counts


@pytest.mark.parametrize("name", fl.catalogue.of(SOFTMAX))
def test_softmax_of_a_long_vector_is_counted_at_once(name: str) -> None:
    assert calls(lambda: fl.count(name, length=2**40)) < 5000


def test_a_problem_that_a_program_does_not_take_is_refused() -> None:
    formula = fl.CATALOGUE["flash2"].formula
    assert formula
    p = fl.Problem(batch=1, heads=2, head_dim=16, dtype="float16", lengths=[3, (2, 7)])
    with pytest.raises(fl.UsageError, match="lengths = .*: expected nothing: flash3_fp8 knows"):
        fl.check_formula("flash3_fp8", formula, p)


@pytest.mark.parametrize("dtype", [np.zeros((3, 2)), "float12", 3], ids=str)
def test_a_dtype_that_is_none_is_refused(dtype: Any) -> None:
    p = fl.Problem(batch=1, heads=1, len_q=8, head_dim=16, dtype="float16")
    with pytest.raises(fl.UsageError, match="^dtype = .*: expected one of float32"):
        fl.count("standard", p, dtype=dtype)


def test_numbers_of_blocks_beyond_64_bits() -> None:
    p = fl.Problem(batch=2**62, heads=4, len_q=1, len_kv=1024, head_dim=64, dtype="float16")
    assert fl.count("flash_decoding", p).by_tensor["k"].hbm_read == 2**62 * 4 * 1024 * 64 * 2
    longest = p.replace(batch=1, heads=1, len_q=1, len_kv=2**62 - 1)
    assert fl.count("flash_decoding", longest).by_tensor["k"].hbm_read == (2**62 - 1) * 64 * 2
    with pytest.raises(fl.UsageError, match="^len_kv = .*: expected at most"):
        fl.count("flash_decoding", longest.replace(len_kv=2**62))
