"""The notebooks: made from their sources, run, and compared with what was committed.

    python notebooks/source/lessons.py build [NAME …]    make them from notebooks/source/*.md
    python notebooks/source/lessons.py check [NAME …]    run copies, and say where the committed ones are stale

notebooks/*.ipynb are what a reader opens, wherever that is: no cell of theirs has run, for a reader is to predict first.
notebooks/outputs/*.ipynb are the same after each cell has run. The site shows these, with what a question asks for folded.

A source is Markdown; what is fenced as `python` is a cell. `<!-- exercise: 00.1 -->` on a line of its own stands for the
exercise: task, skeleton, check, hints and solution, all from flashlab/lessons. Sources, text and integers are compared
exactly, floats (numbers with a point or an exponent) within 1e-3, figures by the table that each carries.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from docs._site import release  # noqa: E402
from flashlab.base.files import replace_file  # noqa: E402
from flashlab.lessons.catalogue import CLASS_EXERCISES, EXERCISES, KERNEL_EXERCISES, TRITON_EXERCISES  # noqa: E402
from flashlab.lessons.class_exercise import ClassExercise  # noqa: E402
from flashlab.lessons.exercise import Exercise  # noqa: E402
from flashlab.lessons.kernel_exercise import KernelExercise  # noqa: E402
from flashlab.lessons.show import TABLE  # noqa: E402

SOURCES, NOTEBOOKS, OUTPUTS = ROOT / "notebooks" / "source", ROOT / "notebooks", ROOT / "notebooks" / "outputs"
CLOSE = 1e-3
"""How far floats may be apart, relative."""
LARGEST = 500_000
"""Bytes of a notebook."""
EXERCISE = re.compile(r"(?m)^<!-- exercise: (\S+) -->$")
NUMBER = re.compile(r"((?<![\w.])[-+−]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?)")
UNSTEADY = re.compile(r"0x[0-9a-f]{6,}|\b20\d\d-\d\d-\d\d\b|\b\d\d:\d\d:\d\d\b|(?<![\w.<])/(?:home|Users|var|usr|opt)/")
"""What no output may hold: addresses, dates and times, paths."""


# -- sources ------------------------------------------------------------------------------------------------------


def notebook_of(source: str) -> NotebookNode:
    """The notebook that a source describes, without outputs."""
    cells: list[NotebookNode] = setup()
    for cell in jupytext.reads(source, fmt="md").cells:
        if cell.cell_type == "markdown":
            cells += markdown(cell.source)
        else:
            cells.append(new_code_cell(cell.source))
    for n, cell in enumerate(cells):
        cell["id"] = f"cell-{n}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def setup() -> list[NotebookNode]:
    """The first cell, where flashlab may have to be installed: from where pyproject.toml says that it is."""
    where = release.stated()
    if where.requirement("lab") is None:
        return []
    code = f'try:\n    import flashlab\nexcept ImportError:\n    %pip install --quiet "{where.requirement("lab")}"'
    return [new_code_cell(code)]


def markdown(text: str) -> Iterator[NotebookNode]:
    """Markdown, with exercises in the place of their marks."""
    for n, part in enumerate(EXERCISE.split(text)):
        if n % 2:
            cells, files = EXERCISES | CLASS_EXERCISES, KERNEL_EXERCISES | TRITON_EXERCISES
            yield from exercise(cells[part]) if part in cells else kernel_exercise(files[part])
        elif part.strip():
            yield new_markdown_cell(part.strip())


def exercise(this: Exercise | ClassExercise) -> Iterator[NotebookNode]:
    """Task, skeleton with its check, and folded: hints one by one, the solution."""
    yield posed(this)
    shapes = (
        r"(?m)^(?:@fl\.program.*\ndef|class) (\w+)",
        r"(?m)^def (\w+)",
    )  # other functions may stand before a program
    name = next(found[1] for shape in shapes if (found := re.search(shape, this.skeleton)))
    yield new_code_cell(f'{this.skeleton}\n\nfl.check({name}, exercise="{this.name}")')
    yield hints(this.hints, f"```python\n{this.solution}```")


def posed(this: Exercise | KernelExercise | ClassExercise) -> NotebookNode:
    """An exercise's title and task."""
    extra = " (extra)" if this.extra else ""
    return new_markdown_cell(f"### Exercise {this.name}{extra}: {this.title}\n\n{this.task}")


