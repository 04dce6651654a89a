"""Tile programs as objects: `@program` makes one of a function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import update_wrapper
from inspect import signature
from typing import Any, Protocol

from simulator import misuse
from simulator.block import Block
from simulator.config import Config, warps_for
from simulator.devices import Device
from simulator.errors import Said, UsageError, unknown
from simulator.machine import Machine
from simulator.operations.attention import ATTENTION
from simulator.operations.operation import Operation
from simulator.problem import Problem, Tile
from simulator.registers import Registers
from simulator.tensors import HbmTensor, SramTile

Body = Callable[..., Any]
"""`(m, *inputs, problem, tile)`. The inputs are those of the operation that callers may not leave out."""


class Configure(Protocol):
    """Chooses a kernel's configuration for a problem on a device. With `tile=None` it chooses the tile as well."""

    def __call__(
        self, problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None
    ) -> Config: ...


def configure_plainly(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """The configuration of a program that brings none: the tile asked for, or 64 x 64. Warps split the rows."""
    del problem, device
    chosen = Tile(64, 64) if tile is None else Tile.parse(tile)
    return Config(tile=chosen, warps=warps_for(chosen.rows))


class Program:
    """A tile program. It can stand wherever an algorithm's name can: to simulate, count, verify, trace or sweep.

    >>> import flashlab as fl
    >>> fl.CATALOGUE["flash1"].program
    <tile program flash1>
    """

    def __init__(self, body: Body, configure: Configure = configure_plainly, operation: Operation = ATTENTION) -> None:
        update_wrapper(self, body)
        self.name: str = getattr(body, "__name__", "program")
        self.body, self.configure, self.operation = body, configure, operation

    def configured(self, configure: Configure) -> Configure:
        """Give the program its configuration, which may stand in another file: `@flash2.configured`. Returns `configure`."""
        self.configure = configure
        return configure

    def __call__(self, m: Machine, *rest: Any) -> Any:
        """Run the body on a machine. `rest` are the inputs, the problem and the tile.

        Raises `UsageError` for a call with too few arguments, too many or unknown ones, also of the body itself.
        """
        try:
            return self.body(m, *rest)
        except TypeError as error:
            try:
                signature(self.body).bind(m, *rest)
            except TypeError as refused:
                inputs = ", ".join(operand.name for operand in self.operation.required)
                asked = f"a function {self.name}(m, {inputs}, problem, tile)"
                has = Said(f"{self.name}{misuse.parameters(self.body)}")
                raise UsageError("program", has, asked) from refused
            if (wrong := misuse.arguments(error, (Block, Machine, HbmTensor, SramTile, Registers))) is not None:
                raise wrong from error
            raise

    def __repr__(self) -> str:
        return f"<tile program {self.name}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """It is pickled as a function is: by the name under which its module has it. One of a notebook goes by its content."""
        name = getattr(self, "__qualname__", self.name)
        found = getattr(sys.modules.get(self.__module__), name, None)
        return name if found is self and self.__module__ != "__main__" else super().__reduce_ex__(protocol)


def program(
    body: Body | None = None, *, configure: Configure = configure_plainly, operation: Operation | str = ATTENTION
) -> Any:
    """Make a tile program of a function `(m, q, k, v, problem, tile)`.

    The function launches blocks and returns `out` or `(out, lse)`. `configure(problem, device, tile)` chooses tile and
    warps where a plain 64 x 64 won't do. A program of another `operation`, or of its name as in `operation="backward"`,
    takes that operation's inputs in place of q, k, v, and returns its outputs.

    >>> import flashlab as fl
    >>> @fl.program
    ... def diagonal(m, q, k, v, problem, tile):
    ...     "Attention where every query sees its own key only: out = v."
    ...     out = m.output("out")
    ...     for block in m.launch("diagonal", rows=problem.row_tiles(tile), warps=4):
    ...         block.step("copy")
    ...         block.store(out, block.fetch(v, block.i, tile.rows), block.i, tile.rows)
    ...     return out
    >>> p = fl.Problem(batch=1, heads=1, len_q=128, head_dim=64, dtype="float16", window=(0, 0))
    >>> fl.count(diagonal, p).hbm.read
    16384
    """
    of = _named(operation) if isinstance(operation, str) else operation
    return Program(body, configure, of) if body is not None else lambda f: Program(f, configure, of)  # pyright: ignore


def _named(name: str) -> Operation:
    """The operation of this name, among those of the catalogue's algorithms."""
    from simulator.catalogue import CATALOGUE  # whose programs come from here

    known = {row.operation.name: row.operation for row in CATALOGUE.values()}
    if name not in known:
        raise unknown("operation", name, known)
    return known[name]
