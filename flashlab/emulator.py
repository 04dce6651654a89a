"""Runs the CUDA sources on a CPU: built by the machine's own C++ compiler, executed, sanitised and counted.

`build` makes a library of a `.cu` file, `Library.launch` runs one of its kernels on buffers in an `Arena`. The C++ side is
`kernels_cu/emulator`; the documentation's page "The emulator" tells how it works and what it doesn't model.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import mmap
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kernels_cu
from flashlab.compiler import cache_dir
from simulator.errors import Unavailable, UsageError, unknown

__all__ = ["Arena", "BuildError", "Finding", "Launched", "Library", "Line", "Moved", "build", "describe"]

_FLAGS = (
    "-std=c++17", "-O2", "-g1", "-fPIC", "-DEMULATOR", "-Wno-unknown-pragmas", "-ffp-contract=off",
    # a call must stay where its line is: places in the code lead back to lines of the source
    "-fno-optimize-sibling-calls", "-fno-crossjumping", "-fno-code-hoisting", "-fno-ipa-icf",
)  # fmt: skip
_WATCH = ("-fsanitize=thread",)  # calls for every plain load and store, which the runtime defines
_MOST_SRAM = 227 * 1024
_MARK = re.compile(r"//\s*step:\s*(\w+)")
_CALL = re.compile(r"^\s*([0-9a-f]+):\s+\S*(?:call|bl)\S*\s+.*<(?:emu_|__tsan_)")
_ADDRESS = re.compile(r"^\s*([0-9a-f]+):")


class BuildError(RuntimeError):
    """The C++ compiler refused a source; the message is its log."""


class Line(NamedTuple):
    """A line of a source file."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number}"


@dataclass(frozen=True)
class Finding:
    """A misuse of the machine: what kind, where in the source, by whom, to which bytes.

    `line` is the kernel's own line, `via` the lines of headers that it went through, innermost first. `other` is the
    second party: of a race the earlier access, of a forgotten wait the copy.
    """

    kind: str
    message: str
    line: Line | None
    via: tuple[Line, ...]
    step: str
    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    tensor: str
    offset: int
    bytes: int
    times: int
    other_line: Line | None = None
    other_block: tuple[int, int, int] | None = None
    other_thread: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        where = f"{self.line or '?'}" + (f", step {self.step}" if self.step else "")
        what = f" ({self.tensor}, byte {self.offset:,})" if self.tensor else ""
        who = f"thread {_point(self.thread)} of block {_point(self.block)}"
        other = ""
        if self.other_thread is not None and self.other_block is not None:
            block = "" if self.other_block == self.block else f" of block {_point(self.other_block)}"
            other = f"; the other: thread {_point(self.other_thread)}{block} at {self.other_line or '?'}"
        times = f" ({self.times:,} times)" if self.times > 1 else ""
        return f"{where}: {self.kind}: {who} {self.message}{what}{other}{times}"


@dataclass(frozen=True)
class Moved:
    """What one kind of warp instruction moved in one step: bytes as the contract counts them, `sectors` of 32 bytes for
    HBM, `wavefronts` (passes over the banks) and the fewest possible (`ideal`) for SRAM."""

    step: str
    tensor: str
    space: str
    op: str
    instructions: int
    bytes: int
    sectors: int
    wavefronts: int
    ideal: int

    @property
    def what(self) -> str:
        """The accounting contract's name: `hbm.read`, `hbm.write`, `hbm.atomic`, `sram.read` or `sram.write`."""
        return f"{self.space}.{_DIRECTIONS[self.space, self.op]}"


_DIRECTIONS = {
    **{("hbm", op): "read" for op in ("ld", "ldgsts", "tma_ld")},
    **{("hbm", op): "write" for op in ("st", "tma_st")},
    **{("hbm", op): "atomic" for op in ("red", "atom")},
    **{("sram", op): "read" for op in ("ld", "ldsm", "gmma", "tma_st")},
    **{("sram", op): "write" for op in ("st", "stsm", "ldgsts", "tma_ld", "atom")},
}


