"""`flashlab cache`: says where, and deletes what is flashlab's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flashlab.base import cache
from flashlab.cli import app


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path))
    for text in ("one", "two"):
        cache.entry("compiled", cache.digest(text), lambda work, text=text: (work / "a").write_text(text) and None)
    (tmp_path / "compiled" / "mine.txt").write_text("a stranger's")
    return tmp_path


def run(*words: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["cache", *words])
    assert result.exit_code == code, result.output
    return result


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and file.name != "mine.txt")


def test_dir_prints_the_folder_alone(folder: Path) -> None:
    assert run("dir").stdout == run().stdout == f"{folder}\n"
    assert json.loads(run("dir", "--json").stdout) == {
        "schema": 1, "folder": str(folder), "entries": 2, "bytes": size(folder),
    }  # fmt: skip


def test_clean_says_what_it_deleted(folder: Path) -> None:
    bytes = size(folder)
    assert run("clean").stdout == f"deleted 2 entries ({bytes:,} bytes) from {folder}\n"
    assert [path.name for path in (folder / "compiled").iterdir()] == ["mine.txt"]
    assert json.loads(run("clean", "--json").stdout) == {"schema": 1, "folder": str(folder), "entries": 0, "bytes": 0}


def test_another_action_is_refused() -> None:
    assert "action = 'clear': expected one of dir, clean" in run("clear", code=2).stderr
