"""What lesson 08 computes and shows: the ring's tile, the order of work, sources side by side, speeds from their files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.lessons import hopper
from flashlab.lessons.lesson08 import WIDEST, finish, ring_tile
from flashlab.measure import results

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
    assert capsys.readouterr().out == f"[measured on another machine: {ladder['measured']}]\n"
    assert ladder["measured"].startswith("NVIDIA H200, 21 November 2026")
    newest = results.latest("ladder", ROOT / results.FOLDER, algorithm="flash3", device="h200")
    assert newest is not None
    for tokens in (1024, 4096, 16384):
        shown = hopper.climb(ladder, head_dim=128, tokens=tokens, causal=True)
        rows = [r for r in newest.data["rows"] if (r["head_dim"], r["length"], r["causal"]) == (128, tokens, True)]
        assert dict(shown.rows) == {r["peer"] or "flash3": r["tflops"] for r in rows}
        assert [name for name, _ in shown.rows] == [*hopper.RUNGS, "cudnn"]


def test_tensor_cores_are_hardly_ever_idle_where_the_lesson_says_so():
    """At head dims 128 and 256, in long sequences; the exponential units are idle half of the time there."""
    rows = [row for row in hopper.measured("profile")["rows"] if row["kernel"] == "flash3" and not row["causal"]]
    long = [row["busy"] for row in rows if row["head_dim"] >= 128 and row["length"] >= 4096]
    assert len(long) == 4 and all(busy["tensor"] > 0.85 and busy["exp"] < 0.5 for busy in long)
