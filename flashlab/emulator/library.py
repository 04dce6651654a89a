"""A built source: launches its kernels on buffers in an arena, and reads what they report."""

from __future__ import annotations

import ctypes
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kernels_cu
from flashlab.emulator.arena import Arena
from flashlab.emulator.places import lines_of
from simulator.errors import UsageError, unknown
from simulator.fields import integer
from simulator.threads import together

__all__ = [
    "Finding", "Launched", "Library", "Line", "Moved", "Parameter", "Unset", "check_limits", "known", "load",
]  # fmt: skip


class Line(NamedTuple):
    """A line of a source file."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number}"


_OF_ALL = ("crash", "memory")
"""Kinds of findings that have neither a line nor a thread."""


class Unset(NamedTuple):
    """A compiler's warning of a local variable: its name, the line that uses it, in which functions; and whether it is sure."""

    name: str
    line: Line
    functions: str
    sure: bool


@dataclass(frozen=True)
class Finding:
    """A misuse of the machine: what kind, where in the source, by which thread (None: of a whole block), to which bytes.

    `at` is the line that did it, and `line` the kernel's own, which is another if it called a function. `via` has all
    lines between, innermost first, also those of flashlab's own primitives, which `at` leaves out. The fields `other_…`
    describe the second party: the earlier access of a race, the copy that nobody waited for. `offset` counts bytes from
    the start of the array; `index` says which element that is, where the array's shape is known. `times` is how often
    it happened.
    """

    kind: str
    message: str
    line: Line | None
    via: tuple[Line, ...]
    step: str
    block: tuple[int, int, int]
    thread: tuple[int, int, int] | None
    space: str
    tensor: str
    offset: int
    bytes: int
    times: int
    index: str = ""
    other_line: Line | None = None
    other_block: tuple[int, int, int] | None = None
    other_thread: tuple[int, int, int] | None = None
    at: Line | None = None
    other_at: Line | None = None

    def __str__(self) -> str:
        nowhere = (
            self.kind == "time limit" and self.line is None and self.thread is None
        )  # of a process that took too long
        if self.kind in _OF_ALL or nowhere:
            return f"{self.kind}: {self.message}"
        where = _where(self.at, self.line) + (f", step {self.step}" if self.step else "")
        element = self.index or f", byte {self.offset:,}"
        what = f" ({self.tensor}{element} in {self.space.upper()})" if self.tensor else ""
        who = f"block {_point(self.block)}"
        if self.thread is not None:
            who = f"thread {_point(self.thread)} of {who}"
        other = ""
        if self.other_thread is not None and self.other_block is not None:
            block = "" if self.other_block == self.block else f" of block {_point(self.other_block)}"
            there = _where(self.other_at, self.other_line)
            other = f"; the other: thread {_point(self.other_thread)}{block} at {there}"
        times = f" ({self.times:,} times)" if self.times > 1 else ""
        return f"{where}: {self.kind}: {who} {self.message}{what}{other}{times}"


@dataclass(frozen=True)
class Moved:
    """What one kind of warp instruction moved in one step.

    `bytes` are as the accounting contract counts them. For HBM, `sectors` are of 32 bytes. For SRAM, `wavefronts` are
    passes over the banks, and `ideal` is the fewest that the same accesses could take. `overlapped` are those bytes that
    were asked for while a copy by the same warp (`cp.async`) was on its way.
    """

    step: str
    tensor: str
    space: str
    op: str
    instructions: int
    bytes: int
    overlapped: int
    sectors: int
    wavefronts: int
    ideal: int

    @property
    def what(self) -> str:
        """The accounting contract's name for it: `hbm.read`, `hbm.write`, `hbm.atomic`, `sram.read` or `sram.write`."""
        return f"{self.space}.{_DIRECTIONS[self.space, self.op]}"

    @property
    def boxes(self) -> bool:
        """Did the copy engine (TMA) move it?"""
        return self.op.startswith("tma")


_DIRECTIONS = {
    **{("hbm", op): "read" for op in ("ld", "ldgsts", "tma_ld")},
    **{("hbm", op): "write" for op in ("st", "tma_st")},
    **{("hbm", op): "atomic" for op in ("red", "atom")},
    **{("sram", op): "read" for op in ("ld", "ldsm", "gmma", "tma_st")},
    **{("sram", op): "write" for op in ("st", "stsm", "ldgsts", "tma_ld", "atom")},
}


