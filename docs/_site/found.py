"""Writes the defects of docs/found-in-public-kernels.md from the newest result of kind `found`: `python -m docs._site.found`."""

from __future__ import annotations

import shlex
from pathlib import Path

from docs._site.blocks import replaced
from flashlab.files import replace_file
from flashlab.measure import results
from flashlab.measure.corpus_defects import DEFECTS, Defect
from flashlab.measure.found import KIND, Found, Row, command

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "found-in-public-kernels.md"


def block() -> str:
    """A section for each defect that is on record, or nothing without a result."""
    newest = results.latest(KIND.name, ROOT / results.FOLDER)
    if newest is None:
        return ""
    rows = {(row.repository, row.file, row.kernel): row for row in Found.model_validate(newest.data).rows}
    found = [(each, rows.get((each.repository, each.file, each.kernel))) for each in DEFECTS]
    return "\n".join(section(each, row) for each, row in found if row is not None)


def section(defect: Defect, row: Row) -> str:
    """One defect: where, why, what flashlab says, a repair, and the command that shows it."""
    first, last = min(row.lines), max(row.lines)
    where = f"https://github.com/{row.repository}/blob/{row.commit}/{row.file}#L{first}-L{last}"
    words = " ".join(map(shlex.quote, ["flashlab", *command(defect, Path(defect.file).name)]))
    return f"""## {defect.title}

[{row.repository}, {row.file}]({where}), `{row.kernel}`. {defect.why}

```text
{chr(10).join(row.findings)}
```

A repair: {defect.repair}

```bash
{words}
```
"""


if __name__ == "__main__":
    replace_file(PAGE, replaced(PAGE.read_text(encoding="utf-8"), "found", {"defects": block()}))
