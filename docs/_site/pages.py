"""Makes the site's generated pages: the lessons, with working players, what was measured, the commands, the JSON Schemas and the
race's data.

docs/conf.py calls `write` before Sphinx reads docs/. Lessons go to docs/lessons, measurements to docs/measured and schemas to
docs/schemas and docs/results/schema, which git ignores. No lesson is run: its outputs are those of notebooks/outputs/*.ipynb,
and figures keep the tables that they carry. Only cells that show a player are run, after the lesson's imports. So such a cell
must stand on its own.
"""

from __future__ import annotations

import ast
import base64
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, new_output

from docs._site import commands, headlines, race
from docs._site import figures as site_figures
from docs._site.kinds import KINDS, schemas
from docs._site.release import stated
from flashlab import Player
from flashlab.lessons.lesson13_watch import Watched
from flashlab.lessons.race import Race, style
from flashlab.lessons.show import TABLE, Shown
from flashlab.measure import results

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS, OUTPUTS, RESULTS = ROOT / "notebooks", ROOT / "notebooks" / "outputs", ROOT / results.FOLDER
IN_THE_BROWSER = tuple(sorted(path.name for n in ("0[0-4]", "1[1-5]") for path in NOTEBOOKS.glob(f"{n}_*.ipynb")))
"""Lessons that a browser's Python can run. 05 to 10 compile kernels, 11 to 13 do so in single exercises, the last ones don't."""


def write(docs: Path, *, few: bool = False) -> None:
    """Make the pages in docs/lessons and docs/measured, and what they link to. Unchanged files are left alone; files of no page are
    removed. `few` leaves out what is measured but for some of each kind."""
    chosen = some_of_each_kind() if few else every_result()
    pages = {f"measured/{name}": text for name, text in measured(chosen)} | {"commands/index.md": commands.page()}
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        pages |= {f"lessons/{name}": text for name, text in lesson(OUTPUTS / path.name)}
        pages[f"lessons/taken/{path.name}"] = path.read_text(encoding="utf-8")
    pages["lessons/index.md"] = lessons_page()
    pages["lessons/players/race-data.js"] = race.script()  # where what is served as it stands is made
    pages["lessons/players/race.css"] = style()
    pages |= {f"schemas/{name}": text for name, text in commands.schemas().items()}
    pages |= {f"results/schema/{name}": text for name, text in schemas().items()}
    for name, text in pages.items():
        path = docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for folder in ("lessons", "measured", "commands", "schemas", "results/schema"):
        for path in (docs / folder).rglob("*.*"):
            if path.relative_to(docs).as_posix() not in pages:
                path.unlink()


# -- lessons ------------------------------------------------------------------------------------------------------


MINUTES = re.compile(
    r"\*(?:About )?(?P<reading>\w+) minutes of reading(?:, (?:and )?|\. )(?P<work>.*?)\.(?P<needs>[^*]*)\*"
)
"""How a lesson says what time it takes, and what it builds on."""