@dataclass(frozen=True)
class Launched:
    """What one launch did.

    `findings` hold each kind and place once; `dropped` is how many there were past the number that is kept. `notes` are in
    their form, but no misuse: stores of one value by several threads ("same value"), reads that a compare-and-swap checks
    ("checked guess"), lanes that happened to be together in place of those that must come ("active mask"), integers that
    wrap and are no index ("overflow"). `plain` is how many accesses came through the compiler's instrumentation rather than
    through the primitives. `flops` and `exp` count floating-point operations and exponentials, `shuffles` the warp
    instructions that hand 32 bits from lane to lane. `stopped` says that a finding ended the
    launch; how far its other blocks had come by then is an accident.
    """

    kernel: str
    moved: tuple[Moved, ...]
    findings: tuple[Finding, ...]
    dropped: int
    plain: int
    flops: int
    exp: int
    stopped: bool = False
    notes: tuple[Finding, ...] = ()
    shuffles: int = 0

    def total(self, what: str, quantity: str = "bytes") -> int:
        """The sum of a quantity (a field of `Moved`) over a level and direction, as in `total("hbm.read")`."""
        return sum(getattr(row, quantity) for row in self.moved if row.what == what)

    def counted(self, what: str) -> int:
        """The bytes of a kernel with steps, as the accounting contract counts them.

        What a block writes to SRAM before its first step counts nothing: it makes the block ready, as mbarriers do.
        """
        return sum(row.bytes for row in self.moved if row.what == what and (row.step or what != "sram.write"))

    def shown(self, what: str) -> int:
        """The same as a GPU's counters show it: of boxes whole sectors of 32 bytes."""
        extra = (
            32 * row.sectors - row.bytes for row in self.moved if row.what == what and row.space == "hbm" and row.boxes
        )
        return self.counted(what) + sum(extra)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "kernel": self.kernel,
            "moved": [asdict(row) | {"what": row.what} for row in self.moved],
            "findings": [asdict(x) | {"text": str(x)} for x in self.findings],
            "dropped": self.dropped,
            "plain": self.plain,
            "flops": self.flops,
            "exp": self.exp,
            "shuffles": self.shuffles,
            "notes": [asdict(x) | {"text": str(x)} for x in self.notes],
            "stopped": self.stopped,
            "unfinished": self.unfinished,
        }

    @property
    def unfinished(self) -> bool:
        """Did it only run out of time? Then nobody knows what it would have come to."""
        return bool(self.findings) and all(x.kind == "time limit" for x in self.findings)

    @property
    def ledger(self) -> dict[tuple[str, str, str], int]:
        """Bytes by (step, tensor, what), as `LaunchCounts.ledger` has them."""
        sums: Counter[tuple[str, str, str]] = Counter()
        for row in self.moved:
            sums[row.step, row.tensor, row.what] += row.bytes
        return dict(sums)


# The library's interface, as kernels_cu/emulator/launch.h declares it


class _Region(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("input", ctypes.c_int),
        ("state", ctypes.c_void_p),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_sram", ctypes.c_uint),
        ("regions", ctypes.POINTER(_Region)),
        ("region_count", ctypes.c_int),
        ("workers", ctypes.c_int),
        ("sanitize", ctypes.c_int),
        ("time_limit", ctypes.c_double),
        ("watched", ctypes.c_void_p),
        ("stop", ctypes.POINTER(ctypes.c_int)),
        ("some", ctypes.c_ulong),
    )


class Parameter(NamedTuple):
    """A kernel's parameter.

    `passed` is v for a value, p for a pointer, c for a pointer to const. `kind` is what it is or points to: i a signed
    integer, u an unsigned one, f a float, s anything else. `size` is that element's bytes (0: unknown, as of void).
    """

    passed: str
    kind: str
    size: int


