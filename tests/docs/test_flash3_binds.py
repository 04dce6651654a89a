"""What binds: the measurement agrees with itself and with arithmetic, and the page says what it says."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from docs._site import flash3 as climb
from docs._site.flash3_binds import (
    FLOPS_8_BIT,
    FLOPS_16_BIT,
    MATMUL,
    Profile,
    busy,
    clocks_of_a_round,
    found,
    outside,
    span,
)
from flashlab.measure import results

PROFILE = climb.profile()
ROWS = [row for row in PROFILE.rows.values() if row["kernel"] != MATMUL]
LISTED = [row for row in ROWS if row["code"]]
WGMMA = [row for row in ROWS if row["kernel"] != "flash2"]


def name(row: Mapping[str, Any]) -> str:
    return f"{row['kernel']}-{row['head_dim']}-{'causal' if row['causal'] else 'full'}-{row['length']}"


def test_every_kernel_was_measured_in_its_cells():
    assert len(PROFILE.rows) == len(PROFILE.of.data["rows"]) == 48
    assert len(PROFILE.mine()) == 18
    assert [row["kernel"] for row in PROFILE.mine()] == ["flash3"] * 18


@pytest.mark.parametrize("row", WGMMA, ids=name)
def test_busy_tensor_cores_do_their_flops(row: Mapping[str, Any]):
    """The counter of busy clocks and that of FLOPs are two; at wgmma's rate one follows from the other."""
    counters = row["counters"]
    rate = FLOPS_8_BIT if row["kernel"] == "flash3_fp8" else FLOPS_16_BIT
    assert counters["flops"] / (counters["clocks"] * PROFILE.sms * rate) == pytest.approx(busy(row, "tensor"), rel=0.03)


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_time_is_clocks_over_the_clock(row: Mapping[str, Any]):
    """Clocks by ncu over the SMs' own clock under load: that is how long a call took there. Short ones a little less, for they find
    their inputs in the L2, which ncu empties."""
    expected = row["counters"]["clocks"] / row["loaded"]["mhz"] / 1e3
    assert row["loaded"]["milliseconds"] == pytest.approx(expected, rel=0.05 if row["length"] > 1024 else 0.07)


@pytest.mark.parametrize("row", LISTED, ids=name)
def test_the_machine_code_and_the_counters_tell_of_the_same_instructions(row: Mapping[str, Any]):
    listed, counted = row["code"]["executed"], row["counters"]["executed"]
    assert sum(listed.values()) == pytest.approx(counted["all"], rel=0.02)
    assert listed["exp"] == pytest.approx(counted["exp"], rel=0.01)
    assert listed["fma"] == pytest.approx(counted["fma"], rel=0.04 if row["kernel"] != "flash2" else 0.15)


@pytest.mark.parametrize("row", LISTED, ids=name)
def test_a_round_of_the_main_loop_is_whole(row: Mapping[str, Any]):
    """It takes each score of its tile through one exponential."""
    found = row["code"]["round"]
    assert found["scores"] / 32 == pytest.approx(found["pipes"]["exp"], rel=0.07)
    assert sum(found["pipes"].values()) == found["instructions"]
    if row["length"] == 16384 and not row["causal"]:  # all the rest is little: the loop's share is the kernel's
        clocks = clocks_of_a_round(found)
        assert busy(row, "exp") / busy(row, "tensor") == pytest.approx(
            clocks["exp"] / clocks["tensor"] * (2 / 3 if row["kernel"] == "flash2" else 1), rel=0.05
        )


def test_zeros_take_less_power_and_no_more_time():
    for row in PROFILE.rows.values():
        if "zeros" in row:
            assert row["zeros"]["watts"] < row["loaded"]["watts"]
            assert row["zeros"]["milliseconds"] < row["loaded"]["milliseconds"]


def changed(kernel: str, dim: int, causal: bool, length: int, change: Any) -> Profile:
    """The profile with one row changed in place."""
    content: Any = copy.deepcopy(PROFILE.of.content)
    for row in content["data"]["rows"]:
        if (row["kernel"], row["head_dim"], row["causal"], row["length"]) == (kernel, dim, causal, length):
            change(row)
    return Profile(results.Result(PROFILE.of.path, content), climb.cells())


def test_what_was_found_follows_the_data():
    def quicker(row: Any) -> None:
        row["counters"]["busy"]["issue"] = 0.7

    before, after = found(PROFILE), found(changed("flash3", 64, False, 4096, quicker))
    assert {key for key in before if before[key] != after[key]} == {"issue"}
    assert before["issue"][1] and not after["issue"][1]
    assert after["issue"][0].endswith("to 70%")


def test_each_expectation_has_its_answer():
    assert list(found(PROFILE)) == list(PROFILE.of.data["expected"])


def test_the_blocks_follow_the_data(monkeypatch: pytest.MonkeyPatch):
    def other(row: Any) -> None:
        row["code"]["stalls"]["outside"] = dict.fromkeys(row["code"]["stalls"]["loop"], 0)

    before = {block: climb.bound(block) for block in climb.BINDS}
    profile = changed("flash3", 128, True, 1024, other)
    assert outside(profile.rows["flash3", 128, True, 1024]) == 0
    monkeypatch.setattr(climb, "profile", lambda: profile)
    assert {block for block in before if climb.bound(block) != before[block]} == {"units", "ends"}


def test_a_span_of_values():
    assert span([0.5, 0.25, 0.4]) == "25% to 50%"
    assert span([0.501, 0.499]) == "50%"
