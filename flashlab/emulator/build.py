"""Builds the library of a `.cu` file with the machine's own C++ compiler, and keeps it by content.

The source is compiled as it is; its `// step:` comments become calls. What calls the runtime is found in the machine code, and
the debug information leads from there to lines.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kernels_cu
from flashlab import cache
from flashlab.emulator.library import Library, load
from flashlab.emulator.places import calls_of, check_tools, lines_of, run
from flashlab.emulator.ptx import without_ptx
from flashlab.emulator.source import check, headers_of, kernels_of, said_of
from simulator.errors import Unavailable, UsageError, unknown

__all__ = ["BuildError", "build", "compiler"]

_FLAGS = (
    "-std=c++17",
    "-O2",
    "-g1",
    "-gdwarf-4",
    "-fPIC",
    "-DEMULATOR",
    "-Wno-unknown-pragmas",
    "-ffp-contract=off",
    "-fno-strict-aliasing",  # CUDA code reads an array as another type, and nvcc lets it
    "-fstack-clash-protection",  # a stack that overflows meets its guard page
    "-fwrapv",  # integers wrap, as on a GPU: an index that overflows leads where it would lead there
    "-fno-delete-null-pointer-checks",  # what goes through a null pointer is to be seen, not removed
    "-fno-optimize-sibling-calls",  # a call must stay where its line is: places in the code lead back to the source
)
_GCC = (
    "-fno-crossjumping",
    "-fno-code-hoisting",
    "-fno-ipa-icf",  # likewise
    "-fno-gnu-unique",  # the shared memory of a template is each library's own, also where another has the same template
    "-fno-extern-tls-init",  # shared memory needs no initialisation at its first use; a template's would crash
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
    # zero, and for every basic block, so that a loop without end is noticed
    "-fsanitize=thread",
    "-fsanitize=bounds,integer-divide-by-zero",
    "-fsanitize-coverage=trace-pc",
    # accesses stay as wide as the source has them, and none goes to memset or memcpy, where it wouldn't be seen
    "-fno-tree-vectorize",
    "-fno-finite-loops",  # one without end stays one
)
_WATCH_GCC = ("-fno-store-merging", "-fno-tree-loop-distribute-patterns")
_WATCH_CLANG = ("-fno-slp-vectorize", "-fno-builtin-memset")
_RUNTIME_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-c")
_MOST_SRAM = 227 * 1024
_MOST_STATIC = 48 * 1024  # of a __shared__ array of known size, as ptxas has it
_MARK = re.compile(r"//\s*step:\s*(\w+)")


class BuildError(RuntimeError):
    """The C++ compiler refused a source; the message is its log."""


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
    check(path, text)
    headers = headers_of(path, text)
    names = tuple(entries) if entries else kernels_of(text)
    if not names:
        raise UsageError("file", str(path), "a source with a __global__ function (of a template, name an instance)")
    for name in names:
        if not any(re.search(rf"\b{name.split('<')[0].strip()}\b", part) for part in (text, *headers.values())):
            raise unknown("kernel", name, kernels_of(text))
    own, watching = (_CLANG, _WATCH_CLANG) if "clang" in compiler()[1] else (_GCC, _WATCH_GCC)
    options = (*_FLAGS, *own, *((*_WATCH, *watching) if watch else ()), f"-D__CUDA_ARCH__={arch}", *macros)
    ours = _digest_of_sources(kernels_cu.emulator_dir(), kernels_cu.include_dir())
    return _library(path.resolve(), text, options, names, cache.digest(ours, *headers.values()))


@functools.lru_cache(maxsize=256)
def _library(path: Path, text: str, options: tuple[str, ...], entries: tuple[str, ...], digest: str) -> Library:
    key = cache.digest(compiler()[1], digest, str(path), text, *options, "", *entries)
    folder = cache.entry("emulator", key, lambda work: _make(work, path, text, options, entries))
    return load(folder, str(path), entries)


def _make(work: Path, path: Path, text: str, options: tuple[str, ...], entries: tuple[str, ...]) -> None:
    """Builds the library and the table of its places into a folder."""
    check_tools()
    runtime = _runtime()
    (work / "kernel.cpp").write_text(_translation_unit(path, text, entries), encoding="utf-8")
    here = kernels_cu.emulator_dir()
    includes = [f"-iquote{path.parent}", f"-I{here}", f"-I{kernels_cu.include_dir()}", f"-I{path.parent}"]
    _compile([*options, *includes, "-c", str(work / "kernel.cpp"), "-o", str(work / "kernel.o")], path)
    (work / "sram.c").write_text(_sram_source(work / "kernel.o"), encoding="utf-8")
    objects = [str(work / "kernel.o"), *map(str, runtime)]
    link = ["-x", "c", str(work / "sram.c"), "-x", "none", *objects, "-fPIC", "-shared", "-pthread"]
    _compile([*link, "-o", str(work / "kernel.so")], path)
    calls = calls_of(work / "kernel.so")
    places = list(zip(calls, lines_of(work / "kernel.so", calls), strict=True))
    statics = _statics(work / "kernel.so", work / "kernel.o")
    for name, _, nbytes in statics:
        if nbytes > _MOST_STATIC:
            accepted = f"at most {_MOST_STATIC:,} bytes: more shared memory must be dynamic (extern __shared__)"
            raise UsageError(f"__shared__ {name}", f"{nbytes:,} bytes", accepted)
    sites = {"places": places, "statics": statics}
    (work / "sites.json").write_text(json.dumps(sites), encoding="utf-8")
    for name in ("kernel.cpp", "kernel.o", "sram.c"):
        (work / name).unlink()


def _translation_unit(path: Path, text: str, entries: tuple[str, ...]) -> str:
    """The source as it is, its step marks made calls, and behind it a door to each kernel."""
    marked = _MARK.sub(lambda m: f'emulator::step("{m[1]}"); {m[0]}', without_ptx(text))
    doors = "".join(f"EMU_DOOR({i}, {entry})\n" for i, entry in enumerate(entries))
    name = json.dumps(str(path), ensure_ascii=False)
    return f'#include "cuda.h"\n#line 1 {name}\n{marked}\n#line 1 "doors"\n{doors}'


def _sram_source(kernel: Path) -> str:
    """`extern __shared__` arrays are thread-local names that the kernel leaves undefined: one memory for all of them."""
    symbols = run(["nm", "--undefined-only", str(kernel)])
    tls = _tls(kernel, undefined=True)
    names = [
        name for name in tls if name in symbols and not name.startswith(("_ZTH", "_ZTW")) and "emulator" not in name
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
    here = kernels_cu.emulator_dir()
    headers = [header.read_bytes() for header in sorted(here.glob("*.h"))]

    def object_of(source: Path) -> Path:
        name = f"{source.stem}.o"
        key = cache.digest(compiler()[1], *_RUNTIME_FLAGS, *headers, str(source), source.read_bytes())

        def make(work: Path) -> None:
            _compile([*_RUNTIME_FLAGS, str(source), "-o", str(work / name)], source)

        return cache.entry("runtime", key, make) / name

    with ThreadPoolExecutor() as pool:
        return list(pool.map(object_of, sorted(here.glob("*.cpp"))))


def _digest_of_sources(*folders: Path) -> str:
    files = [file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()]
    stamps = tuple((str(f), f.stat().st_mtime_ns, f.stat().st_size) for f in files)
    return _digest_of(stamps)


@functools.lru_cache(maxsize=4)
def _digest_of(stamps: tuple[tuple[str, int, int], ...]) -> str:
    # paths, too: findings name the files, and the same files elsewhere may be gone
    return cache.digest(*(part for name, *_ in stamps for part in (name, Path(name).read_bytes())))


@functools.cache
def compiler() -> tuple[str, str]:
    """The path of the C++ compiler, and what it says of its version. Raises `Unavailable` without one."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found, run([found, "--version"])
    raise Unavailable(
        "no C++ compiler, which the emulator needs: apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora), "
        "xcode-select --install (macOS)"
    )


def _compile(options: Sequence[str], source: Path) -> None:
    done = subprocess.run([compiler()[0], *options], capture_output=True, text=True, check=False)
    if done.returncode:
        said = said_of(source, done.stderr, (kernels_cu.emulator_dir(), kernels_cu.include_dir()))
        raise BuildError(f"{source.name} doesn't compile:\n{said}")
