"""Writes docs/found-in-public-kernels.md from the newest results of kinds `found` and `found-gpu`: `python -m docs._site.found`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docs._site.blocks import replaced
from docs._site.defects import DEFECTS, NUMBERS, Defect, command
from flashlab.base.files import replace_file
from flashlab.measure import results
from flashlab.measure.results import Result, markdown_table
from studies.closed import FOUND, FOUND_ON_GPU, off, said, without

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "found-in-public-kernels.md"
NOT_RUN = "These launches have not been run on a GPU yet, under compute-sanitizer or without it.\n"


def blocks(folder: Path = ROOT / results.FOLDER) -> Mapping[str, str]:
    """The page's blocks, by name. A defect without a result has no section."""
    newest, on_gpu = (results.latest(kind.name, folder) for kind in (FOUND, FOUND_ON_GPU))
    rows = {_key(row): row for row in (FOUND.data(newest).rows if newest else ())}
    seen = {_key(row): row for row in (FOUND_ON_GPU.data(on_gpu).rows if on_gpu else ())}
    # of the same file, or it is no comparison
    both = {key: (row, seen[key]) for key, row in rows.items() if key in seen and seen[key].commit == row.commit}

    def sections(defects: Sequence[Defect]) -> str:
        texts = [section(each, rows[key], seen_of(key)) for each in defects if (key := _key(each)) in rows]
        return "\n".join(texts)

    def seen_of(key: tuple[str, str, str]) -> str:
        return sighting(both[key][1], on_gpu) if on_gpu and key in both else ""

    return {
        "gpu": summary(list(both.values()), on_gpu) if on_gpu and both else NOT_RUN,
        "defects": sections(DEFECTS),
        "numbers": sections(NUMBERS),
    }


def _key(of: Any) -> tuple[str, str, str]:
    return of.repository, of.file, of.kernel


def summary(rows: Sequence[tuple[Any, Any]], on_gpu: Result) -> str:
    """What each tool saw of each defect."""
    header = ("kernel", "on the GPU", "compute-sanitizer", "flashlab")
    cells = [(f"`{one.kernel}`", shown(other.plain), tools(other.tools), kinds(one)) for one, other in rows]
    launches = max(other.plain.launches for _, other in rows)
    return f"""{_where(on_gpu)} the same launches ran {launches:,} times without a tool, and under each tool of compute-sanitizer.
A number is that of a tool's findings. "At its lines" says that one of them names a line that takes
part in the defect. "Off" is how far an element is at most from NumPy in float64.

{markdown_table(header, cells)}
"""


def shown(plain: Any) -> str:
    """What the launches without a tool left, in a few words. A CUDA error is said by its name."""
    if plain.distinct is None:
        return (re.findall(r"\bcuda[A-Z]\w+", plain.said) or ["no end"])[-1]
    return without(plain).replace("always the same", "same results")


def tools(each: Sequence[Any]) -> str:
    """The tools that say anything, or that none does."""
    found: dict[str, list[str]] = {}
    for one in each:
        if (words := said(one)) != "–":
            found.setdefault(words, []).append(one.tool)
    return "; ".join(f"{', '.join(names)}: {words}" for words, names in found.items()) or "nothing"


def kinds(row: Any) -> str:
    """What the emulator's findings are, each kind once, and how far its result is off.

    >>> from studies.closed import DEFECT
    >>> kinds(DEFECT.model_construct(findings=["k.cu:7, called at k.cu:9: race: thread 0 …"], nans=0, error=0.5))
    'race, 0.5 off'
    """
    if row.nans:
        return f"{row.nans} NaN"
    named = (re.match(r"\S+?(?:, called at \S+)?: ([^:]+): ", text) for text in row.findings)
    return ", ".join(dict.fromkeys(match[1] for match in named if match)) + off(row.error)


def section(defect: Defect, row: Any, seen: str) -> str:
    """One defect: where, why, what a GPU showed, what flashlab says, a repair, and the command that shows it."""
    lines = row.lines or defect.lines
    where = f"https://github.com/{row.repository}/blob/{row.commit}/{row.file}#L{min(lines)}-L{max(lines)}"
    words = " ".join(map(shlex.quote, ["flashlab", *command(defect, Path(defect.file).name)]))
    if row.nans:
        output = next(text.partition("=")[0] for text in defect.arguments if text.endswith(":out"))
        words += f" --out left.npz\npython -c \"import numpy; print(numpy.load('left.npz')['{output}'])\""
        found = [f"The launch below leaves {row.nans} NaN. No access is wrong, so the emulator has no finding."]
    else:
        found = ["\n".join(["```text", *row.findings, "```"])]
        found += [f"The result of this launch is {near(row.error)}."] if row.error is not None else []
    parts = [
        f"## {defect.title}",
        f"[{row.repository}, {row.file}]({where}), `{row.kernel}`. {defect.why}",
        *filter(None, [seen]),
        *found,
        f"A repair: {defect.repair}",
        f"```bash\n{words}\n```\n",
    ]
    return "\n\n".join(parts)


def sighting(row: Any, on_gpu: Result) -> str:
    """What a GPU showed of one defect, as a paragraph."""
    quiet = [each.tool for each in row.tools if each.findings == 0]
    words = [f"{_where(on_gpu)} {alone(row.plain)}"]
    if quiet:
        words.append(f"Nothing is found by {' and '.join(filter(None, (', '.join(quiet[:-1]), quiet[-1])))}.")
    return " ".join([*words, *(message(each) for each in row.tools if each.findings != 0)])


def alone(plain: Any) -> str:
    """What the launches without a tool left."""
    if plain.distinct is None:
        return f"the launches didn't come to their end: {plain.said}."
    one = plain.distinct == 1
    left = f"{plain.launches:,} launches left {'the same result' if one else f'{plain.distinct:,} different results'}."
    if plain.nans:
        return f"{left} {'It holds' if one else 'They hold'} {plain.nans:,} NaN."
    return left if plain.error is None else f"{left} {'It is' if one else 'They are'} {near(plain.error)}."


def near(error: float) -> str:
    """How far results are from NumPy's.

    >>> near(0.125), near(0.0)
    ('at most 0.12 from NumPy in float64', 'exact')
    """
    return f"at most {error:.2g} from NumPy in float64" if error else "exact"


def message(each: Any) -> str:
    """What a tool found, as a sentence."""
    if each.findings is None:
        return f"{each.tool} didn't come to its end: `{each.first}`."
    warnings = f" ({each.warnings:,} of them as warnings)" if each.warnings else ""
    lines = f", at lines {', '.join(map(str, each.lines))}" if each.lines else ""
    return f"{each.tool} finds {each.findings:,}{warnings}{lines}; the first: `{each.first}`."


def _where(on_gpu: Result) -> str:
    return f"On an {results.title(on_gpu.content)} ({str(on_gpu.content['date'])[:10]})"


if __name__ == "__main__":
    replace_file(PAGE, replaced(PAGE.read_text(encoding="utf-8"), "found", blocks()))