@dataclass(frozen=True)
class Launched:
    """What one launch did. `plain` accesses came through the compiler's instrumentation, not through the primitives."""

    kernel: str
    moved: tuple[Moved, ...]
    findings: tuple[Finding, ...]
    dropped: int
    plain: int
    flops: int
    exp: int

    def total(self, what: str, quantity: str = "bytes") -> int:
        """The sum of a quantity over a level and direction, as in `total("hbm.read")`."""
        return sum(getattr(row, quantity) for row in self.moved if row.what == what)

    @property
    def ledger(self) -> dict[tuple[str, str, str], int]:
        """Bytes by step, tensor and what, as `LaunchCounts.ledger` has them."""
        sums: Counter[tuple[str, str, str]] = Counter()
        for row in self.moved:
            sums[row.step, row.tensor, row.what] += row.bytes
        return dict(sums)


# Memory


class Arena:
    """Buffers that lie far apart, so that what runs over the end of one meets none of the others.

    >>> arena = Arena()
    >>> x = arena.put("x", np.arange(4, dtype="float32"))
    >>> x
    array([0., 1., 2., 3.], dtype=float32)
    """

    _GAP = 1 << 20

    def __init__(self) -> None:
        self.buffers: dict[str, _Buffer] = {}

    def new(self, name: str, nbytes: int) -> np.ndarray[Any, Any]:
        """Bytes that nobody has written yet; they hold NaNs."""
        gap = self._GAP + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, 2 * gap + -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE)
        data = np.frombuffer(memory, np.uint8)[gap : gap + nbytes]
        data[:] = 0xFF
        self.buffers[name] = _Buffer(name, data, np.zeros(nbytes, np.uint8))
        return data

    def put(self, name: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A copy of an array, contiguous and written."""
        values = np.ascontiguousarray(values)
        data = self.new(name, values.nbytes)
        data[:] = values.reshape(-1).view(np.uint8)
        self.buffers[name].written[:] = 1
        return data.view(values.dtype).reshape(values.shape)

    def pointer(self, name: str) -> int:
        return self.buffers[name].data.ctypes.data


@dataclass
class _Buffer:
    """`written`: 1 for each byte that holds a value before the launch. `read_only`: a kernel may not write it."""

    name: str
    data: np.ndarray[Any, Any]
    written: np.ndarray[Any, Any]
    read_only: bool = False


# The library's interface, launch.h


class _Region(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p), ("base", ctypes.c_void_p), ("bytes", ctypes.c_int64), ("input", ctypes.c_int),
        ("written", ctypes.c_void_p),
    )  # fmt: skip


class _Launch(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p), ("arguments", ctypes.POINTER(ctypes.c_void_p)), ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3), ("dynamic_sram", ctypes.c_uint), ("regions", ctypes.POINTER(_Region)),
        ("region_count", ctypes.c_int), ("workers", ctypes.c_int), ("sanitize", ctypes.c_int),
        ("time_limit", ctypes.c_double),
    )  # fmt: skip


@dataclass
class Library:
    """A built source: its kernels, and which line each place in the machine code belongs to."""

    path: Path
    entries: tuple[str, ...]
    places: Mapping[int, tuple[Line, ...]]
    source: str
    _dll: Any = field(repr=False, default=None)

    def parameters(self, entry: str) -> list[tuple[str, int]]:
        """A letter and the size in bytes of each parameter: p a pointer, i or u an integer, f a float, s a struct."""
        letters, sizes = ctypes.create_string_buffer(64), (ctypes.c_uint * 64)()
        n = getattr(self._dll, f"emu_parameters_{self._index(entry)}")(letters, sizes, 64)
        return [(letters.raw[i : i + 1].decode(), sizes[i]) for i in range(n)]

    def launch(
        self, entry: str, grid: Sequence[int], block: Sequence[int], arguments: Sequence[bytes], arena: Arena, *,
        sram: int = 0, sanitize: bool = True, workers: int | None = None, time_limit: float = 0,
    ) -> Launched:  # fmt: skip
        """Run one kernel over a grid. `arguments` are the parameters' bytes, in order; `sram` dynamic bytes a block;
        `time_limit` seconds (0: none) after which a kernel that waits in vain is stopped: `UsageError`."""
        index = self._index(entry)
        storage = [ctypes.create_string_buffer(x, len(x)) for x in arguments]
        pointers = (ctypes.c_void_p * max(1, len(storage)))(*[ctypes.addressof(x) for x in storage])
        buffers = list(arena.buffers.values())
        regions = (_Region * max(1, len(buffers)))(
            *[_Region(b.name.encode(), b.data.ctypes.data, b.data.nbytes, b.read_only, b.written.ctypes.data)
              for b in buffers]
        )  # fmt: skip
        request = _Launch(
            ctypes.cast(getattr(self._dll, f"emu_entry_{index}"), ctypes.c_void_p), pointers, _three(grid), _three(block),
            sram, regions, len(buffers), workers or os.cpu_count() or 1, sanitize, time_limit,
        )  # fmt: skip
        answer = self._dll.emu_launch(ctypes.byref(request))
        report = json.loads(ctypes.string_at(answer))
        self._dll.emu_free(answer)
        if report["timed_out"]:
            raise UsageError(entry, f"no end after {time_limit:g} s", "a kernel that ends")
        return self._launched(entry, report)

    def _index(self, entry: str) -> int:
        if entry not in self.entries:
            raise unknown("kernel", entry, self.entries)
        return self.entries.index(entry)

    def _launched(self, entry: str, report: dict[str, Any]) -> Launched:
        return Launched(
            kernel=entry, moved=tuple(Moved(**row) for row in report["moved"]),
            findings=tuple(self._finding(x) for x in report["findings"]), dropped=report["dropped"],
            plain=report["plain"], flops=report["flops"], exp=report["exp"],
        )  # fmt: skip

    def _finding(self, x: dict[str, Any]) -> Finding:
        chain = self.places.get(x.pop("place"), ())
        other = self.places.get(x.pop("other_place", -1), ())
        for key in ("block", "thread", "other_block", "other_thread"):
            if key in x:
                x[key] = tuple(x[key])
        return Finding(**x, line=self._own(chain), via=chain[:-1], other_line=self._own(other))

    def _own(self, chain: tuple[Line, ...]) -> Line | None:
        """The kernel's line of a place: the outermost of its own file, behind which headers were inlined."""
        mine = [line for line in chain if line.file == self.source]
        return mine[-1] if mine else chain[-1] if chain else None


def _three(extent: Sequence[int]) -> Any:
    return (ctypes.c_uint * 3)(*extent, *[1] * (3 - len(extent)))


def _point(p: tuple[int, int, int]) -> str:
    return str(p[0]) if not p[1] and not p[2] else f"({p[0]}, {p[1]}, {p[2]})"


# Building


def build(
    path: Path, macros: Iterable[str] = (), *, arch: int = 900, entries: Sequence[str] | None = None, watch: bool = True
) -> Library:
    """The library of a `.cu` file, built or from the cache.

    `macros` as compiler options, `arch` what `__CUDA_ARCH__` is, `entries` kernels by name (None: all of the file;
    `name<args>` instantiates a template). `watch` has the compiler report plain loads and stores; kernels that touch
    memory through the primitives alone run faster without. Raises `BuildError`, and `Unavailable` without a compiler.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("file", str(path), f"a CUDA source ({error})") from None
    names = tuple(entries) if entries else kernels_of(text)
    if not names:
        raise UsageError("file", str(path), "a source with a __global__ function")
    options = (*_FLAGS, *(_WATCH if watch else ()), f"-D__CUDA_ARCH__={arch}", *macros)
    return _library(path.resolve(), text, options, names, _digest_of_sources())


def kernels_of(text: str) -> tuple[str, ...]:
    """The names of a source's kernels, templates left out.

    >>> kernels_of("extern \\"C\\" __global__ void __launch_bounds__(128) scale(float* x) {}")
    ('scale',)
    """
    bare = re.sub(r"//[^\n]*|/\*.*?\*/|__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)", "", text, flags=re.DOTALL)
    found = re.finditer(r"(template\s*<[^;{]*>\s*)?(?:extern\s*\"C\"\s*)?__global__\s[^;{(]*?(\w+)\s*\(", bare)
    return tuple(dict.fromkeys(match[2] for match in found if not match[1]))


@functools.lru_cache(maxsize=256)
def _library(path: Path, text: str, options: tuple[str, ...], entries: tuple[str, ...], digest: str) -> Library:
    compiler = _compiler()
    key = hashlib.sha256("\0".join([compiler[1], digest, str(path), text, *options, *entries]).encode()).hexdigest()[:32]
    folder = cache_dir() / "emulator" / key
    if not (folder / "sites.json").is_file():
        _make(folder, path, text, options, entries)
    return _load(folder, str(path), entries)


def _make(folder: Path, path: Path, text: str, options: tuple[str, ...], entries: tuple[str, ...]) -> None:
    """Builds into a folder of its own, which takes its place in one step."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    runtime = _runtime()
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        work = Path(scratch) / "built"
        work.mkdir()
        (work / "kernel.cpp").write_text(_translation_unit(path, text, entries), encoding="utf-8")
        here = kernels_cu.emulator_dir()
        includes = [f"-I{here}", f"-I{kernels_cu.include_dir()}", f"-I{path.parent}"]
        _compile([*options, *includes, "-c", str(work / "kernel.cpp"), "-o", str(work / "kernel.o")], path)
        (work / "sram.c").write_text(_sram_source(work / "kernel.o"), encoding="utf-8")
        objects = [str(work / "kernel.o"), *map(str, runtime)]
        link = ["-x", "c", str(work / "sram.c"), "-x", "none", *objects, "-fPIC", "-shared", "-pthread"]
        _compile([*link, "-o", str(work / "kernel.so")], path)
        sites = {"places": _places(work / "kernel.so"), "statics": _statics(work / "kernel.so", work / "kernel.o")}
        (work / "sites.json").write_text(json.dumps(sites), encoding="utf-8")
        for name in ("kernel.cpp", "kernel.o", "sram.c"):
            (work / name).unlink()
        with contextlib.suppress(OSError):  # another process was faster
            work.rename(folder)


def _translation_unit(path: Path, text: str, entries: tuple[str, ...]) -> str:
    """The source as it is, its step marks made calls, and behind it a door to each kernel."""
    marked = _MARK.sub(lambda m: f'emulator::step("{m[1]}"); {m[0]}', text)
    doors = "".join(
        f'extern "C" void emu_entry_{i}(void** arguments) {{ emulator::call({entry}, arguments); }}\n'
        f'extern "C" int emu_parameters_{i}(char* letters, unsigned* sizes, int most) '
        f"{{ return emulator::describe({entry}, letters, sizes, most); }}\n"
        for i, entry in enumerate(entries)
    )
    return f'#include "cuda.h"\n#line 1 "{path}"\n{marked}\n#line 1 "doors"\n{doors}'


def _sram_source(kernel: Path) -> str:
    """`extern __shared__` arrays are thread-local names that the kernel leaves undefined: one memory for all of them."""
    symbols = _run(["nm", "--undefined-only", str(kernel)])
    tls = _tls(kernel, undefined=True)
    names = [name for name in tls if name in symbols and not name.startswith(("_ZTH", "_ZTW")) and "emulator" not in name]
    first, *others = names or ["emu_sram"]
    lines = [f"_Thread_local unsigned char {first}[{_MOST_SRAM}] __attribute__((aligned(1024)));"]
    lines += [f'extern _Thread_local unsigned char {x}[{_MOST_SRAM}] __attribute__((alias("{first}")));' for x in others]
    return "\n".join([*lines, f"void* emu_dynamic_sram(void) {{ return {first}; }}", ""])


def _tls(binary: Path, *, undefined: bool) -> dict[str, tuple[int, int]]:
    """Thread-local symbols: offset and size, by name."""
    found: dict[str, tuple[int, int]] = {}
    for row in _run(["readelf", "--wide", "--symbols", str(binary)]).splitlines():
        parts = row.split()
        if len(parts) >= 8 and parts[3] == "TLS" and (parts[6] == "UND") == undefined:
            found[parts[7]] = int(parts[1], 16), int(parts[2], 0)
    return found


def _statics(library: Path, kernel: Path) -> list[tuple[str, int, int]]:
    """Static arrays in SRAM: name, offset from the dynamic SRAM, bytes."""
    mine = _tls(kernel, undefined=False)
    linked = _tls(library, undefined=False)
    dynamic = max(linked.values(), key=lambda x: x[1])[0]
    names = _run(["c++filt", *mine]).splitlines() if mine else []
    return [
        (plain.rsplit("::", 1)[-1], linked[name][0] - dynamic, linked[name][1])
        for name, plain in zip(mine, names, strict=True)
        if name in linked
    ]


def _places(library: Path) -> list[tuple[int, list[tuple[str, int]]]]:
    """Where the kernel's code calls the runtime: the return addresses, and the lines that lead there, innermost first."""
    returns: list[int] = []
    called = False
    for row in _run(["objdump", "--disassemble", "--no-show-raw-insn", str(library)]).splitlines():
        if called and (match := _ADDRESS.match(row)):
            returns.append(int(match[1], 16))
            called = False
        called = called or bool(_CALL.match(row))
    if not returns:
        return []
    asked = "\n".join(f"{x - 1:#x}" for x in returns)  # inside the call, not behind it
    rows = _run(["addr2line", "--addresses", "--inlines", "--exe", str(library)], asked).splitlines()
    chains: list[list[tuple[str, int]]] = []
    for row in rows:
        if row.startswith("0x"):
            chains.append([])
            continue
        file, _, number = row.split(" (")[0].rpartition(":")
        if number.isdecimal() and file not in ("doors", "??") and "/emulator/" not in file:
            chains[-1].append((file, int(number)))
    return list(zip(returns, chains, strict=True))


def _load(folder: Path, source: str, entries: tuple[str, ...]) -> Library:
    dll: Any = ctypes.CDLL(str(folder / "kernel.so"))
    dll.emu_launch.restype, dll.emu_free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    sites = json.loads((folder / "sites.json").read_bytes())
    chains = {place: tuple(Line(*line) for line in chain) for place, chain in sites["places"]}
    ids: dict[tuple[Line, ...], int] = {}
    rows = [(place, ids.setdefault(chain, len(ids) + 1)) for place, chain in sorted(chains.items())]
    n = len(rows)
    dll.emu_sites((ctypes.c_uint64 * n)(*[r[0] for r in rows]), (ctypes.c_uint32 * n)(*[r[1] for r in rows]), n)
    statics, m = sites["statics"], len(sites["statics"])
    dll.emu_statics(
        (ctypes.c_char_p * m)(*[s[0].encode() for s in statics]), (ctypes.c_int64 * m)(*[s[1] for s in statics]),
        (ctypes.c_uint32 * m)(*[s[2] for s in statics]), m,
    )  # fmt: skip
    return Library(folder / "kernel.so", entries, chains, source, dll)


def _runtime() -> list[Path]:
    """The objects of the runtime, the same for every kernel."""
    sources = sorted(kernels_cu.emulator_dir().glob("*.cpp"))
    key = hashlib.sha256((_compiler()[1] + _digest_of_sources()).encode()).hexdigest()[:32]
    folder = cache_dir() / "emulator" / f"runtime-{key}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, ThreadPoolExecutor() as pool:
            work = Path(scratch) / "built"
            work.mkdir()
            flags = ("-std=c++17", "-O2", "-fPIC", "-c")
            jobs = [pool.submit(_compile, [*flags, str(s), "-o", str(work / f"{s.stem}.o")], s) for s in sources]
            for job in jobs:
                job.result()
            with contextlib.suppress(OSError):
                work.rename(folder)
    return [folder / f"{source.stem}.o" for source in sources]


def _digest_of_sources() -> str:
    files = sorted([*kernels_cu.emulator_dir().iterdir(), *kernels_cu.include_dir().iterdir()])
    stamps = tuple((str(f), f.stat().st_mtime_ns, f.stat().st_size) for f in files)
    return _digest_of(stamps)


@functools.lru_cache(maxsize=4)
def _digest_of(stamps: tuple[tuple[str, int, int], ...]) -> str:
    return hashlib.sha256(b"\0".join(Path(name).read_bytes() for name, *_ in stamps)).hexdigest()


@functools.cache
def _compiler() -> tuple[str, str]:
    """The C++ compiler and its version."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found, _run([found, "--version"])
    raise Unavailable(
        "no C++ compiler, which the emulator needs: apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora), "
        "xcode-select --install (macOS)"
    )


def _compile(options: Sequence[str], source: Path) -> None:
    done = subprocess.run([_compiler()[0], *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{source.name} doesn't compile:\n{done.stderr.strip()}")


def _run(command: Sequence[str], stdin: str = "") -> str:
    if not shutil.which(command[0]):
        raise Unavailable(f"no {command[0]}, which the emulator needs: it comes with the package binutils")
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=True).stdout


def describe(findings: Sequence[Finding]) -> str:
    """Findings as text, a line each."""
    return "\n".join(str(finding) for finding in findings)
