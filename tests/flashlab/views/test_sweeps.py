"""Sweeps: a row is a count, an infeasible cell is a row, and what is given as a list is an axis."""

from __future__ import annotations

import csv
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from tests.tiers import examples

BASE = fl.Problem(batch=1, heads=2, len_q=256, head_dim=64, dtype="float16", causal=True)


@examples(30)
@given(
    algorithms=st.lists(st.sampled_from(sorted(fl.catalogue.of())), min_size=1, max_size=3, unique=True),
    len_q=st.lists(st.integers(0, 3000), min_size=1, max_size=3, unique=True),
    head_dim=st.lists(st.integers(1, 256), min_size=1, max_size=2, unique=True),
    dtype=st.sampled_from(["float16", "float8_e4m3fn"]),
    sram=st.lists(st.integers(1024, 300_000), max_size=2, unique=True),
    tile=st.lists(st.sampled_from([None, (64, 64), "32x128"]), min_size=1, max_size=2, unique=True),
    device=st.sampled_from(["h100", ["a100", "4090"]]),
    lse=st.booleans(),
)
def test_every_combination_is_a_row_and_every_row_a_count(
    algorithms: list[str],
    len_q: list[int],
    head_dim: list[int],
    dtype: str,
    sram: list[int],
    tile: list[Any],
    device: Any,
    lse: bool,
) -> None:
    tab = fl.sweep(
        algorithms,
        BASE,
        len_q=len_q,
        head_dim=head_dim,
        dtype=[dtype],
        sram=sram or None,
        tile=tile,
        device=device,
        lse=lse,
    )
    devices = device if isinstance(device, list) else [device]
    cells = list(product(algorithms, len_q, head_dim, devices, sram or [None], tile))
    assert len(tab.rows) == len(cells)
    for row, (algorithm, n, d, name, limit, size) in zip(tab.rows, cells, strict=True):
        where = fl.Device.named(name)
        where = where if limit is None else where.replace(sram_per_block=limit)
        problem = BASE.replace(len_q=n, head_dim=d, dtype=dtype)
        assert (row["algorithm"], row["len_q"], row["len_kv"], row["head_dim"]) == (algorithm, n, n, d)
        assert (row["device"], row["sram_per_block"]) == (where.name, where.sram_per_block)
        try:
            c = fl.count(algorithm, problem, tile=size, device=where, lse=lse)
        except fl.UsageError as error:  # it doesn't fit, or the algorithm has another dtype
            assert row["reason"] == str(error) and row["hbm_read"] is None and row["sram_peak"] is None
        else:
            assert row["reason"] is None and row["tile"] == str(c.tile)
            assert (row["hbm_read"], row["hbm_write"], row["hbm_peak"]) == (c.hbm.read, c.hbm.write, c.hbm.peak)
            assert (row["sram_read"], row["sram_write"], row["sram_peak"]) == (c.sram.read, c.sram.write, c.sram.peak)
            assert (row["flops_matmul"], row["flops_other"], row["exp"]) == (c.flops.matmul, c.flops.other, c.exp)
            assert (row["compulsory"], row["intensity"]) == (c.compulsory, c.intensity)


def test_rows_have_the_same_keys_and_plain_values() -> None:
    tab = fl.sweep(["flash1", "flash2"], BASE, sram=[1024, 232448], tile=["64x64"], dram=True)
    assert len({tuple(row) for row in tab.rows}) == 1
    assert all(isinstance(value, str | int | float | bool | None) for row in tab.rows for value in row.values())
    assert {row["reason"] is None for row in tab.rows} == {True, False}
    assert tab.rows[1]["dram_low"] <= tab.rows[1]["dram_estimate"] <= tab.rows[1]["dram_high"]


def test_axes_are_what_has_several_values() -> None:
    assert fl.sweep("flash2", BASE, len_q=128, sram=4096).axes == ()
    assert fl.sweep(["flash1", "flash2"], BASE, len_q=[1, 2], tile=[(64, 64), (32, 32)]).axes == (
        "algorithm",
        "len_q",
        "tile",
    )


def test_len_q_moves_the_keys_unless_they_are_said() -> None:
    assert [row["len_kv"] for row in fl.sweep("flash2", BASE, len_q=[10, 20]).rows] == [10, 20]
    assert [row["len_kv"] for row in fl.sweep("flash2", BASE.replace(len_kv=7), len_q=[10, 20]).rows] == [7, 7]
    assert [row["len_kv"] for row in fl.sweep("flash2", BASE, len_q=[10, 20], len_kv=[5]).rows] == [5, 5]


def test_one_tile_or_window_is_not_a_list() -> None:
    assert [row["tile"] for row in fl.sweep("flash2", BASE, tile=(64, 32)).rows] == ["64x32"]
    assert [row["tile"] for row in fl.sweep("flash2", BASE, tile=fl.Tile(64, 32)).rows] == ["64x32"]
    assert [row["tile"] for row in fl.sweep("flash2", BASE, tile=[(64, 32), "32x32"]).rows] == ["64x32", "32x32"]
    assert [row["window"] for row in fl.sweep("flash2", BASE, window=(8, None)).rows] == ["8,none"]
    assert [row["window"] for row in fl.sweep("flash2", BASE, window=[(8, 0), None]).rows] == ["8,0", None]


