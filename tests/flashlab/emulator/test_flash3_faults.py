"""Faults seeded in FlashAttention-3's kernels: each is caught, by the sanitiser that it belongs to with its line, or by a check."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import flashlab as fl
import kernels_cu
from flashlab.emulator import Finding, Line
from flashlab.verify.rule import expect, judge
from simulator.dtypes import Array
from tests.flashlab.emulator.mutant import kept

pytestmark = pytest.mark.compiler

CHECKS = ("numbers", "bytes", "unwritten")
"""What catches a fault that misuses nothing: the rule, bytes by the formula, outputs that nobody wrote."""

HEADER = "flash3.cuh"
CAUSAL = fl.Problem(batch=1, heads=2, kv_heads=1, len_q=150, len_kv=110, head_dim=40, dtype="float16", causal=True)
"""Up to seven key tiles in a ring of two slots; a pair of row tiles and one alone; rows that see no key; a tail."""
BFLOAT16 = CAUSAL.replace(dtype="bfloat16")
ONE, TWO = (64, 16), (128, 16)
"""Tiles for one warpgroup that computes, and for two."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`old`, which occurs once in `file` (None: the kernel's own), becomes `new`; the symptoms are then `sees` and `also`.

    `at`, `other`: text, once in the kernel, of the line of the finding `sees`, and of its other party's.
    """

    name: str
    old: str
    new: str
    sees: str
    also: tuple[str, ...] = ()
    at: str = ""
    other: str = ""
    kernel: str = "flash3"
    file: str | None = None
    problem: fl.Problem = CAUSAL
    tile: tuple[int, int] = ONE

    @property
    def source(self) -> Path:
        """The kernel's file, patched or beside a patched header."""
        real = kernels_cu.source(self.kernel)
        files = {real.name: real.read_text(encoding="utf-8")}
        if self.file is not None:
            files[self.file] = (kernels_cu.include_dir() / self.file).read_text(encoding="utf-8")
        patched = self.file or real.name
        assert files[patched].count(self.old) == 1, f"{files[patched].count(self.old)} times {self.old!r} in {patched}"
        files[patched] = files[patched].replace(self.old, self.new)
        return kept(files) / real.name


K_FULL = "        mbarrier_wait(sram.k_full(k_ring.slot), k_ring.parity);\n"
V_FULL = "        mbarrier_wait(sram.v_full(v_ring.slot), v_ring.parity);\n"
Q_FULL = "    mbarrier_wait(sram.q_full(), q_parity);\n"
K_EMPTY = "          mbarrier_wait(sram.k_empty(k_ring.slot), k_ring.parity ^ 1);\n"
V_EMPTY = "          mbarrier_wait(sram.v_empty(v_ring.slot), v_ring.parity ^ 1);\n"
Q_EMPTY = "        mbarrier_wait(sram.q_empty(), q_parity ^ 1);\n"
RELEASE_K = "        release(sram.k_empty(k_ring.slot));\n"
RELEASE_V = "        release(sram.v_empty(v_ring.slot));\n"
WAIT_S = "        wgmma_wait<1>();  // S\n        settle(s);\n"
WAIT_O = "        wgmma_wait<0>();\n        settle(o);\n"
RAISE, RESCALE = "if (risen) softmax.raise(s, alpha);", "if (risen) rescale(o, alpha);"
EXPECT = "mbarrier_arrive_expect(full, TileT::BYTES)"
LOAD_K, LOAD_V, LOAD_Q = "load_k(j - 1);", "load_tile(sram.v(v_ring.slot)", "load_tile(sram.q(), q,"
QK_FIRST, QK = "multiply_qk_alone(", "multiply_qk("
PV, PV_LAST = "multiply_pv(", "multiply_pv_alone("

