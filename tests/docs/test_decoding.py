"""docs/decoding.md and docs/mla.md: the tables are what the newest results say."""

from typing import Any

import pytest

from docs._site import decoding, mla
from docs._site.blocks import replaced


@pytest.mark.parametrize(("page", "name"), [(decoding, "decoding"), (mla, "mla")])
def test_the_tables_are_the_newest_results(page: Any, name: str) -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert text == replaced(text, name, page.blocks()), f"run python -m docs._site.{name}"


def test_the_ladder_has_each_rungs_share_of_a_plain_read() -> None:
    took = {"flash_decoding_1": 200.0, "flash_decoding_2": 20.0, "flash_decoding": 12.5, "paged_1": 250.0, "read": 10.0}
    row = {"batch": 1, "heads": 32, "kv_heads": 8, "len_kv": 8192, "microseconds": took}
    *_, line = decoding.rungs([row]).splitlines()
    assert line == "| 1 | 32, 8 | 8,192 | 10.0 | 200.0 (5%) | 20.0 (50%) | 12.5 (80%) | 250.0 (4%) | – |"