def lessons_page() -> str:
    """The lessons in their order, with the time that each takes."""
    rows: list[tuple[str, str, str]] = []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        said = next(found for cell in nbformat.read(path, as_version=4).cells if (found := MINUTES.search(cell.source)))
        work = re.sub(r"^The (.*) take (.*)$", r"\1: \2", said["work"])
        work = re.sub(r" of exercises$", "", work)
        rows.append((f"[]({path.name})", f"{said['reading'].lower().replace('ten', '10')} min", work))
    names = "\n".join(path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb")))
    return (
        "# Lessons: attention, from memory to Hopper\n\n"
        "You predict each result, run it, and count it. Each lesson has exercises whose answers are judged, with the step that "
        "went wrong named. None needs a GPU. Lessons 05 to 07 and 10 to 13 need a C++ compiler. In a checkout `make lab` opens "
        "them, and where flashlab is installed `flashlab lessons` does; lessons 00 to 04, 14 and 15 also run in the browser, and "
        "11 to 13 but for their CUDA.\n\n"
        f"{results.markdown_table(('lesson', 'reading', 'exercises'), rows)}\n\n"
        f"```{{toctree}}\n:hidden:\n\n{names}\n```\n"
    )


def lesson(path: Path) -> Iterator[tuple[str, str]]:
    """Yields names and texts of files: each player as a page, then the notebook with its players, races and figures shown."""
    notebook = nbformat.read(path, as_version=4)
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = 0
    notebook.cells = [file_shown(this) for this in notebook.cells]
    fold(notebook.cells)
    for this in notebook.cells:
        if this.cell_type != "code":
            this["source"] = this.source.replace("](../docs/", "](../")  # the page lies in docs/lessons
            continue
        if imports_only(this.source):
            exec(compile(this.source, path.name, "exec"), names)
        elif re.search(r"(?m)^(race|watch)\(", this.source):
            this["outputs"] = [new_output("display_data", {"text/html": played(this.source, names, path.name).frame()})]
        elif "step_through(" in this.source:
            shown += 1
            player, alone = played(this.source, names, path.name), f"{path.stem}-player-{shown}.html"
            assert isinstance(player, Player)
            yield f"players/{alone}", player.html()
            link = f'<p><a href="../_static/{alone}">The player in a window of its own</a></p>'
            this["outputs"] = [new_output("display_data", {"text/html": player.frame() + link})]
        else:
            this["outputs"] = [with_table(output) for output in this.outputs]
    notebook.cells.insert(1, new_markdown_cell(taken(path.name, stated().github), id="taken"))
    yield path.name, nbformat.writes(notebook, indent=1)


def fold(cells: Iterable[NotebookNode]) -> None:
    """Fold what cells give from a question on up to the next section: a reader is to predict first."""
    asked = False
    for this in cells:
        if this.cell_type == "code":
            if asked:
                this.metadata["tags"] = ["hide-output"]
            asked |= "fl.predict(" in this.source
        else:
            asked &= not re.search(r"(?m)^## ", this.source)


def taken(name: str, github: str) -> str:
    """How a reader comes to run this lesson: its file, the command that opens all, and a click where there is a repository."""
    said = (
        f"*Run it yourself: {{download}}`this notebook <taken/{name}>`, or all of them with `flashlab lessons` "
        "([install](../install.md))"
    )
    if name in IN_THE_BROWSER:
        said += f', or <a href="../lite/lab/index.html?path={name}">in the browser</a>'
    if github:
        said += f", or [on Binder](https://mybinder.org/v2/gh/{github}/HEAD?labpath=notebooks/{name})"
    return said + ".*"


def file_shown(this: NotebookNode) -> NotebookNode:
    """A cell that writes a CUDA file becomes a listing in CUDA's colours. Other cells stay as they are."""
    if not (found := re.match(r"%%writefile (\S+\.cuh?)\n", this.source)):
        return this
    shown = f"```{{code-block}} cuda\n:caption: {found[1]}\n\n{this.source[found.end() :]}\n```"
    return new_markdown_cell(shown, id=this.id)


def imports_only(source: str) -> bool:
    """True if a cell has nothing but imports. A cell with magics such as `%%writefile` has more."""
    if re.search(r"(?m)^\s*[%!]", source):
        return False
    body = ast.parse(source).body
    return bool(body) and all(isinstance(node, ast.Import | ast.ImportFrom) for node in body)


def played(source: str, names: Mapping[str, Any], file: str) -> Player | Race | Watched:
    """What a cell that ends in `step_through(…)`, `race(…)` or `watch(…)` shows in Jupyter."""
    *body, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        raise ValueError(f"{file}: a cell with a player must end in step_through(…)")
    here = dict(names)
    with patch.dict(os.environ):
        os.environ.pop("FLASHLAB_STATIC", None)
        exec(compile(ast.Module(body, []), file, "exec"), here)
        return eval(compile(ast.Expression(last.value), file, "eval"), here)


def with_table(output: NotebookNode) -> NotebookNode:
    """A figure as HTML: the picture, and the table that it carries folded below it. Other outputs stay as they are."""
    data = output.get("data", {})
    if TABLE not in data:
        return output
    return new_output("display_data", {"text/html": figure(data["image/svg+xml"], data[TABLE])})


def figure(svg: str, table: Mapping[str, Any]) -> str:
    """A picture and its table as HTML."""
    about = escape("a figure of " + ", ".join(column for column in table["columns"] if column), quote=True)
    picture = base64.b64encode(svg.encode()).decode("ascii")
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table["columns"])
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell(x))}</td>' for x in row)}</tr>" for row in table["rows"])
    return (
        f'<figure class="drawn"><img alt="{about}; its table is below" src="data:image/svg+xml;base64,{picture}">'
        f"<details><summary>The figure as a table</summary><div class='table-wrapper'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div></details></figure>"
    )


def cell(x: Any) -> str:
    return "–" if x is None else f"{x:,}" if isinstance(x, int) else f"{x:,.4g}" if isinstance(x, float) else str(x)


# -- measurements -------------------------------------------------------------------------------------------------


@cache
def every_result() -> tuple[results.Result, ...]:
    """All results, oldest first. They are read once: that takes seconds."""
    return tuple(results.find(RESULTS))


