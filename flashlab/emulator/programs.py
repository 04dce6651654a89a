"""Runs a whole CUDA program, host code and all, on the emulator: in a process of its own, with limits of time and memory."""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flashlab.base.apart import Ended, call_apart
from flashlab.base.files import path_of
from flashlab.base.host import Empty, is_array, to_numpy
from flashlab.base.scratch import scratch
from flashlab.emulator.apart import MEMORY
from flashlab.emulator.arena import Arena, Buffer
from flashlab.emulator.arguments import bytes_of
from flashlab.emulator.build import build_program
from flashlab.emulator.files import options_of_build
from flashlab.emulator.library import Launched, Library, Line, check_limits, known, load
from simulator.devices import Device
from simulator.dtypes import Array, numpy_dtype
from simulator.errors import UsageError, unknown
from simulator.fields import flag, listed

__all__ = ["HostFinding", "ProgramLaunch", "ProgramRun", "run_program"]


_SLACK = 20.0
"""Seconds beside the program's own: Python starts, and a launch that is late says where it waits."""


@dataclass(frozen=True)
class HostFinding:
    """A misuse of CUDA by host code: what kind, in words, and on which line. Or a note, which is none.

    `tensor` is the array that it is about, and `offset` where in it, in bytes. `other_line` is the other operation of a race.
    """

    kind: str
    message: str
    line: Line | None = None
    tensor: str = ""
    offset: int = 0
    times: int = 1
    other_line: Line | None = None

    def __str__(self) -> str:
        where = f"{self.line}: " if self.line else ""
        what = f" ({self.tensor}, byte {self.offset:,})" if self.tensor and self.offset else ""
        other = f"; the other: {self.other_line}" if self.other_line else ""
        times = f" ({self.times:,} times)" if self.times > 1 else ""
        return f"{where}{self.kind}: {self.message}{what}{other}{times}"


@dataclass(frozen=True)
class ProgramLaunch:
    """All launches of a kernel that one line made with one grid, block and dynamic SRAM: how many `times`, and what they did."""

    kernel: str
    line: Line | None
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    sram: int
    times: int
    launched: Launched


