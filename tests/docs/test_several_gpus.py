"""docs/several-gpus.md: its tables are what formulas and timelines say, and so are the words around them."""

from __future__ import annotations

import re

from docs._site import parallel
from docs._site.blocks import replaced

TEXT = parallel.PAGE.read_text(encoding="utf-8")


def test_the_tables_are_what_formulas_say():
    assert replaced(TEXT, "parallel", parallel.blocks()) == TEXT, "run python -m docs._site.parallel"


def test_what_the_page_says_of_a_million_tokens():
    """Within a host all come near to one GPU's rate but a ring of contiguous rows; over eight hosts the ring alone does."""
    rows = re.findall(r"\| (\d+) \| `(\w+)` \| (\w+) \| [^|]+ \| [^|]+ \| ([\d.]+) \|", TEXT)
    assert len(rows) == 8
    for ranks, scheme, layout, share in rows:
        near = layout == "zigzag" and (ranks == "8" or scheme == "ring")
        assert (float(share) >= 0.97) == near, (ranks, scheme, layout)


def test_the_page_says_that_nothing_was_measured():
    assert "Nothing on this page was measured on several GPUs" in TEXT
    assert not re.search(r"TFLOP/s|GB/s", TEXT.partition("<!-- rates: begin")[0] + TEXT.partition("rates: end")[2])
