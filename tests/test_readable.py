"""Kernels and tile programs stay as short as a reader needs them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONDITIONAL = re.compile(r"(?m)^\s*#\s*(if|ifdef|ifndef|elif|else)\b")
RUNGS = ("flash_decoding_1", "flash_decoding_2", "paged_1")
"""Those that a learner reads first: their kernels have at most 120 lines, and their programs' loops 25, over keys or blocks."""
LOOPS = {
    "flash2": 30, "flash3": 30, "flash3_paged": 30, "paged": 45, "flash_decoding": 45, "cascade": 45,
    **dict.fromkeys(RUNGS, 25),
}  # fmt: skip
"""The most lines of a loop, step marks aside."""


def loops(source: str) -> list[int]:
    """The lines of each loop over blocks or over what a block walks over, without its head and its step marks."""
    lines = source.splitlines()
    return [
        sum(
            "block.step(" not in line and bool(line.strip())
            for line in lines[node.body[0].lineno - 1 : node.end_lineno]
        )
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.For) and any(over in ast.unparse(node.iter) for over in (".launch(", "block.walk"))
    ]


@pytest.mark.parametrize("name", LOOPS)
def test_the_loop_of_a_tile_program_is_read_in_one_breath(name: str) -> None:
    found = loops((ROOT / "simulator" / "programs" / f"{name}.py").read_text(encoding="utf-8"))
    assert all(n <= LOOPS[name] for n in found), found


@pytest.mark.parametrize("path", sorted((ROOT / "kernels_cu").glob("*.cu")), ids=lambda path: path.stem)
def test_a_kernel_is_no_longer_than_it_was_made(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= (120 if path.stem in RUNGS else 250 if path.stem == "flash2" else 450)
    assert len(CONDITIONAL.findall(text)) <= 4


def test_what_is_longer_is_found() -> None:
    marks = "for block in m.launch('x'):\n    block.step('a')\n" + "    x = 1\n" * 31
    assert loops(marks) == [31]
    assert len(CONDITIONAL.findall("#if A\n  # elif B\n#else\n#endif\n#ifdef C\n#define D\n")) == 4
