"""Inline PTX as C++: an asm statement becomes calls of functions that do on the emulator what its instructions do on a GPU.

`translated` reads the statement (its strings and operands), then the PTX in it. Each instruction is looked up in the table
(`ptx_table`), which says what it is in C++; the functions are those of kernels_cu/emulator/ptx.h. The instructions are
those of the PTX ISA (docs.nvidia.com/cuda/parallel-thread-execution), and what isn't in the table is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from flashlab.emulator.ptx_operands import (
    REGISTER_TYPES,
    Instruction,
    Operand,
    PtxError,
    Scope,
    operands_of,
)
from flashlab.emulator.ptx_table import cpp_of

__all__ = ["PtxError", "translated"]

_HEAD = re.compile(r"\b(?:asm|__asm__|__asm)\b\s*(?:(?:volatile|__volatile__|__volatile|inline|__inline__)\s*)*\(")
_MARK = re.compile(r"^[ \t]*#[^\n]*$", re.MULTILINE)  # the preprocessor's: which line comes next
_COMMENT = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|//[^\n]*|/\*.*?\*/", re.DOTALL)
_STRING = re.compile(r'\s*(?:R"(?P<mark>[^()\s\\]*)\((?P<raw>.*?)\)(?P=mark)"|"(?P<text>(?:\\.|[^"\\])*)")', re.DOTALL)
_PLAIN_STRING = re.compile(r'"(?:\\.|[^"\\])*"', re.DOTALL)
_CHARACTER = re.compile(r"(?<![0-9A-Za-z_])'(?:\\.|[^'\\])+'")
_ESCAPE = re.compile(r"\\(n|t|r|\n|.)", re.DOTALL)
_OPERAND = re.compile(r'\s*(?:\[\s*(\w+)\s*\]\s*)?"([^"]*)"\s*\((.*)\)\s*', re.DOTALL)
_CONSTRAINTS = {"h": "u16", "r": "u32", "l": "u64", "q": "b128", "f": "f32", "d": "f64"}
_LABEL = re.compile(r"\s*([A-Za-z_$%][\w$%=]*)\s*:(?!:)")
_DIRECTIVE = re.compile(r"\s*\.reg\s*\.(\w+)\s+([^;]*);")
_GUARD = re.compile(r"\s*@\s*(!?)\s*([%\w$]+)\s*")
_OPCODE = re.compile(r"\s*([a-z][a-z0-9_]*)")
_MODIFIER = re.compile(r"\s*\.\s*([A-Za-z0-9_]+(?:::[%A-Za-z0-9_]+)*)")


def translated(statement: str) -> str:
    """One C++ statement, on one line, of the effect that an asm statement has on a GPU.

    `statement` is the text of a whole one after preprocessing; without a semicolon at its end the result has none either.
    The C++ calls the functions of kernels_cu/emulator/ptx.h. Raises `PtxError`, whose message names the instruction, for
    what the emulator doesn't know.

    >>> translated('asm("" ::: "memory");')
    'do {} while (0);'
    >>> translated('asm("frobnicate.b32 %0, 1;" : "=r"(x));')
    Traceback (most recent call last):
    flashlab.emulator.ptx_operands.PtxError: inline PTX that the emulator doesn't know: frobnicate.b32
    """
    text = _MARK.sub(" ", statement.replace("\\\n", " \n"))
    text = _COMMENT.sub(lambda match: match[0] if match[0].startswith('"') else " ", text).strip()
    end = ";" if text.endswith(";") else ""
    template, outputs, inputs = _sections(text)
    block = _Parser(template).block()
    if not block.items:
        return "do {} while (0)" + end
    asm = _Operands(outputs, inputs)
    body = block.cpp(Scope(asm.named, asm.types))
    taken = {name for scope in block.instructions() for name in scope.by_reference}
    return re.sub(r"\s*\n\s*", " ", f"do {{ {asm.before(taken)}{body}{asm.after(taken)} }} while (0)") + end


# The statement


def _sections(text: str) -> tuple[str, list[str], list[str]]:
    """Of an asm statement: the PTX, its outputs and its inputs."""
    head = _HEAD.match(text)
    if not head:
        raise PtxError("expected an asm statement")
    parts = _split(text[head.end() : text.rindex(")")], ":")
    template, at = "", 0
    while match := _STRING.match(parts[0], at):
        template += match["raw"] if match["text"] is None else _ESCAPE.sub(_unescaped, match["text"])
        at = match.end()
    if parts[0][at:].strip():
        raise PtxError(f"the PTX of an asm statement is strings, not {parts[0][at:].strip()[:40]}")
    lists = [[x for x in _split(part, ",") if x.strip()] for part in parts[1:3]]
    return template, *(lists + [[], []])[:2]  # pyright: ignore[reportReturnType]


def _unescaped(match: re.Match[str]) -> str:
    return {"n": "\n", "t": "\t", "r": "\r", "\n": ""}.get(match[1], match[1])


def _split(text: str, separator: str) -> list[str]:
    """The parts of C++ text between separators that stand in no brackets and in no literal."""
    parts: list[str] = []
    depth = start = at = 0
    while at < len(text):
        if literal := _STRING.match(text, at) if text[at] == "R" else None:
            at = literal.end()
        elif literal := _PLAIN_STRING.match(text, at) or _CHARACTER.match(text, at):
            at = literal.end()
        else:
            depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[at], 0)
            if text[at] == separator and not depth:
                parts.append(text[start:at])
                start = at + 1
            at += 1
    return [*parts, text[start:]]


@dataclass(frozen=True)
class _Asm:
    """An operand of the statement: `%index`, its type, the C++ that it stands for."""

    index: int
    type: str
    expression: str
    output: bool
    read: bool
    from_operand: int | None = None


class _Operands:
    """The operands of a statement, and the C++ that takes values from them and puts results back."""

    def __init__(self, outputs: list[str], inputs: list[str]) -> None:
        self.named: dict[str, int] = {}
        self.list: list[_Asm] = []
        for index, text in enumerate([*outputs, *inputs]):
            match = _OPERAND.fullmatch(text)
            if not match:
                raise PtxError(f'an operand is "constraint"(expression), not {text.strip()[:40]}')
            name, constraint, expression = match.groups()
            if name:
                self.named[name] = index
            letter = constraint.strip("=+&% ")
            same = int(letter) if letter.isdigit() and int(letter) < index else None
            if same is not None:
                kind = self.list[same].type
            elif letter in ("n", "i"):
                kind = "immediate"
            elif letter in _CONSTRAINTS:
                kind = _CONSTRAINTS[letter]
            else:
                raise PtxError(f'a constraint is one of h r l q f d n, not "{constraint}"')
            output = index < len(outputs)
            self.list.append(_Asm(index, kind, expression.strip(), output, not output or "+" in constraint, same))
        self.types = [x.type for x in self.list]

    def before(self, taken: set[str]) -> str:
        cpp = ""
        for x in self.list:
            kind = f"emu_ptx::{x.type}"
            if x.output:
                cpp += f"auto&& emu_lvalue_{x.index} = ({x.expression}); "
            if f"emu_{x.index}" in taken:
                if not x.output:
                    cpp += f"auto&& emu_lvalue_{x.index} = emu_ptx::referred<{kind}>({x.expression}); "
            elif x.type == "immediate":
                cpp += f"const auto emu_{x.index} = ({x.expression}); "
            elif not x.output:
                cpp += f"const {kind} emu_{x.index} = emu_ptx::in<{kind}>({x.expression}); "
            else:
                tied = next((y for y in self.list if y.from_operand == x.index), None)
                value = x.expression if x.read else tied.expression if tied else None
                value = f"emu_lvalue_{x.index}" if x.read else value
                cpp += f"{kind} emu_{x.index} = " + (
                    f"emu_ptx::in<{kind}>({value}); " if value else f"emu_ptx::poison<{kind}>(); "
                )
        return cpp

    def after(self, taken: set[str]) -> str:
        outputs = (x.index for x in self.list if x.output and f"emu_{x.index}" not in taken)
        return "".join(f" emu_ptx::out(emu_lvalue_{i}, emu_{i});" for i in outputs)


# The PTX


@dataclass
class _Block:
    """Instructions, labels and blocks in braces, in order, and the registers that are declared among them."""

    items: list[Instruction | str | _Block] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    labels: list[str] = field(default_factory=list)

    def instructions(self) -> Iterator[Instruction]:
        for item in self.items:
            if isinstance(item, _Block):
                yield from item.instructions()
            elif isinstance(item, Instruction):
                yield item

    def cpp(self, scope: Scope) -> str:
        inner = scope.inside(self.registers, self.labels)
        lines = ["{"]
        if self.labels:
            lines.append(f"__label__ {', '.join(inner.label(name) for name in self.labels)};")
        lines += [f"emu_ptx::{kind} {inner.register(name)} = {{}};" for name, kind in self.registers.items()]
        for item in self.items:
            if isinstance(item, _Block):
                lines.append(item.cpp(inner))
            elif isinstance(item, str):
                lines.append(f"{inner.label(item)}: ;")
            else:
                lines.append(_guarded(item, inner))
        return " ".join([*lines, "}"])


def _guarded(instruction: Instruction, scope: Scope) -> str:
    done = cpp_of(instruction, scope)
    if not instruction.guard:
        return done
    negated, predicate = instruction.guard
    return f"if ({'!' if negated else ''}{scope.value(predicate)}) {{ {done} }}"


class _Parser:
    def __init__(self, template: str) -> None:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", template, flags=re.DOTALL)
        self.text = text.replace("%=", "")
        self.at = 0

    def block(self, inside: bool = False) -> _Block:
        """Reads up to the end, or to the brace that closes the block."""
        block = _Block()
        while True:
            self.at = re.compile(r"[\s;]*").match(self.text, self.at).end()  # pyright: ignore[reportOptionalMemberAccess]
            if self.at >= len(self.text):
                if inside:
                    raise PtxError("a { that nothing closes")
                return block
            if self.text[self.at] == "}":
                if not inside:
                    raise PtxError("a } that nothing opens")
                self.at += 1
                return block
            if self.text[self.at] == "{":
                self.at += 1
                block.items.append(self.block(inside=True))
            elif match := _DIRECTIVE.match(self.text, self.at):
                self._declare(block, match[1], match[2])
                self.at = match.end()
            elif match := _LABEL.match(self.text, self.at):
                block.labels.append(match[1])
                block.items.append(match[1])
                self.at = match.end()
            else:
                block.items.append(self._instruction())

    def _declare(self, block: _Block, kind: str, names: str) -> None:
        if kind not in REGISTER_TYPES:
            raise PtxError(f"inline PTX that the emulator doesn't know: .reg .{kind}")
        for name in names.split(","):
            several = re.fullmatch(r"\s*([%\w$]+)\s*<\s*(\d+)\s*>\s*", name)
            for each in [f"{several[1]}{i}" for i in range(int(several[2]))] if several else [name.strip()]:
                block.registers[each.lstrip("%")] = REGISTER_TYPES[kind]

    def _instruction(self) -> Instruction:
        guard = None
        if match := _GUARD.match(self.text, self.at):
            guard = bool(match[1]), Operand("name", match[2])
            self.at = match.end()
        match = _OPCODE.match(self.text, self.at)
        if not match:
            raise PtxError(
                f"inline PTX that the emulator doesn't know: {self.text[self.at :].split(';')[0].strip()[:60]}"
            )
        parts = [match[1]]
        self.at = match.end()
        while modifier := _MODIFIER.match(self.text, self.at):
            parts.append(modifier[1])
            self.at = modifier.end()
        depth, end = 0, self.at
        while end < len(self.text) and not (self.text[end] == ";" or (self.text[end] == "}" and not depth)):
            depth += {"{": 1, "}": -1}.get(self.text[end], 0)
            end += 1
        rest = self.text[self.at : end]
        self.at = end
        return Instruction(parts, operands_of(rest, ".".join(parts)), guard)
