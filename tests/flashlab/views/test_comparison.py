"""Algorithms side by side: rows are the counts of each, errors those against naive attention."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.base.files import plain
from flashlab.views import figures
from flashlab.views.comparison import COLUMNS, MOST_SCORES, error_of, reference_of
from simulator.operations.backward import BACKWARD
from tests.tiers import examples
from tests.work import calls, peak_bytes

CAUSAL = fl.Problem(batch=1, heads=4, kv_heads=2, len_q=100, head_dim=40, dtype="float16", causal=True)


@examples(20)
@given(
    len_q=st.integers(0, 150),
    len_kv=st.integers(0, 150),
    causal=st.booleans(),
    lse=st.booleans(),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    window=st.none() | st.tuples(st.integers(0, 40), st.none()),
)
def test_on_data_is_by_formula_and_an_error(
    len_q: int, len_kv: int, causal: bool, lse: bool, dtype: str, window: tuple[int, None] | None
) -> None:
    problem = fl.Problem(
        batch=2, heads=4, kv_heads=2, len_q=len_q, len_kv=len_kv, head_dim=24, dtype=dtype, causal=causal, window=window
    )
    formula = fl.compare(problem, lse=lse)
    ran = fl.compare(fl.random_inputs(problem), causal=causal, window=window, lse=lse)
    for row, expected in zip(ran.rows, formula.rows, strict=True):
        assert row.counts.launches == expected.counts.launches and row.counts.tensors == expected.counts.tensors
    assert all(row.error is None for row in formula.rows)
    for row in ran.rows:
        assert row.error is not None and row.error.relative < (2e-2 if dtype == "bfloat16" else 3e-3)
        assert (row.error.lse is not None) is lse and not (row.error.lse or 0) > 1e-3


def test_rows_are_the_catalogue_in_order() -> None:
    assert [row.algorithm for row in fl.compare(CAUSAL).rows] == fl.catalogue.names(CAUSAL)
    assert [row.algorithm for row in fl.compare(CAUSAL.replace(dtype="float8_e4m3fn")).rows] == ["flash3_fp8"]
    token = CAUSAL.replace(len_q=1, len_kv=CAUSAL.len_kv)  # what some rungs take alone
    assert sorted([*fl.catalogue.names(token), "flash3_fp8"]) == sorted(fl.catalogue.of())
    assert set(fl.catalogue.names(token)) - set(fl.catalogue.names(CAUSAL)) == {"flash_decoding_1", "flash_decoding_2"}
    assert [row.algorithm for row in fl.compare(CAUSAL, algorithms=("flash2", "flash1")).rows] == ["flash2", "flash1"]


@pytest.mark.long
def test_ten_million_tokens_are_no_more_work_than_a_million() -> None:
    """DRAM estimates included: about a second's work, and hardly any memory, at any length."""

    def compared(tokens: int) -> Callable[[], None]:
        problem = fl.Problem(batch=1, heads=8, len_q=tokens, head_dim=128, dtype="bfloat16", causal=True)

        def compare() -> None:
            assert "dram" in json.dumps(fl.compare(problem).to_dict())

        return compare

    million, more = compared(10**6), compared(10**7)
    few = calls(million)
    assert few < 2.3e6 and calls(more) < 1.2 * few
    assert peak_bytes(more) < 2e6


def test_memory_tells_n_squared_from_n() -> None:
    def peaks(n: int) -> dict[str, int]:
        return {row.algorithm: row.counts.hbm.peak for row in fl.compare(CAUSAL.replace(len_q=n)).rows}

    small, large = peaks(4096), peaks(8 * 4096)
    assert 60 < large["standard"] / small["standard"] <= 64 and large["flash2"] == 8 * small["flash2"]


def test_inputs_that_know_their_mask() -> None:
    tab = fl.compare(fl.sample(), algorithms=["flash2"])
    assert tab.problem.causal and tab.problem.kv_heads == 2
    assert not fl.compare(fl.sample(), algorithms=["flash2"], causal=False).problem.causal
    assert tab.rows[0].error is not None and tab.rows[0].error.relative < 1e-3


