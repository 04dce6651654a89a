"""Holds simulator and formula to the emulator's counts of the same .cu files, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from flashlab.emulator.library import Launched
from flashlab.measure import sectors
from flashlab.measure.counter_report import Check, CountersReport, LaunchReport
from flashlab.measure.metrics import BYTES
from flashlab.measure.workload import Case
from flashlab.run.emulated import Emulation, emulate_problem
from simulator import shape_run
from simulator.algorithm import Kernel
from simulator.catalogue import get
from simulator.counts import LaunchCounts
from simulator.devices import Device

__all__ = ["emulated", "extras", "launches", "run"]


def run(
    cases: Sequence[Case],
    *,
    device: Device | str | None = None,
    progress: Callable[[Iterable[Case]], Iterable[Case]] = iter,
) -> CountersReport:
    """Run the cases' kernels on the emulator and compare every launch with simulator and formula.

    Every difference by step and tensor, and every misuse, is a line in `.errors`. `device` is the GPU for which the
    kernels are configured (None: "h100"). `progress` wraps the cases, as `tqdm.tqdm` would. Raises `Unavailable`
    without a C++ compiler.
    """
    found: list[LaunchReport] = []
    errors: list[str] = []
    where = Device.named("h100" if device is None else device)
    for case in progress(cases):
        done = emulated(case, where)
        found += launches(case, done)
        errors += [f"{case.name}: {complaint}" for complaint in done.complaints()]
    return CountersReport(where.name, tuple(found), (), tuple(errors), "emulated")


def emulated(case: Case, device: Device) -> Emulation:
    """Run a case on the emulator, on random inputs."""
    row = get(case.algorithm)
    inputs = row.operation.draw(case.problem, seed=0)
    return emulate_problem(row, case.problem, inputs, device=device, lse=case.lse, tile=case.tile)


def launches(case: Case, done: Emulation) -> list[LaunchReport]:
    """A report per launch of a case, in which the emulator's counts are the measured ones."""
    formula = done.counts
    if case.problem.mask:  # what it hides is data, and the counts are those of a run on it
        simulated = formula
    else:
        simulated = shape_run(case.algorithm, case.problem, tile=case.tile, device=formula.device, lse=case.lse)
    real = [i for i, launch in enumerate(formula.launches) if launch.blocks]
    return [
        _launch(
            case,
            done.kernels[i],
            formula.launches[i],
            simulated.launches[i],
            launched,
            sectors.beside_bytes(simulated, i),
        )
        for i, launched in zip(real, done.launches, strict=True)
    ]


def _launch(
    case: Case,
    kernel: Kernel,
    formula: LaunchCounts,
    simulated: LaunchCounts,
    launched: Launched,
    read_in_sectors: int | None,
) -> LaunchReport:
    in_sectors = {"hbm.read": read_in_sectors}

    def check(what: str, both: tuple[int, int], emulated: int) -> Check:
        settled = kernel.settles(what)
        return Check(what, *both, emulated if settled else None, in_sectors.get(what), settled)

    checks = [
        *(check(what, (simulated.bytes(what), formula.bytes(what)), launched.shown(what)) for what in BYTES),
        check("flops.matmul", (simulated.flops_matmul, formula.flops_matmul), launched.flops),
    ]
    return LaunchReport(
        case=case,
        launch=formula.name,
        blocks=formula.blocks,
        threads=32 * formula.warps * formula.blocks,
        checks=tuple(checks),
        dram=None,
        exp=(formula.exp, launched.exp) if formula.exp else None,
        rates={},
        extras=extras(launched),
    )


def extras(launched: Launched) -> dict[str, int]:
    """Sectors of HBM and wavefronts of SRAM by instruction, under the names of the hardware counters."""
    found: dict[str, int] = {}
    for row in launched.moved:
        quantity, value = ("sectors", row.sectors) if row.space == "hbm" else ("wavefronts", row.wavefronts)
        key = f"{quantity}_{row.op}"
        found[key] = found.get(key, 0) + value
    return found
