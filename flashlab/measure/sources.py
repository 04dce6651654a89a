"""Which kernels a result is of: digests of their sources, by algorithm.

A result is evidence of the kernels that it measured. So it keeps two digests of them. One is of the *tokens* of an algorithm's
sources with the headers that they include, so that a comment doesn't count. The other is of the *PTX* that one NVRTC makes of them
for a fixed grid of configurations, so that a header which changes nothing of this kernel doesn't count. If either is today's, the
result is of today's kernel.

`KERNELS` beside the results holds today's digests, the grid and NVRTC's version. `record` renews it.
"""

from __future__ import annotations

import functools
import io
import json
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import kernels_cu
from flashlab import triton
from flashlab.base import cache
from flashlab.base.files import replace_file
from flashlab.run import nvrtc
from simulator.algorithm import Algorithm
from simulator.api import count
from simulator.catalogue import CATALOGUE
from simulator.devices import Device
from simulator.errors import UsageError
from simulator.problem import Problem

__all__ = [
    "KERNELS",
    "Build",
    "Digest",
    "Known",
    "builds",
    "digest_of_ptx",
    "digest_of_tokens",
    "files_of",
    "grid",
    "known",
    "renew",
    "today",
    "tokens",
    "without_comments",
]

KERNELS = "kernels.json"
"""The file of today's digests, in the folder of the results."""

_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_TOKEN = re.compile(r"\w+|[^\w\s]")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_MOST = 8
"""Of an algorithm's configurations in the grid."""
_HEAD_DIMS = (64, 128, 192)
_DEVICE, _ARCH = "h200", "compute_90"


@dataclass(frozen=True)
class Digest:
    """What tells the kernels of one algorithm from older ones. `ptx` is None where nobody compiled them, and of Triton's."""

    tokens: str
    ptx: str | None = None

    def same(self, other: Digest) -> bool:
        """Are these the same kernels, by their text or by what is compiled of it?

        >>> Digest("a", "x").same(Digest("b", "x")), Digest("a").same(Digest("b"))
        (True, False)
        """
        return self.tokens == other.tokens or (self.ptx is not None and self.ptx == other.ptx)


@dataclass(frozen=True)
class Build:
    """One configuration of the grid: a source, the architecture, and NVRTC's options."""

    source: str
    arch: str
    options: tuple[str, ...]


# -- tokens ---------------------------------------------------------------------------------------------------------


def without_comments(text: str) -> str:
    """A source in CUDA with blanks in place of comments, so that every other character keeps its place."""
    return _COMMENT.sub(lambda m: m[1] or re.sub(r"[^\n]", " ", m[0]), text)


def tokens(text: str) -> list[str]:
    """What a source is to a compiler, nearly: two that differ in comments and white space have the same.

    >>> tokens("a = b; // c") == tokens("a=b;")
    True
    """
    return _TOKEN.findall(without_comments(text))


def files_of(row: Algorithm) -> dict[str, str]:
    """The sources of an algorithm's kernels and all headers of ours that they include, by name. An older revision may lack some."""
    found: dict[str, str] = {}

    def take(name: str, folder: Path) -> None:
        path = folder / name
        if name in found or not path.is_file():
            return
        found[name] = path.read_text(encoding="utf-8")
        for header in _INCLUDE.findall(without_comments(found[name])):
            take(header, kernels_cu.include_dir())

    for kernel in row.kernels:
        if kernel.language == "triton":
            found[kernel.source] = triton.source(kernel.source).read_text(encoding="utf-8")
        else:
            take(f"{kernel.source}.cu", kernels_cu.include_dir().parent)
    return found


def digest_of_tokens(row: Algorithm) -> str:
    """The digest of the tokens of an algorithm's sources."""
    in_python = {kernel.source for kernel in row.kernels if kernel.language == "triton"}
    return cache.digest(
        *(part for name, text in sorted(files_of(row).items()) for part in (name, _of(text, name in in_python)))
    )[:16]


@functools.lru_cache(maxsize=256)
def _of(text: str, in_python: bool) -> str:
    """The digest of one file's tokens: headers are many algorithms'."""
    if not in_python:
        return cache.digest(*tokens(text))
    found, skipped = tokenize.generate_tokens(io.StringIO(text).readline), (tokenize.COMMENT, tokenize.NL)
    return cache.digest(*(token.string for token in found if token.type not in skipped))


# -- PTX ------------------------------------------------------------------------------------------------------------


def grid(row: Algorithm) -> tuple[Build, ...]:
    """The configurations by which an algorithm's PTX is known, from the shapes in which its operation is verified."""
    found = dict.fromkeys(build for problem in _problems(row) for build in builds(row, problem))
    return tuple(islice(found, _MOST))


def builds(row: Algorithm, problem: Problem) -> Iterator[Build]:
    """What the launches of a problem are compiled from."""
    counts, kernels = count(row.name, problem, device=_DEVICE), {kernel.entry: kernel for kernel in row.kernels}
    assert counts.config is not None
    options = nvrtc.defines(counts.config, problem.dtype, problem.head_dim)
    for launch in counts.launches:
        kernel = kernels[launch.name]
        if kernel.language == "cuda":
            yield Build(kernel.source, (kernel.arch or _ARCH).replace("sm_", "compute_"), options)