def test_all_algorithms_by_default_and_programs_too() -> None:
    assert [row["algorithm"] for row in fl.sweep(None, BASE).rows] == fl.catalogue.names(BASE)

    @fl.program
    def diagonal(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        out = m.output("out")
        for block in m.launch("diagonal", rows=problem.row_tiles(tile), warps=4):
            block.step("copy")
            block.store(out, block.fetch(v, block.i, tile.rows), block.i, tile.rows)
        return out

    assert [row["algorithm"] for row in fl.sweep([diagonal, "flash2"], BASE).rows] == ["diagonal", "flash2"]
    assert fl.sweep(diagonal, BASE, len_q=[64, 128]).rows[1]["hbm_read"] == 2 * 128 * 128


def test_ones_own_device() -> None:
    mine = fl.Device.named("a100").replace(name="mine", sram_per_block=9000)
    tab = fl.sweep("flash2", BASE, device=["a100", mine], tile="64x64")
    assert [row["device"] for row in tab.rows] == ["a100-40", "mine"]
    assert tab.rows[1]["reason"] and "mine has 9,000" in tab.rows[1]["reason"]


def test_csv_reads_back(tmp_path: Path) -> None:
    tab = fl.sweep(["flash1", "flash2"], BASE, sram=[1024, 232448], tile="64x64")
    path = tab.to_csv(tmp_path / "rows.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 and list(rows[0]) == list(tab.rows[0])
    for read, row in zip(rows, tab.rows, strict=True):
        assert read == {key: "" if value is None else str(value) for key, value in row.items()}


def test_an_empty_sweep_is_empty(tmp_path: Path) -> None:
    tab = fl.sweep([], BASE)
    assert tab.rows == [] and tab.to_csv(tmp_path / "rows.csv").read_text().strip() == ""
    tab.plot()


def test_pandas_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    tab = fl.sweep("flash2", BASE, len_q=[1, 2])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fl.Unavailable, match="pip install pandas"):
        tab.to_pandas()
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    assert tab.to_pandas() == tab.rows


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: fl.sweep("flash2", BASE, length=[1]), "axis = 'length': expected one of batch, heads"),
        (lambda: fl.sweep("flash9", BASE), "did you mean flash"),
        (lambda: fl.sweep("flash2", BASE, device=["h100", "h1"]), "device = 'h1'"),
        (lambda: fl.sweep("flash2", BASE, tile=["64"]), "tile = '64'"),
        (lambda: fl.sweep("flash2", BASE, sram=[-1]), "sram_per_block = -1"),
        (lambda: fl.sweep("flash2", BASE, len_q=[-1]), "len_q = -1"),
        (lambda: fl.sweep("flash2", BASE, dtype="int8"), "dtype = 'int8'"),
        (lambda: fl.sweep("flash2", BASE).plot(x="n"), "x = 'n': expected one of"),
        (lambda: fl.sweep("flash2", BASE).plot(y="device"), "y = 'device': expected a figure"),
        (lambda: fl.sweep("flash2", BASE).plot(y="dram_estimate"), "y = 'dram_estimate'"),
        (lambda: fl.sweep("flash2", BASE, dram=cast("Any", np.zeros((3, 2)))), "dram = "),
        (lambda: fl.sweep("flash2", BASE, lse=cast("Any", "yes")), "lse = 'yes': expected True or False"),
        (lambda: fl.sweep("flash2", BASE).plot(path="rows.docx"), "path = 'rows.docx'"),
        (lambda: fl.sweep("flash2", BASE).to_csv("/nowhere/at/all.csv"), "path = '/nowhere/at/all.csv'"),
    ],
)
def test_bad_input_is_one_line(call: Any, says: str) -> None:
    with pytest.raises(fl.UsageError) as caught:
        call()
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_values_that_do_not_go_together_are_rows_with_a_reason() -> None:
    found = fl.sweep("flash2", BASE, heads=[4, 6], kv_heads=[4, 3])
    assert [row["reason"] for row in found.rows] == [
        None, "kv_heads = 3: expected a divisor of heads = 4", "kv_heads = 4: expected a divisor of heads = 6", None,
    ]  # fmt: skip
    assert [row["heads"] for row in found.rows] == [4, 4, 6, 6] and found.rows[1]["hbm_read"] is None
    with pytest.raises(fl.UsageError, match="kv_heads = 3: expected a divisor of heads = 4"):
        fl.sweep("flash2", BASE, heads=4, kv_heads=3)
    with pytest.raises(fl.UsageError, match="heads = 0: expected an integer of at least 1"):
        fl.sweep("flash2", BASE, heads=[4, 0])
    with pytest.raises(fl.UsageError, match="algorithms = 5"):
        fl.sweep(5, BASE)  # pyright: ignore


@pytest.mark.parametrize("tile", [np.zeros((3, 2)), [np.zeros(2)], "", [0]])
def test_a_tile_that_is_none_is_refused(tile: Any) -> None:
    with pytest.raises(fl.UsageError, match="^tile = .*expected rows x cols, whole numbers of at least 1 each"):
        fl.sweep("flash2", fl.Problem(batch=1, heads=1, len_q=9, head_dim=16, dtype="float16"), tile=tile)
