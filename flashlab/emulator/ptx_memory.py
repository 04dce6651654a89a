"""PTX of memory and of threads together: loads, stores, atomics, cp.async, barriers, fences, shuffles, votes."""

from __future__ import annotations

from collections.abc import Callable

from flashlab.emulator.ptx_operands import Instruction, Operand, Scope
from flashlab.emulator.ptx_scalar import assign

__all__ = ["TABLE", "shared_address"]

_TYPES = (*(f"{letter}{bits}" for letter in "bus" for bits in (8, 16, 32, 64)), "b128", "f32", "f64", "f16", "bf16")
_SPACES = {
    "global": "global", "shared": "shared", "shared::cta": "shared", "shared::cluster": "shared", "const": "fixed",
    "param": "fixed", "param::entry": "fixed", "param::func": "fixed", "local": "fixed",
}  # fmt: skip
# how long a line stays in a cache
_CACHE = (r"ca|cg|cs|lu|cv|wb|wt|nc|unified", r"L[12]::\w+", r"L[12]::cache_hint")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_ATOMICS = ("add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas")
_ATOMIC_TYPES = ("u32", "s32", "b32", "u64", "s64", "b64", "f32", "f64", "f16", "f16x2", "bf16", "bf16x2", "b16", "u16")


def _order(instruction: Instruction) -> str:
    """How an access is ordered: weak, relaxed, acquire, release."""
    instruction.take(*_SCOPES)
    found = instruction.take("weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio", "sc")
    instruction.take(*_SCOPES)
    return {None: "weak", "mmio": "relaxed", "sc": "acq_rel", "volatile": "volatile_"}.get(found, found or "weak")


def _space(instruction: Instruction) -> str:
    return _SPACES.get(instruction.take(*_SPACES) or "", "generic")


def _access(instruction: Instruction) -> tuple[str, str, str, int]:
    """Of a load or store: its space, its order, its type and how many elements it has."""
    instruction.drop(*_CACHE)
    order = _order(instruction)
    space = _space(instruction)
    order = order if order != "weak" else _order(instruction)
    count = int((instruction.take("v2", "v4", "v8") or "v1")[1:])
    (kind,) = instruction.types(1, _TYPES)
    return space, order, kind, count


def _load(instruction: Instruction, scope: Scope) -> str:
    space, order, kind, count = _access(instruction)
    instruction.done(2, 3)
    to = instruction.operands[0]
    targets = list(to.parts) if to.kind == "vector" else [to]
    if len(targets) != count:
        instruction.refuse(f"of {len(targets)} elements")
    address = scope.address(instruction.operands[1])
    load = f"emu_ptx::load<emu_ptx::Space::{space}, emu_ptx::Order::{order}>(emu_v, {address});"
    sets = " ".join(f"emu_ptx::set({scope.value(x)}, emu_v[{i}]);" for i, x in enumerate(targets) if x.kind != "sink")
    return f"{{ emu_ptx::{kind} emu_v[{count}]; {load} {sets} }}"


def _store(instruction: Instruction, scope: Scope) -> str:
    space, order, kind, count = _access(instruction)
    instruction.done(2, 3)
    values = scope.values(instruction.operands[1])
    if len(values) != count:
        instruction.refuse(f"of {len(values)} elements")
    cast = ", ".join(f"emu_ptx::as<emu_ptx::{kind}>({x})" for x in values)
    address = scope.address(instruction.operands[0])
    store = f"emu_ptx::store<emu_ptx::Space::{space}, emu_ptx::Order::{order}>({address}, emu_v);"
    return f"{{ const emu_ptx::{kind} emu_v[] = {{{cast}}}; {store} }}"


