"""Reading a kernel beside its tile program, step by step."""

from __future__ import annotations

import inspect
import re
import textwrap

import kernels_cu
from flashlab.player.sources import marks
from simulator import CATALOGUE, UsageError
from simulator.errors import unknown


def read_step(algorithm: str, step: str, tag: str = "") -> None:
    """Print what a step is in an algorithm's tile program and in its kernel, each with its comments.

    A kernel may do parts of a step elsewhere, under the same name with a tag; `tag` is one that begins so.

    >>> read_step("flash2", "load_q", "to registers")  # doctest: +ELLIPSIS
    tile program, load_q
        q_i: SramTile | Registers = block.load(q, i, tile.rows)
    ...
    flash2.cu, load_q (to registers, for all key tiles)
          copy_wait<1>();
    ...
    """
    path = kernels_cu.source(algorithm)
    text = path.read_text(encoding="utf-8")
    found = marks(text)
    if step not in found:
        raise unknown("step", step, found)
    wanted = (
        [mark for mark in found[step] if mark.tag.startswith(tag)] if tag else [m for m in found[step] if not m.tag]
    )
    if not wanted:
        raise UsageError("tag", tag, "one of " + ", ".join(repr(mark.tag) for mark in found[step]))
    print(f"tile program, {step}\n{_indented(_program_step(algorithm, step))}\n")
    mark = wanted[0]
    lines = text.splitlines()[mark.first : mark.last]
    print(f"{path.name}, {step}{f' ({mark.tag})' if mark.tag else ''}\n{_indented(lines)}")


def _program_step(algorithm: str, step: str) -> list[str]:
    """The lines of a tile program between `block.step(step)` and the next one."""
    lines = inspect.getsource(CATALOGUE[algorithm].program.body).splitlines()
    first = next(n for n, line in enumerate(lines) if f'block.step("{step}")' in line) + 1
    depth = len(lines[first - 1]) - len(lines[first - 1].lstrip())
    last = first
    while (
        last < len(lines) and "block.step(" not in lines[last] and not re.match(rf"\s{{0,{depth - 1}}}\S", lines[last])
    ):
        last += 1
    return lines[first:last]


def _indented(lines: list[str]) -> str:
    """Indented alike, without pragmas; `#if` and its kin stand as deep as what follows them."""
    code: list[str] = []
    for line in reversed([line for line in lines if not line.startswith("#pragma")]):
        after = next((text for text in reversed(code) if text.strip()), "")
        code.append(after[: len(after) - len(after.lstrip())] + line if line.startswith("#") else line)
    return textwrap.indent(textwrap.dedent("\n".join(reversed(code))), "    ")
