"""Writes the parts of README.md, docs/matrix.md, docs/install.md and docs/verify-in-ci.md that come from data.

`python -m docs._site.readme` writes README's links and commands, its table of families and its speeds, and the matrix of all
algorithms on a page of its own, each between its marks. A test holds the pages to them. No figure there is typed by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from docs._site import evidence
from docs._site.blocks import replaced
from docs._site.release import Release, stated
from docs._site.speeds import Speed, speeds
from docs._site.timed import age
from flashlab.base.files import replace_file
from flashlab.measure import results
from flashlab.run import abi
from simulator.algorithm import Algorithm
from simulator.operations.backward import BACKWARD

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "README.md"
PAGES = [PAGE, *(ROOT / "docs" / f"{name}.md" for name in ("matrix", "install", "verify-in-ci"))]
_, MATRIX, INSTALL, CI = PAGES

FASTEST = (
    "flash2", "flash3", "flash3_backward", "flash_decoding", "paged", "mla_hopper_paged",
)  # fmt: skip
"""The kernels of README's table of speeds: those that anybody would use for something."""

Found = Path | evidence.Evidence | None


# -- the matrix -----------------------------------------------------------------------------------------------------


def program(row: Algorithm) -> Found:
    return written(row.program)


def formula(row: Algorithm) -> Found:
    return row.formula and written(row.formula)


def written(thing: Any) -> Path:
    """The file in which something is defined."""
    return Path(str(sys.modules[thing.__module__].__file__))


def kernel(row: Algorithm) -> Found:
    """The algorithm's source in CUDA or Triton."""
    return abi.own_source(row)


def lesson(row: Algorithm) -> Found:
    return ROOT / "notebooks" / f"{row.lesson}.ipynb" if row.lesson else None


COLUMNS: dict[str, Callable[[Algorithm], Found]] = {
    "program": program,
    "formula": formula,
    "kernel": kernel,
    **evidence.COLUMNS,
    "lesson": lesson,
}


@cache
def matrix() -> str:
    """A table for each family, with a row per algorithm and a tick for each thing that it has. Each tick links to that thing.

    What was measured of an older kernel has a circle, and a newer failure a cross.
    """
    parts: list[str] = []
    for title, members in families().items():
        rows = [[f"`{row.name}`", *(tick(find(row)) for find in COLUMNS.values())] for row in members]
        parts.append(f"## {title}\n\n{table(['algorithm', *COLUMNS], rows, ':-:')}")
    return "\n" + "\n".join(parts) + "\n"


def tick(found: Found) -> str:
    if found is None or isinstance(found, Path):
        return f"[✓]({link(found)})" if found else ""
    signs = []
    if found.result:
        said = f' "{found.said}"' if found.said else ""
        signs.append(f"[{evidence.STATES[found.state]}]({link(found.result.path)}{said})")
    if found.failed:
        signs.append(f"[{evidence.STATES['failed']}]({link(found.failed.path)})")
    return " ".join(signs)


def link(path: Path) -> str:
    """From a page in docs. A lesson is its page on the site."""
    return f"../{path.relative_to(ROOT).as_posix()}".replace("../docs/", "").replace("../notebooks/", "lessons/")


# -- the families ---------------------------------------------------------------------------------------------------

FAMILIES: Mapping[str, Callable[[Algorithm], bool]] = {
    "Backward passes": lambda row: row.operation is BACKWARD,
    "Triton": lambda row: row.name.endswith("_triton"),
    "MLA, the latent cache": lambda row: row.name.startswith("mla"),
    "Shared prefixes (cascade)": lambda row: row.operation.shares_prefix,
    "Caches in pages": lambda row: row.operation.in_pages,
    "Decoding": lambda row: row.name.startswith("flash_decoding"),
    "FlashAttention-3 and FP8": lambda row: row.name.startswith("flash3"),
    "FlashAttention-2": lambda row: row.name == "flash2",
    "FlashAttention-1": lambda row: row.name == "flash1",
    "The textbook, online softmax": lambda row: True,
}
"""The families by their titles, the last first: an algorithm belongs to the first one that takes it."""


def families() -> dict[str, list[Algorithm]]:
    """The algorithms of each family, in the catalogue's order."""
    found: dict[str, list[Algorithm]] = {title: [] for title in reversed(FAMILIES)}
    for row in evidence.rows():
        found[next(title for title, takes in FAMILIES.items() if takes(row))].append(row)
    return found


@cache
def family_table() -> str:
    """A row per family, and in each column how its algorithms stand."""
    finds = COLUMNS.values()
    rows = [[title, *(together([find(row) for row in of]) for find in finds)] for title, of in families().items()]
    return table(["family", *COLUMNS], rows, ":-:")


