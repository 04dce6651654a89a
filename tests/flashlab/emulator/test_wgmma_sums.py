"""The emulator's products of e4m3, bit for bit: what an H200 gave, the rule in Python, and faults that must show."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernels_cu
from flashlab.measure import results
from tests.flashlab.emulator.sums import INSTRUCTIONS, Cases, different, emulated, recorded
from tests.patches import patched
from tests.tiers import examples, one_of_each

pytestmark = pytest.mark.compiler

RESULT = results.latest("accumulation", Path(__file__).resolve().parents[3] / results.FOLDER)
assert RESULT is not None
RECORDED = [case for case in recorded(RESULT.data) if case[0].dtype == ml_dtypes.float8_e4m3fn]
E4M3 = INSTRUCTIONS["wgmma e4m3"]


def test_every_bit_is_the_gpus() -> None:
    assert {instruction.entry for instruction, _, _ in RECORDED} == {"wgmma_e4m3", "wgmma_e4m3_registers"}
    assert [line for x, kind, d in RECORDED for line in different(kind, d, emulated(x, kind))] == []


@examples(60)
@given(st.data())
def test_every_bit_is_the_rules(data: st.DataObject) -> None:
    """Any operands and accumulators that are numbers, also in chains."""
    n, steps = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    values = st.integers(0, 255).filter(lambda byte: byte % 128 != 127)
    few = st.sampled_from([0, 0x01, 0x07, 0x08, 0x38, 0x7E, 0x80, 0xB8, 0xFE])
    size = n * steps * E4M3.depth
    drawn = st.lists(data.draw(st.sampled_from([values, few])), min_size=size, max_size=size)
    a, b = (np.array(data.draw(drawn), np.uint8).reshape(n, -1).view(E4M3.dtype) for _ in "ab")
    finite = st.floats(width=32, allow_nan=False, min_value=-(2.0**120), max_value=2.0**120)
    kind = Cases("drawn", a, b, np.array(data.draw(st.lists(finite, min_size=n, max_size=n)), np.float32))
    assert different(kind, E4M3.rule.added(kind.a, kind.b, kind.c), emulated(E4M3, kind)) == []


@pytest.mark.alike(1)
@pytest.mark.parametrize(("n", "lost"), [(1024, 0), (4096, 0.0601), (16384, 0.429), (65536, 0.857)])
def test_what_adds_up_is_lost(n: int, lost: float) -> None:
    """n times 16 · 448: so much was missing from flash3_fp8's outputs on the GPU when it had one accumulator for all keys."""
    a, b = (np.full((1, n), value).astype(E4M3.dtype) for value in (16, 448))
    got = emulated(E4M3, Cases("equal", a, b, np.zeros(1, np.float32)))
    assert abs(1 - got[0] / (16 * 448 * n) - lost) < 1e-3


SPECIAL: dict[str, tuple[float, float, float, float]] = {
    "NaN of A": (np.nan, 1, 1, np.nan),
    "NaN of A times 0": (np.nan, 0, 1, np.nan),
    "NaN of B": (1, np.nan, 1, np.nan),
    "NaN of C": (1, 1, np.nan, np.nan),
    "infinity": (1, 1, np.inf, np.inf),
    "minus infinity": (1, 1, -np.inf, -np.inf),
    "the greatest float": (0, 0, 3.4028235e38, 3.402616e38),
    "-0 times 0 to -0": (-0.0, 0, -0.0, 0.0),
}
"""All of A's operands, of B's, the accumulator, and what the GPU made of it."""


@pytest.mark.parametrize("name", SPECIAL)
def test_what_isnt_a_number_stays_none(name: str) -> None:
    x, y, before, after = SPECIAL[name]
    a, b = (np.full((1, E4M3.depth), value).astype(E4M3.dtype) for value in (x, y))
    got = emulated(E4M3, Cases(name, a, b, np.array([before], np.float32)))
    assert np.array_equal(got, np.array([after], np.float32), equal_nan=True)
    assert not np.signbit(got[0]) or after < 0 or np.isnan(after)


WRONG = {
    "float32 sums": ("else if (bytes == 1) add_eights(operands, values, columns, type, product.b_element);\n  ", ""),
    "one bit more": ("KEPT = 13,", "KEPT = 14,"),
    "the accumulator isn't aligned with": ("products_top > c_top ? products_top : c_top;", "products_top;"),
    "the sum isn't cut": ("FIRST = ~0u << (23 - KEPT)", "FIRST = ~0u"),
    "subnormal operands normalised": ("std::max(type == EMU_E4M3 ? -6 : -14, std::ilogb(x))", "std::ilogb(x)"),
    "0 has an exponent": ("x == 0 ? -1000 :", "x == 0 ? -6 :"),
}


@pytest.mark.parametrize("name", one_of_each(WRONG, lambda _: "wrong"))
def test_a_wrong_sum_is_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = WRONG[name]
    folder = tmp_path / "emulator"
    shutil.copytree(kernels_cu.emulator_dir(), folder)
    source = (folder / "wgmma.cpp").read_text(encoding="utf-8")
    (folder / "wgmma.cpp").write_text(patched(source, old, new), encoding="utf-8")
    monkeypatch.setattr(kernels_cu, "emulator_dir", lambda: folder)
    assert any(different(kind, d, emulated(x, kind)) for x, kind, d in RECORDED)
