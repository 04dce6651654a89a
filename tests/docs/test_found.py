"""docs/found-in-public-kernels.md: it shows what is on record, and each defect on record is found at a line of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs._site import found as page
from docs._site.blocks import replaced
from flashlab.measure import found, results
from flashlab.measure.corpus_defects import DEFECTS, Defect

ROOT = Path(__file__).resolve().parents[2]
RESULT = results.latest("found", ROOT / results.FOLDER)
assert RESULT is not None
ROWS = found.Found.model_validate(RESULT.data).rows


def test_the_page_is_what_the_data_say() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert replaced(text, "found", {"defects": page.block()}) == text, "run python -m docs._site.found"


def test_every_defect_is_on_record_and_found_where_it_is() -> None:
    by_name = {(row.repository, row.file, row.kernel): row for row in ROWS}
    assert by_name.keys() == {(each.repository, each.file, each.kernel) for each in DEFECTS}
    for each in DEFECTS:
        assert set(each.lines) & set(by_name[each.repository, each.file, each.kernel].lines), each.kernel


@pytest.mark.compiler
def test_a_row_is_what_the_command_line_says(tmp_path: Path) -> None:
    """A launch that misuses memory, and one that doesn't."""
    source = "__global__ void k(float* x, int n) {\n  x[threadIdx.x + n] = 1;\n}\n"
    (tmp_path / "k.cu").write_text(source, encoding="utf-8")

    def row(n: int) -> found.Row:
        arguments = ("x=float32[32]:zeros", f"n={n}")
        defect = Defect("a/b", "k.cu", "k", "Too far", (2,), "It is.", "None.", arguments, (1,), (32,))
        return found.run(defect, tmp_path, "0" * 40)

    assert row(0).findings == []
    assert row(1).lines == [2] and "out of bounds" in row(1).findings[0]
    with pytest.raises(RuntimeError, match="n = 'many'"):
        defect = Defect("a/b", "k.cu", "k", "", (), "", "", ("x=float32[32]:zeros", "n=many"), (1,), (32,))
        found.run(defect, tmp_path, "")