@dataclass
class Library:
    """A built source: its kernels (`entries`), and the source lines that each place in the machine code belongs to."""

    path: Path
    entries: tuple[str, ...]
    places: Mapping[int, tuple[Line, ...]]
    source: str
    _dll: Any = field(repr=False, default=None)
    unset: tuple[Unset, ...] | None = None
    """What the compiler warned of: local variables that may be read before they are set. None if it can't fill them."""
    indices: frozenset[Line] = frozenset()
    """The lines that compute indices of arrays: an overflow there is a misuse, and elsewhere a note."""

    def parameters(self, entry: str) -> list[Parameter]:
        """The parameters of a kernel, in order."""
        letters, sizes = ctypes.create_string_buffer(128), (ctypes.c_uint * 64)()
        n = getattr(self._dll, f"emu_parameters_{self._index(entry)}")(letters, sizes, 64)
        words = letters.raw.decode()
        return [Parameter(words[2 * i], words[2 * i + 1], sizes[i]) for i in range(n)]

    def fields(self, entry: str) -> dict[tuple[int, str], tuple[Parameter, int]]:
        """The members of a kernel's structs: by the parameter's place and the member's name, what it is and where it lies."""
        tell = getattr(self._dll, f"emu_fields_{self._index(entry)}", None)
        found: dict[tuple[int, str], tuple[Parameter, int]] = {}
        if tell is not None:

            @ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_ulong)
            def say(parameter: int, name: bytes, letters: bytes, size: int, offset: int) -> None:
                passed, kind = letters.decode()
                found[parameter, name.decode()] = Parameter(passed, kind, size), offset

            tell(say)
        return found

    def launch(
        self, entry: str, grid: Sequence[int], block: Sequence[int], arguments: Sequence[bytes], arena: Arena, *,
        sram: int = 0, sanitize: bool = True, workers: int | None = None, time_limit: float = 0,
        watched: tuple[str, int] | None = None, blocks: int = 0,
    ) -> Launched:  # fmt: skip
        """Run one kernel over a grid, or over so many of its `blocks` (0: all), spread over it.

        `grid` and `block` are one to three extents. `arguments` are the parameters' bytes, in order. `sram` is the
        dynamic shared memory in bytes per block. A kernel that still runs after `time_limit` seconds of processor
        time (0: no limit) is stopped, which is a finding. Of a byte that is `watched` (a buffer's name, and the offset in
        it) each line that stores to it is a finding of the kind "stored". An interrupt ends the launch. Raises `UsageError`
        for a kernel that the library lacks.
        """
        index = self._index(entry)
        storage = [_aligned(x) for x in arguments]
        pointers = (ctypes.c_void_p * max(1, len(storage)))(*[x.ctypes.data for x in storage])
        buffers = list(arena.buffers.values())
        regions = (_Region * max(1, len(buffers)))(
            *[
                _Region(b.name.encode(), b.data.ctypes.data, b.data.nbytes, b.read_only, b.written.ctypes.data)
                for b in buffers
            ]
        )
        stop = ctypes.c_int(0)
        request = _Launch(
            ctypes.cast(getattr(self._dll, f"emu_entry_{index}"), ctypes.c_void_p), pointers, _three(grid), _three(block),
            sram, regions, len(buffers), workers or os.cpu_count() or 1, sanitize, time_limit,
            arena.pointer(watched[0]) + watched[1] if watched else None, ctypes.pointer(stop), blocks,
        )  # fmt: skip
        # native code in this thread would never hear of an interrupt
        (answer,) = together([lambda: self._dll.emu_launch(ctypes.byref(request))], partial(setattr, stop, "value", 1))
        report = json.loads(ctypes.string_at(answer))
        self._dll.emu_free(answer)
        return self._launched(entry, report, arena)

    def chain(self, place: int) -> tuple[Line, ...]:
        """The lines that lead to a place in the machine code, innermost first; empty for one of the emulator's own."""
        return self._chain(place)

    def launched(self, entry: str, report: dict[str, Any]) -> Launched:
        """What the runtime reports of a launch."""
        return self._launched(entry, report, Arena())

    def _index(self, entry: str) -> int:
        if entry not in self.entries:
            raise unknown("kernel", entry, self.entries)
        return self.entries.index(entry)

    def _launched(self, entry: str, report: dict[str, Any], arena: Arena) -> Launched:
        found = [self._finding(x, arena) for x in report["findings"]]
        overflows = [x for x in found if x.kind == "overflow" and x.at not in self.indices]
        return Launched(
            kernel=entry,
            moved=tuple(_in_order([Moved(**row) for row in report["moved"]])),
            findings=tuple(x for x in found if x not in overflows),
            dropped=report["dropped"],
            plain=report["plain"],
            flops=report["flops"],
            exp=report["exp"],
            shuffles=report["shuffles"],
            stopped=bool(report["stopped"]),
            notes=(*(self._finding(x, arena) for x in report["notes"]), *overflows),
        )

    def _finding(self, x: dict[str, Any], arena: Arena) -> Finding:
        chain = self._chain(x.pop("place"))
        other = self._chain(x.pop("other_place", -1))
        for key in ("block", "thread", "other_block", "other_thread"):
            if key in x:
                x[key] = tuple(x[key])
        known = arena.buffers.get(x["tensor"]) if x["space"] == "hbm" else None
        index = known.index(x["offset"]) if known and 0 <= x["offset"] else ""  # also just past the end, as [1000]
        return Finding(
            **x, index=index, line=self._own(chain), via=chain[:-1], other_line=self._own(other), at=self._innermost(chain),
            other_at=self._innermost(other),
        )  # fmt: skip

    def _chain(self, place: int) -> tuple[Line, ...]:
        """The lines of a place, innermost first. A place that is no call (a fault's) is looked up when it is needed."""
        if place in self.places or place < 0:
            return self.places.get(place, ())
        return tuple(Line(*line) for line in lines_of(self.path, [place])[0])

    def _own(self, chain: tuple[Line, ...]) -> Line | None:
        """The kernel's own line for a place: the outermost line of its file, into which headers were inlined."""
        mine = [line for line in chain if line.file == self.source]
        return mine[-1] if mine else chain[-1] if chain else None

    def _innermost(self, chain: tuple[Line, ...]) -> Line | None:
        """The line that did it: the innermost that isn't in the headers of primitives, which are to a kernel what CUDA is."""
        ours = f"{kernels_cu.include_dir()}{os.sep}"
        return next((line for line in chain if not line.file.startswith(ours)), self._own(chain))