def _atomic(instruction: Instruction, scope: Scope) -> str:
    """atom and red, which has no result."""
    instruction.drop(*_CACHE)
    order = _order(instruction)
    space = _space(instruction)
    order = order if order != "weak" else _order(instruction)
    operation = instruction.take(*_ATOMICS)
    instruction.drop("noftz")
    count = int((instruction.take("v2", "v4", "v8") or "v1")[1:])
    instruction.drop("noftz")
    (kind,) = instruction.types(1, _ATOMIC_TYPES)
    if not operation:
        instruction.refuse()
    result, rest = (
        (None, instruction.operands)
        if instruction.parts[0] == "red"
        else (instruction.operands[0], instruction.operands[1:])
    )
    address, *values = rest
    wanted = 2 if operation == "cas" else 1
    instruction.done()
    if not wanted <= len(values) <= wanted + 1:
        instruction.refuse(f"with {len(instruction.operands)} operands")
    call = f"emu_ptx::atomic<emu_ptx::{kind}, emu_ptx::Atomic::{operation}_, emu_ptx::Space::{space}, emu_ptx::Order::{order}>"
    if count == 1:
        value = f"{call}({scope.address(address)}, {', '.join(scope.value(x) for x in values[:wanted])})"
        return assign(scope, instruction, value) if result else f"{value};"
    elements = scope.values(values[0])
    results = list(result.parts) if result else [Operand("sink")] * count
    if len(elements) != count or len(results) != count:
        instruction.refuse(f"of {len(elements)} elements")
    return " ".join(
        f"emu_ptx::set({scope.value(r)}, {call}({scope.address(address)} + {i} * sizeof(emu_ptx::{kind}), {x}));"
        for i, (r, x) in enumerate(zip(results, elements, strict=True))
    )


def shared_address(scope: Scope, operand: Operand, space: str | None) -> str:
    """A shared address of 32 bits; without a state space, of a generic one."""
    return f"emu_ptx::{'shared' if space else 'shared_of'}({scope.address(operand)})"


def _copy(instruction: Instruction, scope: Scope) -> str:
    """cp.async, without bulk."""
    if instruction.take("commit_group"):
        instruction.done(0)
        return "emu_copy_commit();"
    if instruction.take("wait_group"):
        instruction.done(1)
        return f"emu_copy_wait(static_cast<unsigned>({scope.value(instruction.operands[0])}));"
    if instruction.take("wait_all"):
        instruction.done(0)
        return "emu_copy_commit(); emu_copy_wait(0);"
    if instruction.take("mbarrier"):
        instruction.take("arrive")
        counted = bool(instruction.take("noinc"))
        space = instruction.take("shared", "shared::cta")
        instruction.types(1, ("b64",))
        instruction.done(1)
        return f"emu_ptx_copies_arrive({shared_address(scope, instruction.operands[0], space)}, {int(counted)});"
    hint = "L2::cache_hint" in instruction.left
    instruction.drop(*_CACHE)
    instruction.take("shared", "shared::cta")
    instruction.take("global")
    instruction.done(3, 4, 5)
    to, source, size, *rest = instruction.operands
    kept = rest[0] if len(rest) - hint > 0 else None
    last = f", emu_ptx::kept({scope.value(kept)}, {scope.value(size)})" if kept else f", {scope.value(size)}"
    return (
        f"emu_copy_async(emu_ptx::shared({scope.address(to)}), reinterpret_cast<const void*>({scope.address(source)}), "
        f"{scope.value(size)}{last});"
    )


def _cp(instruction: Instruction, scope: Scope) -> str:
    from flashlab.emulator import ptx_matrix  # it needs this module

    reduce = bool(instruction.take("reduce"))
    if not instruction.take("async"):
        instruction.refuse()
    if instruction.take("bulk"):
        return ptx_matrix.bulk(instruction, scope, reduce)
    return _copy(instruction, scope)


# Threads together


