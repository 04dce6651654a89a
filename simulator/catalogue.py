"""The catalogue: one row an algorithm. Adding an algorithm adds files of its name and a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simulator.config import Config
from simulator.errors import UsageError, unknown
from simulator.formulas import flash1 as flash1_formula
from simulator.formulas import flash2 as flash2_formula
from simulator.formulas import flash2_backward as flash2_backward_formula
from simulator.formulas import flash3 as flash3_formula
from simulator.formulas import flash3_fp8 as flash3_fp8_formula
from simulator.formulas import online_softmax as online_softmax_formula
from simulator.formulas import standard as standard_formula
from simulator.operations.attention import ATTENTION
from simulator.operations.operation import Operation
from simulator.problem import DTYPES, FP8, Problem
from simulator.program import Program
from simulator.programs.flash1 import flash1
from simulator.programs.flash2 import flash2
from simulator.programs.flash2_backward import flash2_backward
from simulator.programs.flash3 import flash3
from simulator.programs.flash3_1 import flash3_1
from simulator.programs.flash3_2 import flash3_2
from simulator.programs.flash3_3 import flash3_3
from simulator.programs.flash3_fp8 import flash3_fp8
from simulator.programs.online_softmax import online_softmax
from simulator.programs.softmax import softmax_merge, softmax_naive, softmax_online, softmax_safe
from simulator.programs.standard import standard
from simulator.time.launch import Launch
from simulator.time.rates import Rates
from simulator.time.schedules import flash1 as flash1_schedule
from simulator.time.schedules import flash2 as flash2_schedule
from simulator.time.schedules import flash3 as flash3_schedule
from simulator.time.schedules import flash3_1 as flash3_1_schedule
from simulator.time.schedules import flash3_2 as flash3_2_schedule
from simulator.time.schedules import flash3_3 as flash3_3_schedule
from simulator.time.schedules import flash3_fp8 as flash3_fp8_schedule
from simulator.time.schedules import online_softmax as online_softmax_schedule
from simulator.time.schedules import standard as standard_schedule

Formula = Callable[..., None]
"""`formula(book, problem, tile, config, *, lse)` fills a `Book` as the tile program would."""


Schedule = Callable[[Problem, Config, Rates], list[Launch]]
"""What the blocks of each launch do, and in which order they start: for the prediction of time."""


@dataclass(frozen=True)
class Kernel:
    """A launch on the GPU: the `.cu` file, its entry point, and the arrays it takes, in order; an array that the call
    doesn't have (the LSE, unless asked for) is passed as NULL. Those in `boxes` are passed as TMA's descriptors, with how
    many rows their boxes have ("rows" or "cols" of the tile, or "head_dim"): such a kernel runs on Hopper only, in 16 or 8 bit."""

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
    """An algorithm's tile program, formula, schedule and kernels; one's own program has none of the last three.

    >>> import flashlab as fl
    >>> fl.CATALOGUE["flash2"].kernels[0].arguments
    ('q', 'k', 'v', 'out', 'lse')
    """

    name: str
    program: Program
    formula: Formula | None = None
    schedule: Schedule | None = None
    kernels: tuple[Kernel, ...] = ()
    dtypes: tuple[str, ...] = DTYPES
    """What its kernels compute in."""

    @property
    def operation(self) -> Operation:
        """What it computes."""
        return self.program.operation

    @property
    def hopper(self) -> bool:
        """Does it need sm_90a?"""
        return any(kernel.hopper for kernel in self.kernels)

    def takes(self, problem: Problem) -> bool:
        """Does it take the problem's dtype, of 8 bits or of more? One's own programs take any."""
        return not self.kernels or (problem.dtype == FP8) == (FP8 in self.dtypes)

    def taking(self, problem: Problem) -> Algorithm:
        """Itself, if it takes the problem's dtype. Raises `UsageError`."""
        if not self.takes(problem):
            name = self.name
            accepted = (
                f"{FP8} for {name}" if FP8 in self.dtypes else f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]} for {name}"
            )
            raise UsageError("dtype", problem.dtype, accepted)
        return self


