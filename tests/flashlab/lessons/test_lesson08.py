"""What lesson 08 computes and shows: the ring's tile, the order of work, sources side by side, measurements from their files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashlab as fl
from flashlab.lessons import hopper
from flashlab.lessons.lesson08 import WIDEST, finish, ring_tile
from flashlab.measure import results
from flashlab.measure.accumulation.cases import INSTRUCTIONS

ROOT = Path(__file__).resolve().parents[3]


@given(st.integers(1, 512), st.sampled_from(["float16", "float32"]), st.integers(60, 400))
def test_the_rings_tile_is_the_widest_that_fits(head_dim: int, dtype: str, kilobytes: int):
    problem = fl.Problem(batch=1, heads=1, len_q=64, head_dim=head_dim, dtype=dtype)
    device = fl.DEVICES["h100"].replace(name="mine", sram_per_block=kilobytes * 1024)
    tile = ring_tile(problem, device)

    def stages(cols: int) -> int:
        """Of the ring that the library's rung 2 finds room for; 0 if for none."""
        try:
            return fl.count("flash3_2", problem, tile=(tile.rows, cols), device=device).config.stages
        except fl.SramOverflow:
            return 0

    if tile.cols >= 16:
        assert tile.cols % 16 == 0 and stages(tile.cols) == 2
    assert tile.cols == WIDEST or stages(max(tile.cols, 0) + 16) < 2


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 20))
def test_handing_out_work_longest_first_is_within_a_third_of_the_best(work: list[int], sms: int):
    """Graham 1969: at most 4/3 of the best, which is no less than the longest piece and an even share; in any order twice."""
    least = max(max(work), sum(work) / sms)
    assert least <= finish(sorted(work, reverse=True), sms) <= finish(work, sms) * 4 / 3
    assert finish(work, sms) <= sum(work) / sms + max(work)
    assert finish(work, 1) == sum(work)


@pytest.mark.parametrize("rung", hopper.RUNGS)
def test_a_step_is_shown_as_program_and_as_kernel(rung: str):
    shown = hopper.beside(rung, "load_k", "output")
    program, kernel = shown.steps["output"]
    assert program.startswith('block.step("output")') and "block.matmul" in program
    assert kernel.startswith("// step: output") and ("multiply_pv" in kernel or "mma(" in kernel)
    assert kernel.count("{") >= kernel.count("}")  # nothing beyond the loop that the step is in
    assert "&lt;" in shown._repr_html_() and "<0>" not in shown._repr_html_()
    assert program in repr(shown) and kernel in repr(shown)


def test_an_excerpt_ends_where_its_brace_closes():
    agenda = hopper.excerpt("scheduler.cuh", "struct Agenda").splitlines()
    assert agenda[-1] == "};" and not any(line.startswith("}") for line in agenda[:-1])
    assert hopper.excerpt("flash3.cuh", "DEVICE void become_producer").endswith("}")


def test_speeds_are_those_of_the_newest_file(capsys: pytest.CaptureFixture[str]):
    ladder = hopper.measured("ladder")
    assert capsys.readouterr().out == "[measured on an NVIDIA H200, not here]\n"
    newest = results.latest("ladder", ROOT / results.FOLDER, algorithm="flash3", device="h200")
    assert newest is not None
    for tokens in (1024, 4096, 16384):
        shown = hopper.climb(ladder, head_dim=128, tokens=tokens, causal=True)
        rows = [r for r in newest.data["rows"] if (r["head_dim"], r["length"], r["causal"]) == (128, tokens, True)]
        assert dict(shown.rows) == {r["peer"] or "flash3": r["tflops"] for r in rows}
        assert [name for name, _ in shown.rows] == [*hopper.RUNGS, "cudnn"]


def test_errors_and_ratios_of_fp8_are_those_of_the_newest_file():
    newest = results.latest("fp8", ROOT / results.FOLDER, algorithm="flash3_fp8", device="h200")
    assert newest is not None
    shown = hopper.measured("fp8")
    assert shown["accuracy"] == newest.data["accuracy"] and shown["speed"] == newest.data["speed"]


def functions(first: str, behind: str) -> dict[str, Any]:
    """What the lesson defines from `def first` to the line that begins with `behind`, by name."""
    text = (ROOT / "notebooks" / "source" / "08_hopper.md").read_text(encoding="utf-8")
    cell = re.search(rf"\n(def {first}\(.*?)\n{behind}", text, re.DOTALL)
    assert cell
    names: dict[str, Any] = {"np": np, "ml_dtypes": ml_dtypes}
    exec(cell[1], names)
    return names


@settings(max_examples=20)
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
    names = functions("leading", "draw = ")
    rule = next(x.rule for x in INSTRUCTIONS.values() if x.dtype.itemsize == 1)
    a, b = (size * np.random.default_rng(seed).standard_normal((2, 1, 32 * instructions))).astype(
        ml_dtypes.float8_e4m3fn
    )
    exact = rule.added(a, b, np.zeros(1, np.float32))
    assert names["added"](a[0].astype(float), b[0].astype(float), 32 * instructions) == exact[0]
