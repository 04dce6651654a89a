"""Writes the measured part of docs/pages.md from the newest result: `python -m docs._site.serve`."""

from __future__ import annotations

from docs._site.blocks import replaced
from docs._site.decoding import ROOT
from docs._site.timed import link
from flashlab.base.files import replace_file
from flashlab.measure import results
from studies.serve import Serving, table

PAGE = ROOT / "docs" / "pages.md"
PARTS = ("days", "shares", "sharing", "driven")
"""The lists of the data, in the order in which their tables stand."""


def blocks() -> dict[str, str]:
    of = results.latest("serve", ROOT / results.FOLDER)
    if of is None:
        return dict.fromkeys(PARTS, "This was not measured yet.\n")
    said = f"*CPU, {of.content['date'][:10]}: `{of.content['command']}` ({link(of)}).*"
    tables = table(Serving.model_validate(of.data)).split("\n\n")
    return {name: f"{each}\n\n{said}\n" for name, each in zip(PARTS, tables, strict=True)}


if __name__ == "__main__":
    replace_file(PAGE, replaced(PAGE.read_text(encoding="utf-8"), "serve", blocks()))
