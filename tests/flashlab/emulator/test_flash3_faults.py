"""Faults seeded in FlashAttention-3's kernels: each is caught, by the sanitiser that it belongs to with its line, or by a check."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import flashlab as fl
import kernels_cu
from flashlab.emulator import Finding, Line
from flashlab.verify.rule import expect, judge
from simulator.dtypes import Array
from tests.flashlab.emulator.mutant import kept
from tests.patches import line_of, patched
from tests.tiers import one_of_each

pytestmark = pytest.mark.compiler

CHECKS = ("numbers", "bytes", "unwritten", "zeros")
"""What catches a fault that misuses nothing: the rule, bytes by the formula, outputs that nobody wrote, counters that aren't 0."""

HEADER, SCHEDULER = "flash3.cuh", "scheduler.cuh"
CAUSAL = fl.Problem(batch=1, heads=2, kv_heads=1, len_q=150, len_kv=110, head_dim=40, dtype="float16", causal=True)
"""Up to seven key tiles in a ring of two slots; a pair of row tiles and one alone; rows that see no key; a tail."""
BFLOAT16 = CAUSAL.replace(dtype="bfloat16")
ONE, TWO = (64, 16), (128, 16)
"""Tiles for one warpgroup that computes, and for two."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`old`, code that occurs once in `file` (None: the kernel's own), becomes `new`; the symptoms are then `sees` and `also`.

    `within`: the step in whose region `old` is looked for (None: anywhere). `at`, `other`: code, once in the kernel, of the line of
    the finding `sees`, and of its other party's. How code is found: tests/patches.py.
    """

    name: str
    old: str
    new: str
    sees: str
    also: tuple[str, ...] = ()
    within: str | None = None
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
        if self.file is not None:  # with all the others: a header finds those beside it first
            files |= {
                path.name: path.read_text(encoding="utf-8") for path in sorted(kernels_cu.include_dir().glob("*.cuh"))
            }
        file = self.file or real.name
        files[file] = patched(files[file], self.old, self.new, step=self.within)
        return kept(files) / real.name


LOOP = "for (int j = work.tiles.last - 1; j >= work.tiles.first; --j) { … "
"""Over the consumers' key tiles, all but the first."""
K_FULL = "mbarrier_wait(sram.k_full(k_ring.slot), k_ring.parity);"
V_FULL = "mbarrier_wait(sram.v_full(v_ring.slot), v_ring.parity);"
Q_FULL = "mbarrier_wait(sram.q_full(), q_parity);"
K_EMPTY = "mbarrier_wait(sram.k_empty(k_ring.slot), k_ring.parity ^ 1);"
V_EMPTY = "mbarrier_wait(sram.v_empty(v_ring.slot), v_ring.parity ^ 1);"
Q_EMPTY = "mbarrier_wait(sram.q_empty(), q_parity ^ 1);"
TELL = "if (DYNAMIC && agenda.number >= gridDim.x) store_shared(sram.number(), agenda.number);"
RELEASE_K = "release(sram.k_empty(k_ring.slot));"
RELEASE_V = "release(sram.v_empty(v_ring.slot));"
WAIT_S = "wgmma_wait<1>(); settle(s);"
WAIT_O = "wgmma_wait<0>(); settle(o);"
RAISE, RESCALE = "if (risen) softmax.raise(s, alpha);", "if (!RESCALE_LATE && risen) rescale(o, alpha);"
EXPECT = "mbarrier_arrive_expect(full, TileT::BYTES)"
LOAD_K, LOAD_V, LOAD_Q = "load_k(j - 1);", "load_tile(sram.v(v_ring.slot)", "load_tile(sram.q(), q,"
QK_FIRST, QK = "multiply_qk_alone(", "multiply_qk("
PV, PV_LAST = "multiply_pv(", "multiply_pv_alone("

