"""The emulator as the third way beside simulator and formula: the counts of the same .cu files, with no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from flashlab.emulator.library import Launched
from flashlab.measure.counters import BYTES, Check, CountersReport, LaunchReport
from flashlab.measure.workload import Case
from flashlab.run.emulated import Emulation, emulate
from simulator import random_inputs, shape_run
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

    What differs by step and tensor, and every misuse, is a line in `.errors`. `device` is the GPU that the kernels are
    configured for (None: "h100"). Raises `Unavailable` without a C++ compiler.
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
    """A case on the emulator, on random numbers."""
    inputs, masks = random_inputs(case.problem, seed=0), case.problem.masks
    return emulate(case.algorithm, *inputs, device=device, lse=case.lse, tile=case.tile, **masks)


def launches(case: Case, done: Emulation) -> list[LaunchReport]:
    """A case's launches, with the emulator's counts as what was measured."""
    formula = done.counts
    simulated = shape_run(case.algorithm, case.problem, tile=case.tile, device=formula.device, lse=case.lse)
    real = [i for i, launch in enumerate(formula.launches) if launch.blocks]
    return [
        _launch(case, formula.launches[i], simulated.launches[i], launched)
        for i, launched in zip(real, done.launches, strict=True)
    ]


def _launch(case: Case, formula: LaunchCounts, simulated: LaunchCounts, launched: Launched) -> LaunchReport:
    checks = [
        *(Check(what, simulated.bytes(what), formula.bytes(what), launched.counted(what)) for what in BYTES),
        Check("flops.matmul", simulated.flops_matmul, formula.flops_matmul, launched.flops),
    ]
    return LaunchReport(
        case=case,
        launch=formula.name,
        blocks=formula.blocks,
        checks=tuple(checks),
        dram=None,
        exp=(formula.exp, launched.exp) if formula.exp else None,
        rates={},
        extras=extras(launched),
    )


def extras(launched: Launched) -> dict[str, int]:
    """Sectors of HBM and wavefronts of SRAM by instruction, under the names that the hardware counters have."""
    found: dict[str, int] = {}
    for row in launched.moved:
        quantity, value = ("sectors", row.sectors) if row.space == "hbm" else ("wavefronts", row.wavefronts)
        key = f"{quantity}_{row.op}"
        found[key] = found.get(key, 0) + value
    return found
