"""The choice of "auto": the fastest algorithm that takes a problem, on a GPU or on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulator import catalogue
from simulator.algorithms import flash3_backward_deterministic, flash3_paged, flash_decoding
from simulator.devices import Device
from simulator.errors import UsageError, unknown
from simulator.operations.operation import Operation
from simulator.problem import Problem, Tile
from simulator.program import Program
from simulator.simulate import TileLike

__all__ = ["check", "chosen", "elsewhere", "fastest", "is_auto", "one_order"]

_ONE_ORDER = " in one order"
_FASTEST = {
    "attention": ("flash_decoding", "flash3", "flash2"),
    "backward": ("flash3_backward_deterministic", "flash3_backward", "flash3_backward_wide", "flash2_backward"),
    "backward in one order": ("flash3_backward_deterministic", "flash3_backward_wide", "flash2_backward_deterministic"),
    "paged attention": ("flash3_paged", "paged"),
    "latent attention": ("mla_hopper", "mla"),
    "paged latent attention": ("mla_hopper_paged", "mla_paged"),
}

_PAYS: dict[str, Callable[[Problem, Device], bool]] = {
    "flash3_backward_deterministic": flash3_backward_deterministic.pays,
    "flash3_paged": flash3_paged.pays,
    "flash_decoding": flash_decoding.pays,
}
"""Where the fastest is so for some problems only: whether it is."""


def is_auto(algorithm: Any) -> bool:
    """An array in the wrong place compares element by element: whoever looks the name up refuses it."""
    return isinstance(algorithm, str) and algorithm == "auto"


def check(algorithm: str | Program, operation: Operation) -> None:
    """Raises `UsageError` for what is neither "auto" nor an algorithm of the operation."""
    if is_auto(algorithm) or catalogue.get(algorithm).operation is operation:
        return
    names = list(catalogue.of(operation))
    raise unknown("algorithm", algorithm, ["auto", *names] if operation.name in _FASTEST else names)


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
    names = _FASTEST[operation.name + _ONE_ORDER * one_order]
    asked = None if tile is None else Tile.parse(tile)
    takes = [name for name in names if not catalogue.get(name).refuses(problem, device, asked)]
    pays = {} if one_order else _PAYS
    best = (name for name in takes if pays.get(name, _always)(problem, device))
    return next(best, takes[0] if takes else _anywhere(operation, problem, one_order))


def _anywhere(operation: Operation, problem: Problem, one_order: bool) -> str:
    """What runs on any device. Where no algorithm takes the problem, it says why."""
    names = _FASTEST[operation.name + _ONE_ORDER * one_order]
    return next((name for name in reversed(names) if not catalogue.get(name).refuses(problem)), names[-1])


def elsewhere(algorithm: str | Program, operation: Operation, *, one_order: bool = False) -> str | Program:
    """The algorithm itself; for "auto" the one that takes most problems, on any device.

    With `one_order` it is one of those of which each run gives the same bits.
    """
    return _FASTEST[operation.name + _ONE_ORDER * one_order][-1] if is_auto(algorithm) else algorithm


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


def _always(problem: Problem, device: Device) -> bool:
    del problem, device
    return True
