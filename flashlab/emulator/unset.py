"""Local variables that a kernel reads before it sets them.

A register has no address, so no access to it is seen. But what a kernel leaves may not depend on a variable that nobody set:
the compiler fills such variables with a pattern, and where the pattern shows in what a launch leaves, or g++ warns, the launch
is repeated with zeros in place of the pattern. If other bits come out, that is proof. g++'s warnings then say which variable it
is; alone they prove nothing, for g++ doesn't know that two branches are always taken together.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from flashlab.emulator.library import Arena, Finding, Launched, Library, Line, Unset
from simulator.dtypes import Array

__all__ = ["PATTERN", "UNROLLED", "ZEROS", "unrolled", "unset_local", "warnings_of"]

PATTERN = "-ftrivial-auto-var-init=pattern"
ZEROS = "-ftrivial-auto-var-init=zero"
UNROLLED = (
    "-O3",
    "-fno-tree-vectorize",
    "--param=max-completely-peeled-insns=20000",
    "--param=max-completely-peel-times=64",
    "-fdisable-rtl-loop2_unroll",
)  # too late for warnings, and slow
"""Options by which loops over an array's elements vanish, and g++ sees each element as a variable."""

_HUGE = 1e37  # the pattern's bytes are 0xfe: -1.7e38 as a float32 or a bfloat16, a NaN as a float16
_WORDS = {4: -0x01010102, 8: -0x0101010101010102}  # the pattern as an integer
_NEAR = 1 << 20
_WARNED = re.compile(
    r"^(?P<file>.+?):(?P<line>\d+):\d+: warning: [‘'`](?P<name>.+?)['’] (?P<sure>is|may be) used uninitialized.*\n"
    r"(?:(?!.*(?:warning|error): ).*\n)*?(?P<at>.+?):(?P<declared>\d+):\d+: note: .*declared here",
    re.MULTILINE,
)
_FUNCTION = re.compile(r"(?:In function|inlined from) [‘'`](.+?)['’][,: ]")


def warnings_of(log: str) -> list[Unset]:
    """The variables that a compiler's log says are used before they are set, with the line of their declaration.

    >>> said = "k.cu: In function ‘void k(float*)’:\\nk.cu:3:7: warning: ‘s’ is used uninitialized [-Wuninitialized]\\n"
    >>> warnings_of(f"{said}k.cu:2:9: note: ‘s’ was declared here")
    [Unset(name='s', line=Line(file='k.cu', number=2), functions='void k(float*)', sure=True)]
    """
    found: list[Unset] = []
    end, functions = 0, ""
    for match in _WARNED.finditer(log):
        # g++ names a function once for all that it says of it
        functions = " / ".join(_FUNCTION.findall(log[end : match.start()])) or functions
        end = match.end()
        name = re.split(r"[.\[]", match["name"])[0]  # of an array or a struct one element is enough
        found.append(Unset(name, Line(match["at"], int(match["declared"])), functions, match["sure"] == "is"))
    return list(dict.fromkeys(found))


def unrolled(text: str) -> str:
    """A source in which g++ unrolls every loop of a known length up to 64.

    >>> unrolled("for (int i = 0; i < 4; ++i) {}")
    '_Pragma("GCC unroll 64") for (int i = 0; i < 4; ++i) {}'
    >>> unrolled("for (;;) {}")
    'for (;;) {}'
    """
    bare = re.sub(r"#[ \t]*pragma[ \t]+unroll\b[^\n]*", "", text)
    return re.sub(r"\bfor[ \t]*\((?=[^;]*;\s*[^;\s])", '_Pragma("GCC unroll 64") for (', bare)  # g++ wants a condition


def unset_local(
    library: Library, entry: str, left: Mapping[str, Array], arena: Arena,
    rebuilt: Callable[[Sequence[str], bool], Library],
    repeated: Callable[..., tuple[Launched, Arena]],
) -> tuple[Finding, ...]:  # fmt: skip
    """What a launch without findings owes to local variables that nobody set: one finding, or none.

    `left` are the arrays as the launch left them, which lie in `arena`. `rebuilt` builds the kernel with more options of the
    compiler, with its accesses watched or not (then g++ sees more). `repeated(library, watched=None)` runs the same launch on fresh
    arrays, in one order, and reports who stores to a `watched` byte of an array.
    """
    if library.unset is None:
        return ()
    warned = [x for x in library.unset if _is_in(x, entry)]
    if not warned and not any(_shows(x, arena.buffers[name].written) for name, x in left.items()):
        return ()
    with _quiet():
        _, one = repeated(library)
        done, other = repeated(rebuilt([ZEROS], True))
        place = _difference(left, one, other)
        if place is None or done.stopped:
            return ()
        stored = [x for x in repeated(library, watched=place)[0].findings if x.kind == "stored"]
    if not stored:
        return ()
    if not warned:
        with suppress(RuntimeError):  # of the compiler: the pragma may stand where g++ wants none
            warned = [x for x in rebuilt(UNROLLED, False).unset or () if _is_in(x, entry)]
    return (_finding(stored[-1], sorted(warned, key=lambda x: not x.sure)),)


def _finding(stored: Finding, warned: Sequence[Unset]) -> Finding:
    """The finding, at the line where g++ sees the variable, or else at the store that shows it."""
    store = stored.at or stored.line
    names = list(dict.fromkeys(x.name for x in warned))
    if not names:
        return replace(stored, kind="uninitialised", message="stores what depends on a local variable that nobody set")
    which = " or ".join(f"'{name}'" for name in names[:3])
    message = f"reads the local variable {which}, which nobody set: what it stores at {store} depends on it"
    line = warned[0].line
    return replace(stored, kind="uninitialised", message=message, at=line, line=line, via=())


def _is_in(x: Unset, entry: str) -> bool:
    """Is it in that kernel? g++ names templates by their parameters, so their arguments aren't compared."""
    name = re.split(r"[<(]", entry)[0].split("::")[-1].strip()
    return bool(re.search(rf"\b{re.escape(name)}\b", x.functions))


def _shows(array: Array, written: np.ndarray[Any, Any]) -> bool:
    """Do an array's written elements look like the pattern, or like something computed from it?"""
    known = (written.reshape(-1, array.itemsize) == 1).all(1)
    values: Any = array.reshape(-1)[known]
    if array.dtype.kind in "iu" and array.itemsize in _WORDS:
        signed = values.view(f"i{array.itemsize}")
        return bool((abs(signed - _WORDS[array.itemsize]) < _NEAR).any())
    if array.dtype.kind in "iub" or array.dtype.names is not None:
        return False
    with np.errstate(all="ignore"):
        wide = values.astype(np.float64)
    return bool((~(abs(wide) < _HUGE) & ~np.isinf(wide)).any())


def _difference(left: Mapping[str, Array], one: Arena, other: Arena) -> tuple[str, int] | None:
    """The first byte of an element in which two launches differ. Bytes and structs may have gaps, which mean nothing."""
    for name, array in left.items():
        if array.itemsize == 1 or array.dtype.names is not None or one.buffers[name].read_only:
            continue
        a, b = (x.buffers[name] for x in (one, other))
        differs = np.flatnonzero(a.data != b.data)
        if len(differs):
            return name, int(differs[0])
    return None


@contextmanager
def _quiet() -> Generator[None]:
    """A kernel that prints has printed once already."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