def check_limits(workers: Any, time_limit: Any) -> None:
    """Raise `UsageError` for limits of a run that mean nothing."""
    if workers is not None:
        integer("workers", workers, 1)
    number_of_seconds = isinstance(time_limit, int | float) and not isinstance(time_limit, bool)
    if not number_of_seconds or not 0 <= time_limit < float("inf"):
        raise UsageError("time_limit", time_limit, "seconds, at least 0 (0: no limit)")


def _aligned(parameter: bytes) -> np.ndarray[Any, Any]:
    """A copy of a parameter's bytes at a multiple of 64, where any struct may lie."""
    room = np.zeros(len(parameter) + 63, np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + len(parameter)] = np.frombuffer(parameter, np.uint8)
    return room[start : start + len(parameter)]


def _in_order(moved: Sequence[Moved]) -> list[Moved]:
    """The rows sorted by step and name, so that their order doesn't hang on addresses."""
    steps = list(dict.fromkeys(["", *(row.step for row in moved)]))
    return sorted(moved, key=lambda row: (steps.index(row.step), row.space, row.tensor, row.op))


def _three(extent: Sequence[int]) -> Any:
    return (ctypes.c_uint * 3)(*extent, *[1] * (3 - len(extent)))


def _where(at: Line | None, line: Line | None) -> str:
    return f"{at or line or '?'}" + (f", called at {line}" if at not in (None, line) else "")


def _point(p: tuple[int, int, int]) -> str:
    return str(p[0]) if not p[1] and not p[2] else f"({p[0]}, {p[1]}, {p[2]})"


def known(folder: Path, source: str, entries: tuple[str, ...] = (), dll: Any = None) -> Library:
    """The library that `flashlab.emulator.build` left in a folder. Without a `dll` it only knows lines, and runs nothing."""
    sites = json.loads((folder / "sites.json").read_bytes())
    chains = {place: tuple(Line(*line) for line in chain) for place, chain in sites["places"]}
    said = sites["unset"]
    unset = None if said is None else tuple(Unset(name, Line(*line), *rest) for name, line, *rest in said)
    indices = frozenset(Line(*line) for line in sites["indices"])
    return Library(folder / "kernel.so", entries, chains, source, dll, unset, indices)


def load(folder: Path, source: str, entries: tuple[str, ...]) -> Library:
    """The library that `flashlab.emulator.build` left in a folder, loaded."""
    dll: Any = ctypes.CDLL(str(folder / "kernel.so"))
    dll.emu_launch.restype, dll.emu_free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    library = known(folder, source, entries, dll)
    ids: dict[tuple[Line, ...], int] = {}
    rows = [(place, ids.setdefault(chain, len(ids) + 1)) for place, chain in sorted(library.places.items())]
    n = len(rows)
    dll.emu_sites((ctypes.c_uint64 * n)(*[r[0] for r in rows]), (ctypes.c_uint32 * n)(*[r[1] for r in rows]), n)
    statics = json.loads((folder / "sites.json").read_bytes())["statics"]
    m = len(statics)
    dll.emu_statics(
        (ctypes.c_char_p * m)(*[s[0].encode() for s in statics]),
        (ctypes.c_int64 * m)(*[s[1] for s in statics]),
        (ctypes.c_uint32 * m)(*[s[2] for s in statics]),
        m,
    )
    return library
