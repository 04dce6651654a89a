"""Finds the CUDA sources in the strings of a Python file, by reading it: nothing of it is run.

A source is what `cupy.RawKernel`, `cupy.RawModule`, `load_inline` of torch, `cuda.core.Program` or PyCUDA's `SourceModule` is
given, and any other string that holds a kernel.
"""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from flashlab.base.files import path_of
from flashlab.emulator.folding import Module, Text, Unknown
from simulator.errors import UsageError

__all__ = ["DOORS", "Embedded", "Located", "Own", "embedded", "found_in", "located", "names_a_kernel"]

_KERNEL = re.compile(r"__global__\s+(?:[\w:]+\s+|__\w+__\s*\([^()]*(?:\([^()]*\))?[^()]*\)\s*)*((?!__)\w+)\s*\(")
_LONG_STRING = re.compile(
    r"(?:(\w+)\s*=\s*)?(?:[A-Za-z_.]+\(\s*)?[rRuUbB]*(?P<quotes>\"{3}|'{3})(.*?)(?P=quotes)", re.DOTALL
)
DOORS = {
    "RawKernel": "code",
    "RawModule": "code",
    "load_inline": "cuda_sources",
    "Program": "code",
    "SourceModule": "source",
}
_OPTIONS = ("options", "extra_cuda_cflags", "extra_nvcc_flags", "nvcc_options")
_BEFORE = {
    "load_inline": "#include <torch/types.h>\n",
    **dict.fromkeys(("RawKernel", "RawModule", "Program"), "#undef M_PI\n"),
}
"""What a door puts before a source: headers, or less than the host's own, as NVRTC has it."""


@dataclass(frozen=True)
class Embedded:
    """A CUDA source in a Python file.

    `names` are those by which the file knows it: what it is bound to, and its kernels. `kernels` are those that the file asks for,
    `options` what it gives the compiler. `before` stands ahead of the text.
    """

    names: tuple[str, ...]
    text: Text
    kernels: tuple[str, ...] = ()
    options: tuple[str, ...] = field(default=())
    before: str = ""
    unknown: frozenset[str] = frozenset()
    """Names in the text that stand for what only a run would tell."""

    @property
    def source(self) -> str:
        """The text with the numbers of its lines in the Python file."""
        return self.before + self.text.numbered()

    @property
    def defined(self) -> tuple[str, ...]:
        """The kernels that the text defines."""
        return tuple(dict.fromkeys(_KERNEL.findall(self.text)))


@functools.lru_cache(maxsize=64)
def _embedded(path: Path, stamp: tuple[int, int]) -> tuple[Embedded, ...]:
    del stamp
    try:
        module = Module(path)
    except SyntaxError:  # of Python 2, say
        every = _long_strings(path.read_text(encoding="utf-8-sig"))
    except (OSError, RecursionError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError("file", str(path), f"a Python file that can be read ({reason})") from None
    else:
        every = [replace(each, unknown=frozenset(module.unknown)) for each in (*_given(module), *_left(module))]
    found: dict[str, Embedded] = {}
    for each in every:
        if not each.defined or any(each.text in other for other in found if other != each.text):
            continue  # a part of another
        old = found.get(each.text)
        found[each.text] = each if old is None else _joined(old, each)
    return tuple(found.values())


def embedded(path: Path) -> tuple[Embedded, ...]:
    """The CUDA sources in a Python file, in their order. Raises `UsageError` for a file that can't be read."""
    try:
        state = path.stat()
    except OSError as error:
        raise UsageError("file", str(path), f"a Python file that can be read ({error.strerror})") from None
    return _embedded(path.resolve(), (state.st_mtime_ns, state.st_size))


def _long_strings(text: str) -> Iterator[Embedded]:
    """The strings between three quotes, in a file that can't be parsed."""
    for match in _LONG_STRING.finditer(text):
        if "__global__" in match[3] and "{" in match[3]:
            filled = re.sub(r"%\((\w+)\)[sdif]", r"\1", match[3])
            found = Text(filled, text.count("\n", 0, match.start(3)) + 1)
            yield _made(found, [match[1]] if match[1] else [])


def _joined(one: Embedded, other: Embedded) -> Embedded:
    """The same text, given twice."""
    pairs = {
        name: tuple(dict.fromkeys((*getattr(one, name), *getattr(other, name))))
        for name in ("names", "kernels", "options")
    }
    return replace(one, **pairs, before=one.before or other.before)


def _given(module: Module) -> Iterator[Embedded]:
    """What is given to one of the doors."""
    bound = {value: target for node in ast.walk(module.tree) for target, value in _targets(node)}
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        door = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        wanted = DOORS.get(door)
        if wanted is None:
            continue
        keywords = {each.arg: each.value for each in node.keywords if each.arg}
        place = 2 if door == "load_inline" else 0
        code = keywords.get(wanted) or (node.args[place] if len(node.args) > place else None)
        if code is None:
            continue
        try:
            value = module.value(code)
        except Unknown:
            continue
        texts = [
            each
            for each in (cast("list[Any]", value) if isinstance(value, list) else [value])
            if isinstance(each, Text)
        ]
        if not texts:
            continue
        kernels = _asked(module, door, node, keywords)
        options = [str(each) for name in _OPTIONS if name in keywords for each in _list(module, keywords[name])]
        names = [bound[node]] if node in bound else []
        whole = functools.reduce(lambda a, b: a + "\n" + b, texts)
        if isinstance(code, ast.Name | ast.Attribute):
            names.append(code.id if isinstance(code, ast.Name) else code.attr)
        yield _made(whole, names, kernels, options, _BEFORE.get(door, ""))


def _asked(module: Module, door: str, node: ast.Call, keywords: dict[str, ast.expr]) -> list[str]:
    """The kernels that a call names."""
    named = keywords.get("name") or (node.args[1] if len(node.args) > 1 else None)
    if door == "RawKernel" and named is not None:
        return [str(each) for each in _list(module, named)]
    if door == "RawModule" and "name_expressions" in keywords:
        return [str(each) for each in _list(module, keywords["name_expressions"])]
    return []


def _list(module: Module, node: ast.AST) -> list[Any]:
    """A list's elements, as far as they are known; of anything else, itself."""
    nodes = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    found: list[Any] = []
    for each in nodes:
        try:
            value = module.value(each)
        except Unknown:
            continue
        found += cast("list[Any]", value) if isinstance(value, list) else [value]
    return [each for each in found if isinstance(each, str)]


def _left(module: Module) -> Iterator[Embedded]:
    """The strings with a kernel in them, whoever may use them."""
    bound = {value: target for node in ast.walk(module.tree) for target, value in _targets(node)}
    inside: set[ast.AST] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Expr):  # a docstring
            inside.add(node.value)
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and node not in inside | module.read:
            inside.update(ast.walk(node))
            try:
                value = module.value(node)
            except Unknown:
                continue
            if isinstance(value, Text) and "__global__" in value and "{" in value:
                yield _made(value, [bound[node]] if node in bound else [])


