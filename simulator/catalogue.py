"""The catalogue: one row an algorithm. Adding an algorithm adds files of its name and a row here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from simulator.errors import UsageError, unknown
from simulator.formulas import flash1 as flash1_formula
from simulator.formulas import flash2 as flash2_formula
from simulator.formulas import flash3 as flash3_formula
from simulator.formulas import flash3_1 as flash3_1_formula
from simulator.formulas import flash3_2 as flash3_2_formula
from simulator.formulas import flash3_3 as flash3_3_formula
from simulator.formulas import online_softmax as online_softmax_formula
from simulator.formulas import standard as standard_formula
from simulator.problem import ITEMSIZE
from simulator.program import Program
from simulator.programs.flash1 import flash1
from simulator.programs.flash2 import flash2
from simulator.programs.flash3 import flash3
from simulator.programs.flash3_1 import flash3_1
from simulator.programs.flash3_2 import flash3_2
from simulator.programs.flash3_3 import flash3_3
from simulator.programs.online_softmax import online_softmax, softmax_merge, softmax_naive, softmax_online, softmax_safe
from simulator.programs.standard import standard

Formula = Callable[..., None]
"""`formula(book, problem, tile, config, *, lse)` fills a `Book` as the tile program would."""


@dataclass(frozen=True)
class Kernel:
    """A launch on the GPU: the `.cu` file, its entry point, and the arrays it takes, in order; an array that the call
    doesn't have (the LSE, unless asked for) is passed as NULL. Those in `boxes` are passed as TMA's descriptors, with the
    side of the tile, "rows" or "cols", that their boxes have: such a kernel runs on Hopper only, in 16 bit."""

    source: str
    entry: str
    arguments: tuple[str, ...]
    boxes: tuple[tuple[str, str], ...] = ()

    @property
    def hopper(self) -> bool:
        """Does it need sm_90a?"""
        return bool(self.boxes)


@dataclass(frozen=True)
class Algorithm:
    """An algorithm's tile program, formula and kernels; one's own program has neither of the last two.

    >>> import flashlab as fl
    >>> fl.CATALOGUE["flash2"].kernels[0].arguments
    ('q', 'k', 'v', 'out', 'lse')
    """

    name: str
    program: Program
    formula: Formula | None = None
    kernels: tuple[Kernel, ...] = ()

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What its kernels compute in."""
        return tuple(ITEMSIZE)[1:] if any(kernel.hopper for kernel in self.kernels) else tuple(ITEMSIZE)


_SCORES = Kernel("standard", "standard_scores", ("q", "k", "s"))
_OUTPUT = Kernel("standard", "standard_output", ("p", "v", "out"))
_BOXES = ("q", "rows"), ("k", "cols"), ("v", "cols")

CATALOGUE = {
    row.name: row
    for row in (
        Algorithm("standard", standard, standard_formula.standard,
                  (_SCORES, Kernel("standard", "standard_softmax", ("s", "p", "lse")), _OUTPUT)),
        Algorithm("online_softmax", online_softmax, online_softmax_formula.online_softmax,
                  (_SCORES, Kernel("online_softmax", "online_softmax", ("s", "p", "lse")), _OUTPUT)),
        Algorithm("flash1", flash1, flash1_formula.flash1,
                  (Kernel("flash1", "flash1", ("q", "k", "v", "o", "l", "m", "out", "lse")),)),
        Algorithm("flash2", flash2, flash2_formula.flash2,
                  (Kernel("flash2", "flash2", ("q", "k", "v", "out", "lse")),)),
        Algorithm("flash3_1", flash3_1, flash3_1_formula.flash3_1,
                  (Kernel("flash3_1", "flash3_1", ("q", "k", "v", "out", "lse"), _BOXES),)),
        Algorithm("flash3_2", flash3_2, flash3_2_formula.flash3_2,
                  (Kernel("flash3_2", "flash3_2", ("q", "k", "v", "out", "lse"), _BOXES),)),
        Algorithm("flash3_3", flash3_3, flash3_3_formula.flash3_3,
                  (Kernel("flash3_3", "flash3_3", ("q", "k", "v", "out", "lse"), _BOXES),)),
        Algorithm("flash3", flash3, flash3_formula.flash3,
                  (Kernel("flash3", "flash3", ("q", "k", "v", "out", "lse"), _BOXES),)),
    )
}  # fmt: skip
"""Every algorithm by name."""

VECTOR_PROGRAMS = {p.name: p for p in (softmax_naive, softmax_safe, softmax_online, softmax_merge)}
"""The softmax of a vector, four ways: no heads, no masks, counted by `count(name, length=…, dtype=…)`."""


_ELSEWHERE = {
    "flash3_fp8": "an algorithm of 16- or 32-bit inputs (FP8: flashlab fp8, or flashlab.fp8.attention of flashlab.fp8.quantize)",
}
"""Kernels that don't take what the algorithms take, and how they are run."""


def unknown_algorithm(argument: str, name: object, known: Iterable[str]) -> UsageError:
    """The error for a name that isn't among `known`; of a kernel that is run otherwise it says how.

    >>> str(unknown_algorithm("algorithm", "flash4", ["flash2", "flash3"]))
    "algorithm = 'flash4': expected one of flash2, flash3 (did you mean flash3?)"
    """
    accepted = _ELSEWHERE.get(str(name))
    return unknown(argument, name, known) if accepted is None else UsageError(argument, name, accepted)


def get(algorithm: str | Program) -> Algorithm:
    """The row of an algorithm, by name; one's own tile program makes a row of its own. Raises `UsageError`."""
    if isinstance(algorithm, Program):
        return next(
            (row for row in CATALOGUE.values() if row.program is algorithm), Algorithm(algorithm.name, algorithm)
        )
    if not isinstance(algorithm, str) or algorithm not in CATALOGUE:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise unknown_algorithm("algorithm", algorithm, CATALOGUE)
    return CATALOGUE[algorithm]
