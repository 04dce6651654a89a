"""Operands of PTX instructions, what they are in C++, and the instruction as the table sees it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

__all__ = ["REGISTER_TYPES", "Instruction", "Operand", "PtxError", "Scope", "operands_of"]

REGISTER_TYPES = {
    "pred": "pred", "f32": "f32", "f64": "f64", "f16": "u16", "bf16": "u16", "f16x2": "u32", "bf16x2": "u32", "b128": "b128",
    **{f"{letter}{bits}": f"u{bits}" for letter in "bsu" for bits in (8, 16, 32, 64)},
}  # fmt: skip
"""What registers of a type hold in C++: bits, apart from predicates and the wider floats."""

_LANE = "emu_ptx::lane()"
_SPECIAL = {
    **{f"tid.{i}": f"emu_thread_index().{i}" for i in "xyz"},
    **{f"ntid.{i}": f"emu_block_dim().{i}" for i in "xyz"},
    **{f"ctaid.{i}": f"emu_block_index().{i}" for i in "xyz"},
    **{f"nctaid.{i}": f"emu_grid_dim().{i}" for i in "xyz"},
    # clusters of one block
    **{f"clusterid.{i}": f"emu_block_index().{i}" for i in "xyz"},
    **{f"nclusterid.{i}": f"emu_grid_dim().{i}" for i in "xyz"},
    **{f"cluster_ctaid.{i}": "0u" for i in "xyz"},
    **{f"cluster_nctaid.{i}": "1u" for i in "xyz"},
    "cluster_ctarank": "0u",
    "cluster_nctarank": "1u",
    "is_explicit_cluster": "false",
    "laneid": _LANE,
    "warpid": "emu_ptx::warp()",
    "nwarpid": "emu_ptx::warps()",
    "smid": "0u",
    "nsmid": "1u",
    "gridid": "0ull",
    "clock": "static_cast<unsigned>(emu_ptx_nanoseconds())",
    "clock_hi": "static_cast<unsigned>(emu_ptx_nanoseconds() >> 32)",
    "clock64": "emu_ptx_nanoseconds()",
    "globaltimer": "emu_ptx_nanoseconds()",
    "globaltimer_lo": "static_cast<unsigned>(emu_ptx_nanoseconds())",
    "globaltimer_hi": "static_cast<unsigned>(emu_ptx_nanoseconds() >> 32)",
    "lanemask_eq": f"(1u << {_LANE})",
    "lanemask_lt": f"((1u << {_LANE}) - 1u)",
    "lanemask_le": f"((2u << {_LANE}) - 1u)",
    "lanemask_gt": f"~((2u << {_LANE}) - 1u)",
    "lanemask_ge": f"~((1u << {_LANE}) - 1u)",
}


class PtxError(ValueError):
    """Inline PTX that the emulator doesn't know; the message names the instruction."""


@dataclass(frozen=True)
class Operand:
    """An operand of an instruction.

    `kind` is name (a register, `%3` or a special register), number, vector, address, pair (`p|q`), not (`!p`) or sink
    (`_`). `text` is the name or number, of an address its offset; `parts` are the elements.
    """

    kind: str
    text: str = ""
    parts: tuple[Operand, ...] = ()


def operands_of(text: str, opcode: str) -> list[Operand]:
    """The operands of an instruction, from the text behind its opcode."""
    return [_operand(part, opcode) for part in _commas(text) if part.strip()]


def _commas(text: str) -> list[str]:
    parts: list[str] = []
    depth = start = 0
    for at, letter in enumerate(text):
        depth += {"{": 1, "[": 1, "(": 1, "}": -1, "]": -1, ")": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]


_NUMBER = (
    r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|\d+\.\d*(?:[eE][-+]?\d+)?|\d+(?:[eE][-+]?\d+)?U?"
)
_NAME = r"%\[\w+\]|%?%?[A-Za-z_$][\w$]*(?:\.[xyzw])?|%\d+"


def _operand(text: str, opcode: str) -> Operand:
    text = text.strip()
    if text == "_":
        return Operand("sink")
    if text.startswith("{") and text.endswith("}"):
        return Operand("vector", parts=tuple(operands_of(text[1:-1], opcode)))
    if text.startswith("[") and text.endswith("]"):
        first, *others = _commas(text[1:-1])
        base = re.fullmatch(rf"\s*({_NAME}|{_NUMBER})\s*(?:([-+])\s*({_NAME}|-?(?:{_NUMBER})))?\s*", first)
        if not base:
            raise PtxError(f"inline PTX that the emulator doesn't know: {opcode} with the address {text}")
        sign = Operand("number", "-1" if base[2] == "-" else "1")
        offset = (_operand(base[3], opcode), sign) if base[3] else ()
        rest = tuple(_operand(x, opcode) for x in others)
        return Operand("address", parts=(Operand("vector", parts=(_operand(base[1], opcode), *offset)), *rest))
    if "|" in text:
        return Operand("pair", parts=tuple(_operand(x, opcode) for x in text.split("|")))
    if text.startswith("!"):
        return Operand("not", parts=(_operand(text[1:], opcode),))
    if re.fullmatch(rf"[-+]?(?:{_NUMBER})", text):
        return Operand("number", text)
    if re.fullmatch(_NAME, text):
        return Operand("name", text)
    raise PtxError(f"inline PTX that the emulator doesn't know: {opcode} with the operand {text[:40]}")


