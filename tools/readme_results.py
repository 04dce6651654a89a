"""The measured claims of README.md, drawn from the files in docs/results: none is typed by hand.

`python tools/readme_results.py` writes them into README.md; a test holds the two equal.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flashlab.measure import results  # noqa: E402
from tools import kinds  # noqa: E402

README = ROOT / "README.md"
BEGIN = "<!-- results: begin (written by tools/readme_results.py) -->\n"
END = "<!-- results: end -->"


def claims() -> str:
    """A line for the newest result of each kind, subject, condition and device."""
    found = results.find(ROOT / results.FOLDER)
    newest = {(result.kind, result.path.stem.rpartition("_")[0]): result for result in found}
    lines = [
        f"- {kinds.claim(result)}: [{_label(result)}]({result.path.relative_to(ROOT).as_posix()})"
        for _, result in sorted(newest.items())
    ]
    return "\n".join(lines or ["No measurement on a GPU has been recorded yet."]) + "\n"


def _label(result: results.Result) -> str:
    """The kind, and the condition of results that have one."""
    return result.kind if result.condition is None else f"{result.kind}, {result.condition}"


def readme_with(text: str, new: str) -> str:
    """README's text with the claims replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + new + END + after


if __name__ == "__main__":
    README.write_text(readme_with(README.read_text(encoding="utf-8"), claims()), encoding="utf-8")