WAITS = [
    Fault(
        name="wait for K removed", old=K_FULL, new="", sees="wait forgotten", at=QK, other=LOAD_K, also=("mbarrier",),
    ),
    Fault(
        name="wait for V removed", old=V_FULL, new="", sees="wait forgotten", at=PV, other=LOAD_V, also=("mbarrier",),
    ),
    Fault(
        name="wait for Q removed", old=Q_FULL, new="", sees="wait forgotten", at=QK_FIRST, other=LOAD_Q,
        also=("mbarrier",),
    ),
    Fault(
        name="parity of an empty slot wrong", old=K_EMPTY, new=K_EMPTY.replace(" ^ 1", ""), sees="deadlock",
        at="load_k(work.tiles.last);",
    ),
    Fault(
        name="wait for an empty slot removed", old=V_EMPTY, new="", sees="race", at=LOAD_V, other=PV,
        also=("mbarrier", "wait forgotten", "deadlock"),
    ),
    Fault(
        name="wait for the row tile before removed", old=Q_EMPTY, new="", sees="wait forgotten", at=QK, other=LOAD_Q,
    ),
    Fault(
        name="K released before its product is waited for", old=WAIT_S + RELEASE_K, new=RELEASE_K + WAIT_S,
        sees="race", at=LOAD_K, other=QK,
    ),
    Fault(
        name="V released before its product is waited for", old=WAIT_O + RELEASE_V, new=RELEASE_V + WAIT_O,
        sees="race", at=LOAD_V, other=PV,
    ),
    Fault(
        name="wait leaves a product too many", old="wgmma_wait<1>();  // S", new="wgmma_wait<2>();  // S",
        sees="wait forgotten", at="if (risen) softmax.raise(", other=QK, also=("race",),
    ),
    Fault(
        name="O rescaled while its product runs", old=RAISE, new=RAISE.replace(";", ", rescale(o, alpha);"),
        sees="wait forgotten", at="softmax.raise(s, alpha), rescale", other=PV,
    ),
    Fault(
        name="product never committed", file=HEADER, old="#endif\n  }\n  wgmma_commit();\n", new="#endif\n  }\n",
        sees="wait forgotten", at="softmax.raise(s, alpha);\n      softmax.exponentials",
        other=QK_FIRST, also=("race",),
    ),
    Fault(
        name="fence removed before a product of registers", file=HEADER, old="wgmma_fence();\n  multiply_pv",
        new="multiply_pv", sees="fence forgotten", at=PV_LAST,
    ),
    Fault(
        name="fence removed before accumulators are used anew", old="wgmma_fence();\n        multiply_qk",
        new="multiply_qk", sees="fence forgotten", at=QK,
    ),
    Fault(
        name="rung 1: slot filled again before all are done", kernel="flash3_1",
        old="    barrier();  // everybody is done with K_j and V_j\n", new="", sees="race", problem=BFLOAT16, tile=TWO,
        at="load_k(ring, j - STAGES);", other="multiply_qk(",
    ),
]  # fmt: skip
"""Who waits for what: loads, slots, products, and the order of registers."""

