"""The choice of "auto": the fastest algorithm that takes a problem, on a GPU or on a CPU."""

from __future__ import annotations

from typing import Any

from simulator import catalogue
from simulator.algorithm import Algorithm
from simulator.devices import Device
from simulator.errors import UsageError, unknown
from simulator.operations.operation import Operation
from simulator.problem import Problem, Tile
from simulator.program import Program
from simulator.simulate import TileLike

__all__ = ["check", "chosen", "elsewhere", "fastest", "is_auto", "one_order"]


def is_auto(algorithm: Any) -> bool:
    """Is it "auto"? An array in the wrong place would compare element by element. The look-up of the name refuses it later."""
    return isinstance(algorithm, str) and algorithm == "auto"


def check(algorithm: str | Program, operation: Operation) -> None:
    """Raises `UsageError` for anything but "auto" and the algorithms of the operation."""
    if _ranked(operation) if is_auto(algorithm) else catalogue.get(algorithm).operation is operation:
        return
    names = list(catalogue.of(operation))
    raise unknown("algorithm", algorithm, ["auto", *names] if _ranked(operation) else names)


def chosen(
    algorithm: str | Program,
    operation: Operation,
    problem: Problem,
    device: Device | None = None,
    tile: TileLike = None,
    *,
    one_order: bool = False,
) -> str | Program:
    """The algorithm itself; for "auto" the fastest that takes the problem on a GPU, or without a `device` the one that runs
    anywhere. `flash2` is what a call has where it says none, and `flash_decoding` stands in for it where K and V have 8 bits."""
    if is_auto(algorithm):
        if device is None:
            return _anywhere(operation, problem, one_order)
        return fastest(operation, problem, device, tile, one_order=one_order)
    default = isinstance(algorithm, str) and algorithm == "flash2"
    return "flash_decoding" if default and problem.quantized else algorithm


def fastest(
    operation: Operation, problem: Problem, device: Device, tile: TileLike = None, *, one_order: bool = False
) -> str:
    """The fastest algorithm that takes the problem on a device. `one_order` is as in `elsewhere`."""
    asked = None if tile is None else Tile.parse(tile)
    takes = [row for row in _ranked(operation, one_order) if not row.refuses(problem, device, asked)]
    best = (row.name for row in takes if one_order or row.pays(problem, device))
    return next(best, takes[0].name if takes else _anywhere(operation, problem, one_order))


def _anywhere(operation: Operation, problem: Problem, one_order: bool) -> str:
    """What runs on any device. Where no algorithm takes the problem, it says why."""
    rows = _ranked(operation, one_order)[::-1]
    return next((row for row in rows if not row.refuses(problem)), rows[0]).name


def _ranked(operation: Operation, one_order: bool = False) -> list[Algorithm]:
    """What "auto" chooses from, the fastest first. With `one_order`, without those that add outputs up by atomics."""
    ranked = (row for row in catalogue.CATALOGUE.values() if row.rank and row.operation is operation)
    return sorted((row for row in ranked if not (one_order and row.atomics)), key=lambda row: -row.rank)


def elsewhere(algorithm: str | Program, operation: Operation, *, one_order: bool = False) -> str | Program:
    """The algorithm itself; for "auto" the one that takes most problems, on any device.

    With `one_order` it is one that gives the same bits in each run.
    """
    return _ranked(operation, one_order)[-1].name if is_auto(algorithm) else algorithm


def one_order(algorithm: str | Program, operation: Operation) -> str | Program:
    """The algorithm, if each run of it gives the same bits; for "auto" the one that runs anywhere. Raises `UsageError` for others.

    >>> from simulator.operations.backward import BACKWARD
    >>> one_order("auto", BACKWARD)
    'flash2_backward_deterministic'
    """
    if is_auto(algorithm):
        return elsewhere(algorithm, operation, one_order=True)
    if catalogue.get(algorithm).atomics:
        accepted = [row.name for row in catalogue.of(operation).values() if not row.atomics]
        raise UsageError("algorithm", algorithm, f"auto, {', '.join(accepted)} where deterministic")
    return algorithm
