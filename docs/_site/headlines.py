"""The four numbers that the site opens with, each from data files: `python -m docs._site.headlines` writes them into pages.

They are what is counted, what was found, what is predicted and how fast it is. Each leads to the page that has the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from docs._site import evidence, readme
from docs._site.blocks import replaced
from docs._site.speeds import speeds
from docs._site.time_model import beside_predictions, mean_error
from flashlab.base.files import replace_file
from studies.closed import FOUND

DOCS = Path(__file__).resolve().parents[1]
PAGE = DOCS / "index.md"


class Headline(NamedTuple):
    """A number, what it is of, and the page that has the rest (from docs)."""

    number: str
    words: str
    page: str


def headlines() -> Iterator[Headline]:
    counted = [of.data["summary"] for of in evidence.measured("counters")]
    equal, compared = (sum(each[name] for each in counted) for name in ("equal", "compared"))
    yield Headline(
        f"{equal:,} of {compared:,}",
        "counts of bytes and matrix FLOPs by the formulas equal a GPU's hardware counters",
        "accounting.md",
    )
    found = FOUND.data(evidence.measured("found")[-1]).rows
    yield Headline(
        str(len(found)), "true defects found in published kernels whose own tests pass", "found-in-public-kernels.md"
    )
    newest = evidence.measured("blind")[-1]
    cells = beside_predictions(newest)
    errors = [mean_error([x for x in cells if x.cell.algorithm == name]) for name in newest.algorithms]
    yield Headline(
        f"{100 * min(errors):.0f} to {100 * max(errors):.0f} %",
        f"is the time model's mean error, by kernel, in {len(cells)} predictions made before measuring",
        "time.md",
    )
    fast = [one for one in speeds() if one.of.of_today(one.algorithm)]
    slowest, fastest = (min(fast, key=lambda one: one.ratios[0]), max(fast, key=lambda one: one.ratios[-1]))
    yield Headline(
        f"{slowest.ratios[0]:.2f} to {fastest.ratios[-1]:.2f} ×",
        f"the speed of the best other kernel timed beside it: slowest is `{slowest.algorithm}`, fastest `{fastest.algorithm}`",
        "matrix.md",
    )


def cards(up: str = "") -> str:
    """The numbers as cards, for a page from which docs is `up`."""
    each = [f":::{{container}} number\n**{of.number}**\n\n[{of.words}]({up}{of.page})\n:::\n" for of in headlines()]
    return f"::::{{container}} numbers\n{''.join(each)}::::\n"


def families() -> str:
    """The table of families, without the words that README has around it."""
    return f"{readme.family_table()}\n"


def blocks() -> dict[str, str]:
    return {"numbers": cards(), "families": families()}


if __name__ == "__main__":
    replace_file(PAGE, replaced(PAGE.read_text(encoding="utf-8"), "headlines", blocks()))