@dataclass(frozen=True, repr=False)
class ProgramRun:
    """A run of a program: its exit `status` (None: it never came to its end), what it `printed`, and its `launches`.

    `findings` are those of host code, `notes` what is no misuse. The `arrays` of a function that was called are as it left them;
    `unwritten` says how many bytes of the `Empty` ones it never wrote.

    >>> _ = Path("leaves.cu").write_text("int main() { int* x; cudaMalloc(&x, 40); return cudaFree(x + 1); }")
    >>> run_program("leaves.cu")
    status 1: 2 findings
    leaves.cu:1: free: cudaFree of an address inside of x
    the program ended with status 1
    note: leaves.cu:1: not freed: 40 bytes of x are never freed
    """

    status: int | None
    printed: str
    launches: tuple[ProgramLaunch, ...]
    findings: tuple[HostFinding, ...]
    notes: tuple[HostFinding, ...] = ()
    arrays: Mapping[str, Array] = field(default_factory=dict[str, "Array"])
    unwritten: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def passed(self) -> bool:
        """Did it come to its end with status 0, with no misuse and every `Empty` array filled?"""
        return not self.complaints()

    @property
    def unfinished(self) -> bool:
        """Did it only run out of time? Then nobody knows what it would have come to.

        A program that is told of a launch that was late may give up, also by a crash.
        """
        found = [*self.findings, *(x for each in self.launches for x in each.launched.findings)]
        kinds = {x.kind for x in found}
        return "time limit" in kinds and kinds <= {"time limit", "crash"}

    def complaints(self) -> list[str]:
        """Everything that is wrong, one line each."""
        of_kernels = [str(x) for each in self.launches for x in each.launched.findings]
        left = [f"{name}: {n:,} bytes were never written" for name, n in self.unwritten.items()]
        ended = [f"the program ended with status {self.status}"] if self.status else []
        return [*dict.fromkeys([*map(str, self.findings), *of_kernels]), *left, *ended]

    def __repr__(self) -> str:
        found = self.complaints()
        verdict = f"{len(found)} finding{'s' if len(found) > 1 else ''}" if found else "passed"
        return "\n".join([f"status {self.status}: {verdict}", *found, *(f"note: {x}" for x in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the arrays."""
        return {
            "passed": self.passed,
            "status": self.status,
            "printed": self.printed,
            "launches": [
                {**{key: getattr(x, key) for key in ("kernel", "line", "grid", "block", "sram", "times")},
                 "launch": x.launched.to_dict()}
                for x in self.launches
            ],
            "findings": [asdict(x) | {"text": str(x)} for x in self.findings],
            "notes": [asdict(x) | {"text": str(x)} for x in self.notes],
            "unwritten": dict(self.unwritten),
        }  # fmt: skip


def run_program(
    path: Path | str, arguments: Sequence[str] = (), *, call: str | None = None, given: Mapping[str, Any] | None = None,
    macros: Mapping[str, object] | None = None, includes: Sequence[Path | str] = (), std: str = "c++17",
    device: Device | str = "h100", sanitize: bool = True, workers: int | None = None, time_limit: float = 300,
) -> ProgramRun:  # fmt: skip
    """Run a `.cu` program on the CPU: its `main` with `arguments`, on a CUDA runtime of the emulator's.

    It runs in a process of its own, in the current folder, and may read no standard input. **That is no sandbox**: it can do what
    any program of yours can do. Grids, sizes and dynamic SRAM come from the program. With `call`, that function of the host is
    called in place of `main`. `given` maps its parameters' names to numbers, and to arrays (or `Empty`), which it gets as pointers
    to device memory. After `time_limit` seconds of processor time (0: no limit) the program is stopped. The other parameters are
    those of `emulate_file`.

    Raises `UsageError` for bad input, `BuildError` for a source that doesn't compile, `Unavailable` without a compiler.

    >>> source = "__global__ void k(int* x) { *x = 7; } "
    >>> source += "int main() { int *x, y; cudaMalloc(&x, 4); k<<<1, 1>>>(x); "
    >>> source += 'cudaMemcpy(&y, x, 4, cudaMemcpyDeviceToHost); printf("%d", y); return cudaFree(x); }'
    >>> _ = Path("seven.cu").write_text(source)
    >>> run = run_program("seven.cu")
    >>> run.printed, run.passed, run.launches[0].launched.total("hbm.write")
    ('7', True, 4)
    """
    path = path_of("file", path)
    words = [*listed("arguments", arguments, "a list of texts")]
    if wrong := [word for word in words if not isinstance(word, str) or "\0" in word]:
        raise UsageError("arguments", wrong[0], "texts")
    if given is not None and not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError("given", given, "a dictionary, a value for each name")
    if given and call is None:
        raise UsageError("given", ", ".join(map(str, given)), "nothing: arguments by name are for the function of call")
    where = Device.named(device)
    check_limits(workers, time_limit)
    sanitize = flag("sanitize", sanitize)
    options = options_of_build(where, macros, includes, std)
    folder, names = build_program(path, call, **options)
    source = str(path.resolve())
    values = {key: to_numpy(key, x) if is_array(x) else x for key, x in (given or {}).items()}
    settings = {"workers": workers or os.cpu_count() or 1, "sanitize": sanitize, "time_limit": time_limit}
    with scratch() as place:
        report = place / "report.json"
        how = _Called(call, names, values) if call else None
        ended: Ended | None = None
        printed = ""
        arrays: Mapping[str, Array] = {}
        unwritten: Mapping[str, int] = {}
        try:
            answer = call_apart(
                _in_child,
                folder,
                source,
                words,
                report,
                how,
                where,
                settings,
                seconds=time_limit + _SLACK if time_limit else math.inf,
                memory=MEMORY,
            )
            printed, (arrays, unwritten) = answer.printed, answer.value
        except Ended as error:
            ended, printed = error, error.printed
        return _read(known(folder, source), report, ended, printed, arrays, unwritten)


def _read(
    library: Library, report: Path, ended: Ended | None, printed: str, arrays: Mapping[str, Array],
    unwritten: Mapping[str, int],
) -> ProgramRun:  # fmt: skip
    """What the runtime has reported of a program, and how its process ended."""
    said: dict[str, Any] = json.loads(report.read_bytes()) if report.exists() else {}

    def line(place: int) -> Line | None:
        chain = library.chain(place)
        return chain[0] if chain else None

    def told(rows: Sequence[Mapping[str, Any]]) -> list[HostFinding]:
        return [
            HostFinding(
                x["kind"],
                x["message"],
                line(x["place"]),
                x["tensor"],
                x["offset"],
                x["times"],
                line(x.get("other_place", -1)),
            )
            for x in rows
        ]

    launches = [
        ProgramLaunch(
            x["kernel"], line(x["place"]), (*x["grid"],), (*x["block"],), x["sram"], x["times"],
            library.launched(x["kernel"], x["launched"]),
        )
        for x in said.get("launches", ())
    ]  # fmt: skip
    findings = told(said.get("findings", ()))
    status: int | None = said.get("status")
    if ended is not None and not said.get("ended"):
        findings.append(_end(library, report.with_name(f"{report.name}.crash"), ended))
    elif status is not None and status < 0:  # a finding ended it
        status = None
    if any(x.launched.stopped for x in launches):  # how far it came is chance
        unwritten = {}
    return ProgramRun(
        status, printed, tuple(launches), tuple(findings), tuple(told(said.get("notes", ()))), arrays, unwritten
    )


def _end(library: Library, crash: Path, ended: Ended) -> HostFinding:
    """What ended a program's process."""
    if ended.late:
        return HostFinding("time limit", f"the program still runs: {ended}")
    if not crash.exists():
        return HostFinding("crash", f"the program's code ended it: {ended}")
    number, *places = (row[0] for row in struct.iter_unpack("<q", crash.read_bytes()))
    chains = (library.chain(place) for place in places)
    line = next((chain[0] for chain in chains if chain), None)
    return HostFinding("crash", f"the program was ended by {signal.Signals(number).name}", line)


# In the child


class _Settings(ctypes.Structure):
    """EmuProgram of kernels_cu/emulator/host_calls.h."""

    _fields_ = (
        ("report", ctypes.c_char_p),
        ("device", ctypes.c_char_p),
        *(
            (name, ctypes.c_int)
            for name in ("major", "minor", "sms", "sram_per_block", "sram_per_sm", "threads_per_sm")
        ),
        ("memory", ctypes.c_ulong),
        ("l2", ctypes.c_ulong),
        ("workers", ctypes.c_int),
        ("sanitize", ctypes.c_int),
        ("time_limit", ctypes.c_double),
    )


@dataclass(frozen=True)
class _Called:
    """A function of the host, the names of its parameters, and their values."""

    name: str
    parameters: tuple[str, ...]
    values: Mapping[str, Any]


class _DeviceArena(Arena):
    """An arena of the program's device memory, which host code may not touch."""

    def __init__(self, dll: Any) -> None:
        super().__init__()
        self._new = dll.emu_program_array
        self._new.restype = ctypes.c_void_p

    def new(self, name: str, nbytes: int) -> np.ndarray[Any, Any]:
        state = ctypes.c_void_p()
        at = self._new(name.encode(), ctypes.c_ulong(max(nbytes, 1)), ctypes.byref(state))
        if not at or not state.value:
            raise MemoryError(f"{name}: {nbytes:,} bytes of device memory")
        places: tuple[int, int] = at, state.value
        data, written = (np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(x)) for x in places)
        self.buffers[name] = Buffer(name, data, written)
        return data


def _in_child(
    folder: Path, source: str, words: Sequence[str], report: Path, how: _Called | None, device: Device,
    settings: Mapping[str, Any],
) -> tuple[dict[str, Array], dict[str, int]]:  # fmt: skip
    """Run the program. Its `main` never returns here: the runtime ends the process, after it has written the report."""
    library = load(folder, source, (how.name,) if how else ())
    dll: Any = ctypes.CDLL(str(folder / "kernel.so"))
    major, minor = device.compute_capability
    begun = _Settings(
        os.fsencode(report), device.name.encode(), major, minor, device.sms, device.sram_per_block, device.sram_per_sm,
        32 * device.max_warps_per_sm, device.memory, device.l2, settings["workers"], settings["sanitize"], settings["time_limit"],
    )  # fmt: skip
    dll.emu_program_begin(ctypes.byref(begun))
    if how is None:
        argv = [os.fsencode(Path(source).with_suffix("")), *map(os.fsencode, words)]
        texts = (ctypes.c_char_p * (len(argv) + 1))(*argv, None)
        environment = [os.fsencode(f"{key}={value}") for key, value in os.environ.items()]
        dll.emu_program_main(dll.main, len(argv), texts, (ctypes.c_char_p * (len(environment) + 1))(*environment, None))
    assert how is not None  # the other way doesn't come back
    arena = _DeviceArena(dll)
    wanted = library.parameters(how.name)
    if missing := [name for name in how.parameters if name not in how.values]:
        raise UsageError("given", ", ".join(how.values) or "none", f"also {', '.join(missing)}, as {how.name} has")
    for name in how.values:
        if name not in how.parameters:
            raise unknown("argument", name, how.parameters)
    parts = [bytes_of(arena, name, how.values[name], wish) for name, wish in zip(how.parameters, wanted, strict=True)]
    storage = [ctypes.create_string_buffer(part, len(part)) for part in parts]
    dll.emu_call((ctypes.c_void_p * max(1, len(storage)))(*map(ctypes.addressof, storage)))
    left: dict[str, Array] = {}
    unwritten: dict[str, int] = {}
    for name, buffer in arena.buffers.items():
        value = how.values[name]
        dtype = numpy_dtype(value.dtype) if isinstance(value, Empty) else value.dtype
        left[name] = buffer.data.copy().view(dtype).reshape(value.shape)
        if isinstance(value, Empty) and settings["sanitize"] and (missing_bytes := int((buffer.written == 0).sum())):
            unwritten[name] = missing_bytes
    dll.emu_program_end()
    return left, unwritten
