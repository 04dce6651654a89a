"""A learner who gets everything right: `python tests/flashlab/lessons/learner.py NAME` runs a lesson with all solutions filled in.

Sliders and players are live, as in Jupyter; says what didn't pass.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec

from nbformat import NotebookNode

from flashlab.lessons.catalogue import CLASS_EXERCISES, EXERCISES, KERNEL_EXERCISES, PREDICTIONS, TRITON_EXERCISES
from notebooks.source import lessons


def answered(name: str) -> tuple[NotebookNode, dict[int, str]]:
    """A lesson with every answer filled in, and what the outputs of these cells have to say."""
    notebook = lessons.notebook_of((lessons.SOURCES / f"{name}.md").read_text(encoding="utf-8"))
    expected: dict[int, str] = {}
    for n, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        if asked := re.search(r'fl\.predict\("([\d.]+)"', cell.source):
            truth = ", ".join(f"{key}={value!r}" for key, value in PREDICTIONS[asked[1]].truth().items())
            cell.source, expected[n] = f'fl.predict("{asked[1]}", {truth})', ": right"
        elif posed := re.search(r'fl\.check\(\w+, exercise="([\d.]+)"\)', cell.source):
            cell.source, expected[n] = (EXERCISES | CLASS_EXERCISES)[posed[1]].solution + "\n" + posed[0], "Passed"
        elif posed := re.search(r'fl\.check\("\w+\.(?:cu|py)", exercise="([\d.]+)"\)', cell.source):
            exercise = (KERNEL_EXERCISES | TRITON_EXERCISES)[posed[1]]
            expected[n] = "Passed" if posed[1] in KERNEL_EXERCISES or find_spec("triton") else "Not here"
            notebook.cells[n - 1].source = f"%%writefile {exercise.file}\n{exercise.solution}"
    return notebook, expected


if __name__ == "__main__":
    notebook, expected = answered(sys.argv[1])
    os.environ.pop("FLASHLAB_STATIC", None)
    lessons.execute(notebook, static=False)
    for n, words in expected.items():
        (output,) = notebook.cells[n].outputs
        if words not in output.data["text/plain"]:
            sys.exit(f"cell {n}: {output.data['text/plain']}")
    lesson = sys.argv[1].split("_")[0]
    (progress,) = (cell.outputs[0].data["text/plain"] for cell in notebook.cells if cell.source == "fl.progress()")
    (line,) = (line for line in progress.splitlines() if line.startswith(lesson))
    counts = re.findall(r"(\d+) of (\d+)", line)
    if any(done != all_of_them for done, all_of_them in counts) or f"answered, {counts[0][1]} right" not in line:
        sys.exit(line)
    if not any(
        "widget" in kind for cell in notebook.cells for o in cell.get("outputs", []) for kind in o.get("data", {})
    ):
        sys.exit("no sliders")