BARRIERS = [
    Fault(
        name="too few bytes expected", file=HEADER, old=EXPECT, new=EXPECT.replace("BYTES", "BYTES / 2"),
        sees="mbarrier", at=Q_FULL,
    ),
    Fault(
        name="too many bytes expected", file=HEADER, old=EXPECT, new=EXPECT.replace("BYTES", "BYTES + 16"),
        sees="deadlock", at=Q_FULL,
    ),
    Fault(
        name="slot of the ring not advanced", old=RELEASE_V + "        v_ring.advance();\n", new=RELEASE_V,
        sees="wait forgotten", at=PV, other=LOAD_V, also=("deadlock",),
    ),
    Fault(
        name="parity of the ring never flips", file=HEADER, old="slot = 0, parity ^= 1;", new="slot = 0;",
        sees="mbarrier", at=LOAD_K, also=("race", "wait forgotten"),
    ),
    Fault(
        name="empty once one warpgroup of two is done", file=HEADER, tile=TWO,
        old="mbarrier_init(sram.k_empty(slot), 4 * CONSUMERS)", new="mbarrier_init(sram.k_empty(slot), 4)",
        sees="race", at=LOAD_K, other=QK, also=("mbarrier", "wait forgotten", "deadlock"),
    ),
    Fault(
        name="one consumer never releases", old=RELEASE_V, new=f"if (consumer == 0) {RELEASE_V.strip()}\n",
        sees="deadlock", at=V_EMPTY, tile=TWO,
    ),
    Fault(
        name="mbarriers not shown to the copy engine", file=HEADER, old="    mbarrier_publish();\n", new="",
        sees="proxy fence forgotten", at=LOAD_Q,
    ),
    Fault(
        name="mbarriers used before they are made", file=HEADER, old="  }\n  barrier();", new="  }", sees="race",
        at=Q_FULL,
    ),
    Fault(
        name="turns of too few threads", file=HEADER, old="sync(1 + consumer, 2 * WARPGROUP)",
        new="sync(1 + consumer, WARPGROUP)", sees="barrier", at="turns.take();", tile=TWO,
    ),
    Fault(
        name="one consumer never passes its turn on", old="turns.pass();", new="if (consumer == 0) turns.pass();",
        sees="deadlock", at="turns.take();", tile=TWO,
    ),
    Fault(
        name="more registers claimed than there are", file=HEADER, old="claim_registers<240>",
        new="claim_registers<256>", sees="deadlock", at="become_consumer();", tile=TWO,
    ),
    Fault(
        name="fewer registers kept than a thread may have", file=HEADER, old="release_registers<24>",
        new="release_registers<16>", sees="registers", at="become_producer();", also=("deadlock",), tile=TWO,
    ),
]  # fmt: skip
"""How many arrive, with how many bytes, at which phase; and the registers that warpgroups pass on."""

RESULTS = [
    Fault(
        name="K of the tile before", old="first) load_k(j - 1);", new="first) load_k(j);", sees="numbers",
    ),
    Fault(
        name="box a row too low", old="kv, j * BC, sram.v_full", new="kv, j * BC + 1, sram.v_full", sees="numbers",
        problem=BFLOAT16,
    ),
    Fault(
        name="box of the query's head", old="kv_head(shape, work.head);", new="work.head;", sees="numbers",
    ),
    Fault(
        name="O scaled once too often", old=RESCALE, new=RESCALE.replace(";", ", rescale(o, alpha);"),
        sees="numbers",
    ),
    Fault(
        name="mask of the last tile skipped", old="softmax.mask(s, shape, lane_row, work.tiles.last, full);", new="",
        sees="numbers",
    ),
    Fault(
        name="LSE of the lane's upper row", old="store_lse(lse, shape, work, row,", new="store_lse(lse, shape, work, lane_row,",
        sees="numbers", also=("bytes", "unwritten"),
    ),
    Fault(
        name="LSE a row too low", file=HEADER, old="* shape.len_q + row;", new="* shape.len_q + row + 1;",
        sees="out of bounds", at="store_lse(lse",
    ),
    Fault(
        name="agenda drops the last unit", old="unit >= units * all_heads)", new="unit >= units * all_heads - 1)",
        sees="unwritten", also=("numbers", "bytes"),
    ),
    Fault(
        name="middle tile of a head computed twice", old=" && half == 0 && front != back;", new=" && half == 0;",
        sees="bytes",
    ),
    Fault(
        name="last tile of a head in every pair", old="back = row_tiles - 1 - front;", new="back = row_tiles - 1;",
        sees="race between blocks", at="store_o(out",
    ),
]  # fmt: skip
"""What is loaded, computed and stored: by whom, and which."""

FAULTS = [*WAITS, *BARRIERS, *RESULTS]
SOUND = sorted({(fault.kernel, fault.problem.dtype, fault.tile) for fault in FAULTS})


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name.replace(" ", "-")) for fault in FAULTS])
def test_caught(fault: Fault) -> None:
    """By its sanitiser at its line; or, if it misuses nothing, by just those checks."""
    done, checks = run(fault.kernel, fault.problem, fault.tile, fault.source)
    said = "\n".join(done.complaints()) or "no complaint"
    if fault.sees in CHECKS:
        assert not done.findings, said
        assert checks == {fault.sees, *fault.also}, said
    else:
        assert {finding.kind for finding in done.findings} == {fault.sees, *fault.also}, said
        assert any(_names(finding, fault) for finding in done.findings), said


