"""What lesson 07 shows is what docs/results holds."""

from __future__ import annotations

from flashlab.lessons.lesson07 import FLASH2, STANDARD, launches_of, measured
from notebooks.source import measured as lesson_data


def test_the_lesson_s_data_are_those_of_docs_results():
    assert lesson_data.TO.read_text(encoding="utf-8") == lesson_data.text(), "run python notebooks/source/measured.py"


def test_the_cases_that_are_shown_are_there():
    assert len(launches_of(FLASH2)) == 1 and len(launches_of(STANDARD)) == 3
    assert measured()["summary"]["equal"] == measured()["summary"]["compared"]


def test_measured_reads_lie_between_compulsory_and_requested():
    stray = 64 * 1024
    for row in measured()["launches"]:
        assert row["compulsory_read"] - stray <= row["dram_read"] <= row["requested"]["hbm.read"] + stray, row["case"]


def test_the_text_of_lesson_03_quotes_what_was_measured():
    text = (lesson_data.ROOT / "notebooks" / "source" / "03_flash1.md").read_text(encoding="utf-8")
    (alone,) = (
        row["milliseconds"]
        for row in measured()["before_flash2"]
        if (row["algorithm"], row["dtype"], row["head_dim"], row["length"]) == ("standard", "float16", 64, 4096)
        and not row["causal"]
    )
    assert f"standard attention takes {alone:.2f} ms for the second problem" in text
