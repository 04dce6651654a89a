"""Builds the library of a `.cu` file with the machine's own C++ compiler, and keeps it by content.

`source` makes the text for the compiler. What calls the runtime is found in the machine code, and the debug information leads
from there to lines.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import kernels_cu
from flashlab.base import cache
from flashlab.emulator import scan
from flashlab.emulator.host import host_function
from flashlab.emulator.indices import index_lines
from flashlab.emulator.library import Library, load
from flashlab.emulator.places import calls_of, check_tools, lines_of, run
from flashlab.emulator.prefix import options_of, precompiled
from flashlab.emulator.source import BuildError, Source, Survey, above, explained, headers_of, prepared, read
from flashlab.emulator.unset import PATTERN, UNROLLED, unrolled, warnings_of
from simulator.errors import Unavailable, UsageError, unknown

__all__ = ["BuildError", "build", "build_program", "compiler", "is_ready", "parsed", "survey"]

STANDARDS = {"c++14": "c++17", "c++17": "c++17", "c++20": "c++20"}
"""What `std` may be, and the standard by which a source is compiled: the emulator itself needs C++17."""

_FLAGS = (
    "-O2",
    "-g1",
    "-gdwarf-4",
    "-fPIC",
    "-DEMULATOR",
    "-Wno-unknown-pragmas",
    "-Wno-narrowing",  # nvcc's front end lets it
    "-ffp-contract=off",
    "-fno-strict-aliasing",  # CUDA code reads an array as another type, and nvcc lets it
    "-fstack-clash-protection",  # a stack that overflows meets its guard page
    "-fwrapv",  # integers wrap, as on a GPU: an index that overflows leads where it would lead there
    "-fno-delete-null-pointer-checks",  # what goes through a null pointer is to be seen, not removed
    "-fno-semantic-interposition",  # a library may take its own functions for its own, and have them inlined
    "-fno-optimize-sibling-calls",  # a call must stay where its line is: places in the code lead back to the source
)
_GCC = (
    "-fno-crossjumping",
    "-fno-code-hoisting",
    "-fno-ipa-icf",  # likewise
    "-Wmaybe-uninitialized",
    "-fno-gnu-unique",  # the shared memory of a template is each library's own, also where another has the same template
    "-fno-extern-tls-init",  # shared memory needs no initialisation at its first use; a template's would crash
    "-fno-var-tracking",  # nobody asks where a variable is, but finding that out is a fifth of compiling
)
_CLANG = (
    "-mllvm",
    "-simplifycfg-sink-common=false",
    "-mllvm",
    "-simplifycfg-hoist-common=false",
    "-Wno-unknown-attributes",
)
_WATCH = (
    # calls, which the runtime defines: for every plain load and store, before an index past its array or a division by
    # zero, after a signed integer wrapped, and for every basic block, so that a loop without end is noticed
    "-fsanitize=thread",
    "-fsanitize=bounds,integer-divide-by-zero",
    "-fsanitize=signed-integer-overflow",  # which wraps in spite of the next option, and says so
    "-fno-wrapv",
    "-fsanitize-coverage=trace-pc",
    # accesses stay as wide as the source has them, and none goes to memset or memcpy, where it wouldn't be seen
    "-fno-tree-vectorize",
    "-fno-finite-loops",  # one without end stays one
)
_WATCH_GCC = (
    "-fno-store-merging",
    "-fno-tree-loop-distribute-patterns",
    "--param=tsan-distinguish-volatile=1",
    "-fno-tree-sra",  # a float4 is loaded and stored in one piece
)
_WATCH_CLANG = ("-fno-slp-vectorize", "-fno-builtin-memset", "-mllvm", "-tsan-distinguish-volatile")
_ENDS = {  # what would end the process ends the launch: the runtime says so instead
    **{name: f"emu_{name}" for name in ("abort", "exit", "_exit", "_Exit", "quick_exit")},
    "_ZSt9terminatev": "emu_terminate",
    "__cxa_allocate_exception": "emu_throw",
    "__cxa_rethrow": "emu_rethrow",
}
_OF_HOST_CODE = {  # what touches memory out of the compiler's sight: the runtime looks at it first
    **{name: f"__tsan_{name}" for name in ("memcpy", "memmove", "memset")},
    "free": "emu_host_release",
    **{name: f"emu_host_{name}" for name in ("_ZdlPv", "_ZdaPv", "_ZdlPvm", "_ZdaPvm")},  # delete and delete[]
}
_THREADS = re.compile(r"^\s*#\s*include\s*[<\"]omp\.h[>\"]", re.MULTILINE)
_RUNTIME_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-c")
_MOST_SRAM = 227 * 1024
_MOST_STATIC = 48 * 1024  # of a __shared__ array of known size, as ptxas has it


def build(
    path: Path, macros: Iterable[str] = (), *, arch: int = 900, entries: Sequence[str] | None = None, watch: bool = True,
    includes: Iterable[Path | str] = (), std: str = "c++17", text: str | None = None,
) -> Library:  # fmt: skip
    """The library of a `.cu` file, built or from the cache. `text` is its text, if it isn't the whole file's.

    `macros` as compiler options, `arch` what `__CUDA_ARCH__` is, `entries` kernels by name (None: all of the file;
    `name<args>` instantiates a template). `watch` has the compiler report plain loads and stores; kernels that touch
    memory through the primitives alone run faster without. `includes` are folders of headers, `std` is one of `STANDARDS`.
    Raises `BuildError`, and `Unavailable` without a compiler.
    """
    text, path = read(path) if text is None else text, path.resolve()
    folders = [Path(folder).resolve() for folder in includes]
    command = _command(path, macros, folders, arch=arch, std=std)
    digest = _digest(path, text, folders)
    if not entries:
        found = _survey(path, text, command, digest)
        entries = [kernel.name for kernel in found.kernels if not kernel.template]
    if not entries:
        raise UsageError("file", str(path), "a source with a __global__ function (of a template, name an instance)")
    return _library(path, text, command, watch, tuple(entries), digest)


def build_program(
    path: Path, call: str | None = None, macros: Iterable[str] = (), *, arch: int = 900,
    includes: Iterable[Path | str] = (), std: str = "c++17",
) -> tuple[Path, tuple[str, ...]]:  # fmt: skip
    """The folder with the library of a whole program, host code and all, and the names of the parameters of `call`.

    `call` is a function of the host that the program is entered by, in place of `main`. Raises as `build` does, and `UsageError`
    for a program without such a function.
    """
    text, path = read(path), path.resolve()
    folders = [Path(folder).resolve() for folder in includes]
    command = _command(path, macros, folders, arch=arch, std=std)
    if _THREADS.search(text):
        command += ("-fopenmp",)
    digest = _digest(path, text, folders)
    source = prepared(path, text, command, (), digest, True)
    entry = host_function(source.pieces, call or "main")
    if entry is None and call:
        known = [piece.name for piece in source.pieces if piece.host and piece.kind == "function" and piece.body >= 0]
        raise unknown("call", call, list(dict.fromkeys(known)))
    if entry is None:
        raise UsageError(
            "file", str(path), "a program with a main(), or --call FUNCTION, or `flashlab emulate` for a kernel"
        )
    own = cache.digest(*(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))))
    key = cache.digest(compiler()[1], digest, own, str(path), text, *command, call or "")
    made = cache.entry("emulator", key, lambda work: _make(work, source, command, True, (), source.program(call)))
    return made, tuple(scan.parameters(source.tokens, entry)) if call else ()


def survey(
    path: Path, macros: Iterable[str] = (), *, arch: int = 900, includes: Iterable[Path | str] = (), std: str = "c++17",
    text: str | None = None,
) -> Survey:  # fmt: skip
    """The kernels of a source and their launches, as `build` would see them. Raises as `build` does."""
    text = read(path) if text is None else text
    folders = [Path(folder).resolve() for folder in includes]
    command = _command(path.resolve(), macros, folders, arch=arch, std=std)
    return _survey(path.resolve(), text, command, _digest(path, text, folders))


def parsed(path: Path, entries: Sequence[str], *, arch: int = 900) -> Source:
    """A source as `build` reads it for these kernels: preprocessed, and split into its declarations. Raises as `build` does."""
    text, path = read(path), path.resolve()
    command = _command(path, (), (), arch=arch, std="c++17")
    return prepared(path, text, command, tuple(entries), _digest(path, text, ()))


@functools.lru_cache(maxsize=256)
def _survey(path: Path, text: str, command: tuple[str, ...], digest: str) -> Survey:
    own = cache.digest(*(source.read_bytes() for source in sorted(Path(__file__).parent.glob("*.py"))))
    key = cache.digest(compiler()[1], digest, own, str(path), text, *command)

    def make(work: Path) -> None:
        found = prepared(path, text, command, (), digest).survey()
        (work / "survey.json").write_text(json.dumps(asdict(found)), encoding="utf-8")

    return Survey.read(json.loads((cache.entry("survey", key, make) / "survey.json").read_bytes()))


def _command(path: Path, macros: Iterable[str], folders: Sequence[Path], *, arch: int, std: str) -> tuple[str, ...]:
    """The compiler with what preprocessing and compiling have in common."""
    if std not in STANDARDS:
        raise unknown("std", std, STANDARDS)
    here = kernels_cu.emulator_dir()
    beside = [f"-I{here}", f"-I{kernels_cu.include_dir()}", *(f"-I{folder}" for folder in (*folders, path.parent))]
    beside += [f"-idirafter{folder}" for folder in above(path) if folder not in folders]
    own = _CLANG if "clang" in compiler()[1] else _GCC
    defined = ("-DEMULATOR", f"-D__CUDA_ARCH__={arch}", *macros)
    return (
        compiler()[0],
        f"-std={STANDARDS[std]}",
        *_FLAGS,
        *own,
        *_fills(),
        *defined,
        f"-iquote{path.parent}",
        *beside,
    )


def _digest(path: Path, text: str, folders: Sequence[Path]) -> str:
    ours = _digest_of_sources(kernels_cu.emulator_dir(), kernels_cu.include_dir())
    headers = headers_of(path, text, [*folders, *above(path)])
    return cache.digest(ours, *(part for name, content in headers.items() for part in (str(name), content)))


@functools.lru_cache(maxsize=256)
def _library(
    path: Path, text: str, command: tuple[str, ...], watch: bool, entries: tuple[str, ...], digest: str
) -> Library:
    key = cache.digest(compiler()[1], digest, str(path), text, *command, str(watch), *entries)

    def make(work: Path) -> None:
        # only the arguments of a template may hold macros: else what was prepared for the survey serves
        asked = entries if any("<" in entry for entry in entries) else ()
        _make(work, prepared(path, text, command, asked, digest), command, watch, entries)

    return load(cache.entry("emulator", key, make), str(path), entries)


def _make(
    work: Path,
    source: Source,
    command: Sequence[str],
    watch: bool,
    entries: tuple[str, ...],
    program: str | None = None,
) -> None:
    """Builds the library and the table of its places into a folder: of kernels, or of a whole program, whose text is given."""
    check_tools()
    runtime = _runtime()
    watching = (*_WATCH, *(_WATCH_CLANG if "clang" in compiler()[1] else _WATCH_GCC)) if watch else ()

    unit = source.unit(entries) if program is None else program
    done = _compiled_unit(source, unit, [*command, *watching], work)
    if done.returncode:
        raise BuildError(explained(source, entries, done.stderr))
    renamed = _ENDS if program is None else _ENDS | _OF_HOST_CODE
    run(["objcopy", *(f"--redefine-sym={name}={ours}" for name, ours in renamed.items()), str(work / "kernel.o")])
    objects = [work / "kernel.o", _sram(work / "kernel.o"), *runtime]
    # relocations say where calls are
    link = [*map(str, objects), "-fPIC", "-shared", "-pthread", "-Wl,--no-undefined", "-Wl,--emit-relocs"]
    link += ["-Wl,-Bsymbolic"] if program is not None else []  # its names are its own, also where Python has them
    link += ["-fopenmp"] if "-fopenmp" in command else []
    linked = _compiled([compiler()[0], *link, "-o", str(work / "kernel.so")])
    if linked.returncode:
        raise BuildError(explained(source, entries, linked.stderr))
    calls = calls_of(work / "kernel.so")
    places = list(zip(calls, lines_of(work / "kernel.so", calls), strict=True))
    statics = _statics(work / "kernel.so", work / "kernel.o")
    for name, _, nbytes in statics:
        if nbytes > _MOST_STATIC:
            accepted = f"at most {_MOST_STATIC:,} bytes: more shared memory must be dynamic (extern __shared__)"
            raise UsageError(f"__shared__ {name}", f"{nbytes:,} bytes", accepted)
    sites = {
        "places": places, "statics": statics, "unset": warnings_of(done.stderr) if _fills() else None,
        "indices": index_lines(source, entries) if watch else [],
    }  # fmt: skip
    (work / "sites.json").write_text(json.dumps(sites), encoding="utf-8")
    for name in ("kernel.cpp", "kernel.o"):
        (work / name).unlink()


def _compiled_unit(source: Source, unit: str, command: Sequence[str], work: Path) -> subprocess.CompletedProcess[str]:
    """Compile a unit, behind the source's prefix, to kernel.o. Macros have been replaced: a second time, they'd replace what the
    prefix has of the emulator's own names."""
    file = work / "kernel.cpp"
    compiling = [
        *(option for option in command if not option.startswith(("-D", "-U"))),
        "-c",
        str(file),
        "-o",
        str(work / "kernel.o"),
    ]
    whole = f'#include "keywords.h"\n{source.prefix}{unit}'
    if UNROLLED[0] in command:  # the loops of the prefix, too
        file.write_text(unrolled(whole), encoding="utf-8")
        return _compiled(compiling)
    header = precompiled(compiler(), options_of(command), source.prefix, cache.folder())
    if header and header.is_file():
        file.write_text(unit, encoding="utf-8")
        done = _compiled([*compiling, "-include", str(header)])
        if not done.returncode:
            return done
    file.write_text(whole, encoding="utf-8")  # g++ may name a header in what it says, and fail to load one
    return _compiled(compiling)


