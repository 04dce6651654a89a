"""docs/flash3.md says what the data files and the heads of the kernels say, and types no measured figure by itself."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from docs._site import flash3 as climb
from docs._site.blocks import replaced
from flashlab.measure import results

pytestmark = pytest.mark.xdist_group("flash3's page")  # its blocks are drawn once
TEXT = climb.PAGE.read_text(encoding="utf-8")
MARKED = re.compile(r"(?s)<!-- (\w+): begin .*?<!-- \1: end -->")
MEASURED = re.compile(r"\d\s*(?:TFLOP|%|ms|µs)|\d\.\d+\s*(?:×|times)|[×*]\s*\d\.\d|\d{3,} TFLOP")
"""What only a measurement can say."""


def redrawn() -> dict[str, str]:
    return {name: draw() for name, draw in climb.BLOCKS.items()}


@functools.cache
def blocks() -> dict[str, str]:
    """As the files have it."""
    return redrawn()


def texts(svg: str) -> list[str]:
    """A picture's words and figures, every bar's among them; its curves depend on matplotlib's version."""
    return re.findall(r"<text[^>]*>([^<]*)", svg)


def test_the_page_is_what_the_data_say():
    assert replaced(TEXT, "flash3", blocks()) == TEXT, "run python -m docs._site.flash3"


def test_every_block_of_the_page_is_written():
    assert set(MARKED.findall(TEXT)) == set(climb.BLOCKS)
    with pytest.raises(ValueError, match="no block 'ladder'"):
        replaced(TEXT.replace("<!-- ladder: end -->", ""), "flash3", blocks())


@pytest.mark.parametrize("name", climb.DRAWN)
def test_a_picture_is_what_the_data_say(name: str):
    found = texts(climb.DRAWN[name]())
    assert texts((climb.PICTURES / name).read_text(encoding="utf-8")) == found, "run python -m docs._site.flash3"


def test_the_pictures_have_every_kernel():
    ladder, units = (texts(draw()) for draw in climb.DRAWN.values())
    assert len([word for word in ladder if re.fullmatch(r"\d{3}", word)]) >= 2 * len(climb.DIMS) * (
        len(climb.CLIMB) + 1
    )
    assert len([word for word in units if re.fullmatch(r"\d\.\d\d", word)]) == len(climb.DIMS) * (len(climb.CLIMB) + 1)


def test_no_measured_figure_is_typed():
    assert MEASURED.findall(MARKED.sub("", TEXT)) == []
    assert MEASURED.findall("it makes 700 TFLOP/s, 12 % or 1.16 times more")


def test_a_block_follows_the_data(monkeypatch: pytest.MonkeyPatch):
    """A figure that changes in a file changes the page and the picture."""
    real = climb.result

    def slower(kind: str, algorithm: str | None, condition: str | None = None, **device: str) -> results.Result:
        of = real(kind, algorithm, condition, **device)
        if kind != "ladder":
            return of
        rows: list[Mapping[str, Any]] = [
            {**row, "tflops": row["tflops"] / 2, "ratio": 2 * row["ratio"]} if row["peer"] == "flash3_2" else row
            for row in of.data["rows"]
        ]
        return results.Result(of.path, {**of.content, "data": {**of.data, "rows": rows}})

    drawn = climb.ladder_picture()
    before = blocks()
    monkeypatch.setattr(climb, "result", slower)
    after = redrawn()
    assert {name for name in before if before[name] != after[name]} == {"ladder", "flash3_2", "flash3_3"}
    assert texts(climb.ladder_picture()) != texts(drawn)


def test_a_rung_says_what_its_source_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    source = tmp_path / "k.cu"
    comment = ["K", "", "Expected: much,", "and more.", "Measured: less.", "  - a", "    b", "  - c", "What binds: d."]
    source.write_text("".join(f"// {line}".rstrip() + "\n" for line in comment) + "\nint x;\n")
    monkeypatch.setattr("kernels_cu.source", {"k": source}.get)
    assert climb.said("k").partition("\n\n")[2] == (
        "> **Expected**: much, and more.\n>\n> **Measured**: less.\n>\n> - a b\n> - c\n>\n> **What binds**: d.\n"
    )
