"""Reads what expressions of a Python file are, without running it: its constants, and what is made of them.

A name is what it is assigned. Of several assignments the last one before the use counts. What only a run would tell stands as its
name in a text that has a place for it, as `{n}` in an f-string: a macro may then say it.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import string
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

__all__ = ["Module", "Text", "Unknown"]

_DEPTH = 24
_MOST_CHARS = 1 << 22
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Div: lambda a, b: a / b,
}
_WIDE = re.compile(r"\d{5}")  # columns for a value: no source has so many
_PASSED = frozenset(("strip", "lstrip", "rstrip", "lower", "upper", "replace", "format", "encode", "decode"))


_TYPES = {
    "float16": "__half", "float32": "float", "float64": "double", "int8": "signed char", "int16": "short", "int32": "int",
    "int64": "long long", "uint8": "unsigned char", "uint16": "unsigned short", "uint32": "unsigned int",
    "uint64": "unsigned long long", "complex64": "complex<float>", "complex128": "complex<double>",
}  # fmt: skip


class Unknown(Exception):
    """Only a run would tell."""


class Text(str):
    """A text that begins on `line` of the file. `marks` say on which lines its parts begin: pairs of a position and a line."""

    marks: tuple[tuple[int, int], ...]

    def __new__(cls, value: str, line: int, marks: Sequence[tuple[int, int]] = ()) -> Text:
        self = super().__new__(cls, value)
        self.marks = tuple(marks) or ((0, line),)
        return self

    @property
    def line(self) -> int:
        return self.marks[0][1]

    def __add__(self, other: str) -> Text:
        marks = other.marks if isinstance(other, Text) else ()
        return Text(str(self) + other, self.line, [*self.marks, *((len(self) + at, line) for at, line in marks)])

    def numbered(self) -> str:
        """The text with lines that tell a preprocessor where its parts come from.

        >>> print((Text("a\\nb\\n", 3) + Text("c", 7)).numbered())
        #line 3
        a
        b
        #line 7
        c
        """
        marks = dict(reversed(self.marks))
        out, at, line = list[str](), 0, None
        for row in self.splitlines(keepends=True):
            now = max((mark for mark in marks if mark <= at), default=0)
            wanted = marks[now] + self.count("\n", now, at) if at == now or "\n" in self[now:at] else line
            if wanted != line and not (out and out[-1].endswith("\\\n")):  # not within a macro's definition
                out.append(f"#line {wanted}\n")
                line = wanted
            out.append(row)
            at, line = at + len(row), (line or 0) + 1
        return "".join(out)


class Module:
    """A Python file as its syntax tree. Raises `SyntaxError`, `OSError` or `ValueError` for a file that is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text(encoding="utf-8-sig"))
        self.scopes: dict[ast.AST, ast.AST] = {}  # of a node: the function or module that it stands in
        self.bound: dict[tuple[ast.AST, str], list[tuple[int, ast.AST]]] = {}  # by scope and name: line and value
        self.attributes: dict[str, list[ast.AST]] = {}
        self.read: set[ast.AST] = set()  # what was asked for, or is a part of that
        self.unknown: set[str] = set()  # names that stand for what only a run would tell
        self._others: dict[Path, Module | None] = {}
        self._enter(self.tree, self.tree)

    def _enter(self, node: ast.AST, scope: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            self.scopes[child] = scope
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.bound.setdefault((scope, child.name), []).append((child.lineno, child))
            if isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    self.bound.setdefault((scope, alias.asname or alias.name), []).append((child.lineno, child))
            for target, value in _assigned(child):
                if isinstance(target, ast.Name):
                    self.bound.setdefault((scope, target.id), []).append((target.lineno, value))
                elif isinstance(target, ast.Attribute):
                    self.attributes.setdefault(target.attr, []).append(value)
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            self._enter(child, child if inside else scope)

    def value(self, node: ast.AST, known: Mapping[str, Any] | None = None, depth: int = _DEPTH) -> Any:
        """What an expression is: a `Text`, a number, a list, a tuple, a dictionary, None. Raises `Unknown`."""
        if depth <= 0:
            raise Unknown
        self.read.add(node)
        found = self._value(node, known or {}, depth - 1)
        if isinstance(found, str) and len(found) > _MOST_CHARS:
            raise Unknown
        if isinstance(found, str) and not isinstance(found, Text):
            return Text(found, getattr(node, "lineno", 1))
        return found

    def _value(self, node: ast.AST, known: Mapping[str, Any], depth: int) -> Any:
        match node:
            case ast.Constant(value=str() as text):
                return Text(text, node.lineno)
            case ast.Constant(value=int() | float() | None as constant):
                return constant
            case ast.JoinedStr():
                return self._joined(node, known, depth)
            case ast.Name():
                return self._named(node, known, depth)
            case ast.List() | ast.Tuple():
                return [self.value(each, known, depth) for each in node.elts]
            case ast.Dict() if all(node.keys):
                keys = [self.value(cast(ast.AST, key), known, depth) for key in node.keys]
                return dict(zip(keys, (self.value(each, known, depth) for each in node.values), strict=True))
            case ast.BinOp(op=ast.Mod()):
                return self._percent(node, known, depth)
            case ast.BinOp() if type(node.op) in _OPERATORS:
                return self._operation(node, known, depth)
            case ast.IfExp():
                return self.value(node.body, known, depth)
            case ast.Subscript():
                whole, key = self.value(node.value, known, depth), self.value(node.slice, known, depth)
                return _tried(lambda: whole[key])
            case ast.ListComp() | ast.GeneratorExp() if len(node.generators) == 1 and isinstance(
                node.generators[0].target, ast.Name
            ):
                (loop,) = node.generators
                name, items = cast(ast.Name, loop.target).id, self.value(loop.iter, known, depth)
                if not isinstance(items, list | tuple):
                    raise Unknown
                return [self.value(node.elt, {**known, name: item}, depth) for item in cast("list[Any]", items)]
            case ast.Attribute(attr=name, value=ast.Name(id="np" | "numpy" | "cp" | "cupy")) if name in _TYPES:
                return name
            case ast.Attribute():
                values = self.attributes.get(node.attr, ()) or self._of_class(node)
                if len(values) == 1:
                    return self.value(values[0], {}, depth)
            case ast.Call():
                return self._call(node, known, depth)
            case _:
                pass
        raise Unknown

    def _of_class(self, node: ast.Attribute) -> list[ast.AST]:
        """What a class binds, as in `Kernels.CODE` or `self.CODE`."""
        found: list[ast.AST] = []
        for each in ast.walk(self.tree):
            if isinstance(each, ast.ClassDef):
                for statement in each.body:
                    found += [value for target, value in _assigned(statement)
                              if isinstance(target, ast.Name) and target.id == node.attr]  # fmt: skip
        return found

    def _operation(self, node: ast.BinOp, known: Mapping[str, Any], depth: int) -> Any:
        left, right = self.value(node.left, known, depth), self.value(node.right, known, depth)
        if isinstance(node.op, ast.Mult) and isinstance(left, str | list):
            n = len(cast("str | list[Any]", left))
            if not isinstance(right, int) or not 0 <= right * n < _MOST_CHARS:
                raise Unknown
        return _tried(lambda: _OPERATORS[type(node.op)](left, right))

    def _joined(self, node: ast.JoinedStr, known: Mapping[str, Any], depth: int) -> Text:
        parts: list[str] = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                parts.append(self._placed(part.value, part.format_spec, known, depth))
            else:
                parts.append(cast(Any, part).value)
        return Text("".join(parts), node.lineno)

    def _placed(self, node: ast.AST, spec: ast.AST | None, known: Mapping[str, Any], depth: int) -> str:
        """What stands in a place of a text: the value, or else a name for it."""
        try:
            value = self.value(node, known, depth)
            how = "" if spec is None else str(self.value(spec, known, depth))
            return _tried(lambda: "" if _WIDE.search(how) else format(value, how))
        except Unknown:
            return self._name_for(node)

    def _name_for(self, node: ast.AST) -> str:
        """A name that C takes for an expression that only a run would tell."""
        name = node.attr if isinstance(node, ast.Attribute) else re.sub(r"\W+", "_", ast.unparse(node)).strip("_")
        self.unknown.add(name)
        return name

    def _percent(self, node: ast.BinOp, known: Mapping[str, Any], depth: int) -> Any:
        left = self.value(node.left, known, depth)
        if not isinstance(left, Text):
            raise Unknown
        given: Any
        if isinstance(node.right, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.right.keys):
            pairs = zip(node.right.keys, node.right.values, strict=True)
            given = {cast(ast.Constant, key).value: self._filled(value, known, depth) for key, value in pairs}
        elif isinstance(node.right, ast.Tuple):
            given = tuple(self._filled(each, known, depth) for each in node.right.elts)
        else:
            given = self._filled(node.right, known, depth)
            given = cast("dict[str, Any]", given) if isinstance(given, dict) else (given,)
        if _WIDE.search(left):
            raise Unknown
        text = re.sub(r"%(\(\w+\))?[-+0-9.]*[dif]", lambda m: f"%{m[1] or ''}s", left)
        return Text(_tried(lambda: text % given), left.line)

    def _filled(self, node: ast.AST, known: Mapping[str, Any], depth: int) -> Any:
        try:
            return self.value(node, known, depth)
        except Unknown:
            return self._name_for(node)

    def _named(self, node: ast.Name, known: Mapping[str, Any], depth: int) -> Any:
        if node.id in known:
            return known[node.id]
        if node.id == "__file__":
            return str(self.path)
        scope = self.scopes.get(node, self.tree)
        while True:
            values = self.bound.get((scope, node.id), [])
            others = [
                (line, value) for line, value in values if not _holds(value, node)
            ]  # in `code = f(code)` an earlier one
            before = [value for line, value in others if line <= node.lineno]
            for value in reversed(before or [value for _, value in others]):
                if isinstance(value, ast.ImportFrom):
                    return self._imported(value, node.id, depth)
                if isinstance(value, ast.AugAssign):
                    return self._added(values, known, depth)
                return self.value(value, known, depth)
            if (default := _default(scope, node.id)) is not None:
                return self.value(default, known, depth)
            if scope is self.tree:
                raise Unknown
            scope = self.scopes.get(scope, self.tree)

    def _added(self, values: Sequence[tuple[int, ast.AST]], known: Mapping[str, Any], depth: int) -> Any:
        """`code = "…"`, `code += "…"`, in order."""
        whole: Any = None
        for _, value in values:
            if isinstance(value, ast.AugAssign):
                more = self.value(value.value, known, depth)
                whole = _tried(lambda whole=whole, more=more: whole + more)
            else:
                whole = self.value(value, known, depth)
        return whole

    def _imported(self, node: ast.ImportFrom, name: str, depth: int) -> Any:
        """What another file of the same package, or the same folder, assigns to a name."""
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        folder = self.path.parent
        for _ in range(max(0, node.level - 1)):
            folder = folder.parent
        parts = (node.module or "").split(".")
        folders = [folder] if node.level else [folder, *folder.parents[:4]]
        for place in folders:
            file = place.joinpath(*parts).with_suffix(".py")
            if (other := self._other(file)) and (values := other.bound.get((other.tree, original))):
                return other.value(values[-1][1], {}, depth)
        raise Unknown

    def _other(self, file: Path) -> Module | None:
        if file not in self._others:
            try:
                self._others[file] = Module(file) if file.is_file() and file != self.path else None
            except (OSError, SyntaxError, ValueError):
                self._others[file] = None
        return self._others[file]

    def _call(self, node: ast.Call, known: Mapping[str, Any], depth: int) -> Any:
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        if isinstance(called, ast.Attribute) and name in ("substitute", "safe_substitute"):
            return self._substituted(node, called.value, known, depth)
        if name in ("read", "read_text", "read_bytes") and isinstance(called, ast.Attribute):
            return self._file(self.value(called.value, known, depth))
        if name == "join" and isinstance(called, ast.Attribute) and ast.unparse(called.value).endswith("path"):
            return os.path.join(*(str(self.value(each, known, depth)) for each in node.args))
        if name in ("dirname", "abspath", "realpath") and node.args:
            path = str(self.value(node.args[0], known, depth))
            return os.path.dirname(path) if name == "dirname" else os.path.abspath(path)
        if name in ("open", "Path", "str", "int", "float", "tuple", "list", "dedent", "Template") and node.args:
            return self._made(name, self.value(node.args[0], known, depth))
        if isinstance(called, ast.Attribute) and (name in _PASSED or name == "join"):
            return self._method(node, called, known, depth)
        if name.endswith("get_typename") and node.args:  # CuPy's: what a dtype is in C
            return _tried(lambda: _TYPES[str(self.value(node.args[0], known, depth))])
        if isinstance(called, ast.Name):
            return self._function(node, called, known, depth)
        raise Unknown

    def _made(self, name: str, value: Any) -> Any:
        if name in ("open", "Path", "Template", "tuple", "list"):
            return value
        if name == "dedent":
            return Text(textwrap.dedent(value), value.line) if isinstance(value, Text) else value
        return _tried(lambda: {"str": str, "int": int, "float": float}[name](value))

    def _file(self, name: Any) -> Text:
        """What a file beside this one holds."""
        for place in (self.path.parent, Path.cwd()):
            try:
                return Text((place / str(name)).read_text(encoding="utf-8-sig"), 1)
            except (OSError, ValueError):
                continue
        raise Unknown

    def _substituted(self, node: ast.Call, template: ast.AST, known: Mapping[str, Any], depth: int) -> Text:
        text = self.value(template, known, depth)
        if not isinstance(text, Text):
            raise Unknown
        named = {each.arg: self._filled(each.value, known, depth) for each in node.keywords if each.arg}
        return Text(string.Template(text).safe_substitute(named), text.line)

    def _method(self, node: ast.Call, called: ast.Attribute, known: Mapping[str, Any], depth: int) -> Any:
        text = self.value(called.value, known, depth)
        if not isinstance(text, str):
            raise Unknown
        if called.attr in ("encode", "decode"):
            return text
        if called.attr == "format" and _WIDE.search(text):
            raise Unknown
        if called.attr == "join":
            parts = self.value(node.args[0], known, depth) if node.args else None
            if (
                not isinstance(parts, list)
                or not all(isinstance(part, str) for part in cast("list[Any]", parts))
                or not parts
            ):
                raise Unknown
            return functools.reduce(lambda a, b: a + text + b, cast("list[str]", parts))
        try:
            given = [self._filled(each, known, depth) for each in node.args]
            named = {each.arg: self._filled(each.value, known, depth) for each in node.keywords if each.arg}
            made = getattr(str(text), called.attr)(*(x if called.attr == "format" else str(x) for x in given), **named)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise Unknown from None
        # lines that were stripped from the start still count
        skipped = text[: len(text) - len(text.lstrip())].count("\n") if called.attr in ("strip", "lstrip") else 0
        return Text(made, getattr(text, "line", node.lineno) + skipped)

    def _function(self, node: ast.Call, called: ast.Name, known: Mapping[str, Any], depth: int) -> Any:
        """What a function of the file returns, if it returns a text."""
        for value in self.bound.get((self.tree, called.id), []):
            function = value[1]
            if not isinstance(function, ast.FunctionDef):
                continue
            names = [each.arg for each in function.args.args]
            given = dict(zip(names, (self._maybe(each, known, depth) for each in node.args), strict=False))
            given |= {each.arg: self._maybe(each.value, known, depth) for each in node.keywords if each.arg}
            said = {name: x for name, x in given.items() if x is not Unknown}
            returned = [each for each in ast.walk(function) if isinstance(each, ast.Return) and each.value]
            if returned:
                return self.value(cast(ast.AST, returned[-1].value), said, depth)
        raise Unknown

    def _maybe(self, node: ast.AST, known: Mapping[str, Any], depth: int) -> Any:
        try:
            return self.value(node, known, depth)
        except Unknown:
            return Unknown


def _assigned(node: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
    """The targets of a statement with what they get."""
    match node:
        case ast.Assign():
            pairs: list[tuple[ast.AST, ast.AST]] = []
            for target in node.targets:
                many = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                if many and len(cast(ast.Tuple, target).elts) == len(cast(ast.Tuple, node.value).elts):
                    pairs += zip(cast(ast.Tuple, target).elts, cast(ast.Tuple, node.value).elts, strict=True)
                else:
                    pairs.append((target, node.value))
            return pairs
        case ast.AnnAssign(value=ast.AST() as value) | ast.NamedExpr(value=value):
            return [(node.target, value)]  # type: ignore[attr-defined]
        case ast.AugAssign(op=ast.Add()):
            return [(node.target, node)]
        case ast.withitem(optional_vars=ast.AST() as target):
            return [(target, node.context_expr)]
        case _:
            return []


def _default(scope: ast.AST, name: str) -> ast.expr | None:
    """What a function's parameter is unless it is said. Raises `Unknown` for a parameter that is always said."""
    if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return None
    every = [*scope.args.posonlyargs, *scope.args.args]
    pairs = [*zip(reversed(every), reversed(scope.args.defaults), strict=False)]
    pairs += [
        (arg, default) for arg, default in zip(scope.args.kwonlyargs, scope.args.kw_defaults, strict=True) if default
    ]
    for arg, default in pairs:
        if arg.arg == name:
            return default
    if name in [arg.arg for arg in (*every, *scope.args.kwonlyargs)]:
        raise Unknown
    return None


def _holds(value: ast.AST, node: ast.Name) -> bool:
    """Does a name stand within a value that is an expression?"""
    if not isinstance(value, ast.expr):
        return False
    start, end = (value.lineno, value.col_offset), (value.end_lineno or 0, value.end_col_offset or 0)
    return start <= (node.lineno, node.col_offset) < end


def _tried(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise Unknown from None
