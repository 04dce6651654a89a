"""Lessons 00 to 04, 14 and 15, and 11 to 13 but for their CUDA, need no process, no thread and no ctypes: a browser can run them.

That is tested in plain CPython, with these barred. No run in a browser is claimed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
import pytest

from docs._site import lite
from docs._site.pages import IN_THE_BROWSER
from tests.flashlab.lessons.learner import answered

ROOT = Path(__file__).resolve().parents[3]
LESSONS = [Path(name).stem for name in IN_THE_BROWSER]
Cell = tuple[str, str | None]


def browser(cells: Sequence[Cell], folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "cells.json"
    file.write_text(json.dumps(cells), encoding="utf-8")
    environment = os.environ | {
        "FLASHLAB_HOME": str(folder),
        "FLASHLAB_STATIC": "",
        "MPLBACKEND": "Agg",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, str(Path(__file__).with_name("browser.py")), str(file)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=280)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] if n[:2] != "00" else []) for n in LESSONS])
def test_a_lesson_runs_in_a_browser(name: str, tmp_path: Path) -> None:
    """With every prediction and every exercise filled in: all are right. A `.cu` file is refused in a line."""
    notebook, expected = answered(name)
    cells = list[Cell]()
    for n, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and not cell.source.startswith("%%writefile"):
            refused = "needs a C++ compiler" if re.search(r"fl\.check\(\"\w+\.cu", cell.source) else None
            cells.append((cell.source, refused or expected.get(n)))
    assert len(expected) >= 5
    done = browser(cells, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import ctypes", "ctypes"),
        ("import subprocess; subprocess.run(['true'])", "no process and no thread"),
        ("import threading; threading.Thread(target=print).start()", "no process and no thread"),
        ("1 + 1", "cell 0: 2"),
    ],
)
def test_what_is_barred_is_barred(source: str, said: str, tmp_path: Path) -> None:
    done = browser([(source, "three")], tmp_path)
    assert done.returncode != 0
    assert said in done.stderr


def test_parts_are_computed_one_after_the_other(tmp_path: Path) -> None:
    """Sequences, of which each has a thread elsewhere."""
    source = (
        "import flashlab as fl\n"
        "p = fl.Problem(batch=1, heads=1, head_dim=16, dtype='float16', lengths=[20, 30])\n"
        "fl.simulate('flash2', *fl.random_inputs(p), lengths=[20, 30])"
    )
    done = browser([(source, "run of flash2: out (1, 1, 50, 16)")], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_check_judges_in_the_notebooks_own_process(tmp_path: Path) -> None:
    """What a program prints, raises and misses is a verdict, as in a process of its own. A kernel is refused in a line."""
    head = "@fl.program\ndef mine(m, q, k, v, problem, tile):\n    "
    check = '\nfl.check(mine, exercise="00.2")'
    cells: list[Cell] = [
        ("import flashlab as fl", None),
        (f"{head}return m.output('out'){check}", "it was never stored"),
        (f"{head}raise SystemExit('enough'){check}", "enough"),
        (f"{head}print('x' * 200_000)\n    return m.output('out'){check}", "it printed more than 100,000 bytes"),
        (f"{head}1 / 0{check}", "ZeroDivisionError: division by zero"),
        ('fl.check("mine.cu", exercise="05.1")', "needs a C++ compiler, and a browser has none"),
        ("try:\n    fl.emulate\nexcept RuntimeError as error:\n    said = str(error)\nsaid", "a browser has none"),
        ("'apt' in said", "False"),
        ("import os\nos.getcwd()", str(tmp_path)),
    ]
    done = browser(cells, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_browsers_lessons_begin_with_what_installs_them(tmp_path: Path) -> None:
    lite.write(tmp_path)
    assert sorted(path.stem for path in tmp_path.iterdir()) == LESSONS
    for path in tmp_path.iterdir():
        made, source = (nbformat.read(p, as_version=4) for p in (path, ROOT / "notebooks" / path.name))
        nbformat.validate(made)
        assert made.metadata.kernelspec.name == "python"  # Pyodide's
        assert "fetching Python" in made.cells[0].source and made.cells[0].cell_type == "markdown"
        assert made.cells[1].source.startswith("%pip install")
        for cell in source.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        assert made.cells[2:] == source.cells
