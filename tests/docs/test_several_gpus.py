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


def test_no_rate_is_typed():
    """What was measured stands in blocks, which results fill."""
    typed = re.sub(r"(?s)<!-- (\w+): begin .*?<!-- \1: end -->", "", TEXT)
    assert "<!--" not in typed
    assert not re.search(r"\d\s*(TFLOP/s|GB/s|ms\b|µs)", typed)


def test_a_result_becomes_tables():
    """By rows as `python -m studies parallel` writes them."""
    row = {"contender": "ring", "length": 16_384, "backward": False, "ms": 2.0, "tflops": 400.0, "predicted": 1.0}
    assert parallel.speeds({"speeds": [row]}).splitlines()[-1] == "| ring | 400 (800) | – |"
    sent = {"contender": "ring", "backward": True, "calls": 100, "formula": 1000, "tx": 1005}
    rows = [sent, {**sent, "tx": 1001}]
    assert (
        parallel.link_bytes({"bytes": rows, "proto": None}).splitlines()[-1]
        == "| `ring` | both ways | 1,000 | 1,005 | +0.500 % |"
    )
    query = {"contender": "ranks", "keys": 1000, "heads": 64, "kv_heads": 8, "ms": 0.5, "share": 0.6}
    assert parallel.decodes({"decodes": [query]}).splitlines()[-1] == "| ranks | 1,000 | 64, 8 | 0.500 | 0.60 |"
    shares = dict.fromkeys(("out", "dq", "dk", "dv"), 0.5)
    assert parallel.rules({"rules": [{"contender": "ring", "shares": shares}]}).endswith(
        "| ring | 0.50 | 0.50 | 0.50 | 0.50 |"
    )