@pytest.mark.parametrize(("kernel", "dtype", "tile"), SOUND)
def test_sound_kernels_have_no_complaint(kernel: str, dtype: str, tile: tuple[int, int]) -> None:
    """On the problems and tiles on which the faults have."""
    done, checks = run(kernel, CAUSAL.replace(dtype=dtype), tile, kernels_cu.source(kernel))
    assert done.complaints() == []
    assert checks == set()


def run(kernel: str, problem: fl.Problem, tile: tuple[int, int], source: Path) -> tuple[fl.Emulation, set[str]]:
    """A run of that file, and which of the checks fail."""
    arrays = fl.random_inputs(problem, seed=0)
    done = fl.emulate(
        *arrays, algorithm=kernel, causal=problem.causal, lse=True, tile=tile, device="h200", source=source,
        time_limit=20,
    )  # fmt: skip
    right = judge(expect(problem, *arrays), done.out, done.lse).passed
    failed = {"numbers": not right, "bytes": bool(done.differences), "unwritten": bool(done.unwritten)}
    return done, {check for check in CHECKS if failed[check]}


def _names(finding: Finding, fault: Fault) -> bool:
    """The finding is of the fault's kind and at its lines."""
    return (
        finding.kind == fault.sees
        and _is(finding.line, fault.at, fault.source)
        and (not fault.other or _is(finding.other_line, fault.other, fault.source))
    )


def _is(line: Line | None, text: str, source: Path) -> bool:
    """The line is that of a text that occurs once in the kernel as it was run."""
    kernel = source.read_text(encoding="utf-8")
    assert kernel.count(text) == 1, f"{text!r}: {kernel.count(text)} times"
    begin = kernel.find(text) + len(text) - len(text.lstrip())
    return line is not None and Path(line.file) == source.resolve() and line.number == 1 + kernel.count("\n", 0, begin)


@pytest.mark.parametrize("kernel", ["flash3_3", "flash3"])
def test_a_wait_in_a_branch_that_warps_take_apart(kernel: str) -> None:
    """PTX wants all four warps at one wait. The maxima rise from tile to tile, but only in the rows of the first warp."""
    p = fl.Problem(batch=1, heads=1, len_q=64, len_kv=96, head_dim=64, dtype="float16")
    q, k, v = fl.random_inputs(p, seed=3)
    falling: Array = np.linspace(12, 0.2, 96).astype(np.float16)  # tiles are walked from the last to the first
    first_warp: Array = np.where(np.arange(64) < 16, 1, 0.01).astype(np.float16)
    q, k = q * first_warp[:, None], k * falling[:, None]
    name, text = f"{kernel}.cu", kernels_cu.source(kernel).read_text(encoding="utf-8")
    branch = "if (risen) {\n softmax.raise(s, alpha);\n wgmma_wait<0>();  // in the branch\n settle(o);\n }"
    assert text.count(RAISE) == 1
    faulty = kept({name: text.replace(RAISE, branch)}) / name
    for source, kinds in ((kernels_cu.source(kernel), []), (faulty, ["divergent collective"])):
        done = fl.emulate(q, k, v, algorithm=kernel, lse=True, tile=ONE, device="h200", source=source, time_limit=20)
        assert [finding.kind for finding in done.findings] == kinds, done.complaints()
        assert judge(expect(p, q, k, v), done.out, done.lse).passed
        assert all(_is(finding.line, "wgmma_wait<0>();  // in the branch", source) for finding in done.findings)
        assert all(_is(finding.other_line, WAIT_O.strip().split("\n")[0] + "\n", source) for finding in done.findings)


def test_more_blocks_than_sms_hand_over_their_registers() -> None:
    """A warp that was told to wait for registers may have been given them before it does."""
    p = fl.Problem(batch=1, heads=300, len_q=40, len_kv=100, head_dim=64, dtype="bfloat16")
    ran = fl.emulate(
        *fl.random_inputs(p), algorithm="flash3", device="h200", source=kernels_cu.source("flash3"), time_limit=60
    )
    assert ran.complaints() == []
