"""The command line as typed: words in, what it prints and its exit status out."""

from __future__ import annotations

import json
from inspect import signature
from typing import Any

from typer.testing import CliRunner

from flashlab.cli import app

APART: Any = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}
"""Old versions of typer mix the two streams unless told."""


def run(*words: object, code: int = 0) -> Any:
    """The result of a call that must end with this status."""
    result = CliRunner(**APART).invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (words, result.output, result.exception)
    return result


def document(*words: object, code: int = 0) -> dict[str, Any]:
    """What a call prints with `--json`."""
    found = json.loads(run(*words, "--json", code=code).stdout)
    assert found["schema"] == 1
    return found


def one_line(*words: object) -> str:
    """The error of a call that must fail with status 2, nothing on stdout, and a line on stderr."""
    result = run(*words, code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("flashlab: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr
