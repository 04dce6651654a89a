"""PTX of one thread: arithmetic, comparisons, logic, conversions, moves, branches."""

from __future__ import annotations

from collections.abc import Callable

from flashlab.emulator.ptx_operands import Instruction, Scope

__all__ = ["TABLE", "assign"]

_INTEGERS = tuple(f"{letter}{bits}" for letter in "us" for bits in (8, 16, 32, 64))
_BITS = ("b8", "b16", "b32", "b64", "b128", "pred")
_FLOATS = ("f16", "bf16", "f16x2", "bf16x2", "f32", "f32x2", "f64")
_SMALL_INTEGERS = ("u16x2", "s16x2")
_TYPES = (*_INTEGERS, *_BITS, *_FLOATS, *_SMALL_INTEGERS)
_EIGHTS = ("e4m3x2", "e5m2x2", "e2m1x2", "ue8m0x2", "e2m3x2", "e3m2x2")
_ROUNDINGS = ("rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi")
_FLAGS = ("ftz", "sat", "satfinite", "relu", "NaN", "abs", "xorsign")

# arithmetic whose functions in C++ have the same name, by how many operands they read
_OPERATIONS = {
    "add": 2, "sub": 2, "mul": 2, "div": 2, "rem": 2, "min": 2, "max": 2, "abs": 1, "neg": 1, "fma": 3, "mad": 3, "sad": 3,
    "and": 2, "or": 2, "xor": 2, "not": 1, "cnot": 1, "shl": 2, "shr": 2, "brev": 1, "popc": 1, "clz": 1, "copysign": 2,
    "rcp": 1, "sqrt": 1, "rsqrt": 1, "sin": 1, "cos": 1, "ex2": 1, "lg2": 1, "tanh": 1,
}  # fmt: skip
_NAMES = {"and": "and_", "or": "or_", "xor": "xor_", "not": "not_", "div": "divide", "abs": "absolute"}
_COMPARISONS = (
    "eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan",
)  # fmt: skip


def assign(scope: Scope, instruction: Instruction, value: str, to: int = 0) -> str:
    """`value` goes to an operand of the instruction."""
    operand = instruction.operands[to]
    if operand.kind == "sink":
        return f"static_cast<void>({value});"
    return f"emu_ptx::set({scope.value(operand)}, {value});"


def _mode(instruction: Instruction) -> str:
    modes = [f"emu_ptx::{name}" for name in iter(lambda: instruction.take(*_ROUNDINGS, *_FLAGS), None)]
    return " | ".join(modes) or "0"


def _call(name: str, kind: str, mode: str, values: list[str]) -> str:
    return f"emu_ptx::{name}<emu_ptx::{kind}, {mode}>({', '.join(values)})"


def _operation(instruction: Instruction, scope: Scope) -> str:
    base = instruction.parts[0]
    if instruction.take("cc"):
        instruction.refuse("carries")
    values = [scope.value(x) for x in instruction.operands[1:]]
    half = instruction.take("lo", "hi", "wide")
    (kind,) = instruction.types(1, _TYPES)
    instruction.drop("approx", "full")
    mode = _mode(instruction)
    if instruction.left == ["f32"] and kind in (
        "f16",
        "bf16",
    ):  # add.rn.f32.bf16 d, a, c: a is of 16 bits, all else of 32
        instruction.left.clear()
        values[: 2 if base == "fma" else 1] = [
            f"emu_ptx::as<emu_ptx::{kind}>({x})" for x in values[: 2 if base == "fma" else 1]
        ]
        values = [f"static_cast<float>({x})" if x.startswith("emu_ptx::as") else x for x in values]
        kind = "f32"
    instruction.done(1 + _OPERATIONS[base], 2 + _OPERATIONS[base] if base in ("min", "max") else 1 + _OPERATIONS[base])
    if base in ("min", "max") and len(values) == 3:
        inner = _call(base, kind, mode, values[:2])
        return assign(scope, instruction, _call(base, kind, mode, [inner, values[2]]))
    name = _NAMES.get(base, base) if half in (None, "lo") else f"{base}_{half}"
    return assign(scope, instruction, _call("fma" if name == "mad" and "f" in kind else name, kind, mode, values))


