"""Seeded bugs on Hopper: in parts of a group's heads, in ragged batches of wide heads, in products between whole panels, and in the
order of key tiles."""

from __future__ import annotations

from dataclasses import replace

from tests.mutants.backward import (
    HOPPER,
    HOPPER_SHARED,
    HOPPER_TILES,
    IN_ORDER,
    KERNEL,
    SEQUENCES,
    WIDE,
    WIDE_TILES,
    KernelMutant,
)

ORDER = "kernels_cu/include/longest_first.cuh"
PARTS, PARTS_APART = "a group's heads, few keys, causal, batch 2", "a group's heads, few keys, sequences"

KERNELS = [
    *(
        replace(each, algorithm="flash3_backward", file=HOPPER if each.file == KERNEL else each.file,
                sms=12 if each.case == PARTS else 132)
        for each in (
            KernelMutant(
                mechanism="the last part left out", file=HOPPER_TILES, old="int part = 1; part < PARTS;",
                new="int part = 1; part < PARTS - 1;", check="rule", case=PARTS,
            ),
            KernelMutant(
                mechanism="the first part added twice", file=HOPPER_TILES, old="int part = 1; part < PARTS;",
                new="int part = 0; part < PARTS;", check="gqa", case=PARTS,
            ),
            KernelMutant(
                mechanism="the first part for all", file=HOPPER_TILES, old="rows.head * PARTS + part, row",
                new="rows.head * PARTS, row", check="gqa", case=PARTS,
            ),
            KernelMutant(
                mechanism="parts of the KV heads before", file=HOPPER_TILES, old="rows.head * PARTS + part, row",
                new="rows.head + part, row", check="rule", case=PARTS_APART,
            ),
            KernelMutant(
                mechanism="all heads of the group in each part", file=HOPPER_SHARED, old="seen() ? end - members_of(shape) : end",
                new="seen() ? kv_head(shape) * (shape.heads / shape.kv_heads) : end", check="bytes", case=PARTS,
            ),
            KernelMutant(
                mechanism="a part's first head left out", file=HOPPER_SHARED, old="seen() ? end - members_of(shape) : end",
                new="seen() ? end - members_of(shape) + (end > members_of(shape) ? 0 : 1) : end", check="rule", case=PARTS,
            ),
            KernelMutant(
                mechanism="parts stored as those of the first batch", step="store_dkv",
                old="work.part(shape) - batch * shape.kv_heads * PARTS", new="work.part(shape) % (shape.kv_heads * PARTS) / PARTS",
                check="misuse", case=PARTS,
            ),
            KernelMutant(
                mechanism="blocks for the parts of some heads only", file=HOPPER_TILES,
                old="shape.batch * shape.kv_heads * PARTS - 1;", new="shape.batch * shape.kv_heads - 1;", check="misuse",
                case=PARTS,
            ),
            KernelMutant(
                mechanism="KV heads that share the L2 counted as parts", file=HOPPER_SHARED,
                old="shape.batch * shape.kv_heads * PARTS - first_head", new="shape.batch * shape.kv_heads - first_head",
                check="misuse", case=PARTS,
            ),
            KernelMutant(
                mechanism="parts of another key tile", step="store_dkv",
                old="row_address(dk, batch, part, origin.key + key), dk_sum", new="row_address(dk, batch, part, key % BC), dk_sum",
                check="misuse", case=PARTS,
            ),
            KernelMutant(
                mechanism="a sequence's parts stored as the first one's", step="store_dkv",
                old="row_address(dv, batch, part, origin.key + key), dv_sum", new="row_address(dv, batch, part, key), dv_sum",
                check="misuse", case=PARTS_APART,
            ),
            KernelMutant(
                mechanism="parts of the next sequence's keys stored", step="store_dkv",
                old="key < own.len_kv ? round_up(shape.head_dim, 4)", new="key < shape.len_kv ? round_up(shape.head_dim, 4)",
                check="bytes", case=PARTS_APART,
            ),
            KernelMutant(
                mechanism="odd lanes' rows on top of those of even ones", step="store_dkv",
                old="key = lane_key + opaque(lane_id()) % 2 * 8;", new="key = lane_key;", check="misuse", case=PARTS,
            ),
            KernelMutant(
                mechanism="columns that a part hasn't got", step="store_dkv", old="round_up(shape.head_dim, 4)", new="COLUMNS",
                check="misuse", case=PARTS, head_dim=40,
            ),
            KernelMutant(
                mechanism="a part's dK without the scale", step="store_dkv",
                old="dk_sum, of_kept(shape.scale, shape.kept), columns", new="dk_sum, of_kept(1, shape.kept), columns",
                check="adjoint", case=PARTS,
            ),
            KernelMutant(
                mechanism="the last row of a block's not added up", step="add_parts", old="add_parts(dk_parts, dk, shape, rows);",
                new="add_parts(dk_parts, dk, shape, {rows.batch, rows.head, rows.first, rows.end - 1});", check="misuse",
                case=PARTS,
            ),
            KernelMutant(
                mechanism="the scale once more where parts are added up", file=HOPPER_TILES, old="store_elements(to, sum);",
                new="store_elements(to, times(sum, shape.scale));", check="adjoint", case=PARTS,
            ),
        )
    ),
    *(
        replace(each, algorithm="flash3_backward_wide", file=WIDE if each.file == KERNEL else each.file, case=SEQUENCES)
        for each in (
            KernelMutant(
                mechanism="a neighbour's queries weighed with 0 for wide heads", step="load_q",
                old="clear_rows<CONSUMERS>(sram.q(ring.slot), rows, CLEARED);", new="", check="sequences",
            ),
            KernelMutant(
                mechanism="a neighbour's dO weighed with 0 for wide heads", step="load_do",
                old="clear_rows<CONSUMERS>(sram.dout(ring.slot), rows, CLEARED);", new="", check="sequences",
            ),
            KernelMutant(
                mechanism="a neighbour's keys weighed with 0 for dQ",
                old="clear_rows<CONSUMERS>(sram.k(k_ring.slot), keys, CLEARED);", new="", check="sequences",
            ),
            KernelMutant(
                mechanism="a neighbour's values weighed with 0 for dQ",
                old="clear_rows<CONSUMERS>(sram.v(v_ring.slot), keys, CLEARED);", new="", check="sequences",
            ),
            KernelMutant(
                mechanism="a sequence's last query cleared for wide heads", step="load_q",
                old="sram.q(ring.slot), rows, CLEARED", new="sram.q(ring.slot), rows - 1, CLEARED", check="rule",
            ),
            KernelMutant(
                mechanism="values cleared before they have come", step="load_v",
                old="mbarrier_wait(sram.v_full(v_ring.slot), v_ring.parity); clear_rows", new="clear_rows", check="misuse",
            ),
            KernelMutant(
                mechanism="dO cleared before it has come", step="load_do",
                old="mbarrier_wait(sram.do_full(ring.slot), ring.parity); clear_rows", new="clear_rows", check="misuse",
            ),
            KernelMutant(
                mechanism="a warp that reads its place before it is told", file=WIDE_TILES,
                old="store_shared(at + sizeof(Work), own); } barrier();", new="store_shared(at + sizeof(Work), own); }",
                check="misuse",
            ),
            KernelMutant(
                mechanism="row tiles aligned with the first key", file=WIDE_TILES,
                old="aligned = own.queries - (rows.end - rows.first), first", new="aligned = 0, first", check="misuse",
            ),
            KernelMutant(
                mechanism="row tiles that walk over the first sequence's keys", old="own_head, origin.key + j * BC, sram.k_full",
                new="own_head, j * BC, sram.k_full", check="rule",
            ),
            KernelMutant(
                mechanism="dQ of the first sequence's rows", old="rows.head, origin.query + row), sum", new="rows.head, row), sum",
                check="misuse",
            ),
            KernelMutant(
                mechanism="dQ of the next sequence's rows stored", step="store_dq",
                old="row < alone.len_q ? padded_row_bytes(shape)",
                new="row < shape.len_q ? padded_row_bytes(shape)", check="misuse",
            ),
            KernelMutant(
                mechanism="the LSE and D of the first sequence for dQ", old="* shape.len_q + origin.query;", new="* shape.len_q;",
                check="misuse",
            ),
            KernelMutant(
                mechanism="dK and dV in the first sequence's rows", old="own_head, origin.key + key), sum",
                new="own_head, key), sum",
                check="misuse",
            ),
            KernelMutant(
                mechanism="the first sequence's keys boxed", old="k, batch, own_head, origin.key + work.first_key",
                new="k, batch, own_head, work.first_key", check="rule",
            ),
            KernelMutant(
                mechanism="row tiles of a plain batch dealt out", file=WIDE_TILES,
                old="row_tiles = row_tiles_of(shape), first_head", new="row_tiles = ceil_div(shape.len_q, BR), first_head",
                check="misuse",
            ),
            KernelMutant(
                mechanism="empty places of row tiles not left", step="load_q", old="if (work.end == 0) return;", new="",
                check="misuse",
            ),
        )
    ),
    *(
        replace(each, algorithm="flash3_backward", file=HOPPER_TILES, head_dim=96)
        for each in (
            KernelMutant(
                mechanism="the last columns left out of S and dP", old="d < HEAD_DIM; d += 16) wgmma_ss",
                new="d < HEAD_DIM - 16; d += 16) wgmma_ss", check="rule",
            ),
            KernelMutant(
                mechanism="S and dP over whole panels", old="d < HEAD_DIM; d += 16) wgmma_ss",
                new="d < COLUMNS; d += 16) wgmma_ss", check="bytes",
            ),
        )
    ),
    *(
        replace(each, algorithm="flash3_backward_wide", file=WIDE_TILES, head_dim=160)
        for each in (
            KernelMutant(
                mechanism="the last columns left out of S and dP for wide heads", old="d < HEAD_DIM; d += 16) if (d < HELD)",
                new="d < HEAD_DIM - 16; d += 16) if (d < HELD)", check="rule",
            ),
            KernelMutant(
                mechanism="the last columns left out of S and dP for dQ", old="d < HEAD_DIM; d += 16) wgmma_ss",
                new="d < HEAD_DIM - 16; d += 16) wgmma_ss", check="rule",
            ),
            KernelMutant(
                mechanism="S and dP for dQ over whole panels", old="d < HEAD_DIM; d += 16) wgmma_ss",
                new="d < COLUMNS; d += 16) wgmma_ss", check="bytes",
            ),
        )
    ),
    *(
        replace(each, algorithm="flash3_backward", case=IN_ORDER)
        for each in (
            KernelMutant(
                mechanism="alike tiles of the sequences behind come first, too", file=ORDER,
                old="other < keys.number ? lengths.least : lengths.next",
                new="lengths.least", check="misuse",
            ),
            KernelMutant(
                mechanism="alike tiles of two sequences at one place of the order", file=ORDER,
                old="other < keys.number ? lengths.least : lengths.next",
                new="lengths.next", check="misuse",
            ),
            KernelMutant(
                mechanism="a length as it is against one of three bits", file=ORDER,
                old="return {queries / step * step,",
                new="return {queries,", check="misuse",
            ),
            KernelMutant(
                mechanism="the tiles before it in its own sequence left out", file=ORDER,
                old="tiles = keys.before<BC>(place) / BC;",
                new="tiles = 0;", check="misuse",
            ),
            KernelMutant(
                mechanism="two empty places at one place of the order", file=ORDER,
                old="tiles = end_kv / BC - kv / BC + 1;",
                new="tiles = ceil_div(end_kv - kv, BC);", check="misuse",
            ),
            KernelMutant(
                mechanism="the last tile of a sequence not counted", file=ORDER,
                old="min(ceil_div(keys, BC),",
                new="min(keys / BC,", check="misuse",
            ),
            KernelMutant(
                mechanism="a sequence's keys for its queries", file=ORDER,
                old="return queries < least ? 0 :",
                new="return keys < least ? 0 :", check="misuse",
            ),
            KernelMutant(
                mechanism="the first lane's sequence alone", file=ORDER,
                old="before = warp_sum(before);",
                new="", check="misuse",
            ),
            KernelMutant(
                mechanism="an empty place taken for a key tile", file=ORDER,
                old="empty ? Work{} : Work{first_key, 1, seen}",
                new="Work{first_key, 1, seen}", check="misuse",
            ),
            KernelMutant(
                mechanism="all blocks with the first head", file=HOPPER_SHARED,
                old="if (work.end > 0) work.end = end;",
                new="", check="misuse",
            ),
            KernelMutant(
                mechanism="the key tiles of another number", file=HOPPER_SHARED,
                old="ordered_tile(offsets.order, place / heads,",
                new="ordered_tile(offsets.order, place % heads,", check="misuse",
            ),
        )
    ),
]  # fmt: skip
