"""PTX of matrices and of the engines: ldmatrix, mma, mbarriers, bulk copies, tensor maps, wgmma."""

from __future__ import annotations

import re
from collections.abc import Callable

from flashlab.emulator.ptx_memory import shared_address
from flashlab.emulator.ptx_operands import Instruction, Operand, Scope

__all__ = ["TABLE", "bulk"]

_SHARED = ("shared", "shared::cta", "shared::cluster")
_BITS = {
    "f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8, "s4": 4, "u4": 4, "b1": 1,
}  # fmt: skip
_DEPTHS = {16: (8, 16), 32: (4, 8), 64: (4, 8, 16), 8: (16, 32), 4: (32, 64), 1: (128, 256)}  # of m16n8
_SHALLOW = {64: 4, 8: 16, 4: 32, 1: 128}  # of m8n8


def _ldmatrix(instruction: Instruction, scope: Scope) -> str:
    instruction.drop("sync", "aligned")
    shape = instruction.take("m8n8", "m8n16", "m16n16")
    count = int((instruction.take("x1", "x2", "x4") or "x0")[1:])
    transposed = bool(instruction.take("trans"))
    space = instruction.take(*_SHARED)
    if shape != "m8n8" or not instruction.take("b16"):
        instruction.refuse()
    transposed = bool(instruction.take("trans")) or transposed
    instruction.done(2)
    is_load = instruction.parts[0] == "ldmatrix"
    registers, address = instruction.operands if is_load else reversed(instruction.operands)
    values = scope.values(registers)
    if len(values) != count:
        instruction.refuse(f"with {len(values)} registers")
    at = shared_address(scope, address, space)
    if is_load:
        call = f"emu_ldmatrix(emu_v, {at}, {int(transposed)});" if count == 4 else (
            f"emu_ptx_ldmatrix(emu_v, {at}, {count}, {int(transposed)});"
        )  # fmt: skip
        sets = " ".join(f"emu_ptx::set({x}, emu_v[{i}]);" for i, x in enumerate(values))
        return f"{{ unsigned emu_v[4]; {call} {sets} }}"
    cast = ", ".join(f"emu_ptx::as<emu_ptx::u32>({x})" for x in values)
    return f"{{ const unsigned emu_v[] = {{{cast}}}; emu_ptx_stmatrix({at}, emu_v, {count}, {int(transposed)}); }}"


def _movmatrix(instruction: Instruction, scope: Scope) -> str:
    instruction.drop("sync", "aligned", "m8n8", "trans", "b16")
    instruction.done(2)
    to, source = (scope.value(x) for x in instruction.operands)
    return f"emu_ptx::set({to}, emu_ptx_movmatrix(emu_ptx::as<emu_ptx::u32>({source})));"