def some_of_each_kind() -> list[results.Result]:
    """Of each kind, and of each part of one, the first result from a GPU and the first from a CPU: they have all that a page may
    have."""
    found: dict[tuple[Any, ...], results.Result] = {}
    for result in every_result():
        found.setdefault((result.kind, result.data.get("part"), result.content["device"] is None), result)
    return list(found.values())


def measured(chosen: Iterable[results.Result]) -> Iterator[tuple[str, str]]:
    """Yields name and Markdown of the page of these results, and of one page per result."""
    found = {name_of(result): result for result in chosen}
    yield "index.md", overview(found)
    for name, result in found.items():
        yield name, with_figure(result, site_figures.of(result))


def overview(found: Mapping[str, results.Result]) -> str:
    """The numbers that matter, and one table of all files, the newest first. site.js filters it."""
    head = ["subject", "kind", "algorithms", "device", "date", "verdict", "kernels"]
    rows = sorted(found.items(), key=lambda item: str(item[1].content["date"]), reverse=True)
    body = "\n".join(
        f'<tr><td><a href="{name.removesuffix(".md")}.html">{escape(result.about)}</a></td>'
        + "".join(f"<td>{escape(text)}</td>" for text in facts(result))
        + "</tr>"
        for name, result in rows
    )
    titles = "".join(f'<th scope="col">{each}</th>' for each in head)
    return f"""---
hide-toc: true
---

# All that was measured

Counts are exact and repeatable. That they are also *true* is for the hardware to say. Everything on this site is drawn from
these files, which the project's own commands wrote: [how to read them](../results/README.md).

{headlines.cards("../")}
## All files

Words narrow the list: `h100 bench`, `verify failed`, `flash3 today's`. A file is of *today's* kernels if none of their sources has
changed since, and of *older* ones else.

<div class="files">
<label for="filter">Show files with</label>
<input id="filter" type="search" autocomplete="off" spellcheck="false" placeholder="flash3 h100">
<span role="status">{len(rows)} files</span>
<div class="table-wrapper" role="region" aria-label="All files" tabindex="0"><table id="files">
<thead><tr>{titles}</tr></thead>
<tbody>
{body}
</tbody></table></div></div>
"""


def facts(result: results.Result) -> tuple[str, ...]:
    """A file in the words of the table: kind, algorithms, device, date, verdict, and of which kernels it is."""
    content = result.content
    device = content["device"]["name"].removeprefix("NVIDIA ").partition(" ")[0] if content["device"] else "CPU"
    names = ", ".join(result.algorithms)
    kernels = "" if not content.get("kernels") else "older" if result.older else "today's"
    return result.kind, names, device, str(content["date"])[:10], verdict(result), kernels


def verdict(result: results.Result) -> str:
    """Passed or failed, where its kind judges anything."""
    says = KINDS[result.kind].passed
    judged = [says(result.data, name) for name in result.algorithms] if says else [result.data.get("passed")]
    known = [each for each in judged if each is not None]
    return "" if not known else "passed" if all(known) else "failed"


def name_of(result: results.Result) -> str:
    """The file name of a result's page: its kind, then the name of its data file."""
    return f"{result.kind}_{result.path.stem}.md"


def page(result: results.Result) -> str:
    """A result's page: what it says, where it comes from, its figure and its tables."""
    return with_figure(result, site_figures.of(result))


def with_figure(result: results.Result, shown: Shown | None) -> str:
    """The same, where the figure has been drawn."""
    content = result.content
    device = cast("Mapping[str, Any] | None", content["device"])
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    facts = {
        **({"Algorithms": ", ".join(result.algorithms)} if result.algorithms else {}),
        "Command": f"`{content['command']}`",
        "Device": f"{device['name']}, driver {content['driver']}" if device else "CPU",
        "Date": str(content["date"]),
        "Versions": versions,
        "Data": f"[{result.path.name}](../results/{result.path.relative_to(RESULTS).as_posix()})",
    }
    rows = "\n".join(f"| {name} | {text} |" for name, text in facts.items())
    drawn = figure(shown.svg, {"columns": shown.columns, "rows": shown.rows}) + "\n\n" if shown else ""
    said, _, tables = KINDS[result.kind].markdown(result).partition("\n\n")
    back = "*One of [all files](index.md).*"
    head = f"---\norphan: true\n---\n\n# {result.kind}: {result.about}\n\n{back} {said}."
    return f"{head}\n\n| what | value |\n|---|---|\n{rows}\n\n{drawn}{tables}\n"
