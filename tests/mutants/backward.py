"""Seeded bugs in the backward pass, in its tile program and its kernel. No GPU is needed: simulator and emulator run them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from simulator.operations.backward import BACKWARD
from tests.mutants.zoo import ROOT, Mutant
from tests.patches import patched

PROGRAM, KERNEL = "simulator/programs/flash2_backward.py", "kernels_cu/flash2_backward.cu"
ORDERED, MEMORY = "kernels_cu/include/dq_in_turn.cuh", "kernels_cu/include/memory.cuh"
FLASH1, STANDARD = "kernels_cu/flash1_backward.cu", "kernels_cu/standard_backward.cu"
MASK, MMA, TILES, ROWS = (f"kernels_cu/include/{name}.cuh" for name in ("mask", "mma", "backward", "backward_rows"))
SUMS, VISITS = "kernels_cu/include/sum_tiles.cuh", "kernels_cu/include/flash2_backward.cuh"
HOPPER, HOPPER_TILES = "kernels_cu/flash3_backward.cu", "kernels_cu/include/flash3_backward.cuh"
CLEAR, CLEAR_KEYS = "kernels_cu/include/clear.cuh", "own.len_kv - work.first_key, CLEARED);"
WIDE, WIDE_TILES = "kernels_cu/flash3_backward_wide.cu", "kernels_cu/include/flash3_backward_wide.cuh"
WIDE_PROGRAM, HOPPER_SHARED = "simulator/programs/flash3_backward_wide.py", "kernels_cu/include/hopper_backward.cuh"
SCORES, LSE = "kernels_cu/include/scores.cuh", "a gradient of the LSE"
SINKS = "sinks, causal, GQA, batch 2, rows without keys"
GROUP, SEQUENCES = "ragged, GQA, batch 2", "sequences, causal, GQA"
SINKS_APART = "sinks, sequences, causal, GQA"
CAPPED = "a soft cap, causal, GQA"
LONG = "a query less than a tile, a key more"
PHILOX = "kernels_cu/include/philox.cuh"
TURNS, TURNS_OF_A_WINDOW, UNSEEN = "several tiles", "several tiles, window", "queries that see no key"
IN_ORDER, UNSORTED = "sequences in an order", "sequences, all alike"
TURN = "mbarrier_wait(sram.turn((n - 1) & 1), ((n + 1) / 2 & 1) ^ 1);"
SHAPES = {
    **BACKWARD.shapes,
    IN_ORDER: {"heads": 2, "lengths": [57, 0, 130, (3, 70), (200, 260), 60, (130, 0)], "causal": True},
    UNSORTED: {"heads": 1, "lengths": [(40, 64)] * 4},
    TURNS: {"heads": 2, "len_q": 270, "len_kv": 250, "head_dim": 128},
    UNSEEN: {"heads": 1, "len_q": 250, "len_kv": 70, "head_dim": 128, "causal": True},
    TURNS_OF_A_WINDOW: {"heads": 1, "len_q": 250, "len_kv": 250, "head_dim": 128, "window": (60, 20)},
}
"""The problems of verification, and what only turns and an order of key tiles need."""


@dataclass(frozen=True, kw_only=True)
class KernelMutant:
    """`old`, code that occurs once in `step` of `file`, becomes `new`. Then `check` must fail on the problem `case`.

    A check is one of verification, "misuse" (the emulated machine finds it) or "bytes" (the formula does). On a device of so
    many `sms`, if that isn't 0, a block has a part of a group's heads. A block that waits for ever sleeps,
    so the emulated machine takes long to be sure. Of a bug that `hangs` it is sure at once.
    """

    mechanism: str
    old: str
    new: str
    check: str
    case: str = "causal"
    step: str | None = None
    file: str = KERNEL
    algorithm: str = "flash2_backward"
    head_dim: int = 64
    hangs: bool = False
    sms: int = 0

    def written(self, folder: Path) -> Path:
        """A copy of the kernels' folder with the bug in it."""
        shutil.copytree(ROOT / "kernels_cu", folder / "kernels_cu", ignore=shutil.ignore_patterns("emulator"))
        path = folder / self.file
        path.write_text(patched(path.read_text(encoding="utf-8"), self.old, self.new, step=self.step), encoding="utf-8")
        return folder / "kernels_cu"