def _sram(kernel: Path) -> Path:
    """An object with the dynamic SRAM of a kernel. Few names are in use, so it is kept for other kernels."""
    text = _sram_source(kernel)

    def make(work: Path) -> None:
        (work / "sram.c").write_text(text, encoding="utf-8")
        done = _compiled([compiler()[0], "-x", "c", "-fPIC", "-c", str(work / "sram.c"), "-o", str(work / "sram.o")])
        if done.returncode:
            raise BuildError(f"the emulator's SRAM doesn't compile:\n{done.stderr}")

    return cache.entry("runtime", cache.digest(compiler()[1], text), make) / "sram.o"


def _sram_source(kernel: Path) -> str:
    """`extern __shared__` arrays are thread-local names that the kernel leaves undefined: one memory for all of them."""
    names = [
        name
        for name in _tls(kernel, undefined=True)
        if not name.startswith(("_ZTH", "_ZTW")) and "emulator" not in name
    ]
    first, *others = names or ["emu_sram"]
    lines = [f"_Thread_local unsigned char {first}[{_MOST_SRAM}] __attribute__((aligned(1024)));"]
    lines += [
        f'extern _Thread_local unsigned char {x}[{_MOST_SRAM}] __attribute__((alias("{first}")));' for x in others
    ]
    return "\n".join([*lines, f"void* emu_dynamic_sram(void) {{ return {first}; }}", ""])


