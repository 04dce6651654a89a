"""The table of PTX instructions: what each is in C++, by the first word of its opcode."""

from __future__ import annotations

from collections.abc import Callable

from flashlab.emulator import ptx_matrix, ptx_memory, ptx_scalar
from flashlab.emulator.ptx_operands import Instruction, PtxError, Scope

__all__ = ["cpp_of"]

_TABLE: dict[str, Callable[[Instruction, Scope], str]] = {
    **ptx_scalar.TABLE,
    **ptx_memory.TABLE,
    **ptx_matrix.TABLE,
}


def cpp_of(instruction: Instruction, scope: Scope) -> str:
    """The C++ statements of an instruction. Raises `PtxError` for one that the emulator doesn't know."""
    rule = _TABLE.get(instruction.parts[0])
    if rule is None:
        instruction.refuse()
    try:
        return rule(instruction, scope)
    except (IndexError, KeyError):
        instruction.refuse(f"with {len(instruction.operands)} operands")
    except PtxError as error:
        if instruction.name in str(error):
            raise
        raise PtxError(f"{error} (in {instruction.name})") from None
