"""Lesson 13: where keys lie, a manager against the model without pages, copies, and what the text says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.lessons.catalogue import CLASS_EXERCISES, EXERCISES, class_solution, solution
from flashlab.lessons.lesson07 import measured
from flashlab.lessons.lesson13 import LONG, MAXIMUM, lengths, sharing, wasted
from flashlab.lessons.lesson13_watch import BRANCHES, Watched, watch
from simulator import Problem, Tile
from simulator.operations.paged import PAGED
from tests.flashlab.lessons.answers import class_of, program_of
from tests.mutants.managers import MANAGERS
from tests.tiers import examples

TEXT = (Path(__file__).resolve().parents[3] / "notebooks" / "source" / "13_pages.md").read_text(encoding="utf-8")

# -- key n of a request -------------------------------------------------------------------------------------------


@examples(12)
@given(
    keys=st.integers(1, 130), page_size=st.integers(1, 70), cols=st.sampled_from([16, 32]), group=st.integers(1, 16),
    kv_heads=st.integers(1, 2),
)  # fmt: skip
def test_the_budget_is_that_of_the_librarys_first_rung(keys: int, page_size: int, cols: int, group: int, kv_heads: int):
    p = Problem(
        batch=1, heads=group * kv_heads, kv_heads=kv_heads, len_q=1, len_kv=keys, head_dim=64, dtype="float16",
        page_size=page_size,
    )  # fmt: skip
    ours = fl.count("paged_1", p, tile=(16, cols))
    budget = EXERCISES["13.1"].budget(p, Tile(16, cols))
    moved = {name: (t.hbm_read, t.hbm_write) for name, t in ours.by_tensor.items() if name != "seq_lens"}
    assert moved == dict(budget.tensors)
    assert ours.flops.matmul == budget.matmul


def test_the_solution_attends_as_the_library_does():
    p = Problem(batch=1, heads=8, kv_heads=2, len_q=1, len_kv=200, head_dim=64, dtype="float16", page_size=16, pages=40)
    arrays = PAGED.draw(p, 5)
    mine, ours = (fl.simulate(x, **arrays, tile=(16, 32)).out for x in (solution("13.1"), "paged_1"))
    assert mine == pytest.approx(ours, abs=2e-3)


def test_a_place_that_is_no_place_is_told_with_its_key():
    p = Problem(batch=1, heads=2, len_q=1, len_kv=40, head_dim=64, dtype="float16", page_size=16)
    arrays = PAGED.draw(p, 0)
    for place, said in (
        ("n % problem.page_size, n", r"place\(3\) = \(3, 3\): expected an entry of the block table, 0 to 2"),
        ("n // problem.page_size", "place\\(n\\) = ndarray: expected two numbers"),
        ("n / problem.page_size, n", r"place\(0\) = \(0.0, 0\)"),
    ):
        text = EXERCISES["13.1"].solution.replace("n // problem.page_size, n % problem.page_size", place)
        with pytest.raises(fl.UsageError, match=said):
            fl.simulate(program_of(text), **arrays, tile=(16, 32))


# -- what the text says -------------------------------------------------------------------------------------------


def test_forty_requests_have_room_and_a_hundred_more():
    memory = 30 * MAXIMUM // 16
    pages = sum(-(-n // 16) for n in lengths(40))
    assert 140 <= memory // (pages / 40) < 150 and "All forty, and a hundred more would fit." in TEXT


def test_the_draw_is_one_in_which_rules_of_thumb_hold():
    assert all(wasted(lengths(), size) == pytest.approx((size - 1) / 2, rel=0.01) for size in (16, 64, 256))
    assert round(sum(lengths()) / 100) == 495


@given(requests=st.integers(1, 5), prefix=st.integers(0, 40), own=st.integers(1, 9), size=st.integers(1, 9))
def test_what_is_shared_is_full_pages_of_the_prefix(requests: int, prefix: int, own: int, size: int):
    tables, blocks = sharing(requests, prefix, own, size)
    assert tables == requests * -(-(prefix + own) // size)
    assert tables - blocks == (requests - 1) * (prefix // size)


def test_the_claims_are_those_of_the_files():
    found = measured()
    shares = {(row["lengths"], row["way"]): row["share"] for row in found["served"]["shares"]}
    assert min(shares["sharegpt", f"pages of {n}"] for n in (16, 32)) > 0.96 > shares["sharegpt", "pages of 64"]
    assert 0.07 < 1 - shares["alpaca", "pages of 16"] < 0.09  # "twice what the claim allows"
    near = min(found["served"]["sharing"], key=lambda row: abs(row["saved"] - 0.55))
    assert near["faster"] == pytest.approx(1 / 0.45, rel=0.02)
    with_prefixes, without = sorted(found["served"]["found"], key=lambda row: not row["caching"])
    assert round(100 * with_prefixes["reused"] / with_prefixes["prompt_tokens"]) == 4  # "four in a hundred"
    assert without["reused"] == 0 and (with_prefixes["requests"], without["requests"]) == (60, 60)
    slower = [x["microseconds"]["paged"] / x["microseconds"]["flash_decoding"] - 1 for x in found["pages"]["rows"]]
    assert 0.09 < slower[0] < 0.12 and max(slower[1:]) < 0.06  # "by a tenth for a single request"
    (row,) = found["cascade"]["rows"]
    assert (row["batch"], row["len_prefix"], row["len_kv"]) == (128, 32_768, 256)


def test_a_table_of_pages_of_one_token_is_less_than_a_hundredth():
    moved = fl.count("paged_1", LONG.replace(page_size=1), device="h100").by_tensor
    assert 100 * moved["block_table"].hbm_read < moved["k"].hbm_read + moved["v"].hbm_read


def test_the_bugs_that_the_text_speaks_of():
    of_the_cache = {
        "a phantom hit after everything was evicted", "an evicted block keeps what it held", "a part of a block can be found",
        "found before the launch wrote it", "equal digests are taken for equal tokens",
        "the digest leaves out what comes before", "requests of other adapters share", "a hit of the whole prompt",
    }  # fmt: skip
    assert of_the_cache <= {bug.name for bug in MANAGERS} and len(of_the_cache) == 8 and "Eight of the 36 bugs" in TEXT
    assert len(MANAGERS) == 36 and "one of the 36 bugs" in CLASS_EXERCISES["13.3"].afterwards


def test_the_first_insight_comes_within_a_thousand_words():
    assert len(TEXT.partition("All forty")[0].split()) < 1000


# -- the player ---------------------------------------------------------------------------------------------------


def test_a_managers_history_can_be_watched():
    shown = watch(class_solution("13.3"))
    assert isinstance(shown, Watched) and len(shown.lines) == len(BRANCHES)
    assert sum("A block is copied first." in line for line in shown.lines) == 2  # "Two copies for three answers"
    assert "Each step is a call of the manager." in shown.html and "by prediction" not in shown.html.split("<script")[0]
    assert "<iframe" in shown._repr_html_() and "<script" not in shown._repr_html_()
    wrong = CLASS_EXERCISES["13.3"].solution.replace(
        "length % self.block_size > 0 and self.refs[table[-1]] > 1", "False"
    )
    assert repr(watch(class_of(wrong))).endswith("b writes token 10 into block 5, and a and c have it, too")


def test_where_a_page_is_made_the_calls_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("FLASHLAB_STATIC", "1")
    assert watch(class_solution("13.3")) is None
    assert (
        "4  allocate_slots('b', 1) → [(5, 4)]. A block is copied first.  4 pages in use, 5 saved by sharing"
        in capsys.readouterr().out
    )


@pytest.mark.browser
def test_the_player_says_what_each_call_did(browser: Any, tmp_path: Path):
    path = tmp_path / "calls.html"
    path.write_text(watch(class_solution("13.3")).html, encoding="utf-8")
    tab = browser.new_page()
    tab.goto(path.as_uri())
    for _ in range(3):
        tab.keyboard.press("ArrowRight")
    assert tab.text_content("#said") == "allocate_slots('b', 1) → [(5, 4)]. A block is copied first."
    assert tab.text_content("#facts") == "4 pages in use, 5 pages saved by sharing, 3 rows without a token."
    assert [x.text_content() for x in tab.query_selector_all("#requests td:nth-child(2)")] == [
        "rests",
        "answers",
        "rests",
    ]
    tab.close()
