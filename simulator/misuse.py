"""What a tile program hands to the wrong call: errors that name the call, where Python or NumPy would fail somewhere inside."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from simulator.dtypes import Array
from simulator.errors import Said, UsageError
from simulator.registers import Registers
from simulator.tensors import HbmTensor, SramTile

_BROUGHT = "block.load brings one from HBM, and block.put one from registers"
_EITHER, _IN_SRAM = f"a tile in SRAM or in registers: {_BROUGHT}", f"a tile in SRAM: {_BROUGHT}"
_SPLIT = (
    "how the warps read each of the two operands, as in ('rows', 'none'): 'rows' or 'cols' (they share it out), or 'none' "
    "(each reads all of it)"
)
_NUMBERS = float, int, np.number
_CALLED = {"Block": "block", "Machine": "m", "Registers": "x", "SramTile": "tile", "HbmTensor": "tensor"}


def operand(name: str, x: object, kinds: type | tuple[type, ...], accepted: str) -> None:
    """Refuses what is of another kind."""
    if not isinstance(x, kinds):
        raise UsageError(name, Said(_in_words(x)), accepted)


def tensor(call: str, x: object) -> None:
    """Refuses what is no tensor in HBM."""
    if not isinstance(x, HbmTensor):
        raise UsageError(f"the tensor of {call}", Said(_in_words(x)), "a tensor in HBM, as q or an output is")


def tile(call: str, x: object) -> None:
    """Refuses what is no tile in SRAM."""
    if not isinstance(x, SramTile):
        accepted = "a tile in SRAM, as block.load and block.alloc return"
        raise UsageError(f"the tile of {call}", Said(_in_words(x)), accepted)


def full(name: str, x: SramTile) -> None:
    """Refuses a buffer in which nothing was put yet."""
    if x.empty:
        raise UsageError(name, Said(f"{x.name}, which is empty"), "block.put into it before")


def registers(call: str, *operands: object, numbers: bool = False) -> None:
    """Refuses operands that aren't in registers, among which there may be `numbers`."""
    for x in operands:
        if not isinstance(x, Registers) and not (numbers and isinstance(x, _NUMBERS)):
            brought = f": {x.brought}" if isinstance(x, HbmTensor | SramTile) else ""
            raise UsageError(f"operand of {call}", Said(_in_words(x)), f"registers{brought}")


def product(a: SramTile | Registers, b: SramTile, split: Sequence[object], acc: Registers | None) -> None:
    """Refuses operands that no tensor core multiplies, a missing split, and what the product can't be added to."""
    operand("block.matmul's first operand", a, (SramTile, Registers), _EITHER)
    operand("block.matmul's second operand", b, SramTile, _IN_SRAM)
    full("block.matmul's operand", b)
    if isinstance(a, SramTile):
        full("block.matmul's operand", a)
    if len(split) != 2:
        raise UsageError("block.matmul's split", split or "missing", _SPLIT)
    if a.cols != b.rows:
        shapes = f"({a.rows}, {a.cols}) @ ({b.rows}, {b.cols})"
        raise UsageError("matmul", shapes, "as many columns on the left as rows on the right (is a .T missing?)")
    if acc is not None:
        registers("block.matmul's acc", acc)
        if (acc.rows, acc.cols) != (a.rows, b.cols):
            shape = f"({acc.rows}, {acc.cols})"
            raise UsageError("block.matmul's acc", Said(shape), f"({a.rows}, {b.cols}), as the product has")


def stored(call: str, to: object, x: object, rows: int, j: int, cols: int | None) -> int:
    """The columns of a tile that registers fill. Refuses others, which would count as if they did, and inputs."""
    if not isinstance(to, HbmTensor):
        raise UsageError(f"the tensor of {call}(tensor, registers, i, rows)", Said(_in_words(to)), "a tensor in HBM")
    if not isinstance(x, Registers):
        raise UsageError(f"{call}'s second operand", Said(_in_words(x)), "registers")
    if to.spec.role == "input":
        raise UsageError(f"{call}'s tensor", Said(f"{to.name}, an input"), "an output or a workspace")
    cols = cols or to.cols
    inside = to.cols - j * cols
    if x.rows != rows or x.cols not in (cols, inside):
        shape = f"({rows}, {cols})" + (f", or ({rows}, {inside}) where {to.name} ends" if 0 < inside < cols else "")
        raise UsageError(f"{call}'s registers", Said(f"({x.rows}, {x.cols})"), f"{shape}, as the tile of {to.name} has")
    return cols


