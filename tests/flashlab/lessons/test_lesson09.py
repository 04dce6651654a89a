"""What lesson 09 computes and shows: attention and sums in eight bits as the kernel and the hardware do them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.lessons import hopper
from flashlab.lessons.lesson09 import NEAR, STOPS, eight
from flashlab.measure import results
from tests.flashlab.emulator.sums import INSTRUCTIONS
from tests.tiers import examples

ROOT = Path(__file__).resolve().parents[3]


def test_errors_and_ratios_of_fp8_are_those_of_the_newest_file():
    newest = results.latest("fp8", ROOT / results.FOLDER, algorithm="flash3_fp8", device="h200")
    assert newest is not None
    shown = hopper.measured("fp8")
    assert shown["accuracy"] == newest.data["accuracy"] and shown["speed"] == newest.data["speed"]


def functions(first: str, behind: str) -> dict[str, Any]:
    """What the lesson defines from `def first` to the line that begins with `behind`, by name."""
    text = (ROOT / "notebooks" / "source" / "09_eight_bits.md").read_text(encoding="utf-8")
    cell = re.search(rf"\n(def {first}\(.*?)\n{behind}", text, re.DOTALL)
    assert cell
    names: dict[str, Any] = {"np": np, "ml_dtypes": ml_dtypes}
    exec(cell[1], names)
    return names


@examples(20)
@given(st.integers(0, 2**32), st.integers(1, 128), st.sampled_from([1.0, 2.0, 4.0]))
def test_the_lessons_attention_in_fp8_is_the_tile_programs(seed: int, keys: int, size: float):
    """Of a single key tile, where both round the same P: with one-hot values `out` is the weights, the smallest too."""
    q, k = size * np.random.default_rng(seed).standard_normal((2, 1, 1, 128, 128))
    v = np.eye(128)[None, None]
    q, k, v = (x.astype(ml_dtypes.float8_e4m3fn) for x in (q[:, :, :16], k[:, :, :keys], v[:, :, :keys]))
    shown = functions("attend", "```")["attend"](*(x.astype(float) for x in (q, k, v)), fp8=True)
    exact = fl.simulate("flash3_fp8", q, k, v).out.astype(float)
    near = np.isclose(shown, exact, rtol=2.0**-8, atol=0)  # but for a P in the middle of two, where the last bit tells
    assert near.mean() > 0.98


@given(st.integers(0, 2**32))
def test_the_lessons_attention_in_fp8_leaves_a_constant_v_as_it_is(seed: int):
    q, k = np.random.default_rng(seed).standard_normal((2, 4, 50, 16))
    assert functions("attend", "```")["attend"](q, k, np.ones_like(k), fp8=True) == pytest.approx(1)


@given(st.integers(0, 2**32), st.sampled_from([0.003, 1.0, 30.0]), st.integers(1, 4))
def test_the_lessons_sum_of_8_bit_products_is_what_was_measured(seed: int, size: float, instructions: int):
    """The cell's functions against the rule that the H200's sums follow in every bit, chains and subnormal operands too."""
    names = functions("leading", "```")
    rule = next(x.rule for x in INSTRUCTIONS.values() if x.dtype.itemsize == 1)
    a, b = (size * np.random.default_rng(seed).standard_normal((2, 1, 32 * instructions))).astype(
        ml_dtypes.float8_e4m3fn
    )
    exact = rule.added(a, b, np.zeros(1, np.float32))
    assert names["added"](a[0].astype(float), b[0].astype(float), 32 * instructions) == exact[0]


def test_a_sum_of_ones_stops_where_the_lesson_says():
    """By the rule that every measured sum follows: one more instruction of 32 ones changes nothing."""
    rule = next(x.rule for x in INSTRUCTIONS.values() if x.dtype.itemsize == 1)
    ones = np.ones((1, 65536), ml_dtypes.float8_e4m3fn)
    assert rule.added(ones, ones, np.zeros(1, np.float32))[0] == STOPS
    assert functions("leading", "```")["added"](np.ones(65536), np.ones(65536), 65536) == STOPS


def test_the_example_with_3_bits_in_the_place_of_13():
    """9 and two products make 11 instead of 11.75; at 18 they are cut to nothing. The same function, with fewer bits."""
    text = (ROOT / "notebooks" / "source" / "09_eight_bits.md").read_text(encoding="utf-8")
    cell = re.search(r"\n(def leading\(.*?)\n```", text, re.DOTALL)
    assert cell and cell[1].count("2**13") == 2
    names: dict[str, Any] = {"np": np}
    exec(cell[1].replace("2**13", "2**3"), names)
    products = np.array([1.5, 1.25]), np.ones(2)
    assert names["instruction"](9.0, *products) == 11 and 9 + 1.5 + 1.25 == 11.75
    assert names["instruction"](18.0, *products) == 18


def test_what_lies_beyond_448_is_nan_here_and_448_by_the_kernels_conversion():
    assert np.isnan(np.array([500.0]).astype(ml_dtypes.float8_e4m3fn).astype(float)).all()
    primitives = (ROOT / "kernels_cu" / "include" / "wgmma.cuh").read_text(encoding="utf-8")
    assert set(re.findall(r"cvt\.rn\S*e4m3x2\.f32", primitives)) == {"cvt.rn.satfinite.e4m3x2.f32"}


@given(st.lists(st.floats(-440, 440, width=32), min_size=1, max_size=20))
def test_only_numbers_near_the_middle_of_two_may_be_rounded_either_way(numbers: list[float]):
    x = np.array(numbers)
    near, slack = eight(x)
    assert (np.abs(near - x) <= np.maximum(np.abs(x) / 16, 2.0**-10) * (1 + 1e-6)).all()
    for moved in (x * (1 + NEAR / 2), x * (1 - NEAR / 2)):
        assert (np.abs(eight(moved)[0] - near) <= slack).all()


def test_rates_and_busy_units_are_those_of_the_newest_files(capsys: pytest.CaptureFixture[str]):
    rates, profile = (results.latest(kind, ROOT / results.FOLDER) for kind in ("rates", "profile"))
    assert rates is not None and profile is not None
    shown = hopper.measured("rates")
    assert shown["wgmma"] in [row["value"] for row in rates.data["rows"] if row["what"] == "products_128_sram"]
    assert shown["beside"]["add"] < 0.2 < 0.99 < shown["beside"]["exponential"]
    rows = [row for row in profile.data["rows"] if row["kernel"] in ("flash3", "flash3_fp8")]
    assert [row["busy"] for row in hopper.measured("profile")["rows"]] == [row["counters"]["busy"] for row in rows]
