"""Progress: kept in one file, written whole; a broken one is set aside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import flashlab as fl
from flashlab.lessons import record


def test_it_is_kept_where_the_platform_keeps_data(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FLASHLAB_HOME")
    assert record.home().is_absolute()
    assert "flashlab" in record.home().parts


def test_what_was_noted_is_read(home: Path):
    record.note("exercises", "00.1", passed=True)
    record.note("predictions", "01.1", right=False, answer={"hbm_peak": 3})
    record.note("exercises", "00.1", tries=2)
    assert record.read()["exercises"] == {"00.1": {"passed": True, "tries": 2}}
    assert [path.name for path in home.iterdir()] == ["progress.json"]  # nothing half-written beside it


@pytest.mark.parametrize(
    "content",
    ["", "{", "[" * 100_000, "[]", "null", "7", '{"schema": 1}', '{"schema": 1, "predictions": [], "exercises": {}}', "\x00\xff",
     '{"schema": 1, "predictions": {"00.1": 3}, "exercises": {}}'],
)  # fmt: skip
def test_a_broken_file_is_set_aside(home: Path, content: str):
    home.mkdir()
    (home / "progress.json").write_text(content, encoding="latin-1")
    assert "exercises 0 of" in str(fl.progress())
    assert (home / "progress.broken").read_text(encoding="latin-1") == content
    record.note("exercises", "00.1", passed=True)
    assert json.loads((home / "progress.json").read_text())["exercises"] == {"00.1": {"passed": True}}


def test_a_file_of_a_later_version_is_left_alone(home: Path):
    home.mkdir()
    (home / "progress.json").write_text('{"schema": 99, "new": "things"}')
    assert "exercises 0 of" in str(fl.progress())
    record.note("exercises", "00.1", passed=True)
    assert json.loads((home / "progress.json").read_text()) == {"schema": 99, "new": "things"}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no lock for this")
def test_notebooks_that_write_at_the_same_time_lose_nothing(home: Path):
    script = "import sys; from flashlab.lessons import record\n"
    script += "for i in range(20): record.note('exercises', f'{sys.argv[1]}.{i}', passed=True)"
    children = [subprocess.Popen([sys.executable, "-c", script, str(n)]) for n in range(3)]
    assert [child.wait() for child in children] == [0, 0, 0]
    assert len(record.read()["exercises"]) == 60


def test_where_nothing_can_be_written_nothing_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLASHLAB_HOME", str(tmp_path / "file" / "home"))
    record.note("exercises", "00.1", passed=True)
    assert "exercises 0 of" in str(fl.progress())


def test_answered_and_right_are_counted_apart():
    record.note("predictions", "00.1", right=True)
    for name in ("00.2", "00.3"):
        record.note("predictions", name, right=False)
    assert str(fl.progress()).splitlines()[0].endswith("predictions 3 of 3 answered, 1 right; exercises 0 of 4")


def test_entries_of_lessons_that_are_gone_do_not_count():
    record.note("exercises", "99.9", passed=True)
    record.note("predictions", "99.9", right=True)
    assert all("exercises 0 of" in line for line in str(fl.progress()).splitlines())