def _mma(instruction: Instruction, scope: Scope) -> str:
    instruction.drop("sync", "aligned")
    shape = next((x for x in instruction.left if re.fullmatch(r"m\d+n8k\d+", x)), None)
    if not shape:
        instruction.refuse()
    instruction.left.remove(shape)
    instruction.drop("satfinite", "xor|and", "popc")
    rows, depth = (int(x) for x in re.findall(r"\d+", shape)[::2])
    layouts = [x for x in instruction.left if x in ("row", "col")]
    instruction.drop("row", "col")
    if len(instruction.left) != 4:
        instruction.refuse()
    d, a, b, c = instruction.left
    instruction.left.clear()
    sums = {"f32": "f32", "f16": "f16", "s32": "s32", "f64": "f64"}.get(d)
    if a not in _BITS or b not in _BITS or _BITS[a] != _BITS[b] or not sums or (c != d and (rows, depth) != (8, 4)):
        instruction.refuse()
    bits = _BITS[a]
    volta = (rows, depth, bits) == (8, 4, 16)
    if not volta and layouts != ["row", "col"]:
        instruction.refuse("of other layouts")
    if not volta and depth not in (_DEPTHS[bits] if rows == 16 else (_SHALLOW.get(bits),)):
        instruction.refuse()
    instruction.done(4)
    of_a, of_b = (
        (rows * depth * bits // 1024, 8 * depth * bits // 1024) if bits < 64 else (rows * depth // 32, 8 * depth // 32)
    )
    of_c = rows * 8 // 32 // (2 if d == "f16" else 1)
    if volta:
        of_a, of_b, of_c = 2, 2, 4 if d == "f16" else 8
    vectors = [scope.values(x) for x in instruction.operands]
    if [len(x) for x in vectors] != [of_c, of_a, of_b, of_c]:
        instruction.refuse(f"with {' + '.join(str(len(x)) for x in vectors)} registers")
    part = "f64" if bits == 64 else "u32"
    sum_part = {"f16": "u32"}.get(d, sums)

    def array(name: str, kind: str, values: list[str]) -> str:
        return f"emu_ptx::{kind} {name}[] = {{{', '.join(f'emu_ptx::as<emu_ptx::{kind}>({x})' for x in values)}}};"

    call = f"emu_ptx::mma<{rows}, {depth}, emu_ptx::Element::{a}, emu_ptx::Element::{b}, emu_ptx::Element::{sums}>"
    if volta:
        if c != d:
            instruction.refuse("of two accumulators")
        call = f"emu_ptx::mma_quads<{int(layouts[0] == 'col')}, {int(layouts[1] == 'row')}, emu_ptx::Element::{sums}>"
    sets = " ".join(
        f"emu_ptx::set({scope.value(x)}, emu_c[{i}]);"
        for i, x in enumerate(instruction.operands[0].parts or instruction.operands[:1])
        if x.kind != "sink"
    )
    return (
        f"{{ {array('emu_a', part, vectors[1])} {array('emu_b', part, vectors[2])} {array('emu_c', sum_part, vectors[3])} "
        f"{call}(emu_c, emu_a, emu_b); {sets} }}"
    ).replace("emu_ptx::as<emu_ptx::f32>(emu_ptx::sink())", "0.f")


# mbarriers


def _mbarrier(instruction: Instruction, scope: Scope) -> str:
    what = instruction.take(
        "init", "inval", "arrive", "arrive_drop", "test_wait", "try_wait", "expect_tx", "complete_tx", "pending_count"
    )
    instruction.drop("release", "acquire", "relaxed", "cta", "cluster", "noComplete", "nosleep", "sem")
    expects = bool(instruction.take("expect_tx"))
    parity = bool(instruction.take("parity"))
    space = instruction.take(*_SHARED)
    instruction.drop("release", "acquire", "relaxed", "cta", "cluster")
    instruction.types(1, ("b64",))
    instruction.done()
    operands = instruction.operands
    if what in ("init", "inval", "expect_tx", "complete_tx"):
        at = shared_address(scope, operands[0], space)
        if what == "init":
            return f"emu_mbarrier_init({at}, emu_ptx::as<emu_ptx::u32>({scope.value(operands[1])}));"
        if what == "inval":
            return f"emu_ptx_mbarrier_end({at});"
        return f"emu_ptx_mbarrier_{what}({at}, emu_ptx::as<emu_ptx::u32>({scope.value(operands[1])}));"
    if what in ("test_wait", "try_wait"):
        at, phase = shared_address(scope, operands[1], space), scope.value(operands[2])
        wait = f"emu_mbarrier_try_wait({at}, emu_ptx::{'parity' if parity else 'parity_of'}({phase})) != 0"
        return f"emu_ptx::set({scope.value(operands[0])}, {wait});"
    if what != "arrive":
        instruction.refuse()
    first = operands[0]
    to, rest = (None, operands) if first.kind == "address" else (first, operands[1:])
    at, number = (
        shared_address(scope, rest[0], space),
        f"emu_ptx::as<emu_ptx::u32>({scope.value(rest[1])})" if len(rest) > 1 else None,
    )
    count, nbytes = ("1", number or "0") if expects else (number or "1", "0")
    if to is None or to.kind == "sink":
        return (
            f"emu_mbarrier_arrive({at}, {nbytes});"
            if count == "1"
            else f"emu_ptx_mbarrier_arrive({at}, {count}, {nbytes});"
        )
    return f"emu_ptx::set({scope.value(to)}, emu_ptx_mbarrier_arrive({at}, {count}, {nbytes}));"


# Bulk copies


def bulk(instruction: Instruction, scope: Scope, reduce: bool) -> str:
    """cp.async.bulk and cp.reduce.async.bulk, of arrays and of boxes."""
    if instruction.take("prefetch"):
        return ""
    if instruction.take("commit_group"):
        instruction.done(0)
        return "emu_tma_commit();"
    if instruction.take("wait_all"):
        return "emu_tma_commit(); emu_tma_wait(0, 0);"
    if instruction.take("wait_group"):
        read = bool(instruction.take("read"))
        instruction.done(1)
        return f"emu_tma_wait(static_cast<unsigned>({scope.value(instruction.operands[0])}), {int(read)});"
    boxes = bool(instruction.take("tensor"))
    rank = next((int(x[0]) for x in instruction.left if re.fullmatch(r"[1-5]d", x)), 0)
    instruction.drop("[1-5]d", "tile", r"L2::cache_hint", r"L2::\w+", r"cta_group::.*", "noftz")
    direction = tuple(x for x in instruction.left if x == "global" or x in _SHARED)
    instruction.drop("global", *_SHARED)
    done = instruction.take("mbarrier::complete_tx::bytes", "bulk_group")
    if reduce:
        instruction.refuse()
    instruction.done()
    operands = instruction.operands
    loads = len(direction) == 2 and direction[0] in _SHARED and direction[1] == "global" and done != "bulk_group"
    stores = len(direction) == 2 and direction[0] == "global" and direction[1] in _SHARED and done == "bulk_group"
    if not (loads or stores):
        instruction.refuse()
    if not boxes:
        to, source, size = (operands[i] for i in range(3))
        nbytes = f"emu_ptx::as<emu_ptx::u32>({scope.value(size)})"
        if loads:
            bar = f"emu_ptx::shared({scope.address(operands[3])})"
            place = f"reinterpret_cast<const void*>({scope.address(source)})"
            return f"emu_ptx_bulk_load(emu_ptx::shared({scope.address(to)}), {place}, {nbytes}, {bar});"
        place = f"reinterpret_cast<void*>({scope.address(to)})"
        return f"emu_ptx_bulk_store({place}, emu_ptx::shared({scope.address(source)}), {nbytes});"
    array, other = (operands[1], operands[0]) if loads else (operands[0], operands[1])
    corner = scope.values(array.parts[1])
    if len(corner) != rank:
        instruction.refuse(f"with {len(corner)} coordinates")
    base = Operand("address", parts=array.parts[:1])
    line = f"{{ const int emu_v[] = {{{', '.join(f'emu_ptx::as<int>({x})' for x in corner)}}}; "
    place = f"reinterpret_cast<const void*>({scope.address(base)})"
    at = f"emu_ptx::shared({scope.address(other)})"
    if loads:
        return line + f"emu_tma_load({at}, {place}, emu_v, {rank}, emu_ptx::shared({scope.address(operands[2])})); }}"
    return line + f"emu_tma_store({place}, {at}, emu_v, {rank}); }}"


# Products of a warpgroup


def _wgmma(instruction: Instruction, scope: Scope) -> str:
    what = instruction.take("mma_async", "fence", "commit_group", "wait_group")
    instruction.drop("sync", "aligned")
    if what != "mma_async":
        instruction.done(1 if what == "wait_group" else 0)
        if what == "wait_group":
            return f"emu_wgmma_wait(static_cast<unsigned>({scope.value(instruction.operands[0])}));"
        return {"fence": "emu_wgmma_fence();", "commit_group": "emu_wgmma_commit();"}[what or ""]
    if instruction.left[0] == "sp" or len(instruction.left) < 4:
        instruction.refuse()
    instruction.drop("satfinite")
    shape, d, a, b = instruction.left
    match = re.fullmatch(r"m64n(\d+)k(\d+)", shape)
    instruction.left.clear()
    if not match or a not in _BITS or b not in _BITS or d not in ("f32", "f16", "s32"):
        instruction.refuse()
    columns, depth = int(match[1]), int(match[2])
    if depth * _BITS[a] != 256 or columns % 8 or columns > 256:
        instruction.refuse()
    to, from_a, from_b, *rest = instruction.operands
    if len(to.parts) != columns // (4 if d == "f16" else 2):
        instruction.refuse(f"with {len(to.parts)} accumulators")

    def references(operands: tuple[Operand, ...]) -> str:
        names: list[str] = []
        for operand in operands:
            index = scope.index(operand)
            if index is None:
                instruction.refuse("with a register of its own")
            instruction.by_reference.add(f"emu_{index}")
            names.append(f"emu_ptx::pointer(emu_lvalue_{index})")
        return ", ".join(names)

    flags = [scope.value(x) for x in rest]
    add, scale_a, scale_b = (flags + ["1", "1", "1"])[:3]
    majors = flags[3:]
    in_registers = from_a.kind == "vector"
    a_columns, b_columns = ([*["0"] * in_registers, *majors, "0", "0"])[:2]
    lines = [f"float* const emu_c[] = {{{references(to.parts)}}};"]
    if in_registers:
        lines.append(f"float* const emu_a[] = {{{references(from_a.parts)}}};")
    source = "emu_a" if in_registers else scope.value(from_a)
    kinds = ", ".join(f"emu_ptx::Element::{x}" for x in (a, b, d))
    lines.append(
        f"emu_ptx::wgmma<{columns}, {kinds}>(emu_c, {source}, {scope.value(from_b)}, {add}, {scale_a}, {scale_b}, "
        f"{a_columns}, {b_columns});"
    )
    return f"{{ {' '.join(lines)} }}"


TABLE: dict[str, Callable[[Instruction, Scope], str]] = {
    "ldmatrix": _ldmatrix,
    "stmatrix": _ldmatrix,
    "movmatrix": _movmatrix,
    "mma": _mma,
    "mbarrier": _mbarrier,
    "wgmma": _wgmma,
}
