"""docs/decoding.md: the table is what the newest result says."""

from docs._site import decoding
from docs._site.blocks import replaced


def test_the_table_is_the_newest_result() -> None:
    text = decoding.PAGE.read_text(encoding="utf-8")
    assert text == replaced(text, "decoding", decoding.blocks()), "run python -m docs._site.decoding"