@given(scale=st.floats(0.5, 1.5), shift=st.floats(-1, 1))
@examples(20)
def test_error_is_the_distance(scale: float, shift: float) -> None:
    reference = fl.naive(*fl.random_inputs(CAUSAL), causal=True)
    out, lse = reference.out * scale + shift, reference.lse + shift
    error = error_of(out, lse, reference)
    assert math.isclose(error.max, np.abs(out - reference.out).max())
    assert math.isclose(error.relative, np.linalg.norm(out - reference.out) / np.linalg.norm(reference.out))
    assert error.lse is not None and math.isclose(error.lse, abs(shift), abs_tol=1e-12)


def test_error_where_there_is_nothing_to_be_wrong() -> None:
    zero = fl.Reference(np.zeros((1, 1, 2, 4)), np.full((1, 1, 2), -np.inf))
    assert error_of(zero.out, zero.lse, zero).relative == 0 and error_of(zero.out, zero.lse, zero).lse == 0
    assert error_of(zero.out + 1, None, zero).relative == math.inf
    assert error_of(zero.out, np.zeros((1, 1, 2)), zero).lse == math.inf
    assert math.isnan(error_of(zero.out, np.full((1, 1, 2), np.nan), zero).lse or 0)


def test_the_judge_goes_head_by_head() -> None:
    problem = CAUSAL.replace(batch=2, window=(30, None))
    q, k, v = fl.random_inputs(problem)
    ours, whole = reference_of(problem, {"q": q, "k": k, "v": v}), fl.naive(q, k, v, causal=True, window=(30, None))
    assert ours is not None
    np.testing.assert_allclose(ours.out, whole.out, rtol=1e-12)
    np.testing.assert_allclose(ours.lse, whole.lse, rtol=1e-12)


def test_the_judge_declines_what_would_take_too_much() -> None:
    n = math.isqrt(MOST_SCORES[0]) + 1
    empty: Any = None  # looked at only if it doesn't decline
    assert reference_of(CAUSAL.replace(len_q=n), dict.fromkeys("qkv", empty)) is None
    assert reference_of(CAUSAL.replace(batch=10_000, len_q=1000), dict.fromkeys("qkv", empty)) is None


