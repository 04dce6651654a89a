"""docs/decoding.md and docs/mla.md: the tables are what the newest results say."""

from typing import Any

import pytest

from docs._site import decoding, mla
from docs._site.blocks import replaced


@pytest.mark.parametrize(("page", "name"), [(decoding, "decoding"), (mla, "mla")])
def test_the_tables_are_the_newest_results(page: Any, name: str) -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert text == replaced(text, name, page.blocks()), f"run python -m docs._site.{name}"
