"""Writes the table of docs/emulator.md from the newest result of kind `emulator`: `python -m docs._site.emulator`."""

from __future__ import annotations

from pathlib import Path

from flashlab.files import replace_file
from flashlab.measure import emulator_speed, results

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "emulator.md"
BEGIN = "<!-- times: begin (written by docs/_site/emulator.py) -->\n"
END = "<!-- times: end -->"


def page_with(text: str, block: str) -> str:
    """The page with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + block + END + rest.partition(END)[2]


def block() -> str:
    """The newest measurement as the page shows it, or nothing without one."""
    newest = results.latest("emulator", ROOT / results.FOLDER)
    return "" if newest is None else emulator_speed.KIND.markdown(newest) + "\n"


if __name__ == "__main__":
    replace_file(PAGE, page_with(PAGE.read_text(encoding="utf-8"), block()))
