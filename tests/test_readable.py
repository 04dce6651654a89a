"""Kernels and tile programs stay as short as a reader needs them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONDITIONAL = re.compile(r"(?m)^\s*#\s*(if|ifdef|ifndef|elif|else)\b")
RUNGS = ("flash_decoding_1", "flash_decoding_2", "paged_1")
"""Those that a learner reads first."""
LOOPS = {
    "flash2": 30, "flash3": 30, "flash3_paged": 30, "flash_decoding": 45, "cascade": 45,
    **dict.fromkeys(RUNGS, 25),
}  # fmt: skip
"""The most lines of a loop, step marks aside. `paged` has that of `flash_decoding`."""
MOST_CONDITIONAL, MOST_LINES, MOST_LINES_OF = 4, 450, {"flash2": 250, **dict.fromkeys(RUNGS, 120)}
"""Of a `.cu`."""


def loops(source: str) -> list[int]:
    """The lines of each loop over blocks or over what a block walks over, without its head and its step marks."""
    lines = source.splitlines()
    return [
        sum(
            "block.step(" not in line and bool(line.strip())
            for line in lines[node.body[0].lineno - 1 : node.end_lineno]
        )
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.For) and (ast.unparse(node.target) == "block" or "block.walk" in ast.unparse(node.iter))
    ]


def loops_held(name: str, source: str) -> bool:
    """Is there a loop over blocks, and is none too long?"""
    found = loops(source)
    return bool(found) and max(found) <= LOOPS[name]


def kernel_held(name: str, text: str) -> bool:
    """Is a `.cu` short enough, and one kernel rather than many by preprocessor?"""
    short = len(text.splitlines()) <= MOST_LINES_OF.get(name, MOST_LINES)
    return short and len(CONDITIONAL.findall(text)) <= MOST_CONDITIONAL


@pytest.mark.parametrize("name", LOOPS)
def test_the_loop_of_a_tile_program_is_read_in_one_breath(name: str) -> None:
    source = (ROOT / "simulator" / "programs" / f"{name}.py").read_text(encoding="utf-8")
    assert loops_held(name, source), loops(source)


@pytest.mark.parametrize("path", sorted((ROOT / "kernels_cu").glob("*.cu")), ids=lambda path: path.stem)
def test_a_kernel_is_no_longer_than_it_was_made(path: Path) -> None:
    assert kernel_held(path.stem, path.read_text(encoding="utf-8"))


def test_marks_stand_where_the_player_shows_them() -> None:
    """It shows a `.cu`, and none of its headers."""
    headers = (ROOT / "kernels_cu" / "include").glob("*.cuh")
    assert [path.name for path in headers if re.search(r"//\s*step:", path.read_text(encoding="utf-8"))] == []


def test_what_is_longer_is_found() -> None:
    loop = "for block in m.launch('x'):\n    block.step('a')\n" + "    x = 1\n"
    assert [loops_held("flash2", loop + "    x = 1\n" * n) for n in (29, 30)] == [True, False]
    assert [loops_held("cascade", loop + "    x = 1\n" * n) for n in (44, 45)] == [True, False]
    assert loops("launch = m.launch('x')\nfor block in launch:\n    x = 1\n") == [1]
    assert not loops_held("flash2", "x = 1\n")
    assert [kernel_held("flash2", "x;\n" * n) for n in (250, 251)] == [True, False]
    assert [kernel_held("flash3", "x;\n" * n) for n in (450, 451)] == [True, False]
    assert [kernel_held("flash3", "#if A\n#else\n#endif\n" * n) for n in (2, 3)] == [True, False]
    assert len(CONDITIONAL.findall("#if A\n  # elif B\n#else\n#endif\n#ifdef C\n#define D\n")) == 4
