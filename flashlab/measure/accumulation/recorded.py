"""Cases as text in a results file. A line holds the bytes of a and b, then c and the GPU's sum, all in hexadecimal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from flashlab.measure.accumulation.cases import INSTRUCTIONS, Array, Cases, Instruction

__all__ = ["different", "recorded", "text"]


def text(kind: Cases, d: Array, which: Iterable[int]) -> list[str]:
    """One line per case: `which` of the cases, with the GPU's sums `d` (n,)."""
    return [f"{kind.a[i].tobytes().hex()} {kind.b[i].tobytes().hex()} {_word(kind.c[i])} {_word(d[i])}" for i in which]


def recorded(data: Mapping[str, Any]) -> Iterator[tuple[Instruction, Cases, Array]]:
    """The instructions, cases and GPU's sums in the data of a result of kind `accumulation`."""
    for row in data["recorded"]:
        instruction = INSTRUCTIONS[row["instruction"]]
        a, b, c, d = zip(*(line.split() for line in row["cases"]), strict=True)
        x, y = (np.array([list(bytes.fromhex(t)) for t in ts], np.uint8).view(instruction.dtype) for ts in (a, b))
        before, after = (np.array([int(t, 16) for t in ts], np.uint32).view(np.float32) for ts in (c, d))
        yield instruction, Cases(row["name"], x, y, before), after


def different(kind: Cases, d: Array, got: Array) -> list[str]:
    """One line per case in which `got` and the GPU's sum `d` differ in a bit."""
    where = np.flatnonzero(d.view(np.uint32) != got.view(np.uint32))
    return [f"{kind.name}, {i}: {float(got[i]).hex()} for {float(d[i]).hex()}" for i in where]


def _word(x: np.float32) -> str:
    return f"{int(x.view(np.uint32)):08x}"