def _problems(row: Algorithm) -> Iterator[Problem]:
    dtype = "bfloat16" if "bfloat16" in row.dtypes else row.dtypes[0]
    for shape in row.operation.shapes.values():
        for causal in (False, True):
            for head_dim in _HEAD_DIMS:
                sizes: dict[str, Any] = {"batch": 1, "heads": 2, "head_dim": head_dim, "dtype": dtype, "causal": causal}
                try:
                    problem = row.fitted(Problem(**{**sizes, **shape}))
                except UsageError:  # a shape of another head dim
                    continue
                if not row.refuses(problem, Device.named(_DEVICE)):
                    yield problem


def digest_of_ptx(built: Sequence[Build]) -> str | None:
    """The digest of the PTX of these configurations, without its comments. None if there are none, or if a source refuses one."""
    try:
        parts = [_ptx(build) for build in built]
    except (nvrtc.CompileError, ValueError):  # an older source that lacks the kernel, or wants another macro
        return None
    return cache.digest(*parts)[:16] if parts else None


def _ptx(build: Build) -> str:
    text = nvrtc.compile_kernel(build.source, build.options, arch=build.arch).image.decode()
    return code_of(text)


def code_of(ptx: str) -> str:
    """PTX without comments, and without the constants of headers that no instruction names. Those that are named come first.

    >>> code_of(".global .u32 A = 1;\\n.global .u32 B = 2;\\n.entry k() { ld.global.u32 r, [B]; }  // comment")
    '.global .u32 B = 2;\\n.entry k() { ld.global.u32 r, [B]; }'
    """
    lines = [line.partition("//")[0].rstrip() for line in ptx.splitlines()]
    code = [line for line in lines if line and not line.startswith(".global")]
    named = set(re.findall(r"\w+", "\n".join(code)))
    constants = (line for line in lines if line.startswith(".global"))
    return "\n".join((*sorted(line for line in constants if _name(line) in named), *code))


def _name(constant: str) -> str:
    """The name of a `.global`, which stands before its value or its extent."""
    return re.split(r"[\[=;]", constant)[0].split()[-1]


# -- today's kernels ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """What `KERNELS` holds of an algorithm: the digest, since which day it has been that, and the grid of its PTX."""

    digest: Digest
    since: str
    grid: tuple[Build, ...]


def known(folder: str | Path) -> dict[str, Known]:
    """What the file in a folder of results holds, by algorithm. Nothing if there is no such file."""
    content = _content(folder)
    return {
        name: Known(Digest(x["tokens"], x["ptx"]), x["since"], tuple(Build(s, a, tuple(o)) for s, a, o in x["grid"]))
        for name, x in content["algorithms"].items()
    }


def _content(folder: str | Path) -> dict[str, Any]:
    path = Path(folder) / KERNELS
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"algorithms": {}}


def today(folder: str | Path) -> Mapping[str, Digest]:
    """The digests of the kernels as they are now, by algorithm. Their PTX is known while the file's tokens are theirs."""
    return _today(Path(folder).resolve(), kernels_cu.include_dir())


@functools.cache
def _today(folder: Path, sources: Path) -> Mapping[str, Digest]:
    del sources  # part of the key
    kept = known(folder)
    found: dict[str, Digest] = {}
    for name, row in CATALOGUE.items():
        if row.kernels:
            found[name] = Digest(digest_of_tokens(row))
            if name in kept and kept[name].digest.tokens == found[name].tokens:
                found[name] = kept[name].digest
    return found


def renew(folder: str | Path, date: str) -> dict[str, Known]:
    """Write the file anew, and return what it holds. Only kernels whose tokens have changed are compiled.

    `date` (year-month-day) is the day of those whose PTX has changed, too. Raises `CompilerMissing` where it needs NVRTC and
    finds none, and `UsageError` for another release than the file's.
    """
    kept, found = known(folder), dict[str, Known]()
    if kept and nvrtc.release() != _content(folder)["nvrtc"]:
        raise UsageError(
            "NVRTC", nvrtc.release(), f"{_content(folder)['nvrtc']}, whose PTX the digests in {KERNELS} are of"
        )
    for name, row in CATALOGUE.items():
        if not row.kernels:
            continue
        before, tokens_now = kept.get(name), digest_of_tokens(row)
        if before and before.digest.tokens == tokens_now:
            found[name] = before
            continue
        cells = (before.grid if before else ()) or grid(row)
        now = Digest(tokens_now, digest_of_ptx(cells))
        if now.ptx is None:  # the grid is of other macros
            cells = grid(row)
            now = Digest(tokens_now, digest_of_ptx(cells))
        same = before is not None and now.same(before.digest)
        found[name] = Known(now, before.since if before and same else date, cells)
    _write(Path(folder) / KERNELS, found)
    return found


def _write(path: Path, found: Mapping[str, Known]) -> None:
    """One algorithm per line, so that a change of one shows as one."""
    lines = [
        f" {json.dumps(name)}: "
        + json.dumps({**asdict(x.digest), "since": x.since, "grid": [[b.source, b.arch, b.options] for b in x.grid]})
        for name, x in found.items()
    ]
    head = f'{{"schema": 1, "nvrtc": {json.dumps(nvrtc.release())},\n"algorithms": {{\n'
    replace_file(path, head + ",\n".join(lines) + "\n}}\n", argument="output")
