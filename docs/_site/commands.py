"""Publishes the command line: its page, as typer writes it, and the JSON Schemas of what `--json` prints.

All of it is made when the site is built, the schemas as docs/schemas/*.json.
"""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from pathlib import Path

from flashlab.cli.documents import DOCUMENTS, json_schema

ROOT = Path(__file__).resolve().parents[2]
OPENING = """\
# Commands

On the command line (CLI), each command wraps one call of the Python API. `flashlab COMMAND --help` prints what stands here.
`flashlab --install-completion` makes your shell complete names of algorithms, devices and checks.

The exit status is 0 on success and 1 for a failed check. It is 2 for what could not be asked: bad
usage, a tile that doesn't fit, a missing GPU, compiler or ncu.

With `--json`, a command prints one JSON document, and its schema is published: a link leads to it
below. Errors leave the output empty.

"""


def schemas() -> dict[str, str]:
    """The published schemas, by the names of their files."""
    return {f"{name}.json": json.dumps(json_schema(name), indent=1, ensure_ascii=False) + "\n" for name in DOCUMENTS}


def page() -> str:
    """The page of all commands, in Markdown."""
    command = [sys.executable, "-m", "typer", "flashlab.cli", "utils", "docs", "--name", "flashlab"]
    written = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    _, *sections = re.split(r"(?m)^## ", html.unescape(written))
    return OPENING + "\n".join(_section(section) for section in sections)


def _section(text: str) -> str:
    """A command's section: its examples as a block that one can copy, and a link to its schema."""
    name = text.partition("\n")[0].strip("`").split()[-1]
    text, _, examples = text.partition("\nExamples:\n")
    lines = "\n".join(line for line in examples.splitlines() if line)
    schema = f"[The schema of its JSON document](../schemas/{name}.json)."
    return f"## {text.strip()}\n\n```sh\n{lines}\n```\n\n{schema}\n"
