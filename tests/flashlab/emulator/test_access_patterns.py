"""The emulator's sectors and wavefronts: those that ncu counted on a GPU, for every access pattern that was measured."""

from __future__ import annotations

import csv
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels_cu
from flashlab.measure import results
from tests.flashlab.emulator.patterns import (
    KERNELS,
    Pattern,
    counted,
    crosses_lines,
    differences,
    launched,
    library,
    measured,
    pattern_of,
)
from tests.patches import patched
from tests.tiers import one_of_each

pytestmark = pytest.mark.compiler

ROOT = Path(__file__).resolve().parents[3]
RESULT = results.latest("patterns", ROOT / results.FOLDER)
assert RESULT is not None
ROWS: list[dict[str, Any]] = list(RESULT.data["rows"])
IDEAL = ROOT / "tests" / "data" / "ncu_ideal_wavefronts.csv"
ALL = 0xFFFFFFFF


def is_copy(row: Any) -> bool:
    return row["kernel"].startswith("copy")


@pytest.fixture(scope="module")
def kernels() -> Any:
    return library()


def test_every_kernel_was_measured() -> None:
    assert Counter(row["kernel"] for row in ROWS).keys() == set(KERNELS)
    assert min(Counter(row["kernel"] for row in ROWS).values()) >= 30


def test_sectors_and_wavefronts_are_those_of_the_gpu(kernels: Any) -> None:
    """All but the wavefronts of copies that cross lines, of which ncu sometimes says fewer."""
    found = differences(ROWS, kernels)
    assert [text for row, text in found if not (is_copy(row) and crosses_lines(pattern_of(row)))] == []
    for row, text in found:
        here, there = counted(kernels, pattern_of(row)), measured(row)
        assert here["sectors_ldgsts"] == there["sectors_ldgsts"], text
        assert there["wavefronts_ldgsts"] < here["wavefronts_ldgsts"] <= 1.5 * there["wavefronts_ldgsts"], text
    assert len(found) < 0.2 * sum(map(is_copy, ROWS))


def test_what_ncu_makes_from_the_instructions_differs_for_loads_of_16_bytes_alone() -> None:
    """It goes by halves of the warp where the hardware looks at the whole, so it can only say less."""
    apart = {
        row["kernel"]
        for row in ROWS
        for op in ("ld", "st")
        if row["counters"].get(f"wavefronts_{op}", 0) < row["counters"].get(f"hardware_wavefronts_{op}", 0)
        and not row["kernel"].startswith("ldmatrix")
    }
    assert apart == {"load_shared_16"}
    matrices = [row["counters"] for row in ROWS if row["kernel"].startswith("ldmatrix")]
    assert all(x["wavefronts_ldsm"] == x["hardware_wavefronts_ld"] for x in matrices)


def test_ideal_is_what_ncu_calls_ideal(kernels: Any) -> None:
    """Column for column of what ncu's source view said on the same GPU, but for the loads of 16 bytes where it differs."""
    with IDEAL.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 100
    for row in rows:
        at = tuple(map(int, row["at"].split()))
        (moved,) = launched(kernels, Pattern("", row["kernel"], at, at, int(row["mask"], 16))).moved
        total = int(row["memory_l1_wavefronts_shared"])
        if row["kernel"] == "load_shared_16" and moved.wavefronts != total:
            continue
        assert (moved.wavefronts, moved.ideal) == (total, int(row["memory_l1_wavefronts_shared_ideal"])), row


# Any pattern

slots = st.lists(st.integers(0, 255), min_size=32, max_size=32)
masks = st.integers(1, ALL)


def pattern(kernel: str, numbers: list[int], mask: int) -> Pattern:
    width = int(kernel.rsplit("_", 1)[1])
    at = tuple(width * n for n in numbers)
    return Pattern("drawn", kernel, at, at, mask)


@given(st.sampled_from([name for name in KERNELS if "global" in name]), slots, masks)
def test_sectors_are_the_distinct_ones(kernel: str, numbers: list[int], mask: int) -> None:
    drawn = pattern(kernel, numbers, mask)
    touched = {(drawn.at[i] + b) // 32 for i in range(32) if mask >> i & 1 for b in range(drawn.bytes)}
    assert [*counted(library(), drawn).values()] == [len(touched)]


@given(st.sampled_from(["load_shared_4", "store_shared_4"]), slots, masks)
def test_wavefronts_of_words_are_the_fullest_banks(kernel: str, numbers: list[int], mask: int) -> None:
    words = {n for i, n in enumerate(numbers) if mask >> i & 1}
    fullest = max(Counter(n % 32 for n in words).values())
    assert [*counted(library(), pattern(kernel, numbers, mask)).values()] == [fullest]


@given(st.sampled_from(["8", "16"]), slots, masks)
def test_loads_take_no_more_wavefronts_than_stores(width: str, numbers: list[int], mask: int) -> None:
    load, store = (
        next(iter(counted(library(), pattern(f"{what}_shared_{width}", numbers, mask)).values()))
        for what in ("load", "store")
    )
    assert load <= store


# Rules that are wrong

WRONG = {
    "loads don't go together": ("2 * lanes", "lanes", "load_shared"),
    "stores go together, too": ("x.op != Op::ld || ", "", "store_shared"),
    "lanes 2 apart don't count": ("paired(x, 1) || paired(x, 2)", "paired(x, 1)", "load_shared"),
    "16 bytes half by half": (": x.bytes == 8 ? 16 : 8", ": 16", "ldmatrix"),
    "copies count as loads": ("return x.op == Op::ldgsts && x.bytes == 16;", "return false;", "copy_async"),
    "a copy's chunks may not change places": ("other.swapped == piece.swapped", "!piece.swapped", "copy_async"),
    "every lane is served": ("to[before] == to[lane]", "false", "copy_async"),
}


@pytest.mark.parametrize("name", one_of_each(WRONG, lambda name: "rule"))
def test_a_wrong_rule_is_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, kernel = WRONG[name]
    folder = tmp_path / "emulator"
    shutil.copytree(kernels_cu.emulator_dir(), folder)
    source = (folder / "counts.cpp").read_text(encoding="utf-8")
    (folder / "counts.cpp").write_text(patched(source, old, new), encoding="utf-8")
    monkeypatch.setattr(kernels_cu, "emulator_dir", lambda: folder)
    found = differences(ROWS, library())
    assert any(
        row["kernel"].startswith(kernel) and not (is_copy(row) and crosses_lines(pattern_of(row))) for row, _ in found
    )
