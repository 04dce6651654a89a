"""What an algorithm moves and computes: the accounting contract as data.

A ledger maps entries `(step, tensor, what)` to bytes, where `what` is one of `hbm.read`, `hbm.write`, `hbm.atomic`,
`sram.read` and `sram.write`. Simulator and formulas both fill a `Book`, which makes a `Counts`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from simulator.dtypes import Array
from simulator.lanes import Lanes, largest, summed_over
from simulator.problem import WIDTH, Problem, Tile, Walk, row_bytes

if TYPE_CHECKING:
    from simulator.config import Config
    from simulator.devices import Device
    from simulator.dram import Dram


class Entry(NamedTuple):
    """Where bytes were moved: the step of the program, the tensor, and the level and direction (`"hbm.read"`)."""

    step: str
    tensor: str
    what: str


class Box(NamedTuple):
    """A box that TMA loads from a head of a tensor: its first row and column, and how many rows and columns it has.

    Rows and columns outside the tensor are among them.
    """

    tensor: str
    row: int
    column: int
    rows: int
    columns: int


@dataclass(frozen=True)
class Spec:
    """An array in HBM: `(heads, rows, cols)` of a dtype, where `heads` are those of all batches.

    Rows are padded to 16 bytes. A vector (LSE, l, m) has one value per row, without padding. `role` is "input",
    "output" or "workspace". `axes` are axes that a workspace has between heads and rows, with their sizes:
    `(("splits", 4),)` gives each head four planes of rows and columns. Of a `flat` workspace a kernel is told the address
    alone, because the kernels that write and read it know how it lies. One of `zeros` holds zeros before a launch, and the
    kernel leaves it so. One that is `shared` is there once, for all heads together.

    >>> Spec("q", heads=2, rows=10, cols=40, dtype="float16", role="input").nbytes  # rows of 80 bytes
    1600
    """

    name: str
    heads: int
    rows: int
    cols: int
    dtype: str
    role: str
    vector: bool = False
    axes: tuple[tuple[str, int], ...] = ()
    flat: bool = False
    zeros: bool = False
    shared: bool = False

    @property
    def by_pointer(self) -> bool:
        """Do kernels get a pointer to it? Else they get its strides, too."""
        return self.vector or self.flat

    @property
    def planes(self) -> int:
        """How many planes of rows and columns each head has."""
        return math.prod(n for _, n in self.axes)

    @property
    def itemsize(self) -> int:
        return WIDTH[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next."""
        return self.itemsize if self.vector else row_bytes(self.cols, self.itemsize)

    @property
    def nbytes(self) -> int:
        return self.heads * self.planes * self.rows * self.row_bytes


@dataclass(frozen=True)
class LaunchCounts:
    """One kernel launch: its grid, its ledger and its arithmetic.

    `distinct[(tensor, "read" | "write")]` are the bytes that are requested at least once. The DRAM model needs two more:
    `heads_together` is how many (batch, head) pairs run side by side before the next ones start. `walk(i)` are the
    tiles that row block i of a head walks over. It is None where blocks walk over nothing, or not alike.
    `boxes` says how often TMA loads each box, over all heads. A run notes them. A formula does not. `inferred` says of how many
    rows of blocks the count follows from others (`Representatives`).

    `along` is the axis along which its blocks lie, each with a tile of a sequence's rows, or with a whole sequence. Where a block
    has to know of its queries alone, it is the step in which it looks for them. Where `across`
    isn't 0, blocks have so many rows of any sequences instead, because what they do to a row is the same in all. Of one that is
    `shared`, all heads have the same blocks. With `cols`, so many blocks have the same tile of a head.
    """

    name: str
    blocks: int
    warps: int
    sram_peak: int
    ledger: Mapping[Entry, int]
    distinct: Mapping[tuple[str, str], int]
    flops_matmul: int
    flops_other: int
    exp: int
    heads_together: int = 1
    walk: Callable[[int], Walk] | None = field(default=None, compare=False, repr=False)
    boxes: Mapping[Box, int] = field(default_factory=dict[Box, int], compare=False, repr=False)
    inferred: int = field(default=0, compare=False)
    along: str = "len_q"
    across: int = 0
    shared: bool = field(default=False, compare=False)
    cols: int = field(default=1, compare=False)

    def bytes(self, what: str, tensor: str | None = None, step: str | None = None) -> int:
        """The sum of the ledger over a level and direction (`"hbm.read"`), for one tensor and one step, or for all."""
        return sum(
            n
            for e, n in self.ledger.items()
            if e.what == what and tensor in (None, e.tensor) and step in (None, e.step)
        )