def kernel_exercise(this: KernelExercise) -> Iterator[NotebookNode]:
    """The same, for a file: one cell writes it, the next one checks it."""
    yield posed(this)
    yield new_code_cell(f"%%writefile {this.file}\n{this.skeleton}")
    yield new_code_cell(f'fl.check("{this.file}", exercise="{this.name}")')
    yield hints(this.hints, f"```{'cuda' if this.suffix == '.cu' else 'python'}\n{this.solution}```")


def hints(graded: Sequence[str], solution: str) -> NotebookNode:
    """Hints one by one, then the solution, each folded."""
    folded = [*((f"Hint {n}", hint) for n, hint in enumerate(graded, 1)), ("Solution", solution)]
    parts = (f"<details><summary>{title}</summary>\n\n{text}\n\n</details>" for title, text in folded)
    return new_markdown_cell("\n".join(parts))


# -- running ------------------------------------------------------------------------------------------------------


def run(notebook: NotebookNode) -> NotebookNode:
    """Execute a notebook in place, as it is committed. Raises on a cell that fails or complains."""
    execute(notebook, static=True)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell["outputs"] = steady(cell.outputs)
    if problems := list(complaints(notebook)):
        raise SystemExit("\n".join(problems))
    return notebook


def execute(notebook: NotebookNode, *, static: bool) -> None:
    """Run all cells, in a folder and with a home of their own; `static` has pictures in place of sliders and players."""
    with tempfile.TemporaryDirectory(prefix="lesson-") as folder:
        environment = {
            "FLASHLAB_HOME": folder,
            "FLASHLAB_STATIC": "1" if static else "",
            "IPYTHONDIR": folder,
            "PYTHONPATH": str(ROOT),
            "OPENBLAS_NUM_THREADS": "1",
            "MPLBACKEND": "Agg",
            "JUPYTER_PLATFORM_DIRS": "1",
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        }
        client = NotebookClient(
            notebook, timeout=120, kernel_name="python3", record_timing=False, resources={"metadata": {"path": folder}}
        )
        client.execute(env=os.environ | environment)


