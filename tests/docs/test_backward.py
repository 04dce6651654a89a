"""docs/backward.md says what was measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from docs._site import backward
from docs._site.blocks import replaced


def test_the_page_is_drawn_from_the_results() -> None:
    text = backward.PAGE.read_text(encoding="utf-8")
    assert text == replaced(text, "backward", backward.blocks()), "run python -m docs._site.backward"


def test_counts_that_differ_are_not_called_equal() -> None:
    rows = [{"verdict": verdict} for verdict in ("equal", "equal", "differs", "within")]
    of: Any = SimpleNamespace(
        path=backward.PAGE.parent / "results" / "x.json", content={"device": {"name": "a GPU"}}, algorithms=("flash3_backward",),
        data={"launches": [{"rows": rows}]},
    )  # fmt: skip
    assert "2 of 3 counts are equal" in backward.counted(of)
    assert backward.counted(None) == "This was not measured yet.\n"