@dataclass(frozen=True)
class Hbm:
    """Bytes requested from global memory, and the most bytes allocated at once."""

    read: int
    write: int
    atomic: int
    peak: int


@dataclass(frozen=True)
class Sram:
    """Bytes between SRAM and the registers, and the most bytes alive in one block."""

    read: int
    write: int
    peak: int


@dataclass(frozen=True)
class Flops:
    """Arithmetic: `matmul` is matrix products of padded tiles (2 per multiply-add), `other` is the rest but exp."""

    matmul: int
    other: int


@dataclass(frozen=True)
class TensorCounts:
    """The bytes of one tensor, over all launches."""

    hbm_read: int
    hbm_write: int
    hbm_atomic: int
    sram_read: int
    sram_write: int


@dataclass(frozen=True, repr=False)
class Counts:
    """Everything that one algorithm moves and computes for one problem. Equality compares all but `config`.

    >>> import flashlab as fl
    >>> c = fl.count("flash2", fl.Problem(batch=1, heads=1, len_q=128, head_dim=64, dtype="float16"), tile=(64, 64))
    >>> c.hbm.read, c.hbm.write, c.hbm.peak
    (81920, 16896, 66048)
    >>> c
    <counts of flash2: 81,920 bytes of HBM read, 16,896 written>
    """

    algorithm: str
    problem: Problem
    tile: Tile
    device: Device
    config: Config | None = field(compare=False)
    launches: tuple[LaunchCounts, ...]
    tensors: Mapping[str, Spec]
    sequences: Collection[tuple[Counts, int]] = field(default=(), compare=False, repr=False)
    """Of a ragged batch: the counts of each different sequence, and how many there are of it."""

    renderer: ClassVar[Callable[[Counts], str] | None] = None
    """How a notebook shows counts. `flashlab` sets it."""

    def __repr__(self) -> str:
        how = f", {self.inferred:,} rows of blocks inferred from others" if self.inferred else ""
        return f"<counts of {self.algorithm}: {self.hbm.read:,} bytes of HBM read, {self.hbm.write:,} written{how}>"

    def _repr_html_(self) -> str | None:
        render = type(self).renderer
        return None if render is None else render(self)

    def _sum(self, what: str) -> int:
        return sum(launch.bytes(what) for launch in self.launches)

    @cached_property
    def hbm(self) -> Hbm:
        peak = sum(spec.nbytes for spec in self.tensors.values())
        return Hbm(self._sum("hbm.read"), self._sum("hbm.write"), self._sum("hbm.atomic"), peak)

    @cached_property
    def sram(self) -> Sram:
        peak = max((launch.sram_peak for launch in self.launches), default=0)
        return Sram(self._sum("sram.read"), self._sum("sram.write"), peak)

    @cached_property
    def flops(self) -> Flops:
        return Flops(sum(x.flops_matmul for x in self.launches), sum(x.flops_other for x in self.launches))

    @property
    def exp(self) -> int:
        """Exponentials, one for each element of the tiles that are executed."""
        return sum(launch.exp for launch in self.launches)

    @property
    def inferred(self) -> int:
        """Of how many rows of blocks the count follows from others, in all launches. A formula has none."""
        return sum(launch.inferred for launch in self.launches)

    def distinct(self, launch: LaunchCounts, direction: str) -> int:
        """Bytes that a launch requests at least once in a direction ("read" or "write"), without its own workspace.

        A launch's own workspace is what it both writes and reads. What an earlier launch wrote is an input.
        """
        own = {
            name
            for name, spec in self.tensors.items()
            if spec.role == "workspace" and (name, "read") in launch.distinct and (name, "write") in launch.distinct
        }
        return sum(n for (name, way), n in launch.distinct.items() if way == direction and name not in own)

    @cached_property
    def compulsory_read(self) -> int:
        """The read part of `compulsory`: a cold cache cannot fetch less."""
        return sum(self.distinct(launch, "read") for launch in self.launches)

    @cached_property
    def compulsory(self) -> int:
        """Each distinct byte that a launch requests at least once, reads plus writes, summed over the launches."""
        return self.compulsory_read + sum(self.distinct(launch, "write") for launch in self.launches)

    @cached_property
    def by_tensor(self) -> dict[str, TensorCounts]:
        """The bytes of each tensor, by name. Buffers that live in SRAM only are among them."""
        total: dict[str, dict[str, int]] = {name: defaultdict(int) for name in self.tensors}
        for launch in self.launches:
            for entry, n in launch.ledger.items():
                total.setdefault(entry.tensor, defaultdict(int))[entry.what] += n
        return {
            name: TensorCounts(w["hbm.read"], w["hbm.write"], w["hbm.atomic"], w["sram.read"], w["sram.write"])
            for name, w in total.items()
        }

    @property
    def intensity(self) -> float:
        """FLOPs, exponentials included, per requested byte of HBM. 0 where nothing is moved."""
        moved = self.hbm.read + self.hbm.write + self.hbm.atomic
        return (self.flops.matmul + self.flops.other + self.exp) / moved if moved else 0.0

    @cached_property
    def dram(self) -> Dram:
        """An estimate of the bytes read from DRAM, from a model of the L2: `.estimate .low .high`."""
        from simulator import dram  # imported here, because most counts are never asked for it

        return dram.estimate(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. The keys are the names of the attributes."""
        return {
            "algorithm": self.algorithm,
            "problem": asdict(self.problem),
            "tile": str(self.tile),
            "device": self.device.name,
            "hbm": asdict(self.hbm),
            "sram": asdict(self.sram),
            "flops": asdict(self.flops),
            "exp": self.exp,
            "compulsory": self.compulsory,
            "compulsory_read": self.compulsory_read,
            "dram": asdict(self.dram),
            "intensity": self.intensity,
            "by_tensor": {name: asdict(counts) for name, counts in self.by_tensor.items()},
            "launches": [
                {
                    "name": x.name,
                    "blocks": x.blocks,
                    "warps": x.warps,
                    "sram_peak": x.sram_peak,
                    **{w: x.bytes(w) for w in ("hbm.read", "hbm.write", "hbm.atomic", "sram.read", "sram.write")},
                    "flops_matmul": x.flops_matmul,
                    "flops_other": x.flops_other,
                    "exp": x.exp,
                    "inferred": x.inferred,
                }
                for x in self.launches
            ],
        }


def summed(parts: Sequence[Counts], problem: Problem, times: Sequence[int | Array] | None = None) -> Counts:
    """The counts of a problem whose heads or batches were run in parts. Everything adds up but what one block holds.

    `times` says how many parts each one stands for: 1, if it is left out. A part may have lanes, and then a number for each.
    """
    first, times = parts[0], [1] * len(parts) if times is None else times
    launches: list[LaunchCounts] = []
    shared = {name for part in parts for name, spec in part.tensors.items() if spec.shared}
    for same in zip(*(part.launches for part in parts), strict=True):
        ledger: defaultdict[Entry, int] = defaultdict(int)
        distinct: defaultdict[tuple[str, str], int] = defaultdict(int)
        boxes = Counter[Box]()
        for launch, each in zip(same, times, strict=True):
            boxes.update(launch.boxes)
            for entry, n in launch.ledger.items():
                ledger[entry] += summed_over(n, each)
            for key, n in launch.distinct.items():
                distinct[key] = (
                    max(distinct[key], largest(n)) if key[0] in shared else distinct[key] + summed_over(n, each)
                )
        total = {
            name: sum(summed_over(getattr(x, name), each) for x, each in zip(same, times, strict=True))
            for name in ("blocks", "flops_matmul", "flops_other", "exp")
        }
        bytes_of = {
            "ledger": {e: n for e, n in ledger.items() if n},
            "distinct": {e: n for e, n in distinct.items() if n},
        }
        launches.append(replace(same[0], boxes=boxes, **bytes_of, **total))
    tensors = {
        name: spec
        if spec.shared
        else replace(
            spec,
            heads=sum(
                summed_over(part.tensors[name].heads, n)
                for part, n in zip(parts, times, strict=True)
                if name in part.tensors
            ),
        )
        for name, spec in first.tensors.items()
    }
    return replace(first, problem=problem, launches=tuple(launches), tensors=tensors)


@dataclass
class _Page:
    """A launch while it is being counted."""

    name: str
    blocks: int
    warps: int
    heads_together: int
    ledger: defaultdict[Entry, int] = field(default_factory=lambda: defaultdict(int))
    distinct: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    flops_matmul: int = 0
    flops_other: int = 0
    exp: int = 0
    sram_peak: int = 0
    walk: Callable[[int], Walk] | None = None
    boxes: Counter[Box] = field(default_factory=Counter[Box])
    inferred: int = 0
    along: str = "len_q"
    across: int = 0
    shared: bool = False
    cols: int = 1


class Book:
    """Where simulator and formulas write down what they count. `close` makes the `Counts`.

    Each figure is for a whole launch: all heads of all batches.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=1, len_q=4, head_dim=8, dtype="float16")
    >>> book = fl.Book("mine", p, fl.Tile(16, 16), fl.DEVICES["h100"], None)
    >>> book.launch("mine", blocks=1, warps=1)
    >>> book.add("load_q", "q", hbm_read=64)
    >>> book.close().hbm.read
    64
    """

    def __init__(self, algorithm: str, problem: Problem, tile: Tile, device: Device, config: Config | None) -> None:
        self.algorithm, self.problem, self.tile, self.device, self.config = algorithm, problem, tile, device, config
        self.tensors: dict[str, Spec] = {}
        self._pages: list[_Page] = []

    @property
    def page(self) -> _Page:
        return self._pages[-1]

    def tensor(self, spec: Spec) -> Spec:
        """Enter an array that lies in HBM."""
        self.tensors[spec.name] = spec
        return spec

    def launch(
        self,
        name: str,
        blocks: int,
        warps: int,
        heads_together: int = 1,
        sram_peak: int = 0,
        walk: Callable[[int], Walk] | None = None,
        along: str = "len_q",
        across: int = 0,
        shared: bool = False,
        cols: int = 1,
    ) -> None:
        """Begin a launch. What is counted next belongs to it. `sram_peak` is in bytes, the others as in `LaunchCounts`."""
        peak = sram_peak if blocks else 0
        page = _Page(
            name, blocks, warps, heads_together, sram_peak=peak, walk=walk, along=along, across=across, shared=shared, cols=cols
        )  # fmt: skip
        self._pages.append(page)

    @contextmanager
    def apart(self) -> Generator[_Page]:
        """What is counted inside isn't the launch's: it goes to a page of its own."""
        kept = self._pages.pop()
        self._pages.append(
            replace(kept, ledger=defaultdict(int), boxes=Counter(), flops_matmul=0, flops_other=0, exp=0, sram_peak=0)
        )
        try:
            yield self.page
        finally:
            self._pages[-1] = kept

    def add(self, step: str, tensor: str, **bytes_by_what: int) -> None:
        """Count bytes: `add("load_k", "k", hbm_read=…, sram_write=…)`. A zero leaves no entry."""
        ledger = self._pages[-1].ledger
        for what, n in bytes_by_what.items():
            if isinstance(n, Lanes) or n:  # of lanes some may be 0
                ledger[Entry(step, tensor, what.replace("_", "."))] += n

    def box(self, box: Box, n: int) -> None:
        """Note that TMA loads a box n times."""
        self.page.boxes[box] += n

    def distinct(self, tensor: str, direction: str, n: int) -> None:
        """Count bytes that the launch requests at least once in a direction ("read" or "write")."""
        if isinstance(n, Lanes) or n:
            self.page.distinct[tensor, direction] += n

    def reached(self, tensor: str, direction: str) -> int:
        """The bytes that the launches so far request at least once, in one of them or in several."""
        return sum(page.distinct.get((tensor, direction), 0) for page in self._pages)

    def compute(self, *, matmul: int = 0, other: int = 0, exp: int = 0) -> None:
        """Count arithmetic."""
        page = self.page
        page.flops_matmul += matmul
        page.flops_other += other
        page.exp += exp

    def add_times(self, part: Book, times: int | Array) -> None:
        """Count so many times what another book's launch counts. That may have lanes, and then `times` has a number for each."""
        for entry, n in part.page.ledger.items():
            self.add(entry.step, entry.tensor, **{entry.what: summed_over(n, times)})
        for (tensor, direction), n in part.page.distinct.items():
            self.distinct(tensor, direction, summed_over(n, times))
        one = part.page
        self.compute(
            matmul=summed_over(one.flops_matmul, times), other=summed_over(one.flops_other, times), exp=summed_over(one.exp, times)
        )  # fmt: skip

    def close(self) -> Counts:
        launches = tuple(
            LaunchCounts(p.name, p.blocks, p.warps, p.sram_peak, dict(p.ledger), dict(p.distinct), p.flops_matmul,
                         p.flops_other, p.exp, p.heads_together, p.walk, p.boxes, p.inferred, p.along, p.across, p.shared,
                         p.cols)
            for p in self._pages
        )  # fmt: skip
        return Counts(self.algorithm, self.problem, self.tile, self.device, self.config, launches, dict(self.tensors))