def test_own_program_is_a_row_but_has_no_lengths() -> None:
    @fl.program
    def diagonal(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        out = m.output("out")
        for block in m.launch("diagonal", rows=problem.row_tiles(tile), warps=4):
            block.step("copy")
            block.store(out, block.fetch(v, block.i, tile.rows), block.i, tile.rows)
        return out

    problem = fl.Problem(batch=1, heads=1, len_q=128, head_dim=64, dtype="float16")
    tab = fl.compare(problem, algorithms=[diagonal, "flash2"])
    assert [row.algorithm for row in tab.rows] == ["diagonal", "flash2"]
    assert [(c.algorithm, c.problem.len_q) for c in tab.at_lengths([64, 128])] == [("flash2", 64), ("flash2", 128)]


def test_at_lengths_keeps_tile_device_and_lse() -> None:
    tab = fl.compare(CAUSAL, algorithms=["flash2"], tile="32x64", device="a100", lse=True)
    (counts,) = tab.at_lengths([4096])
    assert counts == fl.count("flash2", CAUSAL.replace(len_q=4096), tile=(32, 64), device="a100", lse=True)
    assert counts.device.name == "a100-40" and str(counts.tile) == "32x64"
    standard = fl.compare(CAUSAL, algorithms=["standard"], lse=True).at_lengths([64])
    assert "lse" in standard[0].tensors


def test_cells_name_what_the_columns_say() -> None:
    (row,) = fl.compare(CAUSAL, algorithms=["flash1"]).rows
    cells = dict(zip(COLUMNS, row.cells(), strict=True))
    assert cells["HBM read"] == figures.nbytes(row.counts.hbm.read)
    assert cells["SRAM peak"] == figures.nbytes(row.counts.sram.peak)
    assert cells["exps"] == figures.count(row.counts.exp) and cells["error"] == ""


def test_printed_it_is_a_table() -> None:
    lines = str(fl.compare(CAUSAL)).splitlines()
    assert len(lines) == 1 + len(fl.catalogue.names(CAUSAL)) and len({len(line) for line in lines}) == 1


def test_to_dict_is_json_with_the_attributes_as_keys() -> None:
    tab = fl.compare(fl.random_inputs(CAUSAL), causal=True)
    found = json.loads(json.dumps(plain(tab.to_dict())))
    assert set(found) == {"problem", "device", "tile", "lse", "rows"}
    assert {"algorithm", "hbm", "sram", "flops", "exp", "compulsory", "dram", "intensity", "error"} <= set(
        found["rows"][0]
    )


def test_plot_writes_the_pictures(tmp_path: Path) -> None:
    figures = fl.compare(CAUSAL).plot(tmp_path / "a" / "b")
    assert set(figures) == {"bytes", "lengths", "roofline"}
    assert {path.name for path in (tmp_path / "a" / "b").iterdir()} == {f"{name}.png" for name in figures}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: fl.compare(CAUSAL, causal=True), "the problem has its own"),
        (lambda: fl.compare(CAUSAL, scale=1.0), "the problem has its own"),
        (lambda: fl.compare(3), "a Problem, or the arrays"),
        (lambda: fl.compare([np.zeros(3)] * 2), "a Problem, or the arrays"),
        (lambda: fl.compare([np.zeros(3)] * 3), "q.shape"),
        (lambda: fl.compare(CAUSAL, algorithms=["flash"]), "did you mean flash"),
        (lambda: fl.compare(CAUSAL, tile="big"), "tile = 'big'"),
        (lambda: fl.compare(CAUSAL, device="h1000"), "did you mean h100?"),
        (lambda: fl.compare(CAUSAL, tile=(2048, 2048)), "bytes of SRAM per block"),
    ],
)
def test_bad_input_is_one_line(call: Any, says: str) -> None:
    with pytest.raises(fl.UsageError) as caught:
        call()
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_progress_wraps_the_algorithms() -> None:
    seen: list[Any] = []
    fl.compare(CAUSAL, progress=lambda items: seen.extend(items) or seen)
    assert seen == fl.catalogue.names(CAUSAL)


@given(st.integers(0, 2**69))
def test_units_are_within_half_a_percent(n: int) -> None:
    amount, unit = figures.nbytes(n).split()
    power = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB").index(unit)
    assert math.isclose(float(amount.replace(",", "")) * 1024**power, n, rel_tol=0.006)
    assert len(amount.replace(".", "")) <= 4


def test_backward_passes_on_data() -> None:
    """The error is that of the gradients: heads are judged one group after the other."""
    p = fl.Problem(batch=2, heads=4, kv_heads=2, len_q=40, len_kv=50, head_dim=16, dtype="float16", causal=True)
    tab = fl.compare(fl.random_inputs(p), backward=True, causal=True)
    assert [row.algorithm for row in tab.rows] == list(fl.catalogue.of(BACKWARD))
    assert all(row.error is not None and 1e-5 < row.error.relative < 1e-3 for row in tab.rows)
    assert [row.counts for row in tab.rows] == [row.counts for row in fl.compare(p, backward=True).rows]
    with pytest.raises(fl.UsageError, match="lse = True: expected False for a backward pass"):
        fl.compare(p, backward=True, lse=True)


def test_a_backward_pass_that_is_wrong_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = BACKWARD.judge
    monkeypatch.setattr(BACKWARD, "judge", lambda p, arrays: {name: 1.01 * x for name, x in judge(p, arrays).items()})
    inputs = fl.random_inputs(fl.Problem(batch=1, heads=2, len_q=40, head_dim=16, dtype="float16"))
    (row,) = fl.compare(inputs, algorithms=["flash2_backward"], backward=True).rows
    assert row.error is not None and row.error.relative > 5e-3
