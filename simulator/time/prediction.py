"""How long a kernel takes, which units it keeps busy, what limits it, and what runs when on an SM."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from simulator import catalogue
from simulator.api import count
from simulator.devices import Device
from simulator.errors import UsageError
from simulator.names import DeviceName
from simulator.problem import COMMON_MASKS, SCORES, Problem, Tile
from simulator.program import Program
from simulator.simulate import TileLike
from simulator.time.costs import LONGEST_WALK, MOST_MASKED, Costs, run
from simulator.time.engine import UNITS, Event
from simulator.time.launch import Launch, Work
from simulator.time.rates import LAUNCH, TURNOVER, Rates
from simulator.time.schedule import deal, finish

UNIT_NAMES = {
    "copy": "the way to L2 and DRAM",
    "sram": "shared memory's port",
    "tensor": "the tensor cores",
    "exp": "the exponential units",
    "alu": "the FMA and ALU lanes",
}
"""What each unit is called in words."""
_BUSY, _BALANCED = 0.85, 0.85


@dataclass(frozen=True)
class LaunchTime:
    """The time of one launch.

    It takes `seconds`: the longer of `sm_seconds` (what the SMs take) and `dram_seconds` (what DRAM's bandwidth takes),
    and what an empty launch takes. `utilisation` is the share of the time that each unit is busy while blocks run, over
    all SMs. `balance` is the share of that time in which the `blocks_per_sm` places of the SMs are taken. `bound` says
    in words what limits the launch.
    """

    name: str
    seconds: float
    sm_seconds: float
    dram_seconds: float
    utilisation: dict[str, float]
    balance: float
    blocks_per_sm: int
    bound: str


@dataclass(frozen=True)
class Timeline:
    """What `timeline` predicts.

    `events` are what runs on one SM in the longest launch, from its first block on, in cycles. Of a walk they show up
    to a dozen key tiles. `clock` is in hertz, for SMs whose tensor cores are idle.

    >>> import flashlab as fl
    >>> t = fl.timeline("flash2", fl.Problem(batch=1, heads=2, len_q=128, head_dim=64, dtype="float16"))
    >>> [launch.name for launch in t.launches], t.events[0].unit, t.events[0].name
    (['flash2'], 'copy', 'load_q')
    """

    algorithm: str
    problem: Problem
    tile: Tile
    device: Device
    launches: tuple[LaunchTime, ...]
    events: tuple[Event, ...] = field(repr=False)
    clock: float

    drawer: ClassVar[Callable[[Timeline], Any] | None] = None
    """What `plot` calls. `flashlab` sets it."""

    @property
    def seconds(self) -> float:
        """The time of all launches. Each begins when the one before is done."""
        return sum(launch.seconds for launch in self.launches)

    @property
    def longest(self) -> LaunchTime:
        """The launch that takes longest."""
        return max(self.launches, key=lambda launch: launch.seconds)

    @property
    def utilisation(self) -> dict[str, float]:
        """The share of the time of all launches in which each unit of the SMs is busy."""
        return {unit: sum(x.utilisation[unit] * x.sm_seconds for x in self.launches) / self.seconds for unit in UNITS}

    @property
    def bound(self) -> str:
        """What limits the launch that takes longest, in words."""
        return self.longest.bound

    def to_dict(self) -> dict[str, Any]:
        """Everything but the events, as plain data for JSON."""
        return {
            "algorithm": self.algorithm,
            "tile": str(self.tile),
            "device": self.device.name,
            "seconds": self.seconds,
            "clock": self.clock,
            "utilisation": self.utilisation,
            "bound": self.bound,
            "launches": [vars(launch) for launch in self.launches],
        }

    def chrome_trace(self) -> dict[str, Any]:
        """`events` in Chrome's trace format, for Perfetto: a track per unit, and a track per actor and unit."""
        warps = sorted({(event.actor, UNITS.index(event.unit)) for event in self.events})
        units = {(1, unit): i for i, unit in enumerate(UNITS, 1)}
        tracks = units | {(2, f"{actor}, {UNITS[u]}"): i for i, (actor, u) in enumerate(warps, 1)}
        entries = [_metadata("process_name", pid, 0, name) for pid, name in ((1, "units of the SM"), (2, "warps"))]
        entries += [_metadata("thread_name", pid, tid, name) for (pid, name), tid in tracks.items()]
        microseconds = 1e6 / self.clock
        for event in self.events:
            for pid, track in ((1, event.unit), (2, f"{event.actor}, {event.unit}")):
                entries.append(
                    {
                        "ph": "X",
                        "pid": pid,
                        "tid": tracks[pid, track],
                        "name": event.name,
                        "cat": event.unit,
                        "ts": event.start * microseconds,
                        "dur": (event.end - event.start) * microseconds,
                        "args": {"actor": event.actor, "unit": event.unit, "cycles": event.end - event.start},
                    }
                )
        return {
            "traceEvents": entries,
            "displayTimeUnit": "ns",
            "otherData": {"algorithm": self.algorithm, "device": self.device.name, "launch": self.longest.name},
        }

    def to_chrome_trace(self, path: str | Path) -> Path:
        """Write `chrome_trace` for ui.perfetto.dev or chrome://tracing, replacing `path`. Returns the path."""
        path = Path(path)
        path.write_text(json.dumps(self.chrome_trace(), allow_nan=False) + "\n", encoding="utf-8")
        return path

    def plot(self) -> Any:
        """A matplotlib figure of the units of one SM over time. Raises `UsageError` if `flashlab` wasn't imported."""
        if Timeline.drawer is None:
            raise UsageError("plot", "simulator", "`import flashlab`, which draws")
        return Timeline.drawer(self)


def _metadata(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def timeline(
    algorithm: str | Program, problem: Problem, tile: TileLike = None, device: Device | DeviceName = "h100"
) -> Timeline:
    """Predict how long an algorithm's kernels take, from a model of the units of an SM. See docs/time.md.

    Raises `UsageError` for an algorithm without a schedule, and for what its kernel doesn't take on the device; `SramOverflow`
    for a tile that doesn't fit.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=4, heads=16, len_q=4096, head_dim=128, dtype="bfloat16", causal=True)
    >>> t = fl.timeline("flash2", p, device="h200")
    >>> 0.0005 < t.seconds < 0.0015, max(t.utilisation, key=t.utilisation.get)
    (True, 'tensor')
    """
    on = Device.named(device)
    row = catalogue.get(algorithm)
    if row.schedule is None:
        known = ", ".join(each.name for each in catalogue.CATALOGUE.values() if each.schedule)
        missing = "one with a schedule, which says what its blocks do at the same time (a tile program doesn't)"
        raise UsageError("algorithm", row.name, f"{missing}: {known}")
    if (
        error := Problem.checked(problem).unknown_mask((*COMMON_MASKS, *SCORES, "chunk"), "the model of time")
    ) is not None:
        raise error
    config = row.program.configure(problem, on, tile)
    row.check(problem, on, config.tile)
    rates = Rates(on, problem.dtype)
    counts = count(algorithm, problem, tile=tile, device=on)
    launches = row.schedule(problem, config, rates)
    times = tuple(
        _time(launch, rates, sum(counts.distinct(counted, way) for way in ("read", "write")))
        for launch, counted in zip(launches, counts.launches, strict=True)
    )
    slowest = max(range(len(times)), key=lambda i: times[i].seconds)
    events = tuple(_first_blocks(launches[slowest], times[slowest].blocks_per_sm, on.sms))
    return Timeline(row.name, problem, config.tile, on, times, events, rates.clock)


def _time(launch: Launch, rates: Rates, moved: int) -> LaunchTime:
    """The time of one launch. `moved` is how many distinct bytes it reads and writes."""
    sms = rates.device.sms
    slots = max(1, min(launch.slots, -(-launch.works // sms)))
    costs = Costs(launch, slots, TURNOVER)
    parts = [([(costs.of(each), n) for each, n in runs], times) for runs, times in launch.order]
    work = sum(times * sum(cost.cycles * n for cost, n in runs) for runs, times in parts)
    busy = sum((float(times * n) * cost.busy for runs, times in parts for cost, n in runs), np.zeros(len(UNITS)))
    cycles_of = [(list(_merged((cost.cycles, n) for cost, n in runs)), times) for runs, times in parts]
    if launch.persistent:
        first = next((runs[0][0].fill for runs, _ in parts if runs), 0.0)
        cycles = (finish if launch.dynamic else deal)(cycles_of, slots * sms) + first
    else:
        cycles = finish(cycles_of, slots * sms)
    share = busy / (cycles * sms) if cycles else busy
    utilisation = {unit: float(x) for unit, x in zip(UNITS, share, strict=True)}
    on_sms, dram = cycles / rates.loaded(utilisation["tensor"], utilisation["copy"]), moved / rates.bandwidth
    seconds = LAUNCH + max(on_sms, dram)
    balance = work / (slots * sms * cycles) if cycles else 0.0
    bound = _bound(seconds, on_sms, dram, utilisation, balance)
    return LaunchTime(launch.name, seconds, on_sms, dram, utilisation, balance, slots, bound)


def _merged(runs: Iterator[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    """Neighbouring runs of the same duration, as one run."""
    last, total = 0.0, 0
    for cycles, n in runs:
        if total and cycles != last:
            yield last, total
            total = 0
        last, total = cycles, total + n
    if total:
        yield last, total


def _bound(seconds: float, on_sms: float, dram: float, utilisation: dict[str, float], balance: float) -> str:
    unit = max(utilisation, key=lambda name: utilisation[name])
    share = f"{utilisation[unit]:.0%}"
    if dram > on_sms:
        return f"DRAM: at its bandwidth the bytes alone take {dram / seconds:.0%} of the time"
    if utilisation[unit] >= _BUSY:
        return f"{UNIT_NAMES[unit]}, busy {share} of the time"
    if balance < _BALANCED:
        return f"too few blocks, or uneven ones: an SM's places are taken {balance:.0%} of the time"
    return f"waiting: no unit is busy all the time, most of all {UNIT_NAMES[unit]}, {share}; warps wait for each other's results"


def _first_blocks(launch: Launch, slots: int, sms: int) -> list[Event]:
    """What runs on the first SM until its first blocks are done, or the first two works of each persistent block."""
    works = list(islice(launch.taken(), 2 * slots * sms))
    shown = [[_shortened(work) for work in works[s * sms :: slots * sms]] for s in range(slots)]
    if not launch.persistent:
        shown = [agenda[:1] for agenda in shown]
    return sorted(run(launch, shown, TURNOVER, record=True).events, key=lambda event: (event.start, event.end))


def _shortened(work: Work) -> Work:
    masked = min(work.masked, MOST_MASKED)
    return Work(min(work.tiles, max(LONGEST_WALK, masked)), masked)


__all__: Sequence[str] = ["UNIT_NAMES", "LaunchTime", "Timeline", "timeline"]
