"""What commands print: one JSON document or tables on stdout; remarks on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from flashlab.base.files import plain, printable

SCHEMA = 1
"""The version of the JSON documents. It rises when a key changes its meaning or is removed."""


def document(content: Mapping[str, Any]) -> None:
    """Print the one JSON document. Infinities and NaN become text that `float` reads: "-inf", "nan"."""
    body = content if "schema" in content else {"schema": SCHEMA, **content}
    print(json.dumps(plain(body), indent=2, allow_nan=False))


def remark(text: str) -> None:
    """Print a line about the run, rather than its result, to stderr."""
    print(printable(text), file=sys.stderr, flush=True)
