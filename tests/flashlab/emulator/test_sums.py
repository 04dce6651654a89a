"""The rule by which tensor cores add, held to what an H200 gave, and every other rule refused by the same cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashlab.measure import results
from tests.flashlab.emulator.sums import INSTRUCTIONS, Cases, alternatives, different, emulated, recorded

RESULT = results.latest("accumulation", Path(__file__).resolve().parents[3] / results.FOLDER)
assert RESULT is not None
DATA: dict[str, Any] = dict(RESULT.data)


def of(instruction: str) -> list[tuple[Cases, Any]]:
    """The recorded cases of an instruction, and what came out."""
    data = {"recorded": [row for row in DATA["recorded"] if row["instruction"] == instruction]}
    return [(kind, d) for _, kind, d in recorded(data)]


def test_every_case_that_was_measured_followed_the_rule() -> None:
    assert [row["instruction"] for row in DATA["rows"]] == list(INSTRUCTIONS)
    for row in DATA["rows"]:
        rule = INSTRUCTIONS[row["instruction"]].rule
        assert (row["kept"], row["mantissa"], row["together"]) == (rule.kept, rule.mantissa, rule.together)
        assert row["equal"] == row["cases"] > 100_000
        assert max(row["alternatives"].values()) < row["cases"]


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_the_rule_gives_every_bit(instruction: str) -> None:
    rule, found = INSTRUCTIONS[instruction].rule, of(instruction)
    assert sum(len(d) for _, d in found) > 150
    assert [line for kind, d in found for line in different(kind, d, rule.added(kind.a, kind.b, kind.c))] == []


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_no_other_rule_does(instruction: str) -> None:
    others = alternatives(INSTRUCTIONS[instruction].rule)
    same = [
        name
        for name, rule in others.items()
        if not any(different(kind, d, rule.added(kind.a, kind.b, kind.c)) for kind, d in of(instruction))
    ]
    assert same == []


@pytest.mark.alike("wgmma float16", "mma.sync float16")
@pytest.mark.compiler
@pytest.mark.parametrize("instruction", [name for name in INSTRUCTIONS if "16" in name])
def test_the_emulator_adds_16_bits_nearly_so(instruction: str) -> None:
    """In float32, rounded: what either loses is a part of the largest addends, in each of so many products."""
    for kind, d in of(instruction):
        a, b, c = (x.astype(np.float64) for x in (kind.a, kind.b, kind.c))
        size = abs(a * b).sum(axis=1) + abs(c) + np.exp2(INSTRUCTIONS[instruction].rule.sizes(a, b).max(axis=1))
        got = emulated(INSTRUCTIONS[instruction], kind)
        assert (abs(got.astype(np.float64) - d) <= 2.0**-23 * 2 * a.shape[1] * size + 2.0**-148).all(), kind.name