def elementwise(f: Callable[..., Any], operands: Sequence[object], tiles: Sequence[Registers]) -> None:
    """Refuses operands of which none is in registers or some are elsewhere, and more or fewer than NumPy's function takes."""
    if not tiles or any(not isinstance(x, (Registers, *_NUMBERS)) for x in operands):
        registers(f"np.{getattr(f, '__name__', 'f')}", *operands, numbers=bool(tiles))
    if isinstance(f, np.ufunc) and f.nin != len(operands):
        raise UsageError(f"operands of np.{f.__name__}", len(operands), f"{f.nin} for this function")


def broadcast(f: Callable[..., Any], tiles: Sequence[Registers], rows: int, cols: int) -> None:
    """Refuses tiles of which one is neither as large as the result nor a row or a column of it."""
    if any(x.rows not in (1, rows) or x.cols not in (1, cols) for x in tiles):
        shapes = " and ".join(f"({x.rows}, {x.cols})" for x in tiles)
        accepted = "tiles of one shape, or one value a row, or one a column (is a .T missing?)"
        raise UsageError(f"operands of np.{getattr(f, '__name__', 'f')}", Said(shapes), accepted)


def walk(f: object) -> None:
    """Refuses what is no function of a block's row."""
    if not callable(f):
        raise UsageError("walk", f, "a function of a block's row, as walk=lambda i: range(i + 1)")


def walked(found: object) -> None:
    """Refuses what no block loops over."""
    if not isinstance(found, Sequence):
        raise UsageError("what walk returns", found, "a range, a list or a tuple, as from walk=lambda i: range(i + 1)")


def places(place: Callable[..., Any], keys: Array, entries: int, rows: int) -> tuple[Array, Array]:
    """What `place` says of keys. Refuses what names no entry of a line of the block table, or no row of a page."""
    accepted = f"an entry of the block table, 0 to {entries - 1:,}, and a row of its page, 0 to {rows - 1:,}"
    said: Any = place(keys)
    found = cast("tuple[Any, ...]", said) if isinstance(said, tuple) else ()
    if len(found) != 2:
        raise UsageError("place(n)", Said(type(cast(object, said)).__name__), f"two numbers: {accepted}")
    entry, row = (np.broadcast_to(cast(Array, np.asarray(x)), keys.shape) for x in found)
    for n, *where in zip(keys.tolist(), entry.tolist(), row.tolist(), strict=True):
        if not all(isinstance(x, int) and 0 <= x < end for x, end in zip(where, (entries, rows), strict=True)):
            raise UsageError(f"place({n})", tuple(where), accepted)
    return entry, row


def arguments(error: TypeError, classes: Sequence[type]) -> UsageError | None:
    """The error for a call of a method of these classes with too few arguments, too many or unknown ones.

    None if Python says something else.
    """
    for each in classes:
        match = re.match(rf"{each.__name__}\.(\w+)\(\) ((?:missing|takes|got) .*)", str(error))
        if match and inspect.isfunction(f := vars(each).get(match[1])):
            call = f"{_CALLED[each.__name__]}.{match[1]}"
            return UsageError(call, Said(match[2]), f"{call}{parameters(f, 1)}")
    return None


def parameters(f: Callable[..., object], first: int = 0) -> inspect.Signature:
    """A function's parameters from the first one on, without their types."""
    return inspect.Signature([p.replace(annotation=p.empty) for p in inspect.signature(f).parameters.values()][first:])


def undecorated(f: object) -> None:
    """Refuses a function that has a tile program's parameters and lacks the decorator."""
    if inspect.isfunction(f) and [*inspect.signature(f).parameters][-2:] == ["problem", "tile"]:
        accepted = f"a tile program: write @fl.program above def {f.__name__}"
        raise UsageError("algorithm", Said(f"the function {f.__name__}"), accepted)


def _in_words(x: object) -> str:
    if isinstance(x, Registers):
        return "registers"
    if isinstance(x, HbmTensor | SramTile):
        return f"{x.name} in {'HBM' if isinstance(x, HbmTensor) else 'SRAM'}"
    return type(x).__name__
