"""Writes the parts of README.md that come from data: the matrix of algorithms, and the speeds of the newest benchmark.

`python -m docs._site.readme` writes both between their marks, and a test holds the page to them. No figure there is
typed by hand.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from docs._site import evidence
from docs._site.blocks import replaced
from docs._site.timed import age
from flashlab.base.files import replace_file
from flashlab.measure import results
from flashlab.run import abi
from simulator.algorithm import Algorithm

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "README.md"

PEERS = {"fa3": "FlashAttention-3", "fa4": "FlashAttention-4", "cudnn": "cuDNN"}
"""The fastest kernels of others, by their names in a benchmark."""
DEVICE = "h200"
"""The device of the table of speeds."""
DIMS, MASKS, LENGTH = (64, 128, 256), (False, True), 16384

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


def matrix() -> str:
    """A table with one row per algorithm and a tick for each thing that it has. Each tick links to that thing.

    What was measured of an older kernel has a circle, and a newer failure a cross.
    """
    rows = [[f"`{row.name}`", *(tick(find(row)) for find in COLUMNS.values())] for row in evidence.rows()]
    return table(["", *COLUMNS], rows, ":-:")


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
    return path.relative_to(ROOT).as_posix()


# -- the speeds -----------------------------------------------------------------------------------------------------


def speed() -> str:
    """A table of flash3 at 16k tokens beside the fastest peers that its newest run timed."""
    of = results.latest("bench", ROOT / results.FOLDER, algorithm="flash3", device=DEVICE)
    if of is None:
        return "No speed has been measured yet.\n"
    timed = of.data["rows"]
    found = {(row["peer"], row["head_dim"], row["causal"], row["length"]): row for row in timed}
    peers = [peer for peer in PEERS if any(key[0] == peer for key in found)]
    rows = [
        [
            str(dim),
            "causal" if causal else "full",
            f"**{found[None, dim, causal, LENGTH]['tflops']:.0f}**",
            *(f"{found[peer, dim, causal, LENGTH]['ratio']:.2f} ×" for peer in peers),
        ]
        for dim in DIMS
        for causal in MASKS
    ]
    header = ["head dim", "mask", "`flash3`, TFLOP/s", *(PEERS[peer] for peer in peers)]
    cells = best(timed, peers)
    said = (
        f"{of.content['device']['name']}, bfloat16, calls interleaved ([data]({link(of.path)}){age(of)}). "
        f"Above 1 ×, `flash3` is the faster one: at least {min(map(min, cells)):.2f} × in all {len(cells)} cells from 1k to 16k "
        "tokens. Compare ratios: power limits move the clock."
    )
    return f"{table(header, rows, '--:')}\n{textwrap.fill(said, 100, break_long_words=False, break_on_hyphens=False)}\n"


def best(timed: list[Any], peers: list[str]) -> list[list[float]]:
    """Each cell's ratios to these peers, above 1 where the algorithm is the faster one."""
    cells: dict[tuple[Any, ...], list[float]] = {}
    for row in timed:
        if row["peer"] in peers:
            cells.setdefault((row["dtype"], row["head_dim"], row["causal"], row["length"]), []).append(row["ratio"])
    return list(cells.values())


# -- the page -------------------------------------------------------------------------------------------------------

BLOCKS = {"matrix": matrix, "speed": speed}


def table(header: list[str], rows: list[list[str]], rule: str) -> str:
    lines = [header, ["---", *[rule] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def drawn() -> Iterator[tuple[str, str]]:
    for name, draw in BLOCKS.items():
        yield name, draw()


if __name__ == "__main__":
    replace_file(PAGE, replaced(PAGE.read_text(encoding="utf-8"), "readme", dict(drawn())))