def _bar(instruction: Instruction, scope: Scope) -> str:
    instruction.drop("aligned", "cta")
    if instruction.take("warp"):
        instruction.take("sync")
        instruction.done(1)
        return f"emu_syncwarp(emu_ptx::as<emu_ptx::u32>({scope.value(instruction.operands[0])}));"
    if instruction.take("cluster"):
        instruction.drop("release", "acquire", "relaxed")
        waits = instruction.take("arrive", "wait", "sync")
        instruction.done(0)
        return "" if waits == "arrive" else "emu_syncthreads();"  # of a cluster of one block
    if instruction.take("red"):
        how = instruction.take("popc", "and", "or")
        instruction.drop("u32", "pred")
        instruction.done(3)
        p = scope.value(instruction.operands[2])
        if instruction.operands[1].text != "0":
            instruction.refuse("of another barrier than 0")
        count = {
            "popc": f"emu_syncthreads_count({p})",
            "or": f"(emu_syncthreads_count({p}) != 0)",
            "and": f"(emu_syncthreads_count(!({p})) == 0)",
        }
        return assign(scope, instruction, count[how or ""])
    arrives = instruction.take("sync", "arrive") == "arrive"
    instruction.done(1, 2)
    values = [f"emu_ptx::as<int>({scope.value(x)})" for x in instruction.operands]
    if instruction.operands[0].text == "0" and len(values) == 1:
        return "emu_syncthreads();"
    return f"emu_named_{'arrive' if arrives else 'barrier'}({values[0]}, {values[1] if len(values) == 2 else '0'});"


def _fence(instruction: Instruction, scope: Scope) -> str:
    if instruction.take("proxy"):
        kind = instruction.left[0]
        if kind == "async":
            return "emu_fence_async();"
        if kind in ("alias", "tensormap::generic"):
            return ""
        instruction.refuse()
    if instruction.take("mbarrier_init"):
        instruction.drop("release", "cluster")
        instruction.done(0)
        return "emu_mbarrier_publish();"
    instruction.drop("sc", "acq_rel", "acquire", "release", r"sync_restrict::[\w:]+")
    reach = instruction.take("cta", "cluster", "gpu", "gl", "sys")
    instruction.done(0)
    return {"cta": "__threadfence_block();", "sys": "__threadfence_system();"}.get(reach or "", "__threadfence();")


def _shuffle(instruction: Instruction, scope: Scope) -> str:
    instruction.take("sync")
    kind = instruction.take("up", "down", "bfly", "idx")
    instruction.types(1, ("b32",))
    instruction.done(4, 5)
    first = instruction.operands[0]
    to, inside = first.parts if first.kind == "pair" else (first, Operand("sink"))
    values = ", ".join(scope.value(x) for x in instruction.operands[1:])
    return (
        f"{{ const auto emu_v = emu_ptx::shuffle<emu_ptx::Shuffle::{kind}>({values}); "
        f"emu_ptx::set({scope.value(to)}, emu_v.value); emu_ptx::set({scope.value(inside)}, emu_v.inside); }}"
    )


def _vote(instruction: Instruction, scope: Scope) -> str:
    instruction.take("sync")
    how = instruction.take("all", "any", "uni", "ballot")
    instruction.types(1, ("pred", "b32"))
    instruction.done(3)
    p, mask = (scope.value(x) for x in instruction.operands[1:])
    mask = f"emu_ptx::as<emu_ptx::u32>({mask})"
    if how == "uni":
        return assign(scope, instruction, f"emu_ptx::uniform({p}, {mask})")
    return assign(scope, instruction, f"emu_vote({mask}, {p}, EMU_{(how or '').upper()})")


def _match(instruction: Instruction, scope: Scope) -> str:
    how = instruction.take("any", "all")
    instruction.take("sync")
    (kind,) = instruction.types(1, ("b32", "b64"))
    instruction.done(3)
    first = instruction.operands[0]
    to, same = first.parts if first.kind == "pair" else (first, Operand("sink"))
    a, mask = (scope.value(x) for x in instruction.operands[1:])
    found = f"emu_vote(emu_ptx::as<emu_ptx::u32>({mask}), emu_ptx::as<emu_ptx::{kind}>({a}), EMU_MATCH)"
    if how == "any":
        return f"emu_ptx::set({scope.value(to)}, {found});"
    return (
        f"{{ const bool emu_same = {found} == emu_ptx::as<emu_ptx::u32>({mask}); "
        f"emu_ptx::set({scope.value(to)}, emu_same ? emu_ptx::as<emu_ptx::u32>({mask}) : 0u); "
        f"emu_ptx::set({scope.value(same)}, emu_same); }}"
    )