KERNELS = [
    KernelMutant(
        mechanism="the gradient of the LSE added to D", file=SCORES, old="return delta - load_global<float>(dlse + row)",
        new="return delta + load_global<float>(dlse + row)", check="adjoint", case=LSE,
    ),
    KernelMutant(
        mechanism="the gradient of the LSE of another head", file=ROWS, old="less_dlse(sum, dlse, place)",
        new="less_dlse(sum, dlse, row)", check="rule", case=LSE,
    ),
    KernelMutant(
        mechanism="the gradient of the LSE left out", file=FLASH1, old="sum = less_dlse(sum, dlse, statistics + row);", new="",
        check="rule", case=LSE, algorithm="flash1_backward",
    ),
    KernelMutant(
        mechanism="the sign of a sink's gradient", file=ROWS, old="store_global(dsinks + blockIdx.x, -sum)",
        new="store_global(dsinks + blockIdx.x, sum)", check="adjoint", case=SINKS,
    ),
    KernelMutant(
        mechanism="the sink of another head", file=ROWS, old="of_head<SINKS>(sinks, head,", new="of_head<SINKS>(sinks, batch,",
        check="head_order", case=SINKS,
    ),
    KernelMutant(
        mechanism="the last rows left out of a sink's gradient", file=ROWS, old="first_row < rows; first_row += 32 * EACH",
        new="first_row < rows / 256 * 256; first_row += 32 * EACH", check="rule", case="sinks, a gradient of the LSE",
    ),
    KernelMutant(
        mechanism="a sink's exponential to base 2", file=ROWS, old="(logs[e] == -INF ? 0 : logs[e])) * LOG2E)",
        new="(logs[e] == -INF ? 0 : logs[e])))", check="rule", case=SINKS, algorithm="flash2_backward_deterministic",
    ),
    KernelMutant(
        mechanism="a sequence's sink with the rows of those before it", file=ROWS, old="load_global<int>(offsets_q + batch) : 0",
        new="0 : 0", check="rule", case=SINKS_APART,
    ),
    KernelMutant(
        mechanism="a sequence's sink with the rows of those behind it", file=ROWS, old="offsets_q + batch + 1",
        new="offsets_q + gridDim.x / shape.heads", check="rule", case=SINKS_APART, algorithm="flash2_backward_deterministic",
    ),
    KernelMutant(
        mechanism="the gradient of the LSE scaled as D", file=STANDARD, old="delta = less_dlse(warp_sum(delta), dlse,",
        new="delta = warp_sum(delta) + shape.scale * less_dlse(0, dlse,", check="rule", case=LSE, algorithm="standard_backward",
    ),
    KernelMutant(
        mechanism="D left out", file=TILES, old="void begin_below … = -d[e % 2]", new="= 0", check="equal_keys",
    ),
    KernelMutant(
        mechanism="keys beyond the end not hidden", file=TILES, old="mask_rows(s[f][m], key, keys_first.len_q);", new="",
        check="rule", case="a query less than a tile, a key more",
    ),
    KernelMutant(
        mechanism="LSE of an empty row as it is", file=TILES, old="natural == -INF ? INF : natural * LOG2E",
        new="natural * LOG2E", check="rule", case="more queries than keys, causal",
    ),
    KernelMutant(
        mechanism="dK without the scale", step="store_dkv", old="warp, of_kept(shape.scale,", new="warp, of_kept(1,",
        check="adjoint",
    ),
    KernelMutant(
        mechanism="dQ without the scale", file=SUMS, old="half, of_kept(shape.scale,", new="half, of_kept(1,", check="rule",
    ),
    KernelMutant(
        mechanism="one query head of the group", old="here.head + group : here.head", new="here.head + 1 : here.head",
        check="gqa", case="ragged, GQA, batch 2",
    ),
    KernelMutant(
        mechanism="sides of the window not exchanged", file=MASK,
        old="other.left = shape.right, other.right = shape.left", new="other.left = shape.left", check="key_sets", case="window",
    ),
    KernelMutant(
        mechanism="lengths not exchanged for the mask", file=MASK,
        old="other.len_q = shape.len_kv, other.len_kv = shape.len_q,", new="", check="key_sets",
        case="more queries than keys, causal",
    ),
    KernelMutant(
        mechanism="a tile that the diagonal cuts taken for full", step="mask", old="own_key + BC - 1, BR", new="own_key, BR",
        check="key_sets",
    ),
    KernelMutant(
        mechanism="mask of another warp's queries", file=TILES, old="first_query + m * TURN + 16 * warp.across",
        new="first_query + m * TURN",
        check="key_sets",
    ),
    KernelMutant(
        mechanism="exponents of a negative scale not turned", file=TILES, old="scores.flip(s[f][m]);", new="",
        check="rule", case="a negative scale, causal",
    ),
    KernelMutant(
        mechanism="the LSE read in place of D", step="load_do", old="load_global<float>(delta +",
        new="load_global<float>(lse +", check="equal_keys", case="aligned",
    ),
    KernelMutant(
        mechanism="padding of a row counted in D", file=ROWS, old="shape.head_dim - own)", new="CHUNK_ELEMENTS)",
        check="memory", case="an odd head dim",
    ),
    KernelMutant(
        mechanism="dS not transposed for dQ", file=TILES, old="load_a_columns(ds_tile, warp.row + 16 * f, key)",
        new="load_a(ds_tile, warp.row + 16 * f, key)", check="key_order", case="aligned",
    ),
    KernelMutant(
        mechanism="halves of a fragment exchanged on their way to HBM", file=MMA, old="odd ? c[0] : c[2]",
        new="odd ? c[2] : c[0]", check="rule", case="aligned", algorithm="flash1_backward",
    ),
    KernelMutant(
        mechanism="K of the first KV head", step="load_kv", old="k, batch, kv_head, keys_before", new="k, batch, 0, keys_before",
        check="head_order", case="ragged, GQA, batch 2",
    ),
    KernelMutant(
        mechanism="LSE of the batch's first head", step="load_q", old="load_global<float>(lse + own",
        new="load_global<float>(lse + own - at.head * shape.len_q", check="head_order", case="causal",
    ),
    KernelMutant(
        mechanism="sum of dQ not set to 0", file=SUMS, old="i < BR * COLUMNS / 4; i +=", new="i < BR * COLUMNS / 8; i +=",
        check="misuse",
    ),
    KernelMutant(
        mechanism="no barrier between dS and its readers", step="ds", old="barrier();", new="", check="misuse",
    ),
    KernelMutant(
        mechanism="no barrier before a tile is loaded over", step="load_q", old="copy_wait<0>(); … barrier();", new="",
        check="misuse",
    ),
    KernelMutant(
        mechanism="dQ stored, not added", file=TILES, old="add_global(sum, make_float4", new="store_global(sum, make_float4",
        check="misuse",
    ),
    KernelMutant(
        mechanism="columns that a warp hasn't got added", file=TILES, old="if (m * TURN + 16 * warp.across >= HEAD_DIM) continue;",
        new="", check="misuse", case="ragged, GQA, batch 2",
    ),
    KernelMutant(
        mechanism="columns that a warp hasn't got multiplied", file=TILES,
        old="HEAD_DIM / 16 % ACROSS == 0 || warp.across == 0", new="true", check="bytes", case="ragged, GQA, batch 2",
    ),
    KernelMutant(
        mechanism="Q prefetched for the tile before", old="at.i < tiles.last ?", new="at.i + 1 < tiles.last ?",
        check="rule", file=VISITS,
    ),
    KernelMutant(
        mechanism="dQ of the last key tile left in its workspace", algorithm="flash1_backward", file=FLASH1,
        step="update_dq", old="j < key_tiles - 1", new="j < key_tiles", check="misuse",
    ),
    KernelMutant(
        mechanism="D read before all warps have written it", algorithm="flash1_backward", file=FLASH1, step="delta",
        old="barrier();", new="", check="misuse",
    ),
    KernelMutant(
        mechanism="what other key tiles gave dQ forgotten", algorithm="flash1_backward", file=FLASH1, step="update_dq",
        old="x = load_global<float4>(sums);", new="{ }", check="key_order", case="aligned",
    ),
    KernelMutant(
        mechanism="a launch of its own with one query head of the group", algorithm="standard_backward", file=STANDARD,
        old="const Dropout dropout(rng_state, shape.kept); float sum … visit < group",
        new="visit < 1", check="gqa", case="ragged, GQA, batch 2",
    ),
    KernelMutant(
        mechanism="padding read that is shorter than what is written", algorithm="standard_backward", file=STANDARD,
        step="store_ds", old="if (key < shape.len_kv) {", new="{", check="misuse",
    ),
    *(
        replace(each, algorithm="flash3_backward", file=HOPPER if each.file == KERNEL else each.file)
        for each in (
            KernelMutant(
                mechanism="the other warpgroup's dS not waited for", step="ds",
                old="mbarrier_wait(sram.ds_full((n - 1) & 1), ((n + 1) / 2 & 1) ^ 1);", new="",
                check="misuse", case=GROUP,
            ),
            KernelMutant(
                mechanism="the tensor cores not told of dS", step="ds", old="fence_async();", new="", check="misuse", case=GROUP,
            ),
            KernelMutant(
                mechanism="dS always in the same buffer", step="ds", old="sram.ds(n & 1)", new="sram.ds(0)", check="misuse",
                case=GROUP,
            ),
            KernelMutant(
                mechanism="the next keys loaded over those in use", old="mbarrier_wait(sram.kv_empty(), agenda.parity ^ 1);",
                new="", check="misuse", case=GROUP,
            ),
            KernelMutant(
                mechanism="keys given back before the last dQ", old="if (work.seen()) {",
                new="release(sram.kv_empty()); if (work.seen()) {", check="misuse", case=GROUP,
            ),
            KernelMutant(
                mechanism="work told before all know the last", file=HOPPER_TILES,
                old="parity ^= 1) { mbarrier_wait(sram.work_empty(), parity ^ 1);", new="parity ^= 1) {", check="misuse",
                case=SINKS,
            ),
            KernelMutant(
                mechanism="key tiles dealt out where they are drawn", file=HOPPER_TILES,
                old="number = gridDim.x + (DYNAMIC ? draw_from(counter, last()) : number); store_shared",
                new="number = gridDim.x + number; store_shared", check="bytes", case=SINKS,
            ),
            KernelMutant(
                mechanism="an LSE to the base e", step="load_q", old="return lse_of(x);", new="return x;", check="rule",
            ),
            KernelMutant(
                mechanism="D added where it is taken away", step="load_do", old="kept_part(-x,", new="kept_part(x,",
                check="equal_keys", case="aligned",
            ),
            KernelMutant(
                mechanism="a tile's dQ added to the first one's",
                old="before = sum_tile_of(shape, here.head, here.i, origin.tile);", new="", check="rule", case=GROUP,
            ),
            KernelMutant(
                mechanism="keys beyond the end seen", step="mask", old="mask_rows(s, lane_key, own.len_kv);", new="",
                check="rule", case="a query less than a tile, a key more",
            ),
            KernelMutant(
                mechanism="dK of TMA's keys without the scale", step="store_dkv",
                old="of_kept(shape.scale, shape.kept), bytes); store_row(row_address(dv",
                new="of_kept(1, shape.kept), bytes); store_row(row_address(dv", check="adjoint",
            ),
            KernelMutant(
                mechanism="heads of dQ's sums that overlap", file=SUMS, old="head * row_tiles_of(shape)",
                new="head * (shape.len_q / BR)", check="misuse", case=GROUP,
            ),
            KernelMutant(
                mechanism="the sums of dQ read in another order", file=SUMS, old="sums.part(n)",
                new="sums.part(COLUMNS / 8 - 1 - n)", check="rule",
            ),
            KernelMutant(
                mechanism="a warpgroup's keys counted twice", step="scores", old="64 * consumer", new="0", check="key_order",
                case="a query less than a tile, a key more",
            ),
        )
    ),
    *(
        replace(each, algorithm="flash3_backward", file=HOPPER if each.file == KERNEL else each.file)
        for each in (
            KernelMutant(
                mechanism="a neighbour's keys weighed with 0", old=f"clear_rows<CONSUMERS>(sram.k(), {CLEAR_KEYS}", new="",
                check="sequences", case=SEQUENCES,
            ),
            KernelMutant(
                mechanism="a neighbour's values weighed with 0", old=f"clear_rows<CONSUMERS>(sram.v(), {CLEAR_KEYS}", new="",
                check="sequences", case=SEQUENCES,
            ),
            KernelMutant(
                mechanism="a neighbour's queries weighed with 0", step="load_q",
                old="clear_rows<CONSUMERS>(sram.q(ring.slot), rows, CLEARED);", new=";", check="sequences", case=SEQUENCES,
            ),
            KernelMutant(
                mechanism="a neighbour's dO weighed with 0", step="load_do",
                old="clear_rows<CONSUMERS>(sram.dout(ring.slot), rows, CLEARED);", new=";", check="sequences", case=SEQUENCES,
            ),
            KernelMutant(
                mechanism="a sequence's last key cleared", old=f"sram.k(), {CLEAR_KEYS}",
                new="sram.k(), own.len_kv - work.first_key - 1, CLEARED);", check="rule", case=SEQUENCES,
            ),
            KernelMutant(
                mechanism="queries cleared before they have come", step="load_q",
                old="mbarrier_wait(sram.q_full(ring.slot), ring.parity); const int rows", new="const int rows", check="misuse",
                case=SEQUENCES,
            ),
            KernelMutant(
                mechanism="zeros that the tensor cores don't see", file=CLEAR, old="fence_async();", new="", check="misuse",
                case=SEQUENCES,
            ),
            KernelMutant(
                mechanism="zeros that the other warpgroup still writes", file=CLEAR,
                old="named_barrier_sync(barrier, CONSUMERS * WARPGROUP);", new="", check="misuse", case=SEQUENCES,
            ),
            KernelMutant(
                mechanism="key tiles looked for among the queries", file=HOPPER_SHARED,
                old="sequence_at<BC>(transposed(shape), offsets.kv,", new="sequence_at<BC>(shape, offsets.q,", check="misuse",
                case=UNSORTED,
            ),
            KernelMutant(
                mechanism="first keys aligned with the first queries", file=HOPPER_SHARED,
                old="aligned = own.queries - (keys.end - keys.first);", new="aligned = 0;",
                check="misuse", case=SEQUENCES,
            ),
            KernelMutant(
                mechanism="boxes of the first sequence's keys", old="first_row = origin.key + work.first_key",
                new="first_row = work.first_key", check="rule", case=SEQUENCES,
            ),
            KernelMutant(
                mechanism="boxes of the first sequence's queries", old="origin.query + at.i * BR, sram.q_full",
                new="at.i * BR, sram.q_full", check="rule", case=SEQUENCES,
            ),
            KernelMutant(
                mechanism="boxes of the first sequence's dO", old="origin.query + at.i * BR, sram.do_full",
                new="at.i * BR, sram.do_full", check="rule", case=SEQUENCES,
            ),
            KernelMutant(
                mechanism="LSE and D of the first sequence", file=HOPPER_SHARED, old="shape.len_q + origin.query + first",
                new="shape.len_q + first", check="rule", case=SEQUENCES,
            ),
            KernelMutant(
                mechanism="LSE and D of the sequences behind", file=HOPPER_SHARED, old="left = origin.alone(shape).len_q - first",
                new="left = shape.len_q - origin.query - first", check="bytes", case=SEQUENCES,
            ),
            KernelMutant(
                mechanism="sums of dQ where those of the sequence before are", file=HOPPER_SHARED,
                old="own.tile = own.query / QUERIES + keys.number;", new="own.tile = own.query / QUERIES;", check="rule",
                case=SEQUENCES,
            ),
            KernelMutant(
                mechanism="dK stored in the rows of the first keys", old="row_address(dk, batch, head, origin.key + key)",
                new="row_address(dk, batch, head, key)", check="misuse", case=SEQUENCES,
            ),
            KernelMutant(
                mechanism="dQ of the next sequence's first rows", file=SUMS, old="min(first + BR, own.end)", new="first + BR",
                check="misuse", case=SEQUENCES,
            ),
            KernelMutant(
                mechanism="empty places of the sums set to 0", step="delta", old="if (RAGGED && rows.first >= rows.end) return;",
                new="", check="bytes", case=SEQUENCES,
            ),
            KernelMutant(
                mechanism="empty places of the sums converted", step="convert_dq",
                old="if (RAGGED && rows.first >= rows.end) return;", new="", check="misuse", case=SEQUENCES,
            ),
            KernelMutant(
                mechanism="empty places told", file=HOPPER_TILES,
                old="if (!ONE_TILE && number <= last() && told.end == 0) continue;", new="", check="misuse", case=UNSORTED,
            ),
            KernelMutant(
                mechanism="sequences told before all know the last", file=HOPPER_TILES,
                old="continue; mbarrier_wait(sram.work_empty(), parity ^ 1);", new="continue;", check="misuse", case=SEQUENCES,
            ),
            KernelMutant(
                mechanism="the first told heard twice", file=HOPPER_TILES, old="hear(RAGGED ? parity ^ 1 : parity);",
                new="hear(parity);", check="misuse", case=SEQUENCES,
            ),
            KernelMutant(
                mechanism="the tiles of a plain batch dealt out", file=HOPPER_SHARED,
                old="return row_tiles_of<BC>(transposed(shape));", new="return ceil_div(shape.len_kv, BC);",
                check="misuse", case=SEQUENCES,
            ),
        )
    ),
    *(
        replace(each, algorithm="flash3_backward_wide", file=WIDE if each.file == KERNEL else each.file)
        for each in (
            KernelMutant(
                mechanism="P read before the other warpgroup wrote it", step="ds",
                old="mbarrier_wait(sram.p_full(ring.slot), ring.parity);", new="", check="misuse", case=GROUP,
            ),
            KernelMutant(
                mechanism="P always in the same slot", step="exp", old="store_weights(sram.p(ring.slot), s);",
                new="store_weights(sram.p(0), s);", check="misuse", case=SINKS,
            ),
            KernelMutant(
                mechanism="Q given back before dK has it", step="ds", old="round_operand(rounded, dp);",
                new="round_operand(rounded, dp); release(sram.q_empty(ring.slot));", check="misuse", case=SINKS,
            ),
            KernelMutant(
                mechanism="dO given back before dV has it", step="exp", old="round_operand(rounded, s);",
                new="round_operand(rounded, s); release(sram.do_empty(ring.slot));", check="misuse", case=SINKS,
            ),
            KernelMutant(
                mechanism="the next V loaded over one in use", step="load_v",
                old="mbarrier_wait(sram.v_empty(v_ring.slot), v_ring.parity ^ 1);", new="", check="misuse", case=LONG, head_dim=256,
            ),
            KernelMutant(
                mechanism="K given back before dQ has it", old="multiply_into(dp, s);",
                new="release(sram.k_empty(k_ring.slot)); multiply_into(dp, s);", check="misuse", case=LONG,
            ),
            KernelMutant(
                mechanism="dV stored as dK", step="store_dkv", old="first ? dv : dk", new="first ? dk : dv", check="rule",
            ),
            KernelMutant(
                mechanism="dK of a warpgroup without the scale", step="store_dkv", old="first ? 1 : shape.scale", new="1",
                check="adjoint",
            ),
            KernelMutant(
                mechanism="dQ of its own rows without the scale", step="store_dq", old="sum, half, shape.scale",
                new="sum, half, 1", check="rule",
            ),
            KernelMutant(
                mechanism="one warpgroup's queries for both", old="own = 64 * (warpgroup_id() - 1)", new="own = 0",
                check="misuse",
            ),
            KernelMutant(
                mechanism="K held as if it lay unswizzled", file=WIDE_TILES, old="^ (row % 8)", new="", check="rule",
                head_dim=128,
            ),
            KernelMutant(
                mechanism="another warp's keys held", file=WIDE_TILES, old="16 * (warp_id() % 4) + lane_id() % 16",
                new="lane_id() % 16", check="key_order", case="aligned", head_dim=128,
            ),
            KernelMutant(
                mechanism="D added to dP for dQ", old="-own_delta[e / 2]", new="own_delta[e / 2]", check="equal_keys",
                case="aligned",
            ),
            KernelMutant(
                mechanism="an LSE to the base e for dQ", old="lse_of(load_global<float>(lse + first + lane_row + 8 * half))",
                new="load_global<float>(lse + first + lane_row + 8 * half)", check="rule",
            ),
            KernelMutant(
                mechanism="a tile that the diagonal cuts taken for full for dQ",
                old="j < full.first || j > full.last", new="j < full.first || j > full.last + 1", check="rule",
            ),
            KernelMutant(
                mechanism="a tile that the diagonal cuts taken for full for dK and dV",
                old="here.i < full.first", new="here.i + 1 < full.first", check="key_sets",
            ),
            KernelMutant(
                mechanism="exponents of a negative scale not turned for dQ", step="mask",
                old="j > full.last) { scores.flip(s);", new="j > full.last) {", check="rule", case="a negative scale, causal",
            ),
            KernelMutant(
                mechanism="one query head of the group for dK and dV", file=HOPPER_SHARED,
                old="++head, i = tiles.first;", new="head = 1 << 30;", check="gqa", case=GROUP,
            ),
            KernelMutant(
                mechanism="K and V of the first KV head for dQ", old="own_head = kv_head(shape, rows.head);", new="own_head = 0;",
                check="head_order", case=GROUP,
            ),
            KernelMutant(
                mechanism="heads that share the L2 taken for one", file=WIDE_TILES,
                old="first_head + place % heads, first = ", new="first_head, first = ", check="misuse", case=GROUP,
            ),
            KernelMutant(
                mechanism="hidden key tiles walked for dQ", file=WIDE_TILES,
                old="visible_tiles(shape, first, min(first + BR, shape.len_q) - 1, BC)",
                new="Keys{0, ceil_div(shape.len_kv, BC) - 1}", check="bytes", case="keys that no query sees",
            ),
        )
    ),
    KernelMutant(
        mechanism="sequences found among the queries", old="{offsets_kv, offsets_q}", new="{offsets_q, offsets_kv}",
        check="misuse", case=SEQUENCES,
    ),
    KernelMutant(
        mechanism="an empty place isn't left", old="if (RAGGED && key_tile.first_row >= key_tile.keys) return;", new="",
        check="bytes", case=SEQUENCES,
    ),
    KernelMutant(
        mechanism="statistics as far apart as a sequence is long", old="* batches.len_q + row;",
        new="* shape.len_q + row;", check="rule", case=SEQUENCES,
    ),
    KernelMutant(
        mechanism="queries of the batch's first sequence", old="row_address(q, batch, at.head, first_row)",
        new="row_address(q, batch, at.head, first_query)", check="rule", case=SEQUENCES,
    ),
    KernelMutant(
        mechanism="dQ added to the batch's first rows", old="queries_before / BR + key_tile.sequence", new="key_tile.sequence",
        check="misuse", case=SEQUENCES,
    ),
    KernelMutant(
        mechanism="gradients of the next sequence's keys stored", old="shape, stored_key, dv_sum",
        new="batches, stored_key, dv_sum", check="misuse", case=SEQUENCES,
    ),
    KernelMutant(
        mechanism="neighbours' queries weighed with 0", old="rows = shape.len_q - first_query, first_row",
        new="rows = batches.len_q - first_query, first_row", check="misuse", case=SEQUENCES,
    ),
    KernelMutant(
        mechanism="a soft cap without its derivative", file=TILES, old="s[f][m][n][e] *= slope[f][n][e];", new=";", check="rule",
        case=CAPPED,
    ),
    KernelMutant(
        mechanism="a soft cap's derivative as that of a sigmoid", file=TILES, old="slope[f][n][e] = 1 - tanh * tanh",
        new="slope[f][n][e] = 1 - tanh", check="adjoint", case=CAPPED,
    ),
    KernelMutant(
        mechanism="0 times the infinity of a hidden score", file=TILES, old="fmaxf(s[f][m][n][e], -1)", new="s[f][m][n][e]",
        check="rule", case=CAPPED,
    ),
    *(
        replace(each, algorithm="flash2_backward_deterministic", check="misuse", case=GROUP)
        for each in (
            KernelMutant(
                mechanism="turns not waited for", file=ORDERED,
                old="if (threadIdx.x == 0) wait_for(turns + turn.counter, key_tile - turn.tiles.first);",
                new="", check="misuse",
            ),
            KernelMutant(
                mechanism="warps that add before their block's turn", file=ORDERED,
                old="wait_for(turns + turn.counter, key_tile - turn.tiles.first); … barrier();", new="", check="misuse",
            ),
            KernelMutant(
                mechanism="the turn handed on before all warps have added", file=ORDERED,
                old="long long begin, int i) const { barrier();", new="long long begin, int i) const {", check="misuse",
            ),
            KernelMutant(
                mechanism="counters of turns not set back", file=ORDERED, old="same.tiles.last - same.tiles.first",
                new="same.tiles.last - same.tiles.first + 1", check="misuse",
            ),
            KernelMutant(
                mechanism="key tiles drawn before all warps read which", file=ORDERED, old="key_tiles - 1)); barrier();",
                new="key_tiles - 1));", check="misuse",
            ),
        )
    ),
    *(
        replace(each, algorithm="flash2_backward_deterministic", case=SEQUENCES)
        for each in (
            KernelMutant(
                mechanism="counters of a sequence's key tiles not set back", file=ORDERED, old="key_tiles - 1", new="key_tiles",
                check="misuse",
            ),
            KernelMutant(
                mechanism="key tiles told where all blocks of a head tell theirs", file=ORDERED, old="+ place.q + place.first_row",
                new="", check="misuse",
            ),
            KernelMutant(
                mechanism="turns of another sequence", step="dq",
                old="row_of(here.head, queries_before), here.i, first_key", new="row_of(here.head, 0), here.i, first_key",
                check="misuse",
            ),
            KernelMutant(
                mechanism="dQ added to the rows of the first sequence", step="dq",
                old="queries_before / BR + key_tile.sequence", new="key_tile.sequence", check="misuse",
            ),
            KernelMutant(
                mechanism="keys numbered from those of the head", file=ORDERED, old="place.q + place.aligned : 0",
                new="place.q : 0", check="misuse",
            ),
            KernelMutant(
                mechanism="keys that end where the queries do", file=ORDERED, old="shape.len_kv = place.keys - place.aligned",
                new="shape.len_kv = place.keys", check="misuse",
            ),
            KernelMutant(
                mechanism="empty places not left",
                old="if (RAGGED && key_tile.first_row >= key_tile.keys) return;", new="", check="misuse",
            ),
            KernelMutant(
                mechanism="the LSE and D of the first sequence", old="row_of(at.head, queries_before + first_query)",
                new="row_of(at.head, first_query)", check="sequences",
            ),
        )
    ),
    *(
        replace(each, algorithm="flash3_backward_deterministic", file=HOPPER if each.file == KERNEL else each.file)
        for each in (
            KernelMutant(
                mechanism="dQ added before the block's turn", old=TURN, new=";", check="misuse", case=TURNS,
            ),
            KernelMutant(
                mechanism="turns not waited for in HBM",
                old="turns.wait(last, work.first_key / BC);", new="", check="misuse", case=TURNS,
            ),
            KernelMutant(
                mechanism="the first part of dQ added to what nobody set to 0", file=HOPPER_TILES,
                old="store_global(first + 32 * n, make_float4(dq", new="add_global(first + 32 * n, make_float4(dq",
                check="misuse", case=TURNS,
            ),
            KernelMutant(
                mechanism="the last part of dQ without those before", file=HOPPER_TILES, old="if (place == LAST) {",
                new="if (false) {", check="rule", case=TURNS,
            ),
            KernelMutant(
                mechanism="dQ of queries that see no key not set to 0", file=HOPPER_TILES,
                old="if (tiles.last < tiles.first) clear_rows_of", new="if (false) clear_rows_of", check="misuse", case=UNSEEN,
            ),
            KernelMutant(
                mechanism="the place in the order of the next query tile", old="load_shared<int>(sram.place(n - 1))",
                new="load_shared<int>(sram.place(n))", check="misuse", case=TURNS_OF_A_WINDOW, hangs=True,
            ),
            KernelMutant(
                mechanism="told that dQ has been added before it has", old="add_in_turn(dq_sum, before,",
                new="release(sram.added((n - 1) & 1)); add_in_turn(dq_sum, before,", check="misuse", case=TURNS, hangs=True,
            ),
            KernelMutant(
                mechanism="the turn of the next key tile", old="wait(last, work.first_key / BC)",
                new="wait(last, work.first_key / BC + 1)", check="misuse", case=TURNS, hangs=True,
            ),
            KernelMutant(
                mechanism="the turn of the tile that is loaded", old="last = at, ++n;",
                new="++n; last = at; last.advance(work.tiles);",
                check="misuse", case=TURNS, hangs=True,
            ),
            KernelMutant(
                mechanism="turns passed on before dQ has been added", step="dq",
                old="mbarrier_wait(sram.added(n & 1), n / 2 & 1);", new="", check="misuse", case=TURNS, hangs=True,
            ),
            KernelMutant(
                mechanism="the last turn kept", step="dq", old="turns.pass(at);",
                new="{ Visit next = at; next.advance(work.tiles); if (work.left(next)) turns.pass(at); }",
                check="misuse", case=TURNS, hangs=True,
            ),
            KernelMutant(
                mechanism="the last turn taken before the one on its side is known",
                old="mbarrier_wait(sram.known((n - 1) & 1), (n + 1) / 2 & 1);",
                new="if (work.left(at)) mbarrier_wait(sram.known((n - 1) & 1), (n + 1) / 2 & 1);",
                check="misuse", case=TURNS, hangs=True,
            ),
            KernelMutant(
                mechanism="turns of another head", file=HOPPER_TILES,
                old="counters + static_cast<long long>(at.head) * shape.len_q", new="counters", check="misuse", case=TURNS,
                hangs=True,
            ),
            KernelMutant(
                mechanism="turns that begin at a key tile which nobody sees", file=HOPPER_TILES, old="tiles.first); if",
                new="0); if", check="misuse", case=TURNS_OF_A_WINDOW, hangs=True,
            ),
            KernelMutant(
                mechanism="a turn passed on without a fence", file=MEMORY, old="__threadfence(); atomicAdd(counter, 1u);",
                new="atomicAdd(counter, 1u);", check="misuse", case=TURNS,
            ),
            KernelMutant(
                mechanism="key tiles by the number of the block where they are drawn", file=HOPPER_TILES,
                old="work_of(draw_from(counter, last()), origin)", new="work_of(blockIdx.x, origin)", check="bytes", case=TURNS,
            ),
            KernelMutant(
                mechanism="the counter of key tiles not set back", file=HOPPER_TILES,
                old="work_of(draw_from(counter, last()), origin)", new="work_of(draw_from(counter, last() + 1), origin)",
                check="misuse", case=TURNS,
            ),
        )
    ),
    KernelMutant(
        mechanism="no fence before counting up", algorithm="flash2_backward_deterministic", file=MEMORY,
        old="__threadfence(); const unsigned before", new="const unsigned before", check="misuse", case=GROUP,
    ),
    KernelMutant(
        mechanism="no soft cap", old="bend(s, scores, shape);", new="", check="rule", case=CAPPED,
    ),
]  # fmt: skip