WAITS = [
    Fault(
        name="wait for K removed", old=LOOP + K_FULL, new="", sees="wait forgotten", at=QK, other=LOAD_K, also=("mbarrier",),
    ),
    Fault(
        name="wait for V removed", old=LOOP + V_FULL, new="", sees="wait forgotten", at=PV, other=LOAD_V, also=("mbarrier",),
    ),
    Fault(
        name="wait for Q removed", old=Q_FULL, new="", sees="wait forgotten", at=QK_FIRST, other=LOAD_Q,
        also=("mbarrier", "race"),
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
        name="wait for the row tile before removed", old=Q_EMPTY + TELL, new=TELL, sees="wait forgotten", at=QK, other=LOAD_Q,
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
        name="wait leaves a product too many", old="wgmma_wait<1>();", new="wgmma_wait<2>();",
        sees="wait forgotten", at="if (risen) softmax.raise(", other=QK, also=("race",),
    ),
    Fault(
        name="O rescaled while its product runs", old=RAISE, new=RAISE.replace(";", ", rescale(o, alpha);"),
        sees="wait forgotten", at="softmax.raise(s, alpha), rescale", other=PV,
    ),
    Fault(
        name="product never committed", file="fp16.cuh", old="void multiply_qk( … wgmma_commit();", new="",
        sees="wait forgotten", at="softmax.raise(s, alpha); if constexpr (!CAP_LATE) softmax.exponentials",
        other=QK_FIRST, also=("race",),
    ),
    Fault(
        name="fence removed before a product of registers", file="fp16.cuh", old="void multiply_pv_alone( … wgmma_fence();",
        new="", sees="fence forgotten", at=PV_LAST,
    ),
    Fault(
        name="fence removed before accumulators are used anew", old="wgmma_fence(); multiply_qk", new="multiply_qk",
        within="scores", sees="fence forgotten", at=QK,
    ),
    Fault(
        name="rung 1: slot filled again before all are done", kernel="flash3_1",
        within="output", old="barrier();", new="", sees="race", problem=BFLOAT16, tile=TWO,
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
        name="slot of the ring not advanced", old=WAIT_O + RELEASE_V + "v_ring.advance();", new=WAIT_O + RELEASE_V,
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
        name="one consumer never releases", old=WAIT_O + RELEASE_V, new=f"{WAIT_O} if (consumer == 0) {RELEASE_V}",
        sees="deadlock", at=V_EMPTY, tile=TWO,
    ),
    Fault(
        name="mbarriers not shown to the copy engine", file=HEADER, old="mbarrier_publish();", new="",
        sees="proxy fence forgotten", at=LOAD_Q,
    ),
    Fault(
        name="mbarriers used before they are made", file=HEADER, old="void open( … barrier();", new="", sees="race",
        at=Q_FULL,
    ),
    Fault(
        name="turns of too few threads", file=HEADER, old="named_barrier_sync(TURN + consumer, 2 * WARPGROUP)",
        new="named_barrier_sync(TURN + consumer, WARPGROUP)", sees="barrier", at="turns.take();", tile=TWO,
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
        name="K of the tile before", within="load_k", old="load_k(j - 1);", new="load_k(j);", sees="numbers",
    ),
    Fault(
        name="box a row too low", within="load_v", old="key_tile(j, here) * BC;",
        new="key_tile(j, here) * BC + 1;", sees="numbers", problem=BFLOAT16,
    ),
    Fault(
        name="box of the query's head", old="kv_head(shape, work.head);", new="work.head;", sees="numbers",
    ),
    Fault(
        name="O scaled once too often", old=RESCALE, new=RESCALE.replace(";", ", rescale(o, alpha);"),
        sees="numbers",
    ),
    Fault(
        name="mask of the last tile skipped", old="softmax.mask(s, own, lane_row, work.tiles.last, full);", new="",
        sees="numbers",
    ),
    Fault(
        name="LSE of the lane's upper row", old="store_lse(lse, shape, work, row,", new="store_lse(lse, shape, work, lane_row,",
        sees="numbers", also=("bytes", "unwritten"),
    ),
    Fault(
        name="LSE a row too low", file=HEADER, old="* batches.len_q + work.q + row;", new="* batches.len_q + work.q + row + 1;",
        sees="out of bounds", at="store_lse(lse",
    ),
    Fault(
        name="agenda drops the last row tile", file=SCHEDULER, old="number >= row_tiles * all_heads)",
        new="number >= row_tiles * all_heads - 1)", sees="unwritten", also=("numbers", "bytes", "zeros"),
    ),
    Fault(
        name="last row tile of a head each time", file=SCHEDULER, old="row_tiles - 1 - place / heads", new="row_tiles - 1",
        sees="race between blocks", at="store_o(out",
    ),
]  # fmt: skip
"""What is loaded, computed and stored: by whom, and which."""

