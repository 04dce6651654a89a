"""An estimate of the bytes that are read from DRAM. It is a model of the L2, tile by tile and wave by wave.

Requested bytes are exact. How many of them the L2 serves is not. The model takes each launch from a cold cache:

- Blocks run in waves, in the launch's own order. A wave has as many blocks as the SMs hold at once.
- The blocks of a wave that walk over the same tiles walk side by side, so each tile is fetched once for all of them.
- Data that is needed again is fetched again if too much else was touched in between. How much is too much was measured
  on an H200 with 60 MB of L2. Data that every SM reads is served up to 28 MiB and lost from 42 MiB on, because each
  half of the L2 keeps a copy of its own. Data that one SM reads is served up to 38 MiB and lost from 56 MiB on.
- What a wave reads once, and what it writes, passes through the L2 as well.
- What reductions add to is fetched before it is added to: at least once, and at most with every reduction.
- Data that one SM reads *and* writes by turns (`flash1`'s O) is lost earlier, from 33 MiB on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simulator.dtypes import Array
from simulator.problem import Walk, round_up
from simulator.ragged import Different

if TYPE_CHECKING:
    from simulator.counts import Counts, LaunchCounts, Spec
    from simulator.devices import Device

# Points (fraction of the L2 that is touched between two uses, share of re-reads that miss), from none to all.
_ALL_SMS_READ_IT = ((28 / 60, 0.0), (34 / 60, 0.75), (42 / 60, 1.0))
_ONE_SM_READS_IT = ((38 / 60, 0.0), (40 / 60, 0.03), (48 / 60, 0.6), (56 / 60, 1.0))
_ONE_SM_READS_AND_WRITES_IT = ((0.55, 0.0), (0.61, 0.08), (0.81, 0.74), (0.94, 1.0))
_TWO_HALVES = {(8, 0), (9, 0), (10, 0)}

_SEGMENTS, _STEPS = 96, 4000
_FEW = 4
"""Of very many different sequences the model looks at so many."""


@dataclass(frozen=True)
class Dram:
    """Bytes read from DRAM, without those written: an estimate, and bounds that always hold from a cold cache."""

    estimate: int
    low: int
    high: int

    def __repr__(self) -> str:
        return f"<bytes read from DRAM: about {self.estimate:,}, at least {self.low:,}, at most {self.high:,}>"


def estimate(counts: Counts) -> Dram:
    """The estimate for all launches of an algorithm. It lies within the bounds."""
    low, high = counts.compulsory_read, counts.hbm.read + counts.hbm.atomic
    return Dram(min(max(low, sum(_launch(counts, launch) for launch in counts.launches)), high), low, high)


def of_launch(counts: Counts, launch: LaunchCounts) -> Dram:
    """The estimate for one launch of an algorithm."""
    low, high = counts.distinct(launch, "read"), launch.bytes("hbm.read") + launch.bytes("hbm.atomic")
    return Dram(min(max(low, _launch(counts, launch)), high), low, high)


def resident_blocks(launch: LaunchCounts, device: Device, most: int) -> int:
    """How many blocks of a launch the device runs at once, by SRAM, warps, and the kernel's limit `most` per SM."""
    by_sram = device.sram_per_sm // (launch.sram_peak + 1024)
    return device.sms * max(1, min(by_sram, device.max_warps_per_sm // launch.warps, most))


def _launch(counts: Counts, launch: LaunchCounts) -> int:
    if not launch.blocks:
        return 0
    if counts.sequences:  # they have no data in common, and the offsets are few
        index = counts.launches.index(launch)
        if isinstance(counts.sequences, Different):
            return _by_a_few(counts.sequences, index)
        return sum(n * _launch(one, one.launches[index]) for one, n in counts.sequences)
    reads = {name: launch.bytes("hbm.read", name) for name in counts.tensors}
    distinct = {name: launch.distinct.get((name, "read"), 0) for name in counts.tensors}
    again = {
        name: reads[name] / distinct[name]
        for name, spec in counts.tensors.items()
        if reads[name] - distinct[name] > _overhang(counts, spec) and distinct[name]
    }
    once = sum(n for name, n in distinct.items() if name not in again and (name, "write") not in launch.distinct)
    once += sum(launch.distinct.get((name, "write"), 0) for name in counts.tensors if launch.bytes("hbm.atomic", name))
    if not again:
        return once
    most = counts.config.blocks_per_sm if counts.config else 16
    at_once = min(launch.blocks, resident_blocks(launch, counts.device, most))
    blocks_per_head = max(1, launch.blocks // (counts.problem.batch * counts.problem.heads))
    if (blocks_per_head == 1 and not launch.walk) or not launch.sram_peak:
        return once + _own_rows(counts, launch, again, at_once / blocks_per_head)
    if blocks_per_head == counts.problem.row_tiles(counts.tile):
        return once + _walks(counts, launch, again, min(at_once, launch.heads_together * blocks_per_head))
    return once + _bands(counts, launch, again, at_once)


def _by_a_few(sequences: Different, index: int) -> int:
    """An estimate for very many different sequences. The model looks at a few of them.

    How many bytes a sequence requests, and how many of them are distinct, is known of each. The model says which share of the
    others comes from DRAM. The sequences stand in a row by their numbers of keys. The few are in the middle of stretches that
    request equally many bytes again. From one to the next the share changes evenly.
    """
    low, again, keys = list[Array](), list[Array](), list[Array]()
    where: list[tuple[Counts, int]] = []
    for part, times in sequences.parts:
        lanes = np.atleast_1d(np.asarray(times, float))
        launch = part.launches[index]
        distinct = part.distinct(launch, "read") + 0 * lanes
        asked = launch.bytes("hbm.read") + launch.bytes("hbm.atomic") + 0 * lanes
        low.append(np.asarray(distinct, float) * lanes)
        again.append(np.asarray(asked - distinct, float) * lanes)
        keys.append(np.asarray(part.problem.len_kv + 0 * lanes, float))
        where += [(part, lane) for lane in range(len(lanes))]
    mass, row = np.concatenate(again), np.argsort(np.concatenate(keys), kind="stable")
    at: Array = np.cumsum(mass[row])
    middles: Array = float(at[-1]) * (np.arange(_FEW) + 0.5) / _FEW
    few = [min(int(i), len(row) - 1) for i in np.searchsorted(at, middles)]
    shares: list[float] = []
    for i in few:
        one = sequences.alone(*where[int(row[i])])
        launch = one.launches[index]
        distinct = one.distinct(launch, "read")
        more = launch.bytes("hbm.read") + launch.bytes("hbm.atomic") - distinct
        shares.append((_launch(one, launch) - distinct) / more if more else 0.0)
    return int(np.concatenate(low).sum() + np.dot(mass[row], np.interp(at, at[few], shares)))


def _overhang(counts: Counts, spec: Spec) -> int:
    """Bytes outside an array that TMA's boxes may request at its edges. They are no second reading of the array."""
    return spec.heads * max(counts.tile) * round_up(spec.row_bytes, 256) if spec.role == "input" else 0


def _own_rows(counts: Counts, launch: LaunchCounts, again: dict[str, float], heads_at_once: float) -> int:
    """For blocks that go over rows of their own again and again: `flash1`'s Q and O, the softmax launch's S."""
    size = sum(launch.distinct[name, "read"] / counts.tensors[name].heads for name in again)
    written = [name for name in again if (name, "write") in launch.distinct]
    curve = _ONE_SM_READS_AND_WRITES_IT if written else _ONE_SM_READS_IT
    missed = _missed(size * heads_at_once, counts.device, curve)
    total = 0
    for name, repeats in again.items():
        own = name in written  # the block itself wrote it, so even the first read may hit
        total += int(launch.distinct[name, "read"] * (1 - own + (repeats - 1 + own) * missed))
    return total


def _walks(counts: Counts, launch: LaunchCounts, again: dict[str, float], running: int) -> int:
    """For launches with one block per row tile, which walks over K and V. `running` blocks of a group run at once."""
    size = sum(launch.distinct[name, "read"] / counts.tensors[name].heads for name in again)
    held = size * max(1.0, launch.heads_together / counts.problem.queries_per_kv)
    if running * counts.problem.batch * counts.problem.heads < launch.heads_together * launch.blocks:
        # there is a second wave: what the first one streamed was touched in between
        streamed = sum(n for (name, _), n in launch.distinct.items() if name not in again)
        held += streamed * running / launch.blocks
    fits = _missed(held, counts.device, _shared(counts.device)) == 0
    passes = 1.0 if fits else _passes(counts, launch, running, held)
    return sum(int(launch.distinct[name, "read"] * passes) for name in again)


def _bands(counts: Counts, launch: LaunchCounts, again: dict[str, float], at_once: int) -> int:
    """For launches with many blocks per row tile (scores): a band of rows uses again what the band before it used."""
    p, pairs = counts.problem, counts.problem.batch * counts.problem.heads
    size = sum(launch.distinct[name, "read"] / counts.tensors[name].heads for name in again)
    in_band = min(launch.blocks, max(at_once, p.key_tiles(counts.tile)))
    streamed = launch.bytes("hbm.write") * in_band / launch.blocks
    missed = _missed(size + streamed, counts.device, _shared(counts.device))
    running = min(at_once, launch.heads_together * launch.blocks // pairs)
    total = 0
    for name, repeats in again.items():
        heads = max(1.0, launch.heads_together * counts.tensors[name].heads / pairs)
        sharers = max(1.0, min(repeats, running / heads))
        total += int(launch.distinct[name, "read"] * (1 + (repeats / sharers - 1) * missed))
    return total


def _shared(device: Device) -> tuple[tuple[float, float], ...]:
    return _ALL_SMS_READ_IT if device.compute_capability in _TWO_HALVES else _ONE_SM_READS_IT


def _missed(working_set: float, device: Device, points: tuple[tuple[float, float], ...]) -> float:
    """The share of re-reads that miss if `working_set` bytes are touched between two uses of a byte."""
    return float(np.interp(working_set / device.l2, [x for x, _ in points], [y for _, y in points]))


def _passes(counts: Counts, launch: LaunchCounts, running: int, held: float) -> float:
    """How often K and V of a group of heads are fetched. `running` blocks walk at once, one segment per step.

    A segment's stack distance is the number of segments that were touched since its last use. A block that ends hands
    its place to the next block, which starts at its own first key.
    """
    p, tile, device, together = counts.problem, counts.tile, counts.device, launch.heads_together
    rows, tiles = p.row_tiles(tile), max(1, p.key_tiles(tile))
    parts = min(tiles, _SEGMENTS)
    walked = [_around(launch.walk(i)) if launch.walk else range(tiles) for i in _sample(rows)]
    groups = min(3, p.batch * p.heads // together)  # the next group's blocks fill the last one's last wave
    spans = [
        (g * parts + first * parts // tiles, g * parts - (-stop * parts // tiles))
        for g in range(groups)
        for first, stop in (_along(r, tiles) for r in walked if r)
    ]
    copies = together * rows / max(1, len(walked))  # how many blocks one of the sample stands for: all heads walk alike
    queue = iter(spans)
    active = [list(span) for _, span in zip(range(max(1, round(running / copies))), queue, strict=False)]
    last = np.full(groups * parts, -1)
    missed = np.array([_missed(d / parts * held, device, _shared(device)) for d in range(len(last) + 1)])
    fetched, step = 0.0, 0
    while active and step < _STEPS:
        touched = sorted({at for at, _ in active})
        used = last[touched]
        used = used[used >= 0]
        behind = len(last) + 1 - np.sort(last).searchsorted(used, "right")  # the stack distances
        fetched += len(touched) - len(used) + sum(missed[behind].tolist())
        last[touched] = step
        step += 1
        for walker in active:
            walker[0] += 1
        active = [w if w[0] < w[1] else list(next(queue, (0, 0))) for w in active]
        active = [w for w in active if w[0] < w[1]]
    return fetched / max(1, int((last >= 0).sum()))


def _around(walk: Walk) -> range:
    """The range of a walk. Of one that leaves out tiles, it is that around them."""
    return walk if isinstance(walk, range) else walk.around


def _along(walk: range, tiles: int) -> tuple[int, int]:
    """The first tile and the one after the last, counted in the direction of the walk."""
    return (walk.start, walk.stop) if walk.step > 0 else (tiles - 1 - walk.start, tiles - 1 - walk.stop)


def _sample(rows: int, most: int = 2048) -> list[int]:
    """Row tiles from the last to the first. If they are more than `most`, they are thinned out evenly."""
    return [rows - 1 - i * rows // min(rows, most) for i in range(min(rows, most))]