def _redux(instruction: Instruction, scope: Scope) -> str:
    instruction.take("sync")
    how = instruction.take("add", "min", "max", "and", "or", "xor")
    absolute, nan = bool(instruction.take("abs")), bool(instruction.take("NaN"))
    (kind,) = instruction.types(1, ("u32", "s32", "b32", "f32"))
    instruction.done(3)
    a, mask = (scope.value(x) for x in instruction.operands[1:])
    mask = f"emu_ptx::as<emu_ptx::u32>({mask})"
    if kind == "f32":
        flags = f"{str(how == 'max').lower()}, {str(absolute).lower()}, {str(nan).lower()}"
        return assign(scope, instruction, f"emu_ptx::reduce_floats<{flags}>({mask}, {a})")
    name = {"xor": "EXCLUSIVE_OR"}.get(how or "", (how or "").upper())
    if kind == "u32" and how in ("min", "max"):
        name = f"U{name}"
    return assign(scope, instruction, f"emu_reduce({mask}, emu_ptx::as<emu_ptx::u32>({a}), EMU_{name})")


def _elect(instruction: Instruction, scope: Scope) -> str:
    instruction.drop("sync", "one")
    instruction.done(2)
    first = instruction.operands[0]
    to, elected = first.parts if first.kind == "pair" else (first, Operand("sink"))
    mask = scope.value(instruction.operands[1])
    return (
        f"{{ const emu_ptx::u32 emu_v = emu_ptx::elected({mask}); emu_ptx::set({scope.value(to)}, emu_v); "
        f"emu_ptx::set({scope.value(elected)}, emu_v == emu_ptx::lane()); }}"
    )


def _activemask(instruction: Instruction, scope: Scope) -> str:
    instruction.types(1, ("b32",))
    instruction.done(1)
    return assign(scope, instruction, "emu_active_mask()")


def _map(instruction: Instruction, scope: Scope) -> str:
    """mapa: the address in another block of the cluster, which has one."""
    instruction.take("shared::cluster")
    instruction.types(1, ("u32", "u64"))
    instruction.done(3)
    return assign(
        scope,
        instruction,
        f"emu_ptx::mapped({scope.value(instruction.operands[1])}, {scope.value(instruction.operands[2])})",
    )


def _rank(instruction: Instruction, scope: Scope) -> str:
    instruction.take("shared::cluster")
    instruction.types(1, ("u32", "u64"))
    instruction.done(2)
    return assign(scope, instruction, "0u")


def _policy(instruction: Instruction, scope: Scope) -> str:
    instruction.left.clear()
    return assign(scope, instruction, "0ull")


def _registers(instruction: Instruction, scope: Scope) -> str:
    claim = instruction.take("inc", "dec") == "inc"
    instruction.drop("sync", "aligned")
    instruction.types(1, ("u32",))
    instruction.done(1)
    return f"emu_setmaxnreg(static_cast<unsigned>({scope.value(instruction.operands[0])}), {int(claim)});"


def _hint(instruction: Instruction, scope: Scope) -> str:
    """What asks for speed only."""
    return ""


TABLE: dict[str, Callable[[Instruction, Scope], str]] = {
    "ld": _load,
    "ldu": _load,
    "st": _store,
    "atom": _atomic,
    "red": _atomic,
    "cp": _cp,
    "bar": _bar,
    "barrier": _bar,
    "fence": _fence,
    "membar": _fence,
    "shfl": _shuffle,
    "vote": _vote,
    "match": _match,
    "redux": _redux,
    "elect": _elect,
    "activemask": _activemask,
    "mapa": _map,
    "getctarank": _rank,
    "createpolicy": _policy,
    "setmaxnreg": _registers,
    **dict.fromkeys(("prefetch", "prefetchu", "discard", "applypriority", "nanosleep", "griddepcontrol"), _hint),
}
