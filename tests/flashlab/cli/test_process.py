"""The command line as a process, with whatever versions of the libraries are installed: help, a run, an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashlab.cli.documents import DOCUMENTS
from tests.flashlab.cli.test_documents import SMALL

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.long


def flashlab(*words: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "flashlab", *map(str, words)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", DOCUMENTS)
def test_help(command: str) -> None:
    status, out, said = flashlab(command, "--help")
    assert (status, said) == (0, "") and "Examples:" in out


@pytest.mark.parametrize("command", SMALL)
def test_a_run(command: str) -> None:
    status, out, _ = flashlab(command, *SMALL[command], "--json")
    assert status == 0
    DOCUMENTS[command].model_validate(json.loads(out))


@pytest.mark.parametrize(
    "words", [["count", "flsh2"], ["count", "--len-q", "x"], ["cont"], ["count", "flash2", "--no"]]
)
def test_an_error_is_one_line(words: list[str]) -> None:
    status, out, said = flashlab(*words)
    assert (status, out) == (2, "") and said.startswith("flashlab: ") and said.count("\n") == 1
