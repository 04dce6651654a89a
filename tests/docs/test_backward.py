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
    of: Any = SimpleNamespace(older=(),
        path=backward.PAGE.parent / "results" / "x.json", content={"device": {"name": "a GPU"}}, algorithms=("flash3_backward",),
        data={"launches": [{"rows": rows}]},
    )  # fmt: skip
    assert "2 of 3 counts are equal" in backward.counted(of)
    assert backward.counted(None) == "This was not measured yet.\n"


def test_a_cell_names_the_kernel_that_ran() -> None:
    """That of the page, or the one in its place; a peer that didn't take the cell has a dash."""
    cell = {"dtype": "float16", "causal": True, "tflops": 400.0, "kernel": None, "peer": None, "ratio": None}
    rows = [
        cell | {"head_dim": 96, "shape": "plain"},
        cell | {"head_dim": 96, "shape": "plain", "peer": "fa4", "ratio": 1.25},
        cell | {"head_dim": 192, "shape": "3 sequences", "kernel": "flash2_backward"},
    ]
    of: Any = SimpleNamespace(
        older=(),
        path=backward.PAGE.parent / "results" / "x.json",
        content={"device": {"name": "a GPU"}},
        data={"rows": rows},
    )
    *_, first, second = backward.odd(of).splitlines()
    assert first == "| plain | float16 × 96 | causal | `flash3_backward` | 400 | 1.25 × |"
    assert second == "| 3 sequences | float16 × 192 | causal | `flash2_backward` | 400 | – |"