def _tls(binary: Path, *, undefined: bool) -> dict[str, tuple[int, int]]:
    """Thread-local symbols: offset and size, by name."""
    found: dict[str, tuple[int, int]] = {}
    for row in run(["readelf", "--wide", "--symbols", str(binary)]).splitlines():
        parts = row.split()
        if len(parts) >= 8 and parts[3] == "TLS" and (parts[6] == "UND") == undefined:
            found[parts[7]] = int(parts[1], 16), int(parts[2], 0)
    return found


def _statics(library: Path, kernel: Path) -> list[tuple[str, int, int]]:
    """Static arrays in SRAM: name, offset from the dynamic SRAM, bytes."""
    mine = _tls(kernel, undefined=False)
    linked = _tls(library, undefined=False)
    dynamic = max(linked.values(), key=lambda x: x[1])[0]
    names = run(["c++filt", *mine]).splitlines() if mine else []
    return [
        (plain.rsplit("::", 1)[-1], linked[name][0] - dynamic, linked[name][1])
        for name, plain in zip(mine, names, strict=True)
        if name in linked
    ]


def _runtime() -> list[Path]:
    """The objects of the runtime, the same for every kernel; each is built once for its source and the headers."""
    keys = _runtime_keys()

    def object_of(source: Path) -> Path:
        name, key = f"{source.stem}.o", keys[source]

        def make(work: Path) -> None:
            done = _compiled([compiler()[0], *_RUNTIME_FLAGS, str(source), "-o", str(work / name)])
            if done.returncode:
                raise BuildError(f"{source.name} of the emulator doesn't compile:\n{done.stderr}")

        return cache.entry("runtime", key, make) / name

    # in any order: processes that begin at the same time then share the work
    sources = random.sample(list(keys), len(keys))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return sorted(pool.map(object_of, sources), key=lambda made: made.name)


