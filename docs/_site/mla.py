"""Writes the measured part of docs/mla.md from the newest results: `python -m docs._site.mla`."""

from __future__ import annotations

from docs._site.agreed import agreed
from docs._site.blocks import replaced
from docs._site.decoding import ROOT, runs, timed
from flashlab.base.files import replace_file

PAGE = ROOT / "docs" / "mla.md"
ALGORITHMS = ("mla", "mla_paged", "mla_hopper", "mla_hopper_paged")


def blocks() -> dict[str, str]:
    beside = {name: timed(name, on="h100") for name in ALGORITHMS}
    alone = {f"{name}_h200": timed(name, on="h200") for name in ("mla_hopper", "mla_hopper_paged")}
    return beside | alone | {"runs": runs("mla_hopper"), "agreed": agreed(ALGORITHMS)}


if __name__ == "__main__":
    replace_file(PAGE, replaced(PAGE.read_text(encoding="utf-8"), "mla", blocks()))
