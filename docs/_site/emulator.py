"""Writes the table of docs/emulator.md from the newest result of kind `emulator`: `python -m docs._site.emulator`."""

from __future__ import annotations

from pathlib import Path

from docs._site.blocks import replaced
from flashlab.base.files import replace_file
from flashlab.measure import results
from studies import timed

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "emulator.md"


def block() -> str:
    """The newest measurement as the page shows it, or nothing without one."""
    newest = results.latest("emulator", ROOT / results.FOLDER)
    return "" if newest is None else timed.EMULATOR.markdown(newest) + "\n"


if __name__ == "__main__":
    replace_file(PAGE, replaced(PAGE.read_text(encoding="utf-8"), "emulator", {"times": block()}))