def _runtime_keys() -> dict[Path, str]:
    """The sources of the runtime, and the names of their objects in the cache."""
    here = kernels_cu.emulator_dir()
    headers = [header.read_bytes() for header in sorted(here.glob("*.h"))]
    flags = (compiler()[1], *_RUNTIME_FLAGS)
    return {source: cache.digest(*flags, *headers, source.read_bytes()) for source in sorted(here.glob("*.cpp"))}


def is_ready() -> bool:
    """Has the runtime been built? It is the same for every kernel."""
    return all((cache.folder() / "runtime" / key).exists() for key in _runtime_keys().values())


def _digest_of_sources(*folders: Path) -> str:
    files = [file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()]
    stamps = tuple((str(f), f.stat().st_mtime_ns, f.stat().st_size) for f in files)
    return _digest_of(stamps)


@functools.lru_cache(maxsize=4)
def _digest_of(stamps: tuple[tuple[str, int, int], ...]) -> str:
    # paths, too: findings name the files, and the same files elsewhere may be gone
    return cache.digest(*(part for name, *_ in stamps for part in (name, Path(name).read_bytes())))


def _fills() -> tuple[str, ...]:
    """The option that fills local variables with a pattern: g++ has it from version 12 on."""
    version = re.search(r"\) (\d+)\.", compiler()[1])
    return (PATTERN,) if "clang" in compiler()[1] or (version and int(version[1]) >= 12) else ()


@functools.cache
def compiler() -> tuple[str, str]:
    """The path of the C++ compiler, and what it says of its version. Raises `Unavailable` without one."""
    own = os.environ.get("CXX")
    for name in (own,) if own else ("g++", "clang++"):
        if found := shutil.which(name):
            try:
                return found, run([found, "--version"])
            except (OSError, subprocess.CalledProcessError):
                raise Unavailable(f"{found} is no C++ compiler: it can't say its version") from None
    if own:
        raise Unavailable(f"CXX is {own!r}, which is no C++ compiler here: name one, without arguments")
    raise Unavailable(
        "no C++ compiler, which the emulator needs: apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora), "
        "xcode-select --install (macOS)"
    )


def _compiled(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run the compiler; what it says, if only of how it ended."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
    done.stderr = done.stderr or f"exit status {done.returncode}"
    if done.returncode and os.strerror(errno.ENOSPC) in done.stderr:  # no fault of the source
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return done