class Scope:
    """What names mean in a block of PTX: operands of the statement, registers, labels."""

    def __init__(self, named: Mapping[str, int], operands: Sequence[str]) -> None:
        self._named, self._operands = named, operands
        self._registers: dict[str, str] = {}
        self._labels: dict[str, str] = {}
        self._depth = 0

    def inside(self, registers: Collection[str], labels: Collection[str]) -> Scope:
        """The scope of a block in braces."""
        scope = Scope(self._named, self._operands)
        depth = scope._depth = self._depth + 1
        scope._registers = self._registers | {x: f"emu_{depth}_{re.sub(r'[^0-9A-Za-z_]', '_', x)}" for x in registers}
        scope._labels = self._labels | {x: f"emu_{depth}_{re.sub(r'[^0-9A-Za-z_]', '_', x)}" for x in labels}
        return scope

    def label(self, name: str) -> str:
        if name not in self._labels:
            raise PtxError(f"inline PTX that the emulator doesn't know: bra to {name}, which isn't a label in reach")
        return self._labels[name]

    def register(self, name: str) -> str:
        return self._registers[name]

    def value(self, operand: Operand) -> str:
        """An operand as a C++ expression; of a register, one that can be assigned to."""
        if operand.kind == "not":
            return f"!{self.value(operand.parts[0])}"
        if operand.kind == "number":
            return _number(operand.text)
        if operand.kind == "sink":
            return "emu_ptx::sink()"
        if operand.kind != "name":
            raise PtxError(f"an operand can't be a {operand.kind} there")
        if (index := self.index(operand)) is not None:
            return f"emu_{index}"
        name = operand.text.lstrip("%")
        if name in self._registers:
            return self._registers[name]
        if name in _SPECIAL:
            return _SPECIAL[name]
        if name == "WARP_SZ":
            return "32"
        raise PtxError(f"inline PTX that the emulator doesn't know: the register {operand.text}")

    def address(self, operand: Operand) -> str:
        """The C++ of an address, a number of 32 or 64 bits."""
        if operand.kind != "address":
            raise PtxError("an operand of inline PTX that isn't an [address]")
        base, *offset = operand.parts[0].parts
        cpp = f"emu_ptx::address({self.value(base)})"
        if offset:
            cpp = f"({cpp} {'-' if offset[1].text == '-1' else '+'} emu_ptx::address({self.value(offset[0])}))"
        return cpp

    def values(self, operand: Operand) -> list[str]:
        """The elements of a vector, or the operand itself."""
        return [self.value(x) for x in operand.parts] if operand.kind == "vector" else [self.value(operand)]

    def index(self, operand: Operand) -> int | None:
        """Which operand of the statement it is, if it is one."""
        if match := re.fullmatch(r"%(\d+)", operand.text):
            if int(match[1]) >= len(self._operands):
                raise PtxError(f"{operand.text} of a statement with {len(self._operands)} operands")
            return int(match[1])
        if match := re.fullmatch(r"%\[(\w+)\]", operand.text):
            if match[1] not in self._named:
                raise PtxError(f"{operand.text} of a statement without such an operand")
            return self._named[match[1]]
        return None


def _number(text: str) -> str:
    if match := re.fullmatch(r"([-+]?)0[fF]([0-9a-fA-F]{8})", text):
        return f"{match[1]}emulator::float_of_bits(0x{match[2]}u)"
    if match := re.fullmatch(r"([-+]?)0[dD]([0-9a-fA-F]{16})", text):
        return f"{match[1]}emu_ptx::as<double>(0x{match[2]}ull)"
    if re.search(r"[.eE]", text) and not re.search(r"0[xX]", text):
        return text if "." in text else f"{text}.0"
    digits = text.rstrip("U").lstrip("-+")
    value = int(digits, 8 if re.fullmatch(r"0[0-7]+", digits) else 0)
    return f"{'-' if text.startswith('-') else ''}{value}{'ull' if value >= 1 << 63 else 'll'}"


@dataclass
class Instruction:
    """An instruction: its opcode's parts between the dots, its operands, its guard (negated?, predicate).

    The table takes the parts one after the other; what it leaves is unknown to it. `by_reference` are the operands of
    the statement that go to the emulator as registers, not by value.
    """

    parts: list[str]
    operands: list[Operand]
    guard: tuple[bool, Operand] | None = None
    by_reference: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.left = list(self.parts[1:])

    @property
    def name(self) -> str:
        return ".".join(self.parts)

    def refuse(self, why: str = "") -> NoReturn:
        raise PtxError(f"inline PTX that the emulator doesn't know: {self.name}{f' ({why})' if why else ''}")

    def take(self, *modifiers: str) -> str | None:
        """The first modifier left that is one of these, taken; None if there is none."""
        for part in self.left:
            if part in modifiers:
                self.left.remove(part)
                return part
        return None

    def drop(self, *patterns: str) -> None:
        """Takes the modifiers that match and mean nothing to the emulator."""
        self.left = [x for x in self.left if not any(re.fullmatch(pattern, x) for pattern in patterns)]

    def types(self, count: int, known: Collection[str]) -> list[str]:
        """Takes the last `count` modifiers, which are types."""
        types = self.left[len(self.left) - count :]
        if len(types) < count or any(x not in known for x in types):
            self.refuse()
        del self.left[len(self.left) - count :]
        return types

    def done(self, *counts: int) -> None:
        """All modifiers have been taken, and there are so many operands."""
        if self.left:
            self.refuse(f".{self.left[0]}")
        if counts and len(self.operands) not in counts:
            self.refuse(f"with {len(self.operands)} operands")
