"""The notebooks: what is committed is what their sources give today, and a stale one of any kind is found."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_output

from docs._site import pages, readme
from docs._site.release import Release
from flashlab.lessons.catalogue import (
    CLASS_EXERCISES,
    EXERCISES,
    KERNEL_EXERCISES,
    LESSONS,
    PREDICTIONS,
    TRITON_EXERCISES,
)
from flashlab.lessons.show import TABLE
from notebooks.source import lessons

ROOT = Path(__file__).resolve().parents[3]
FILES = {**KERNEL_EXERCISES, **TRITON_EXERCISES}
CELLS = {**EXERCISES, **CLASS_EXERCISES}
POSED = [*CELLS, *FILES]
NAMES = sorted(path.stem for path in lessons.SOURCES.glob("*.md"))


def source(name: str) -> str:
    return (lessons.SOURCES / f"{name}.md").read_text(encoding="utf-8")


def committed(name: str) -> NotebookNode:
    return nbformat.read(lessons.OUTPUTS / f"{name}.ipynb", as_version=4)


def opened(path: Path) -> NotebookNode:
    """What a reader has on the screen who opens this file, before anything runs."""
    return nbformat.read(path, as_version=4)


def python(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, since kernels, sockets and warnings are Jupyter's business."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=280)


SHORT = ("04_flash2",)
"""A lesson that quotes much of the sources: a change there is seen at once. The others are run in `make test-long`."""

CAPSTONE = "10"
"""It has one exercise, the largest."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.long]) for n in NAMES])
def test_a_notebook_is_what_its_source_gives(name: str):
    done = python("notebooks/source/lessons.py", "check", name)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long  # for the test before runs each notebook, and the exercises' tests each solution
