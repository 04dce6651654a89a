"""Sizes and arguments of a launch as text: arithmetic with the names of a problem's fields, and arrays of such shapes."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from typing import Any

from simulator import Problem, UsageError
from simulator.dtypes import numpy_dtype
from simulator.errors import unknown
from simulator.fields import integer
from simulator.problem import FIELDS

__all__ = ["array", "calculated", "names_of"]


def _cdiv(n: Any, by: Any) -> Any:
    return -(-n // by)


_FUNCTIONS: Mapping[str, Any] = {
    "cdiv": _cdiv,
    "log2": math.log2,
    "max": max,
    "min": min,
    "sqrt": math.sqrt,
}
_ARRAY = re.compile(r"(?:(out|lse)|([a-z]+\d\w*)\[(.+)\])(?::(out|zeros|full\((.+)\)))?$")


def names_of(problem: Problem) -> dict[str, Any]:
    """What an expression may name: the problem's numbers, both sides of the window (-1: open), and inf. No soft cap is 0.

    >>> names = names_of(Problem(batch=2, heads=4, len_q=64, head_dim=16, dtype="float32"))
    >>> names["scale"], names["window_left"]
    (0.25, -1)
    """
    found = {name: known.none if (x := getattr(problem, name)) is None else x for name, known in FIELDS.items()}
    sides = {"window_left": problem.left, "window_right": problem.right}
    return {
        **{name: value for name, value in found.items() if isinstance(value, int | float)},
        **{name: -1 if side is None else side for name, side in sides.items()},
        "inf": math.inf,
    }


def calculated(argument: str, text: str, problem: Problem) -> Any:
    """The number that an expression comes to, or a tuple of them. A whole number is an int. Raises `UsageError`.

    >>> p = Problem(batch=2, heads=4, len_q=100, head_dim=16, dtype="float32")
    >>> calculated("grid", "cdiv(len_q, 64), batch * heads", p), calculated("sram", "len_q / 25", p)
    ((2, 8), 4)
    """
    accepted = f"numbers, + - * / // %, {', '.join(f'{name}()' for name in _FUNCTIONS)} and a problem's fields"
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return _value(argument, tree, names_of(problem))
    except UsageError:
        raise
    except (SyntaxError, TypeError, ValueError, ArithmeticError) as error:
        raise UsageError(argument, text, f"{accepted} ({error})") from None


def _combined(op: ast.operator, a: Any, b: Any) -> Any:
    match op:
        case ast.Add():
            return a + b
        case ast.Sub():
            return a - b
        case ast.Mult():
            return a * b
        case ast.Div():
            return a / b
        case ast.FloorDiv():
            return a // b
        case ast.Mod():
            return a % b
        case _:
            raise ValueError(f"no {type(op).__name__}")


def _value(argument: str, node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name):
            if name not in names:
                raise unknown(argument, name, names)
            return names[name]
        case ast.Tuple(elts=parts):
            return tuple(_value(argument, part, names) for part in parts)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(argument, inner, names)
        case ast.BinOp(op=op, left=left, right=right):
            found = _combined(op, _value(argument, left, names), _value(argument, right, names))
            return int(found) if math.isfinite(found) and found == int(found) else found
        case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(argument, part, names) for part in parts))
        case _:
            raise ValueError(f"not {ast.unparse(node)}")


def array(argument: str, text: str, problem: Problem, outputs: Mapping[str, tuple[tuple[int, ...], str]]) -> Any:
    """The array that a text describes: `float32[batch, heads]`, with `:zeros`, `:full(-inf)` or `:out` behind it.

    `out` and `lse` stand for the arrays of those names (`outputs` has their shape and dtype). One without a filling is
    an `Empty`, for the kernel to fill. None for a text that describes no array. Raises `UsageError`.

    >>> p = Problem(batch=1, heads=2, len_q=3, head_dim=4, dtype="float32")
    >>> array("m", "float32[heads, len_q]:full(-inf)", p, {}).tolist()
    [[-inf, -inf, -inf], [-inf, -inf, -inf]]
    """
    import numpy as np

    from flashlab.emulator import Empty  # only where something is emulated

    match = _ARRAY.match(text.strip())
    if match is None:
        return None
    output, dtype, sizes, filling, value = match.groups()
    if output:
        shape, dtype = outputs[output]
    else:
        shape = tuple(integer(argument, n, 0) for n in calculated(argument, f"{sizes},", problem))
        try:
            numpy_dtype(dtype)
        except TypeError:
            raise UsageError(argument, text, "DTYPE[SIZES], as in float32[batch, heads]") from None
    if filling in (None, "out"):
        return Empty(shape, dtype)
    return np.full(shape, 0 if value is None else calculated(argument, value, problem), numpy_dtype(dtype))