PROGRAMS = [
    Mutant(
        mechanism="scores not masked", algorithm="flash2_backward", file=PROGRAM, check="key_sets", blind=True,
        find="s = block.mask(s.T, i, j).T", put="pass",
    ),
    Mutant(
        mechanism="LSE of minus infinity subtracted", algorithm="flash2_backward", file=PROGRAM, check="hidden", blind=True,
        find="lse_i.finite()", put="lse_i",
    ),
    Mutant(
        mechanism="D from dO alone", algorithm="flash2_backward", file=PROGRAM, check="equal_keys", blind=False,
        find="block.fetch(out, i, rows)", put="block.fetch(dout, i, rows)",
    ),
    Mutant(
        mechanism="dV of the last tile only", algorithm="flash2_backward", file=PROGRAM, check="adjoint", blind=False,
        find="split=shared, acc=dv_j", put="split=shared",
    ),
    Mutant(
        mechanism="the scale twice in dK", algorithm="flash2_backward", file=PROGRAM, check="rule", blind=False,
        find="dk_j * of_kept(problem.scale, problem)", put="dk_j * problem.scale * problem.scale",
    ),
    Mutant(
        mechanism="D of the group's first query head", algorithm="flash2_backward", file=PROGRAM, check="gqa", blind=True,
        find="block.fetch(delta.head(g)", put="block.fetch(delta.head(0)",
    ),
    Mutant(
        mechanism="dS from the rounded P", algorithm="flash2_backward", file=PROGRAM, check="rule", blind=True,
        dtype="bfloat16", find="bent = p if slope", put="bent = p.round(problem.dtype) if slope",
    ),
    Mutant(
        mechanism="P rounded for the other warpgroup", algorithm="flash3_backward_wide", file=WIDE_PROGRAM, check="rule",
        blind=True, dtype="bfloat16", find="block.put(p_shared, p)", put="block.put(p_shared, p.round(problem.dtype))",
    ),
]  # fmt: skip