def _set(instruction: Instruction, scope: Scope) -> str:
    """setp and set: comparisons."""
    compare = instruction.take(*_COMPARISONS)
    combine = instruction.take("and", "or", "xor")
    is_set = instruction.parts[0] == "set"
    kinds = instruction.types(2 if is_set else 1, _TYPES)
    mode = _mode(instruction)
    instruction.done()
    if not compare:
        instruction.refuse("without a comparison")
    a, b, *rest = [scope.value(x) for x in instruction.operands[1:]]
    other = f", {rest[0]}" if combine else ""
    how = f", emu_ptx::With::{combine}_" if combine else ""
    result = f"emu_ptx::compare<emu_ptx::{kinds[-1]}, emu_ptx::Comparison::{compare}, {mode}{how}>({a}, {b}{other})"
    if is_set:
        return assign(scope, instruction, f"emu_ptx::truth<emu_ptx::{kinds[0]}>({result})")
    first = instruction.operands[0]
    both = list(first.parts) if first.kind == "pair" else [first]
    targets = [scope.value(x) for x in both]
    if kinds[-1] in ("f16x2", "bf16x2"):
        lines = [f"{x} = emu_both{part};" for x, part in zip(targets, (".x", ".y"), strict=False)]
    else:
        lines = [f"{x} = {no}emu_both;" for x, no in zip(targets, ("", "!"), strict=False)]
    return f"{{ const auto emu_both = {result}; {' '.join(lines)} }}"


def _selp(instruction: Instruction, scope: Scope) -> str:
    (kind,) = instruction.types(1, _TYPES)
    instruction.done(4)
    a, b, p = (scope.value(x) for x in instruction.operands[1:])
    value = f"({p} ? emu_ptx::as<emu_ptx::{kind}>({a}) : emu_ptx::as<emu_ptx::{kind}>({b}))"
    return assign(scope, instruction, value)


def _slct(instruction: Instruction, scope: Scope) -> str:
    instruction.drop("ftz")
    kind, sign = instruction.types(2, _TYPES)
    instruction.done(4)
    a, b, c = (scope.value(x) for x in instruction.operands[1:])
    value = f"(emu_ptx::as<emu_ptx::{sign}>({c}) >= 0 ? emu_ptx::as<emu_ptx::{kind}>({a}) : emu_ptx::as<emu_ptx::{kind}>({b}))"
    return assign(scope, instruction, value)


def _mov(instruction: Instruction, scope: Scope) -> str:
    (kind,) = instruction.types(1, _TYPES)
    several = instruction.take("v2", "v4")
    instruction.done(2)
    to, source = instruction.operands
    if several:
        pairs = zip(scope.values(to), scope.values(source), strict=True)
        return " ".join(f"emu_ptx::set({x}, emu_ptx::as<emu_ptx::{kind}>({y}));" for x, y in pairs)
    if to.kind == "vector":
        return f"emu_ptx::unpack<emu_ptx::{kind}>({scope.value(source)}, {', '.join(scope.values(to))});"
    if source.kind == "vector":
        return assign(scope, instruction, f"emu_ptx::pack<emu_ptx::{kind}>({', '.join(scope.values(source))})")
    return assign(scope, instruction, f"emu_ptx::as<emu_ptx::{kind}>({scope.value(source)})")


def _cvt(instruction: Instruction, scope: Scope) -> str:
    if instruction.take("pack"):
        instruction.drop("sat")
        small, kind, carried = (*instruction.types(len(instruction.left), _TYPES), "")[:3]
        if kind != "s32" or carried not in ("b32", "") or small not in ("s8", "u8", "s16", "u16", "u4", "s4"):
            instruction.refuse()
        return assign(scope, instruction, f"emu_ptx::cvt_pack<emu_ptx::{small}>({_values(instruction, scope)})")
    known = (*_TYPES, *_EIGHTS, "tf32")
    to, source = instruction.types(2, known) if instruction.left[-1] in known else _trailing_flags(instruction, known)
    mode = _mode(instruction)
    instruction.done(2, 3)
    values = [scope.value(x) for x in instruction.operands[1:]]
    function = "convert_pair" if len(values) == 2 else "convert"
    return assign(
        scope, instruction, f"emu_ptx::{function}<emu_ptx::{to}, emu_ptx::{source}, {mode}>({', '.join(values)})"
    )


def _trailing_flags(instruction: Instruction, known: tuple[str, ...]) -> list[str]:
    """Some write the saturation behind the types, which ptxas takes."""
    flags = [x for x in instruction.left if x not in known]
    types = [x for x in instruction.left if x in known]
    instruction.left = [*flags, *types]
    return instruction.types(2, known)


def _values(instruction: Instruction, scope: Scope) -> str:
    return ", ".join(scope.value(x) for x in instruction.operands[1:])


