"""What a notebook and a prompt show of counts, runs, comparisons and sweeps: tables, and a line each."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

import flashlab as fl
from flashlab.views import sheets, sweeps

P = fl.Problem(batch=1, heads=2, len_q=64, head_dim=16, dtype="float16")
SWEEP: dict[str, Any] = {"len_q": [64, 128], "tile": ["64x64", "4096x64"]}


class Cells(HTMLParser):
    """The text of each cell of a document whose tags must nest."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open, self.cells, self.tags = list[str](), list[str](), set[str]()
        self.feed(document)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def result(kind: str) -> Any:
    arrays = fl.random_inputs(P)
    return {
        "counts": lambda: fl.count("flash2", P),
        "run": lambda: fl.simulate("flash2", *arrays, lse=True, trace=(0, 1)),
        "comparison": lambda: fl.compare(arrays, algorithms=["flash1", "flash2"]),
        "sweep": lambda: fl.sweep(["flash1", "flash2"], P, **SWEEP),
    }[kind]()


@pytest.mark.parametrize(
    ("kind", "cells", "line"),
    [
        (
            "counts",
            ["HBM read, requested", "12,288", "by tensor", "q"],
            "<counts of flash2: 12,288 bytes of HBM read, ",
        ),
        (
            "run",
            ["out", "1 × 2 × 64 × 16", "float16", "lse", "trace"],
            "<run of flash2: out (1, 2, 64, 16) float16, lse",
        ),
        ("comparison", ["flash1", "flash2", "error"], "<comparison of flash1, flash2: 1 × 2 heads × 64 × 16, float16>"),
        ("sweep", ["flash1", "flash2", "128", "64x64", "reason"], "<sweep of 8 rows over algorithm, len_q, tile>"),
    ],
)
def test_a_notebook_shows_a_table_and_a_prompt_a_line(kind: str, cells: list[str], line: str) -> None:
    found = result(kind)
    document = found._repr_html_()
    shown = Cells(document)
    for cell in cells:
        assert cell in shown.cells or f"<summary>{cell}</summary>" in document, cell
    assert repr(found).startswith(line) and len(repr(found)) < 200
    assert shown.tags <= {"p", "b", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"}


def test_a_name_is_text_and_no_markup() -> None:
    @fl.program
    def mine(m: Any, q: Any, k: Any, v: Any, problem: Any, tile: Any) -> Any:
        for block in m.launch("<script>alert(1)</script>", rows=problem.row_tiles(tile), warps=4):
            block.step("store")
            block.store(m.output("out"), block.full(tile.rows, v.cols, 0.0), block.i, tile.rows)
        return m.output("out")

    shown = Cells(sheets.html(sheets.of_counts(fl.count(mine, P))))
    assert "script" not in shown.tags and "<script>alert(1)</script>" in shown.cells


def test_a_long_sweep_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "SHOWN", 3)
    document = result("sweep")._repr_html_()
    assert document.count("<tr>") == 1 + 3 and "and 5 more rows" in document


def test_terminal_and_notebook_have_the_same_cells(capsys: pytest.CaptureFixture[str]) -> None:
    for sheet in sheets.of_counts(fl.count("flash2", P)):
        sheet.print()
        printed = capsys.readouterr().out
        assert all(cell in printed for cell in Cells(sheet.html()).cells)