DRAWS = [
    Fault(
        name="number told while the last one may be unread", old=Q_EMPTY + TELL, new=TELL + Q_EMPTY, sees="race",
        at="agenda.number = told(", other=TELL, problem=CAUSAL.replace(heads=12, len_q=40, len_kv=16),
    ),
    Fault(
        name="number read before it is told", file=HEADER, old="mbarrier_wait(sram.q_full(), q_parity); return uniform(",
        new="return uniform(", sees="race", at="agenda.number = told(", other=TELL,
    ),
    Fault(
        name="a number passed over", file=SCHEDULER, old="number = gridDim.x + drawn;",
        new="number = gridDim.x + drawn + 1;", sees="unwritten", also=("numbers", "bytes", "zeros"),
    ),
    Fault(
        name="the end is not told", old="mbarrier_arrive(sram.q_full());", new="", sees="deadlock",
        at="agenda.number = told(",
    ),
    Fault(
        name="counter goes on to the next call", file=SCHEDULER, old="shape.heads - 1);", new="shape.heads);", sees="zeros",
    ),
]  # fmt: skip
"""How blocks draw their row tiles, where there are fewer blocks than those."""

FAULTS = [*WAITS, *BARRIERS, *RESULTS, *DRAWS]
SOUND = sorted({(fault.kernel, fault.problem.dtype, fault.tile) for fault in FAULTS})


@pytest.mark.alike(
    "agenda-drops-the-last-row-tile",
    "counter-goes-on-to-the-next-call",
    "K-of-the-tile-before",
    "fewer-registers-kept-than-a-thread-may-have",
    "wait-for-K-removed",
)
@pytest.mark.parametrize(
    "fault", one_of_each(FAULTS, lambda fault: fault.sees, lambda fault: fault.name.replace(" ", "-"))
)
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


@pytest.mark.parametrize("sound", one_of_each(SOUND, lambda sound: sound[0]))
def test_sound_kernels_have_no_complaint(sound: tuple[str, str, tuple[int, int]]) -> None:
    """On the problems and tiles on which the faults have."""
    kernel, dtype, tile = sound
    done, checks = run(kernel, CAUSAL.replace(dtype=dtype), tile, kernels_cu.source(kernel))
    assert done.complaints() == []
    assert checks == set()


def run(kernel: str, problem: fl.Problem, tile: tuple[int, int], source: Path) -> tuple[fl.Emulation, set[str]]:
    """A run of that file, and which of the checks fail."""
    arrays = fl.random_inputs(problem, seed=0)
    row_tiles = problem.batch * problem.heads * problem.row_tiles(fl.Tile(*tile))
    done = fl.emulate(
        kernel,
        *arrays,
        causal=problem.causal,
        lse=True,
        tile=tile,
        device=replace(fl.DEVICES["h200"], name="a few SMs of an H200", sms=row_tiles // 2),  # or nobody draws
        source=source,
        time_limit=20,
    )
    right = judge(expect(problem, *arrays), done.out, done.lse).passed
    failed = {
        "numbers": not right,
        "bytes": bool(done.differences),
        "unwritten": bool(done.unwritten),
        "zeros": bool(done.left),
    }
    return done, {check for check in CHECKS if failed[check]}


def _names(finding: Finding, fault: Fault) -> bool:
    """The finding is of the fault's kind and at its lines."""
    return (
        finding.kind == fault.sees
        and _is(finding.line, fault.at, fault.source)
        and (not fault.other or _is(finding.other_line, fault.other, fault.source))
    )


def _is(line: Line | None, code: str, source: Path) -> bool:
    """The line is that of code that occurs once in the kernel as it was run."""
    number = line_of(source.read_text(encoding="utf-8"), code)
    return line is not None and Path(line.file) == source.resolve() and line.number == number


@pytest.mark.alike("flash3_3")
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
    faulty = kept({name: patched(text, RAISE, branch)}) / name
    lines = faulty.read_text(encoding="utf-8").splitlines()
    waits = [n for n, line in enumerate(lines, 1) if "wgmma_wait<0>();" in line]
    inside = next(n for n in waits if "// in the branch" in lines[n - 1])
    behind = waits[waits.index(inside) + 1]
    for source, kinds in ((kernels_cu.source(kernel), []), (faulty, ["divergent collective"])):
        done = fl.emulate(kernel, q, k, v, lse=True, tile=ONE, device="h200", source=source, time_limit=20)
        assert [finding.kind for finding in done.findings] == kinds, done.complaints()
        assert judge(expect(p, q, k, v), done.out, done.lse).passed
        for finding in done.findings:
            assert finding.line and finding.other_line
            assert {finding.line.number, finding.other_line.number} == {inside, behind}


@pytest.mark.long
def test_more_blocks_than_sms_hand_over_their_registers() -> None:
    """A warp that was told to wait for registers may have been given them before it does."""
    p = fl.Problem(batch=1, heads=300, len_q=40, len_kv=100, head_dim=64, dtype="bfloat16")
    ran = fl.emulate("flash3", *fl.random_inputs(p), device="h200", source=kernels_cu.source("flash3"), time_limit=60)
    assert ran.complaints() == []