_SCORES = Kernel("standard", "standard_scores", ("q", "k", "s"))
_OUTPUT = Kernel("standard", "standard_output", ("p", "v", "out"))
_BOXES = ("q", "rows"), ("k", "cols"), ("v", "cols")
_HALVES = ("float16", "bfloat16")

CATALOGUE = {
    row.name: row
    for row in (
        Algorithm("standard", standard, standard_formula.standard, standard_schedule.launches,
                  (_SCORES, Kernel("standard", "standard_softmax", ("s", "p", "lse")), _OUTPUT)),
        Algorithm("online_softmax", online_softmax, online_softmax_formula.online_softmax, online_softmax_schedule.launches,
                  (_SCORES, Kernel("online_softmax", "online_softmax", ("s", "p", "lse")), _OUTPUT)),
        Algorithm("flash1", flash1, flash1_formula.flash1, flash1_schedule.launches,
                  (Kernel("flash1", "flash1", ("q", "k", "v", "o", "l", "m", "out", "lse")),)),
        Algorithm("flash2", flash2, flash2_formula.flash2, flash2_schedule.launches,
                  (Kernel("flash2", "flash2", ("q", "k", "v", "out", "lse")),)),
        Algorithm("flash3_1", flash3_1, flash3_formula.flash3, flash3_1_schedule.launches,
                  (Kernel("flash3_1", "flash3_1", ("q", "k", "v", "out", "lse"), _BOXES),), _HALVES),
        Algorithm("flash3_2", flash3_2, flash3_formula.flash3, flash3_2_schedule.launches,
                  (Kernel("flash3_2", "flash3_2", ("q", "k", "v", "out", "lse"), _BOXES),), _HALVES),
        Algorithm("flash3_3", flash3_3, flash3_formula.flash3, flash3_3_schedule.launches,
                  (Kernel("flash3_3", "flash3_3", ("q", "k", "v", "out", "lse"), _BOXES),), _HALVES),
        Algorithm("flash3", flash3, flash3_formula.flash3, flash3_schedule.launches,
                  (Kernel("flash3", "flash3", ("q", "k", "v", "out", "lse"), _BOXES),), _HALVES),
        Algorithm("flash3_fp8", flash3_fp8, flash3_fp8_formula.flash3_fp8, flash3_fp8_schedule.launches,
                  (Kernel("flash3_fp8", "flash3_fp8_transpose", ("v", "v_t")),
                   Kernel("flash3_fp8", "flash3_fp8", ("q", "k", "v_t", "q_scale", "k_scale", "v_scale", "out", "lse"),
                          (("q", "rows"), ("k", "cols"), ("v_t", "head_dim")))), (FP8,)),
        Algorithm("flash2_backward", flash2_backward, flash2_backward_formula.flash2_backward),
        Algorithm("softmax_naive", softmax_naive),
        Algorithm("softmax_safe", softmax_safe),
        Algorithm("softmax_online", softmax_online),
        Algorithm("softmax_merge", softmax_merge),
    )
}  # fmt: skip
"""Every algorithm by name."""


def of(operation: Operation = ATTENTION) -> dict[str, Algorithm]:
    """The algorithms of an operation, by name.

    >>> list(of(SOFTMAX))
    ['softmax_naive', 'softmax_safe', 'softmax_online', 'softmax_merge']
    """
    return {name: row for name, row in CATALOGUE.items() if row.operation is operation}


def names(problem: Problem) -> list[str]:
    """The algorithms of attention that take a problem's dtype.

    >>> import flashlab as fl
    >>> names(fl.Problem(batch=1, heads=1, len_q=8, head_dim=64, dtype="float8_e4m3fn"))
    ['flash3_fp8']
    """
    return [row.name for row in of(ATTENTION).values() if row.takes(problem)]


def get(algorithm: str | Program) -> Algorithm:
    """The row of an algorithm, by name; one's own tile program makes a row of its own. Raises `UsageError`."""
    if isinstance(algorithm, Program):
        return next(
            (row for row in CATALOGUE.values() if row.program is algorithm), Algorithm(algorithm.name, algorithm)
        )
    if not isinstance(algorithm, str) or algorithm not in CATALOGUE:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise unknown("algorithm", algorithm, CATALOGUE)
    return CATALOGUE[algorithm]
