"""A tile program that runs in another process: what is asked of it there, and what the checks see of it here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from flashlab.verify import general
from flashlab.verify.adapter import Target, TileShape
from flashlab.verify.session import Session, word
from flashlab.verify.targets import SimulatorTarget
from simulator import CATALOGUE, Problem, Program, catalogue
from simulator.dtypes import Array
from simulator.errors import Said, UsageError
from simulator.names import DeviceName
from simulator.operations.attention import ATTENTION

__all__ = ["described", "methods_of", "target_of"]


def described(program: Program) -> dict[str, Any]:
    """What the judge is told of a program."""
    row = CATALOGUE.get(program.name)
    if row is not None and row.program is program:
        raise UsageError("target", Said(f"{program.__module__}:{program.name}"), f"its name, {program.name}")
    name = getattr(program, "__qualname__", program.name)
    return {"name": name, "module": program.__module__, "operation": program.operation.name}


def methods_of(program: Program) -> dict[str, Callable[..., Any]]:
    """What may be asked of it."""

    def simulate(problem: Problem, arrays: Mapping[str, Any], device: DeviceName, tile: TileShape, scales: Any) -> Any:
        return SimulatorTarget(program, device, tile, asked=False).call(problem, arrays, scales=scales)

    def check(problem: Problem, device: DeviceName, tile: TileShape) -> None:
        SimulatorTarget(program, device, tile, asked=False).check_bytes(problem, None)

    def run(problem: Problem, arrays: Mapping[str, Any], device: DeviceName, tile: TileShape) -> Any:
        return _ours(program, device, tile).run_on(problem, arrays)

    def check_general(problem: Problem, seed: int, device: DeviceName, tile: TileShape) -> None:
        _ours(program, device, tile).check_bytes(problem, seed)

    return {"simulate": simulate, "check": check, "run": run, "check_general": check_general}


def _ours(program: Program, device: DeviceName, tile: TileShape) -> general.Ours:
    return general.subject(catalogue.get(program), "simulator", device=device, tile=tile, framework=None)


def _stub(session: Session) -> Program:
    """A program of the same name and operation, whose body is elsewhere."""
    operation = str(session.told.get("operation"))
    known = {row.operation.name: row.operation for row in CATALOGUE.values()}
    if operation not in known:
        raise UsageError("operation", operation, f"one of {', '.join(known)}: only these have judges here")

    def body(*_: Any) -> Any:
        raise NotImplementedError

    body.__qualname__, body.__module__ = word(session.told.get("name")), word(session.told.get("module"))
    body.__name__ = body.__qualname__.rpartition(".")[2]
    return Program(body, operation=known[operation])


class _Outside(SimulatorTarget):
    """A tile program for attention."""

    def __init__(self, stub: Program, session: Session, device: DeviceName, tile: TileShape) -> None:
        self.session = session
        super().__init__(stub, device, tile)

    def call(
        self,
        problem: Problem,
        arrays: Mapping[str, Any],
        *,
        out: Any = None,
        tile: TileShape = None,
        scales: Any = None,
    ) -> tuple[Any, Any]:
        found = self.session.ask("simulate", problem, dict(arrays), self.device, self.tile or tile, scales)
        out, lse = (*found, None, None)[:2]
        return out, lse

    def check_bytes(self, problem: Problem, tile: TileShape) -> None:
        self.session.ask("check", problem, self.device, self.tile or tile)


@dataclass(frozen=True, kw_only=True)
class _OutsideOurs(general.Ours):
    """A tile program for another operation."""

    session: Session

    def run_on(self, problem: Problem, given: Mapping[str, Any]) -> dict[str, Array]:
        return self.session.ask("run", problem, dict(given), self.device.name, self._tile)

    def check_bytes(self, problem: Problem, seed: int) -> None:
        self.session.ask("check_general", problem, seed, self.device.name, self._tile)

    @property
    def _tile(self) -> TileShape:
        return None if self.tile is None else (self.tile.rows, self.tile.cols)


def target_of(session: Session, device: DeviceName | None, tile: TileShape) -> Target | general.Ours:
    """The program of a session, as the checks see it: on the simulator, of whatever operation it is."""
    stub = _stub(session)
    if stub.operation is ATTENTION:
        return _Outside(stub, session, device or "h100", tile)
    plain = general.subject(catalogue.get(stub), "simulator", device=device, tile=tile, framework=None)
    return _OutsideOurs(**{f.name: getattr(plain, f.name) for f in fields(plain)}, session=session)