def _plain(name: str, count: int, *kinds: str) -> Callable[[Instruction, Scope], str]:
    """An instruction whose function in C++ takes the type and the operands."""

    def rule(instruction: Instruction, scope: Scope) -> str:
        mode = instruction.take("l", "r", "clamp", "wrap", "shiftamt", "b4e", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
        second = instruction.take("clamp", "wrap")
        (kind,) = instruction.types(1, kinds)
        instruction.done(count + 1)
        function = "_".join(x for x in (name, mode, second) if x)
        return assign(scope, instruction, f"emu_ptx::{function}<emu_ptx::{kind}>({_values(instruction, scope)})")

    return rule


def _dot(instruction: Instruction, scope: Scope) -> str:
    half = instruction.take("lo", "hi")
    if (instruction.parts[0] == "dp2a") != bool(half):
        instruction.refuse()
    a, b = instruction.types(2, ("u32", "s32"))
    instruction.done(4)
    name = f"{instruction.parts[0]}{f'_{half}' if half else ''}"
    return assign(scope, instruction, f"emu_ptx::{name}<emu_ptx::{a}, emu_ptx::{b}>({_values(instruction, scope)})")


def _simd(instruction: Instruction, scope: Scope) -> str:
    """vadd2, vabsdiff4 …: a word of two or four integers."""
    add = bool(instruction.take("add"))
    sat = bool(instruction.take("sat"))
    d, a, b = instruction.types(3, ("u32", "s32"))
    instruction.done(4)
    if a != b:
        instruction.refuse("with two types")
    name = instruction.parts[0]
    types = f"emu_ptx::{d}, emu_ptx::{a}, {str(sat).lower()}, {str(add).lower()}"
    function = f"emu_ptx::simd<emu_ptx::Simd::{name[:-1]}, {name[-1]}, {types}>"
    return assign(scope, instruction, f"{function}({_values(instruction, scope)})")


def _isspacep(instruction: Instruction, scope: Scope) -> str:
    space = instruction.take("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param")
    instruction.done(2)
    name = (space or "").split("::")[0]
    return assign(scope, instruction, f"emu_ptx_is_{name}(emu_ptx::address({scope.value(instruction.operands[1])}))")


def _cvta(instruction: Instruction, scope: Scope) -> str:
    to = instruction.take("to")
    space = instruction.take("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param")
    instruction.types(1, ("u32", "u64"))
    instruction.done(2)
    value = scope.value(instruction.operands[1])
    if space and space.startswith("shared"):
        value = f"emu_ptx::to_shared({value})" if to else f"emu_ptx::from_shared({value})"
    return assign(scope, instruction, value)


def _branch(instruction: Instruction, scope: Scope) -> str:
    instruction.drop("uni")
    instruction.done(1)
    return f"goto {scope.label(instruction.operands[0].text)};"


def _exit(instruction: Instruction, scope: Scope) -> str:
    instruction.refuse()


def _trap(instruction: Instruction, scope: Scope) -> str:
    instruction.done(0)
    return "emu_trap();"


def _nothing(instruction: Instruction, scope: Scope) -> str:
    return ""


TABLE: dict[str, Callable[[Instruction, Scope], str]] = {
    **dict.fromkeys(_OPERATIONS, _operation),
    "setp": _set,
    "set": _set,
    "selp": _selp,
    "slct": _slct,
    "mov": _mov,
    "cvt": _cvt,
    "mul24": _plain("mul24", 2, "u32", "s32"),
    "bfe": _plain("bfe", 3, "u32", "s32", "u64", "s64"),
    "bfi": _plain("bfi", 4, "b32", "b64"),
    "bfind": _plain("bfind", 1, "u32", "s32", "u64", "s64"),
    "bmsk": _plain("bmsk", 2, "b32"),
    "szext": _plain("szext", 2, "u32", "s32"),
    "lop3": _plain("lop3", 4, "b32"),
    "prmt": _plain("prmt", 3, "b32"),
    "shf": _plain("shf", 3, "b32"),
    "dp4a": _dot,
    "dp2a": _dot,
    **{f"v{name}{n}": _simd for name in ("add", "sub", "absdiff", "min", "max", "avrg") for n in (2, 4)},
    "isspacep": _isspacep,
    "cvta": _cvta,
    "bra": _branch,
    "exit": _exit,
    "trap": _trap,
    "brkpt": _nothing,
    "pragma": _nothing,
}
