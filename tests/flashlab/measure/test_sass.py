"""The reader of machine code: on a made-up kernel whose loop, waits and producer are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashlab.measure import sass

HEADER = "Address,Source,Instructions Executed,stall_barrier,stall_wait,stall_wait (Not Issued)"
BASE = 0x7FE43B7AA000

Line = tuple[str, int, int, int]
"""Text, with `{n}` for the address of instruction n; executed; samples at a barrier, and waiting."""


def page(*kernels: tuple[str, Sequence[Line]]) -> str:
    """A source page as ncu prints it."""
    text = ""
    for name, lines in kernels:
        text += f'"Kernel Name","{name}",\n' + ",".join(f'"{x}"' for x in HEADER.split(",")) + "\n"
        places = [f"0x{BASE + 16 * i:x}" for i in range(len(lines) + 1)]
        for i, (source, executed, barrier, wait) in enumerate(lines):
            told = "".join(f',"{n:,}"' for n in (executed, barrier, wait, wait))
            text += f'"{places[i]}","      {source.format(*places)}"{told}\n'
    return text


def one(lines: Sequence[Line]) -> sass.Code:
    (code,) = sass.parse(page(("k", lines)))
    return code


def plain(*sources: str) -> sass.Code:
    return one([(source, 1, 0, 0) for source in sources])


TOY: list[Line] = [
    ("S2R R0, SR_TID.X", 8, 0, 0),  # 0: all warps
    ("@P0   BRA {3}", 8, 0, 1),
    ("BRA {18}", 4, 0, 1),
    ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR40], RZ, !UPT, gsb0", 4, 0, 5),  # 3: before the loop
    ("SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2", 40, 0, 2),  # 4: the loop
    ("@!P1  BRA {15}", 40, 0, 3),
    ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR40], RZ, !UPT, gsb0", 40, 1, 0),
    ("WARPGROUP.DEPBAR.LE gsb0, 0x0", 40, 7, 0),
    ("BRA P2, {11}", 40, 0, 0),
    ("FSEL R1, R2, R3, P0", 4, 0, 9),  # 9, 10: a mask
    ("FSEL R2, R2, R3, P0", 4, 0, 9),
    ("MUFU.EX2 R3, R3", 40, 0, 30),
    ("@P0   BRA {4}", 40, 2, 0),
    ("STG.E [R1], R3", 4, 0, 6),  # 13: after it
    ("EXIT", 4, 0, 0),
    ("SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2", 3, 0, 50),  # 15: the wait, tried again, out of the way
    ("@!P1  BRA {15}", 3, 0, 0),
    ("BRA {6}", 3, 0, 0),
    ("UTMALDG.4D [UR8], [UR6]", 4, 0, 100),  # 18: the producer
    ("@P3   BRA {18}", 4, 0, 100),
    ("EXIT", 4, 0, 0),
]


def test_the_toy_kernel():
    code = one(TOY)
    assert code.round == (4, 5, 6, 7, 8, 11, 12)
    assert code.loop == {*range(4, 13), 15, 16, 17}
    assert code.computing == set(range(18)) - {2}
    assert code.issued(code.round) == {"tensor": 1, "exp": 1, "other": 5}
    assert code.flops(code.round) == 2 * 64 * 128 * 16 // 4
    assert code.executed()["exp"] == 40
    assert code.stalls(code.loop) == {"wait": 2 + 3 + 9 + 9 + 30 + 50, "wgmma": 1 + 7, "barrier": 2}
    assert code.stalls(code.computing - code.loop) == {"wait": 1 + 5 + 6}


def test_what_is_not_issued_is_not_counted_twice():
    assert one([("NOP", 1, 3, 4)]).instructions[0].samples == 7


def test_kernels_come_in_their_order_and_apart():
    first, second = sass.parse(page(("a", [("NOP", 1, 0, 0)]), ("b", [("NOP", 2, 0, 0), ("EXIT", 2, 0, 0)])))
    assert (first.kernel, len(first.instructions)) == ("a", 1)
    assert (second.kernel, len(second.instructions)) == ("b", 2)


def test_without_a_loop_over_products_there_is_none():
    code = plain("FADD R0, R0, R1", "@P0   BRA {0}", "EXIT")
    assert (code.round, code.loop, code.computing) == ((), frozenset(), frozenset())


@pytest.mark.parametrize("branch, ends", [("BRA {0}", True), ("@P0   BRA {0}", False), ("BRA P0, {0}", False),
                                          ("BRA.DIV UR4, {0}", False), ("EXIT", True), ("@!P1  EXIT", False)])  # fmt: skip
def test_what_may_follow(branch: str, ends: bool):
    code = plain("NOP", branch, "NOP")
    assert (2 in code.after(1)) is not ends


def test_of_two_loops_round_one_product_the_shorter_is_the_main_one():
    outer = [f"FADD R{i}, R0, R1" for i in range(9)]
    code = plain(*outer, "HMMA.16816.F32 R4, R8, R12, R4", "@P0   BRA {9}", "@P1   BRA {0}", "EXIT")
    assert code.round == (9, 10)
    assert (code.flops(code.round), code.tensor_clocks(code.round)) == (4096, 1)


def test_the_main_loop_is_the_densest_not_the_longest():
    products = ["HMMA.16816.F32 R4, R8, R12, R4"] * 2
    code = plain(*products, "FADD R0, R0, R1", "FADD R0, R0, R1", products[0], "@P0   BRA {4}", "@P1   BRA {0}", "EXIT")
    assert code.round == (4, 5)


def test_operands_of_8_bits_take_half_the_clocks():
    for opcode, clocks in (("HGMMA.64x128x16.F32.BF16", 16), ("QGMMA.64x128x32.F32.E4M3.E4M3", 16)):
        code = plain(f"{opcode} R24, gdesc[UR40], R24", "@P0   BRA {0}", "EXIT")
        assert code.tensor_clocks(code.round) == clocks, opcode


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=5))
def test_what_can_be_skipped_is_in_the_loop_but_not_in_its_round(parts: list[tuple[int, int]]):
    """Some instructions always, some only sometimes, over and over."""
    lines, always = ["HGMMA.64x64x16.F32.BF16 R24, gdesc[UR40], RZ, !UPT"], 1
    for straight, skipped in parts:
        lines += ["FADD R0, R0, R1"] * straight
        lines += [f"@P0   BRA {{{len(lines) + 1 + skipped}}}", *["FMUL R0, R0, R1"] * skipped]
        always += straight + 1
    code = plain(*lines, "@P1   BRA {0}", "EXIT")
    assert len(code.round) == always + 1
    assert len(code.loop) == len(lines) + 1
    assert code.issued(code.round)["fma"] == sum(straight for straight, _ in parts)


def test_what_is_no_instruction_is_refused():
    with pytest.raises(ValueError, match="no instruction: '      \\?'"):
        plain("?")
