from __future__ import annotations

from pathlib import Path

import pytest

from flashlab.base import process


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test keeps its progress in a folder of its own."""
    monkeypatch.setenv("FLASHLAB_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def without_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check runs in this process, as in a browser: a child takes a second to begin. test_check.py is about children."""
    monkeypatch.setattr(process, "IN_A_BROWSER", True)
