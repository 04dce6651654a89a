"""`flashlab lessons`: the notebooks are copied, and nobody's work is lost."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from docs._site.commands import schemas
from flashlab.cli import lessons
from flashlab.lessons import notebooks
from tests.flashlab.cli.typed import document, one_line, run

ROOT = Path(__file__).resolve().parents[3]
NAMES = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))


def test_all_are_copied_and_none_is_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "course"
    assert f"{len(NAMES)} lessons copied" in run("lessons", folder, "--no-open").stdout
    assert sorted(path.name for path in folder.iterdir()) == NAMES
    mine, lost = folder / NAMES[3], folder / NAMES[5]
    mine.write_text("my answers")
    lost.unlink()
    found = document("lessons", folder)
    assert (found["copied"], len(found["kept"])) == ([lost.name], len(NAMES) - 1)
    assert mine.read_text() == "my answers"
    assert lost.is_file()


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_the_notebook_before_any_cell_has_run(name: str, tmp_path: Path) -> None:
    """Its reader predicts first."""
    notebooks.copy(tmp_path)
    shown = ROOT / "notebooks" / "outputs"
    mine, kept = (json.loads((folder / name).read_text(encoding="utf-8")) for folder in (tmp_path, shown))
    assert ["".join(cell["source"]) for cell in mine["cells"]] == ["".join(cell["source"]) for cell in kept["cells"]]
    assert any(cell.get("outputs") for cell in kept["cells"])
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in mine["cells"])


def test_the_document_is_what_its_schema_says(tmp_path: Path) -> None:
    assert set(document("lessons", tmp_path)) == set(json.loads(schemas()["lessons.json"])["required"])


def test_the_first_one_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def ran(command: list[str], **_: Any) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", ran)
    monkeypatch.setattr(lessons.importlib.util, "find_spec", lambda name: object())
    run("lessons", tmp_path / "course")
    assert asked[0][:3] == [sys.executable, "-m", "jupyterlab"] and asked[0][-1] == str(tmp_path / "course" / NAMES[0])


def test_without_jupyterlab_a_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lessons.importlib.util, "find_spec", lambda name: None)
    assert "to open them: make lab" in run("lessons", tmp_path / "course").stdout
    kept = [tmp_path / "site-packages" / "flashlab" / "notebooks" / "00_memory.ipynb"]
    monkeypatch.setattr(notebooks, "originals", lambda: kept)
    monkeypatch.setattr(notebooks, "copy", lambda folder: notebooks.Copies(tmp_path, ("00_memory.ipynb",), ()))
    assert "pip install jupyterlab" in run("lessons", tmp_path / "course").stdout


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    assert f"FOLDER = '{path}'" in one_line("lessons", path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("there", [False, True], ids=["a new folder", "one that is there"])
def test_a_full_disk_leaves_nothing_behind(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "course"
    if there:
        folder.mkdir()
        (folder / NAMES[0]).write_text("my answers")
    read = Path.read_text

    def full(path: Path, *words: Any, **named: Any) -> str:
        if path.name == NAMES[3]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return read(path, *words, **named)

    monkeypatch.setattr(Path, "read_text", full)
    assert "No space left on device" in one_line("lessons", folder)
    assert folder.exists() == there
    assert not there or [path.read_text() for path in folder.iterdir()] == ["my answers"]


def test_installed_ones_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebooks, "_PACKAGE", tmp_path)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "00_mine.ipynb").touch()
    assert [path.name for path in notebooks.originals()] == ["00_mine.ipynb"]
