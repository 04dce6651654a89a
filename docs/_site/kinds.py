"""Publishes the kinds of results, as the modules that measure declare them.

`python -m docs._site.kinds` writes the table in docs/results/README.md, and a test holds it to that. The JSON Schemas to
which it links, docs/results/schema/*.json, are made when the site is built.
"""

from __future__ import annotations

import json
from pathlib import Path

from docs._site.blocks import replaced
from flashlab.base.files import replace_file
from flashlab.measure import results

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / results.FOLDER
PAGE = RESULTS / "README.md"

KINDS = results.kinds(*results.ROOMS, "tests.flashlab.emulator")
"""The kinds by name, in the order of their titles: the library's, and that of the zoo of kernels in the tests."""


def claim(result: results.Result) -> str:
    """The claim that a result supports, in one line."""
    return KINDS[result.kind].claim(result)


def schemas() -> dict[str, str]:
    """The published schemas, by the names of their files."""
    return {
        f"{name}.json": json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
        for kind in KINDS.values()
        for name, schema in kind.schemas().items()
    }


def table() -> str:
    """The kinds as docs/results/README.md lists them."""
    rows = [
        (f"[`{kind.name}`](schema/{kind.name}.json)", f"`{kind.command}`", kind.holds)
        for kind in sorted(KINDS.values(), key=lambda kind: kind.name)
    ]
    return results.markdown_table(("kind", "written by", "what it holds"), rows) + "\n"


def main() -> None:
    replace_file(PAGE, replaced(PAGE.read_text(encoding="utf-8"), "kinds", {"kinds": table()}))


if __name__ == "__main__":
    main()