def _made(
    text: Text, names: Sequence[str], kernels: Sequence[str] = (), options: Sequence[str] = (), before: str = ""
) -> Embedded:
    found = Embedded((), text)
    return Embedded(tuple(dict.fromkeys((*names, *found.defined))), text, tuple(kernels), tuple(options), before)


def _targets(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The names that a statement binds, with their values."""
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name | ast.Attribute):
                yield target.id if isinstance(target, ast.Name) else target.attr, node.value


def found_in(path: Path, name: str | None) -> tuple[Embedded, str | None]:
    """The source of a Python file that `name` means, and the kernel of it, if it means one.

    `name` is that of a kernel, also as an instance of a template, or what the file binds the source to. Without one the file must
    have one source. Raises `UsageError`.
    """
    sources = embedded(path)
    if not sources:
        raise UsageError(
            "file", str(path), "a Python file with a CUDA source: no string in it has a __global__ function"
        )
    if name is None:
        if len(sources) > 1:
            told = ", ".join(dict.fromkeys((each.kernels or each.defined)[0] for each in sources))
            raise UsageError(
                "file",
                str(path),
                f"the name of one of its {len(sources)} CUDA sources behind it, as {path.name}:NAME: {told}",
            )
        source = next(iter(sources))
        return source, _only(source)
    bare = name.partition("<")[0].strip().rpartition("::")[2]
    of_kernel = [each for each in sources if bare in each.defined]
    if of_kernel:  # the last definition counts, as in Python
        return of_kernel[-1], name
    of_name = [each for each in sources if name in each.names]
    if of_name:
        return of_name[-1], _only(of_name[-1])
    told = ", ".join(dict.fromkeys(each for one in sources for each in one.defined))
    raise UsageError("kernel", name, f"one of the kernels in {path.name}: {told}")


def _only(source: Embedded) -> str | None:
    """The one kernel that a file asks for."""
    return source.kernels[0] if len(set(source.kernels)) == 1 else None


def names_a_kernel(path: Path, name: str) -> bool:
    """Does `name` mean a kernel in a string of a Python file, and no function or class of the file?"""
    try:
        text = path.read_text(encoding="utf-8-sig")
        defines = re.search(rf"^(?:async )?(?:def|class) {re.escape(name)}\b", text, re.MULTILINE)
        return not defines and bool(found_in(path, name))
    except (OSError, ValueError, UsageError):
        return False


@dataclass(frozen=True)
class Own:
    """What a Python file gives the compiler for a source in it."""

    macros: tuple[str, ...] = ()
    includes: tuple[Path, ...] = ()
    std: str = ""

    @classmethod
    def of(cls, options: Sequence[str], path: Path) -> Own:
        """Of a compiler's options those that the emulator knows."""
        words = " ".join(options).replace("-I ", "-I").replace("-D ", "-D").split()
        macros = [word for word in words if re.match(r"-D\w", word)]
        folders = [path.parent / word[2:] for word in words if word.startswith("-I")]
        std = next((word for word in words if re.match(r"--?std=c\+\+(2\d)$", word)), "")
        return cls(tuple(macros), tuple(folder for folder in folders if folder.is_dir()), "c++20" if std else "")


@dataclass(frozen=True)
class Located:
    """A source: its file, the kernel that is meant, and, if it isn't the whole file, its text and the options that come with it."""

    path: Path
    kernel: str | None
    text: str | None = None
    own: Own = Own()
    unknown: frozenset[str] = frozenset()


def located(path: Path | str, kernel: str | None) -> Located:
    """The source of a `.cu` file, or of `FILE.py` or `FILE.py:name`. Raises `UsageError`."""
    file, _, name = os.fspath(path).rpartition(":")
    if not file.endswith(".py"):
        file, name = os.fspath(path), ""
    if not file.endswith(".py"):
        return Located(path_of("file", path), kernel)
    place = path_of("file", file)
    source, asked = found_in(place, name or kernel)
    return Located(place, kernel or asked, source.source, Own.of(source.options, place), source.unknown)
