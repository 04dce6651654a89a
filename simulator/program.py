"""Tile programs as objects: what `@program` makes of a function."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Protocol

from simulator.config import Config, warps_for_rows
from simulator.devices import Device
from simulator.machine import Machine
from simulator.operations.attention import ATTENTION
from simulator.operations.operation import Operation
from simulator.problem import Problem, Tile

Body = Callable[..., Any]
"""`(m, *inputs, problem, tile)`, the inputs those of its operation that nobody may leave out."""


class Configure(Protocol):
    """Chooses a kernel's configuration for a problem on a device; `tile=None` is the default."""

    def __call__(
        self, problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None
    ) -> Config: ...


def configure_plainly(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """64 x 64, or the tile asked for; warps split the rows. What one's own program gets unless it brings its own."""
    del problem, device
    chosen = Tile(64, 64) if tile is None else Tile.parse(tile)
    return Config(tile=chosen, warps=warps_for_rows(chosen.rows))


class Program:
    """A tile program. It goes wherever an algorithm's name goes: simulated, counted, verified, traced, swept.

    >>> import flashlab as fl
    >>> fl.CATALOGUE["flash1"].program
    <tile program flash1>
    """

    def __init__(self, body: Body, configure: Configure = configure_plainly, operation: Operation = ATTENTION) -> None:
        update_wrapper(self, body)
        self.name: str = getattr(body, "__name__", "program")
        self.body, self.configure, self.operation = body, configure, operation

    def __call__(self, m: Machine, *rest: Any) -> Any:
        """The body on a machine: its inputs, the problem, the tile."""
        return self.body(m, *rest)

    def __repr__(self) -> str:
        return f"<tile program {self.name}>"


def program(
    body: Body | None = None, *, configure: Configure = configure_plainly, operation: Operation = ATTENTION
) -> Any:
    """Make a tile program of a function `(m, q, k, v, problem, tile)` that launches blocks and returns `out` or `(out, lse)`.

    `configure(problem, device, tile)` chooses tile and warps where the plain 64 x 64 won't do. A program of another
    `operation` takes that one's inputs in place of q, k, v, and returns its outputs.

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
    return Program(body, configure, operation) if body is not None else lambda f: Program(f, configure, operation)  # pyright: ignore