def together(found: list[Found]) -> str:
    """One sign for a family: the worst of its algorithms, and how many have anything where not all do."""
    has = [each for each in found if each is not None and (isinstance(each, Path) or each.state)]
    states = {"today's" if isinstance(each, Path) else "failed" if each.failed else each.state for each in has}
    worst = next((evidence.STATES[state] for state in ("failed", "older", "today's") if state in states), "")
    return worst if len(has) in (0, len(found)) else f"{worst} {len(has)}/{len(found)}"


# -- the speeds -----------------------------------------------------------------------------------------------------


@cache
def few_speeds() -> str:
    said = "Speed, beside the fastest kernel of others in each problem (above 1 ×, ours is faster):\n\n"
    return said + speed_table([one for one in speeds() if one.algorithm in FASTEST], "docs/")


@cache
def all_speeds() -> str:
    return speed_table(speeds(), "")


def speed_table(found: list[Speed], folder: str) -> str:
    """The ratio to the fastest peer of each cell. Links lead from a page in `folder`'s parent."""
    rows = [
        [
            f"`{one.algorithm}`", one.peers, f"{one.ratios[0]:.2f} ×", f"**{one.median:.2f} ×**", f"{one.ratios[-1]:.2f} ×",
            str(len(one.cells)), f"[{one.of.content['device']['name'].removeprefix('NVIDIA ').partition(' ')[0]}, "
            f"{str(one.of.content['date'])[:10]}]({folder}results/{one.of.path.relative_to(ROOT / results.FOLDER).as_posix()})"
            f"{age(one.of) if not one.of.of_today(one.algorithm) else ''}",
        ]
        for one in found
    ]  # fmt: skip
    return table(["kernel", "fastest peers", "slowest", "median", "fastest", "problems", "data"], rows, "--:")


# -- how to get it --------------------------------------------------------------------------------------------------


def start(release: Release) -> str:
    """README's first links, where there are any, and the first commands that a reader types."""
    links = f"{' · '.join(release.links())}\n" if release.links() else ""
    if release.released:
        lines = [release.pip("lab"), "flashlab compare --sample --out out     # draws pictures into out/"]
    else:
        lines = [
            release.clone(),
            "make demo                # sets up .venv, and draws pictures into out/",
            ". .venv/bin/activate",
        ]
    return f"{links}{sh(lines)}"


def sh(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in ["```sh", *lines, "```"])


def wants(release: Release) -> str:
    """What to install for what, as a table."""
    pip = {extra: f"`{release.pip(extra)}`" for extra in ("", "lab", "gpu", "gpu-cuda13")}
    rows = [
        ["to count, simulate, verify, sweep", pip[""], ""],
        ["the lessons, which `flashlab lessons` then opens", pip["lab"], "g++ for lessons 05 to 07 and 10 to 13"],
        ["the emulator", pip[""], "g++ or clang++"],
        ["kernels on a GPU", f"{pip['gpu']} (CUDA 12), {pip['gpu-cuda13']} (CUDA 13)", "NVIDIA's driver, no toolkit"],
        ["`flashlab counters`", "", "Nsight Compute (`ncu`), and leave to read counters"],
        ["`flashlab sanitize`", "", "`compute-sanitizer`, of the CUDA toolkit"],
        ["`flashlab capture`", "`pip install torch transformers`", ""],
    ]
    found = table(["You want", "Install", "It also needs"], rows, "---")
    if release.released:
        return f"{found}\n`uv pip install` takes the same names, and `pipx install {release.name}` gives you the commands alone.\n"
    where = "from the repository" if release.repository else "from a checkout, in whose folder these commands run"
    return f"{found}\nflashlab is not on a package index yet. It is installed {where}.\n"


# -- the pages ------------------------------------------------------------------------------------------------------


def table(header: list[str], rows: list[list[str]], rule: str) -> str:
    lines = [header, ["---", *[rule] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def drawn(release: Release) -> Iterator[tuple[Path, dict[str, str]]]:
    """Each page, and the text of its blocks."""
    yield PAGE, {"start": start(release), "evidence": f"{family_table()}\n{few_speeds()}"}
    yield MATRIX, {"matrix": matrix(), "speed": all_speeds()}
    yield INSTALL, {"wants": wants(release)}
    yield CI, {"install": sh([f"{release.pip()}{release.where and '   #' + release.where}", "pip install pytest"])}


if __name__ == "__main__":
    for page, blocks in drawn(stated()):
        replace_file(page, replaced(page.read_text(encoding="utf-8"), "readme", blocks))
