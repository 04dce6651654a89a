"""Hardware counters of the kernels, held against simulator and formula: `simulated = formula = measured`.

The kernels run in a process of their own under `ncu` (Nsight Compute), many problems in one: its start costs seconds.
Bytes requested from HBM and SRAM must be equal to the byte, the operations of the tensor cores to the operation; reads
from DRAM must lie between what a cold cache cannot avoid and what is requested.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

from flashlab.measure import metrics, ncu, sectors
from flashlab.measure import workload as case_files
from flashlab.measure.counter_report import Check, CountersReport, DramCheck, LaunchReport, ModelCheck
from flashlab.measure.metrics import BYTES, DRAM_READ, DRAM_WRITE, EXP, EXTRAS, RATES, TENSOR_OPS
from flashlab.measure.ncu import Measured, parse
from flashlab.measure.workload import Case
from simulator import Counts, dram, shape_run
from simulator.catalogue import get
from simulator.counts import LaunchCounts
from simulator.devices import Device
from simulator.errors import Unavailable

__all__ = ["compare", "run"]

DRAM_FROM = 1_000_000
"""Problems that allocate no more than this (bytes) are too small for a judgement of DRAM reads."""


def run(
    cases: Sequence[Case],
    *,
    device: Device | None = None,
    simulate_up_to: int = 1_000_000,
    timeout: float = 600,
    progress: Callable[[Iterable[list[Case]]], Iterable[list[Case]]] = iter,
) -> CountersReport:
    """Run the cases' kernels under ncu on this machine's GPU and compare every launch with simulator and formula.

    Problems of more tiles than `simulate_up_to` are compared with the formula alone, unless TMA copies rows that are no
    whole sectors: only a run says what the counters show of those. A case that fails takes the other cases of its
    process with it, and those of other algorithms go on: it is one line in `.errors`. `progress` wraps the batches of
    cases that share a process.
    Raises `Unavailable` without a GPU, without ncu, or without the permission to read counters.
    """
    from flashlab.run.devices import current_device

    device = current_device() if device is None else device
    asked = metrics.asked()
    launches: list[LaunchReport] = []
    models: list[ModelCheck] = []
    errors: list[str] = []
    for batch in progress(_by_algorithm(cases)):
        counts = [case_files.counted(case, device) for case in batch]
        names = [x.name for c in counts for x in c.launches if x.blocks]
        try:
            measured = parse(_profile(batch, asked, timeout))
            if [m.kernel for m in measured] != names:
                raise RuntimeError(f"ncu saw {len(measured)} launches of the {len(names)} that were to run")
        except Unavailable:
            raise
        except RuntimeError as error:
            errors.append(f"{batch[0].algorithm}: {error}")
            continue
        left = iter(measured)
        for case, formula in zip(batch, counts, strict=True):
            simulated = _simulated(case, formula, simulate_up_to)
            compared = [
                compare(case, simulated, formula, i, next(left)) for i, x in enumerate(formula.launches) if x.blocks
            ]
            launches += compared
            models += _model(case, formula, compared)
    return CountersReport(device.name, tuple(launches), tuple(models), tuple(errors))


def _by_algorithm(cases: Sequence[Case]) -> list[list[Case]]:
    """Neighbouring cases of one algorithm, which share a profiler session: what fails in one leaves the others standing."""
    return [list(group) for _, group in groupby(cases, key=lambda case: case.algorithm)]


def _simulated(case: Case, formula: Counts, most: int) -> Counts | None:
    if case.problem.mask:  # by a run already
        return formula
    boxed = {name for kernel in get(case.algorithm).kernels for name, _ in kernel.boxes}
    large = case.problem.row_tiles(formula.tile) * case.problem.key_tiles(formula.tile) > most
    if large and sectors.are_whole(formula, boxed):
        return None
    return shape_run(case.algorithm, case.problem, tile=case.tile, device=formula.device, lse=case.lse)


def _model(case: Case, formula: Counts, launches: Sequence[LaunchReport]) -> list[ModelCheck]:
    """The model against the measurement; none for a problem that is too small to judge."""
    drams = [launch.dram for launch in launches if launch.dram and launch.dram.judged]
    if not drams or len(drams) < len(launches):
        return []
    large = formula.hbm.peak > formula.device.l2 / 2
    return [ModelCheck(case.name, formula.dram.estimate, sum(d.measured for d in drams), large)]


def compare(case: Case, simulated: Counts | None, formula: Counts, index: int, measured: Measured) -> LaunchReport:
    """Hold one measured launch against the same launch of simulator and formula. Needs no GPU."""
    launch = formula.launches[index]
    simulated_launch = None if simulated is None else simulated.launches[index]
    kernel = get(case.algorithm).launched(case.problem, formula.config)[index]
    # no counter sees what TMA writes into SRAM
    unseen = {"sram.write"} if kernel.boxes else set[str]()
    if kernel.waits:  # a counter sees all reads of a wait, and chance says how many there are
        unseen |= {"hbm.read", "sectors_ld"}
    checks = [
        Check(
            what,
            None if simulated_launch is None else simulated_launch.bytes(what),
            launch.bytes(what),
            None if what in unseen else measured.total(names),
            sectors=sectors.beside_bytes(simulated, index) if what == "hbm.read" else None,
            settled=kernel.settles(what),
        )
        for what, names in BYTES.items()
    ]
    if operations := TENSOR_OPS.get(case.problem.operand_dtype):
        simulated_ops = None if simulated_launch is None else simulated_launch.flops_matmul
        found = next((n for name in operations if (n := measured.total([name])) is not None), None)
        settled = kernel.settles("flops.matmul")
        checks.append(Check("flops.matmul", simulated_ops, launch.flops_matmul, found, settled=settled))
    special = measured.total([EXP])  # instructions of a warp, so 32 elements each
    return LaunchReport(
        case=case,
        launch=launch.name,
        blocks=launch.blocks,
        threads=32 * launch.warps * launch.blocks,
        checks=tuple(checks),
        dram=_dram(formula, launch, measured),
        exp=None if special is None or not launch.exp else (launch.exp, 32 * special),
        rates={name: measured.metrics[metric] for name, metric in RATES.items() if metric in measured.metrics},
        extras={
            name: total
            for name, names in EXTRAS.items()
            if name not in unseen and (total := measured.total(names)) is not None
        },
    )


def _dram(counts: Counts, launch: LaunchCounts, measured: Measured) -> DramCheck | None:
    read = measured.total([DRAM_READ])
    if read is None:
        return None
    bounds = dram.of_launch(counts, launch)
    return DramCheck(
        measured=read,
        low=bounds.low,
        high=bounds.high,
        estimate=bounds.estimate,
        written=measured.total([DRAM_WRITE]) or 0,
        judged=counts.hbm.peak > DRAM_FROM,
    )


def _profile(cases: Sequence[Case], asked: Sequence[str], timeout: float) -> str:
    """What ncu printed about the launches of `cases`, run in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        command = case_files.command(case_files.write(cases, Path(folder)), "--counted")
        kernels = {entry for case in cases for entry in case.entries}
        return ncu.profile(command, kernels=kernels, metrics=asked, timeout=timeout)
