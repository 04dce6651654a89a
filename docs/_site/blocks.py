"""Blocks of a page that a script writes, between two comments that name the block and the script."""

from __future__ import annotations

from collections.abc import Mapping


def replaced(text: str, script: str, blocks: Mapping[str, str]) -> str:
    """A page's text with the blocks that `docs/_site/{script}.py` writes. Raises `ValueError` for one that it lacks."""
    for name, block in blocks.items():
        begin, end = f"<!-- {name}: begin (written by docs/_site/{script}.py) -->\n", f"<!-- {name}: end -->"
        before, begun, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not begun or not ended:
            raise ValueError(f"the page has no block {name!r} of docs/_site/{script}.py")
        text = before + begin + block + end + after
    return text
