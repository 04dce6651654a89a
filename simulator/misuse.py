"""What a tile program hands to the wrong call: errors that name the call, where NumPy would fail somewhere inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from simulator.config import padded
from simulator.errors import Said, UsageError
from simulator.registers import Registers
from simulator.tensors import HbmTensor, SramTile

_BROUGHT = "block.load brings one from HBM, and block.put one from registers"
_SPLIT = (
    "how the warps read each of the two operands, as in ('rows', 'none'): 'rows' or 'cols' (they share it out), or 'none' "
    "(each reads all of it)"
)


def operand(name: str, x: object, kinds: type | tuple[type, ...], accepted: str) -> None:
    """Refuses what is of another kind."""
    if not isinstance(x, kinds):
        raise UsageError(name, Said(_in_words(x)), accepted)


def tensor(call: str, x: object) -> None:
    """Refuses what is no tensor in HBM."""
    operand(f"the tensor of {call}", x, HbmTensor, "a tensor in HBM, as q or an output is")


def product(a: SramTile | Registers, b: SramTile, split: Sequence[object]) -> None:
    """Refuses operands that no tensor core multiplies, and a missing split."""
    operand("block.matmul's first operand", a, (SramTile, Registers), f"a tile in SRAM or in registers: {_BROUGHT}")
    operand("block.matmul's second operand", b, SramTile, f"a tile in SRAM: {_BROUGHT}")
    if len(split) != 2:
        raise UsageError("block.matmul's split", split or "missing", _SPLIT)
    if padded(a.cols) != padded(b.rows):
        shapes = f"({a.rows}, {a.cols}) @ ({b.rows}, {b.cols})"
        raise UsageError("matmul", shapes, "as many columns on the left as rows on the right (is a .T missing?)")


def broadcast(f: Callable[..., Any], tiles: Sequence[Registers], rows: int, cols: int) -> None:
    """Refuses tiles of which one is neither as large as the result nor a row or a column of it."""
    if any(x.rows not in (1, rows) or x.cols not in (1, cols) for x in tiles):
        shapes = " and ".join(f"({x.rows}, {x.cols})" for x in tiles)
        accepted = "tiles of one shape, or one value a row, or one a column (is a .T missing?)"
        raise UsageError(f"operands of np.{getattr(f, '__name__', 'f')}", Said(shapes), accepted)


def _in_words(x: object) -> str:
    if isinstance(x, Registers):
        return "registers"
    return f"{x.name} in HBM" if isinstance(x, HbmTensor) else type(x).__name__