@pytest.mark.parametrize("name", NAMES)
def test_a_learner_gets_through(name: str):
    """With every solution and every right prediction filled in, in Jupyter's kernel, with live sliders and players."""
    done = python("tests/flashlab/lessons/learner.py", name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_lesson_has_a_notebook_and_nothing_else_lies_there():
    assert [name.split("_")[0] for name in NAMES] == list(LESSONS)
    for folder in (lessons.NOTEBOOKS, lessons.OUTPUTS):
        assert sorted(path.stem for path in folder.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_a_reader_opens_is_the_source_and_no_cell_has_run(name: str):
    """A reader predicts first. What the site shows has the same cells, and their outputs."""
    notebook, shown = opened(lessons.NOTEBOOKS / f"{name}.ipynb"), committed(name)
    assert notebook == lessons.notebook_of(source(name)), "run make lessons"
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    assert [cell.source for cell in notebook.cells] == [cell.source for cell in shown.cells]
    assert any(cell.get("outputs") for cell in shown.cells)


PLACES = [
    Release("x", "", False),
    Release("x", "", True),
    *(Release("x", "https://github.com/us/it", n) for n in (0, 1)),
]


@pytest.mark.parametrize("where", PLACES, ids=lambda x: f"{x.repository or 'nowhere'}, {bool(x.released)}")
def test_links_and_containers_open_a_notebook_that_has_not_run(where: Release):
    """Binder, Colab, the container's and a checkout's pages: what each opens lies here, without outputs."""
    texts = [text for _, made in readme.drawn(where) for text in made.values()]
    texts += [pages.taken(f"{name}.ipynb", where.github) for name in NAMES]
    texts += [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "Dockerfile")]
    found = [path for text in texts for path in re.findall(r"(?<![\w/-])notebooks/[\w/]*\.ipynb", text)]
    found += [path for text in texts for path in re.findall(r"(?:labpath=|/blob/HEAD/)([\w/.-]+)", text)]
    assert len([text for text in texts if "mybinder.org" in text]) == (len(NAMES) + 1) * bool(where.repository)
    assert len(found) >= 3
    for path in found:
        assert not any(cell.get("outputs") for cell in opened(ROOT / path).cells), path


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_valid_light_and_steady(name: str):
    notebook = committed(name)
    nbformat.validate(notebook)
    assert list(lessons.complaints(notebook)) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_has_what_every_lesson_has(name: str):
    text, number = source(name), name.split("_")[0]
    assert set(re.findall(r"<!-- exercise: (\S+) -->", text)) == {n for n in POSED if n.startswith(number)}
    assert set(re.findall(r'fl\.predict\("([\d.]+)"', text)) == {n for n in PREDICTIONS if n.startswith(number)}
    assert sum(n.startswith(number) for n in POSED) >= (1 if number == CAPSTONE else 3)
    for part in (
        "**Afterwards you can**",
        "From memory",
        "On your own numbers",
        "What to read next",
        "put to the test",
        "explore(",
    ):
        assert part in text, part
    assert all(call.count("...") >= 1 for call in re.findall(r"fl\.predict\([^)]*\)", text))  # nobody's answers


@pytest.mark.parametrize("name", NAMES)
def test_skeletons_in_the_notebook_are_the_exercises(name: str):
    cells = [cell.source for cell in committed(name).cells]
    for exercise in CELLS.values():
        if exercise.lesson == name.split("_")[0]:
            assert any(cell.startswith(exercise.skeleton) for cell in cells if f'exercise="{exercise.name}"' in cell)
            assert any(
                exercise.solution in cell and cell.count("<details>") == len(exercise.hints) + 1 for cell in cells
            )


@pytest.mark.parametrize("name", NAMES)
def test_files_in_the_notebook_are_the_exercises(name: str):
    cells = [cell.source for cell in committed(name).cells]
    for exercise in FILES.values():
        if exercise.lesson == name.split("_")[0]:
            check = f'fl.check("{exercise.file}", exercise="{exercise.name}")'
            n = cells.index(check)
            assert cells[n - 1].rstrip() == f"%%writefile {exercise.file}\n{exercise.skeleton}".rstrip()
            assert exercise.solution in cells[n + 1]
            assert cells[n + 1].count("<details>") == len(exercise.hints) + 1


@pytest.mark.parametrize("name", NAMES)
def test_exercises_have_not_begun_and_predictions_are_open(name: str):
    for cell in committed(name).cells:
        if cell.cell_type == "code" and re.search(r"^fl\.(check|predict)\(", cell.source, re.MULTILINE):
            (output,) = cell.outputs
            assert re.search("Not started|not answered", output.data["text/plain"]), cell.source


@pytest.mark.parametrize(
    ("repository", "released", "installs"),
    [("", False, None), ("https://example.org/x", False, "x[lab] @ git+https://example.org/x"), ("", True, "x[lab]")],
)
def test_the_first_cell_installs_from_where_it_is_to_be_had(
    repository: str, released: bool, installs: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lessons.release, "stated", lambda: Release("x", repository, released))
    first = lessons.notebook_of(source(NAMES[0])).cells[0].source
    assert ("pip" in first) == (installs is not None)
    assert installs is None or f'%pip install --quiet "{installs}"' in first


# -- stale outputs ------------------------------------------------------------------------------------------------


def notebook(text: str = "12,345 bytes in 0.1234 s", svg: str = "<svg/>", value: float = 2.5) -> NotebookNode:
    """A cell that prints, and one that shows a figure."""
    table = {"columns": ["n", "x"], "rows": [[1, value], [2, None]]}
    figure = new_output(
        "execute_result", {"image/svg+xml": svg, "text/plain": "figure", TABLE: table}, execution_count=1
    )
    return nbformat.v4.new_notebook(
        cells=[
            new_code_cell("print(1)", outputs=[new_output("stream", name="stdout", text=text)], id="a"),
            new_code_cell("draw()", outputs=[figure], id="b"),
        ]
    )


def changed(change: Callable[[NotebookNode], object]) -> NotebookNode:
    stale = copy.deepcopy(notebook())
    change(stale)
    return stale


def with_table(rows: list[list[float | None]]) -> Callable[[NotebookNode], object]:
    return lambda nb: nb.cells[1].outputs[0].data[TABLE].update(rows=rows)


STALE: dict[str, Callable[[NotebookNode], object]] = {
    "source": lambda nb: nb.cells[0].update(source="print(2)"),
    "cell-missing": lambda nb: nb.cells.pop(),
    "integer": lambda nb: nb.cells[0].outputs[0].update(text="12,346 bytes in 0.1234 s"),
    "text": lambda nb: nb.cells[0].outputs[0].update(text="12,345 bits in 0.1234 s"),
    "float": lambda nb: nb.cells[0].outputs[0].update(text="12,345 bytes in 0.1238 s"),
    "sign": lambda nb: nb.cells[0].outputs[0].update(text="12,345 bytes in -0.1234 s"),
    "figure's-float": with_table([[1, 2.51], [2, None]]),
    "figure's-integer": with_table([[3, 2.5], [2, None]]),
    "figure's-gap": with_table([[1, 2.5], [2, 1.0]]),
    "figure's-rows": with_table([[1, 2.5]]),
    "output-missing": lambda nb: nb.cells[0].outputs.pop(),
    "figure-missing": lambda nb: nb.cells[1].outputs[0].data.pop("image/svg+xml"),
}


@pytest.mark.parametrize("kind", STALE)
def test_a_stale_notebook_of_each_kind_is_found(kind: str):
    assert len(list(lessons.differences(changed(STALE[kind]), notebook()))) == 1


@pytest.mark.parametrize(
    "fresh",
    [
        notebook(),
        notebook(text="12,345 bytes in 0.12341 s"),
        notebook(svg="<svg>drawn elsewhere</svg>"),
        notebook(value=2.5001),
    ],
)
def test_what_differs_by_rounding_or_by_pixels_is_no_difference(fresh: NotebookNode):
    assert list(lessons.differences(notebook(), fresh)) == []


@given(st.text())
def test_a_text_equals_itself(text: str):
    assert lessons.unequal(text, text) is None


@given(st.floats(0.01, 1e6), st.floats(-0.1, 0.1))
def test_floats_are_told_apart_beyond_a_thousandth(n: float, change: float):
    a, b = f"x = {n:.8e} s", f"x = {n * (1 + change):.8e} s"
    if abs(change) > 1.1e-3:
        assert lessons.unequal(a, b)
    elif abs(change) < 0.9e-3:
        assert lessons.unequal(a, b) is None


@given(st.integers(-(10**12), 10**12), st.integers(-3, 3))
def test_integers_are_compared_exactly(n: int, change: int):
    assert (lessons.unequal(f"{n:,} bytes", f"{n + change:,} bytes") is None) == (change == 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<object at 0x7f12ab34cd>", "0x7f12ab34cd"),
        ("done at 12:34:56", "12:34:56"),
        ("2026-11-21", "2026-11-21"),
        ("in /usr/lib/python3", "/usr/"),
        ("x" * 600_000, "at most 500,000"),
    ],
)
def test_what_differs_from_run_to_run_is_refused(text: str, says: str):
    assert any(says in line for line in lessons.complaints(notebook(text=text)))


def test_figures_without_tables_errors_and_warnings_are_refused():
    bare = changed(lambda nb: nb.cells[1].outputs[0].data.pop(TABLE))
    warned = changed(lambda nb: nb.cells[0].outputs[0].update(name="stderr"))
    failed = changed(lambda nb: nb.cells[0].update(outputs=[new_output("error", ename="E", evalue="no", traceback=[])]))
    widget = changed(lambda nb: nb.cells[1].outputs[0].data.update({"application/vnd.jupyter.widget-view+json": {}}))
    for broken in (bare, warned, failed, widget):
        assert list(lessons.complaints(broken))


def test_streams_that_the_kernel_cut_are_one():
    parts = [new_output("stream", name="stdout", text=text) for text in ("a", "b")]
    assert [output.text for output in lessons.steady(parts)] == ["ab"]


def test_tables_are_plain_json():
    for name in NAMES:
        for cell in committed(name).cells:
            for output in cell.get("outputs", []):
                if TABLE in output.get("data", {}):
                    assert json.dumps(output.data[TABLE], allow_nan=False)
