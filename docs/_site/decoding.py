"""Writes the measured part of docs/decoding.md from the newest result: `python -m docs._site.decoding`."""

from __future__ import annotations

from pathlib import Path

from docs._site.blocks import replaced
from docs._site.timed import device, link
from flashlab.files import replace_file
from flashlab.measure import decoding, results

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "decoding.md"


def timed() -> str:
    """A table of the cells beside others' kernels and a plain read."""
    of = results.latest("decoding", ROOT / results.FOLDER, algorithm="flash_decoding")
    if of is None:
        return "This was not measured yet.\n"
    table = decoding.KIND.table(decoding.KIND.schema.model_validate(of.data))
    return f"{table}\n\n*{device(of)}, {of.content['date'][:10]}: `{of.content['command']}` ({link(of)}).*\n"


def blocks() -> dict[str, str]:
    return {"timed": timed()}


if __name__ == "__main__":
    replace_file(PAGE, replaced(PAGE.read_text(encoding="utf-8"), "decoding", blocks()))
