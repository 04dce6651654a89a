"""What an algorithm is made of: its row of the catalogue, and its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from simulator.config import Config
from simulator.devices import Device
from simulator.errors import Unavailable, UsageError
from simulator.names import DType
from simulator.operations.operation import Operation, always
from simulator.problem import Problem, Tile
from simulator.program import Program
from simulator.support import Support
from simulator.time.launch import Launch
from simulator.time.rates import Rates

Formula = Callable[..., None]
"""`formula(book, problem, tile, config, *, lse)` fills a `Book` as the tile program does."""


Schedule = Callable[[Problem, Config, Rates], list[Launch]]
"""What the blocks of each launch do, and in which order they start. The prediction of time needs it."""


def everywhere(problem: Problem, device: Device) -> bool:
    """The default of `Algorithm.pays`: the algorithm is as fast as its rank says on all problems and devices."""
    del problem, device
    return True


def nowhere(problem: Problem, device: Device) -> bool:
    """The `pays` of an algorithm that is not chosen for its speed."""
    del problem, device
    return False


@dataclass(frozen=True)
class Kernel:
    """A launch on the GPU: the source file, its entry point, and the names of the arrays that it takes, in order.

    An array that the call doesn't have is passed as NULL (the LSE, unless it was asked for). An array in `boxes` is
    passed as a TMA descriptor, with the number of rows of its box: "rows" or "cols" of the tile, "head_dim", or "page", which
    is what of a page fits in a tile (where nothing does, the array itself is passed). `arch` is the architecture to compile
    for if it isn't the GPU's own. A `persistent` kernel may have fewer blocks than tiles. It is launched if `when(problem)`; with
    `parts`, only where a configuration takes heads in parts, or only where it doesn't. If it `waits`, its blocks read again and
    again how far others are. `language` is "cuda" (a `.cu` file of `kernels_cu`) or "triton" (a module of `flashlab/triton`).
    """

    source: str
    entry: str
    arguments: tuple[str, ...]
    boxes: tuple[tuple[str, str], ...] = ()
    arch: str | None = None
    persistent: bool = False
    language: str = "cuda"
    when: Callable[[Problem], bool] = always
    waits: bool = False
    parts: bool | None = None

    def settles(self, what: str) -> bool:
        """Does its source settle a count, such as "sram.read"? In Triton the compiler decides all but HBM's bytes.

        >>> import flashlab as fl
        >>> [fl.CATALOGUE[name].kernels[0].settles("sram.read") for name in ("flash2", "flash2_triton")]
        [True, False]
        """
        return self.language == "cuda" or what.startswith("hbm.")


@dataclass(frozen=True)
class Algorithm:
    """One row: an algorithm's tile program, formula, schedule and kernels. A user's own program has only the first.

    `about` has a sentence for each step, by launch, which the player shows. `follows` is the rung below, from which
    ladders are made. `atomics` are the outputs that atomics add up, so that their last bits may differ from run to run.
    "auto" chooses among the algorithms of an operation that have a `rank`: the highest that takes the problem, if it `pays`
    for it on the device. The lowest runs on any device. `lesson` is the notebook that walks through it. `shown` is what
    its operation has under that name, where the algorithm is for something else.

    >>> import flashlab as fl
    >>> fl.CATALOGUE["flash1"].kernels[0].arguments
    ('q', 'k', 'v', 'o', 'l', 'm', 'out', 'lse')
    """

    name: str
    program: Program
    formula: Formula | None = None
    schedule: Schedule | None = None
    kernels: tuple[Kernel, ...] = ()
    support: Support = Support()
    about: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    follows: str | None = None
    atomics: tuple[str, ...] = ()
    rank: int = 0
    pays: Callable[[Problem, Device], bool] = everywhere
    lesson: str | None = None
    shown: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def operation(self) -> Operation:
        """The operation that the algorithm computes."""
        return self.program.operation

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The dtypes that its kernels take."""
        return self.support.dtypes

    def launched(self, problem: Problem, config: Config | None = None) -> tuple[Kernel, ...]:
        """Those of its kernels that a problem takes, in the order of their launches; without a `config`, of any.

        >>> import flashlab as fl
        >>> p = fl.Problem(batch=1, heads=1, len_q=8, head_dim=64, dtype="float16", mask="dense")
        >>> [kernel.entry for kernel in fl.CATALOGUE["flash2"].launched(p)]
        ['pack_mask', 'flash2']
        """
        forms = (None, True, False) if config is None else (None, config.parts > 1)
        return tuple(kernel for kernel in self.kernels if kernel.when(problem) and kernel.parts in forms)

    @property
    def language(self) -> str | None:
        """The language of its kernels: "cuda" or "triton", or None for a program without kernels."""
        return self.kernels[0].language if self.kernels else None

    @property
    def arch(self) -> str | None:
        """The architecture that its kernels are compiled for. None is the GPU's own."""
        return next((kernel.arch for kernel in self.kernels if kernel.arch), None)

    def fitted(self, problem: Problem) -> Problem:
        """A plain problem as the algorithm has it: as its operation does, with no more queries than its kernels take.

        >>> import flashlab as fl
        >>> p = fl.Problem(batch=1, heads=2, len_q=8, head_dim=64, dtype="float16")
        >>> [fl.CATALOGUE[name].fitted(p).len_q for name in ("flash2", "flash_decoding_1")]
        [8, 1]
        """
        return self.support.fitted(self.operation.fitted(problem))

    def refusal(
        self, problem: Problem, device: Device | None = None, tile: Tile | None = None
    ) -> UsageError | Unavailable | None:
        """The error for a problem that the algorithm doesn't take, or None.

        Without a `device` this is about tile program and formula. With one it is also about the kernels on that device.
        """
        if (error := problem.unknown_mask(self.support.masks, self.name)) is not None:
            return error
        if (error := self.operation.refusal(problem, self.name)) is not None:
            return error
        if not self.kernels:  # a program without kernels takes any problem
            without = "one with a kernel (fl.simulate runs tile programs)"
            return None if device is None else UsageError("algorithm", self.name, without)
        return self.support.refusal(self.name, problem, device, tile)

    def refuses(self, problem: Problem, device: Device | None = None, tile: Tile | None = None) -> str | None:
        """Why the algorithm doesn't take a problem, as one line, or None if it does."""
        error = self.refusal(problem, device, tile)
        return None if error is None else str(error)

    def check(self, problem: Problem, device: Device | None = None, tile: Tile | None = None) -> None:
        """Raises the error that `refusal` returns, if any."""
        if (error := self.refusal(problem, device, tile)) is not None:
            raise error