def steady(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Outputs without what differs from run to run: where the kernel cut a stream in two is chance."""
    merged: list[NotebookNode] = []
    for output in outputs:
        output.pop("transient", None)
        if output.output_type == "stream" and merged and merged[-1].get("name") == output.name:
            merged[-1]["text"] += output.text
        else:
            merged.append(output)
    return merged


def complaints(notebook: NotebookNode) -> Iterator[str]:
    """What no committed notebook may hold."""
    if (size := len(nbformat.writes(notebook))) > LARGEST:
        yield f"{size:,} bytes: expected at most {LARGEST:,}"
    for n, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            if output.output_type == "error" or output.get("name") == "stderr":
                yield f"cell {n} complains: {output.get('text') or output.get('evalue')}"
            for kind, text in contents(output):
                if kind.startswith("image/") and TABLE not in output.get("data", {}):
                    yield f"cell {n}: a figure without its table"
                elif "widget" in kind:
                    yield f"cell {n}: a live widget, which nobody sees outside of Jupyter"
                elif not kind.startswith("image/") and (found := UNSTEADY.search(str(text))):
                    yield f"cell {n}: {found[0]!r} differs from run to run"


# -- comparing ----------------------------------------------------------------------------------------------------


def contents(output: NotebookNode) -> list[tuple[str, Any]]:
    """An output as (MIME type or stream, content)."""
    if output.output_type == "stream":
        return [(output.name, output.text)]
    return sorted(output.get("data", {}).items())


def differences(committed: NotebookNode, fresh: NotebookNode) -> Iterator[str]:
    """Where a committed notebook isn't what its source gives today."""
    if len(committed.cells) != len(fresh.cells):
        yield f"{len(committed.cells)} cells, the source has {len(fresh.cells)}"
        return
    for n, (old, new) in enumerate(zip(committed.cells, fresh.cells, strict=True)):
        if (old.cell_type, old.source) != (new.cell_type, new.source):
            yield f"cell {n}: another source"
            continue
        was, now = ([pair for o in cell.get("outputs", []) for pair in contents(o)] for cell in (old, new))
        if [kind for kind, _ in was] != [kind for kind, _ in now]:
            yield f"cell {n}: outputs of the kinds {[k for k, _ in was]}, now {[k for k, _ in now]}"
            continue
        for (kind, a), (_, b) in zip(was, now, strict=True):
            if not kind.startswith("image/") and (what := unequal(a, b)):  # a figure is judged by its table
                yield f"cell {n}, {kind}: {what}"


def unequal(a: Any, b: Any) -> str | None:
    """How two texts, tables or numbers differ, or None."""
    if isinstance(a, dict) and isinstance(b, dict):
        return unequal(list(a), list(b)) or unequal(list(a.values()), list(b.values()))
    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return f"{len(a)} entries, now {len(b)}"
        return next((what for x, y in zip(a, b, strict=True) if (what := unequal(x, y))), None)
    if isinstance(a, float) and isinstance(b, int | float) or isinstance(b, float) and isinstance(a, int):
        return None if near(a, b) else f"{a}, now {b}"
    if isinstance(a, str) and isinstance(b, str):
        return unequal_text(a, b)
    return None if type(a) is type(b) and a == b else f"{a!r}, now {b!r}"


def unequal_text(a: str, b: str) -> str | None:
    was, now = NUMBER.split(a), NUMBER.split(b)
    for n in range(max(len(was), len(now))):
        x, y = (part[n] if n < len(part) else "" for part in (was, now))
        both_floats = n % 2 and all(re.search(r"[.eE]", part) for part in (x, y))
        same = near(*(float(part.replace(",", "").replace("−", "-")) for part in (x, y))) if both_floats else x == y
        if not same:
            return f"{x.strip()!r}, now {y.strip()!r}"
    return None


def near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=CLOSE, abs_tol=1e-12) or (math.isnan(a) and math.isnan(b))


# -- commands -----------------------------------------------------------------------------------------------------


def text(notebook: NotebookNode) -> str:
    return nbformat.writes(notebook, indent=1) + "\n"


def build(name: str) -> None:
    notebook = notebook_of((SOURCES / f"{name}.md").read_text(encoding="utf-8"))
    replace_file(NOTEBOOKS / f"{name}.ipynb", text(notebook))
    replace_file(OUTPUTS / f"{name}.ipynb", text(run(notebook)))


def check(name: str) -> list[str]:
    paths = NOTEBOOKS / f"{name}.ipynb", OUTPUTS / f"{name}.ipynb"
    if not all(path.is_file() for path in paths):
        return [f"{name}: no notebook of this source"]
    unrun, committed = (nbformat.read(path, as_version=4) for path in paths)
    fresh = notebook_of((SOURCES / f"{name}.md").read_text(encoding="utf-8"))
    stale = [f"{name}, before it runs, {what}" for what in differences(unrun, fresh)]
    return stale + [f"{name}, {what}" for what in differences(committed, run(fresh))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("build", "check"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="as in 00_memory; all if none is given")
    asked = parser.parse_args()
    names = asked.names or sorted(path.stem for path in SOURCES.glob("*.md"))
    if asked.command == "build":
        for name in names:
            print(name, file=sys.stderr)
            build(name)
        return
    stale = [line for name in names for line in check(name)]
    sys.exit("\n".join([*stale, "run python notebooks/source/lessons.py build"]) if stale else 0)


if __name__ == "__main__":
    main()
