"""docs/pages.md says what the newest result says, and its claims follow from it."""

from __future__ import annotations

import re

from docs._site import serve
from docs._site.blocks import replaced
from flashlab.measure import results
from flashlab.serve.shares import shares
from studies.serve import SERVE, Serving
from tests.flashlab.serve.places import RESULTS
from tests.mutants.managers import MANAGERS

TEXT = serve.PAGE.read_text(encoding="utf-8")


def newest() -> Serving:
    found = results.latest("serve", RESULTS)
    assert found is not None
    return SERVE.data(found)


def test_the_tables_are_the_results() -> None:
    assert replaced(TEXT, "serve", serve.blocks()) == TEXT, "run python -m docs._site.serve"


def test_the_manager_was_held_to_its_model_for_a_million_steps() -> None:
    assert sum(row.steps for row in newest().driven) >= 10**6
    assert all(row.failed is None for row in newest().driven)


def test_what_the_page_says_of_the_claims() -> None:
    of = newest()
    share = {(row.lengths, row.way): row.share for row in of.shares}
    assert all(1 - share["sharegpt", f"pages of {size}"] < 0.04 for size in (16, 32))
    assert 1 - share["alpaca", "pages of 16"] > 0.04
    assert {(row.lengths, row.way): row.share for row in of.shares if row.lengths == "alpaca"} == {
        ("alpaca", way): x for way, x in shares("alpaca").items()
    }, "anybody gets the same numbers"
    never = [row for row in of.sharing if not row.given_up]
    often = [row for row in of.sharing if row.given_up and row.width == 6]
    assert max(row.saved for row in never) < 0.55 < max(row.saved for row in often)
    assert all(row.faster > 1 for row in of.sharing)
    nearest = sorted(of.sharing, key=lambda row: abs(row.saved - 0.55))[:2]
    assert all(abs(row.faster - 2.2) < 0.2 for row in nearest), nearest
    assert all(row.faster < 1.5 for row in never)


def test_the_page_counts_the_seeded_bugs_and_the_lines() -> None:
    lines = len((serve.ROOT / "flashlab" / "serve" / "blocks.py").read_text(encoding="utf-8").splitlines())
    assert re.search(rf"It is {lines} lines of Python", TEXT) and lines <= 300
    assert "Thirty-six bugs" in TEXT and len(MANAGERS) == 36
