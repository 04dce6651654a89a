"""Seeded bugs in the rungs of the backward pass for Hopper: where a real one would be, in what each of them adds."""

from __future__ import annotations

from dataclasses import replace

from tests.mutants.backward import TURNS, KernelMutant

_RUNGS = {
    1: [
        KernelMutant(
            mechanism="rung 1: the tensor cores not told of dS", step="ds", old="fence_async();", new="", check="misuse",
        ),
        KernelMutant(
            mechanism="rung 1: dQ from a part of dS", step="dq", old="barrier();", new="", check="misuse",
        ),
        KernelMutant(
            mechanism="rung 1: dQ added before it is there", step="dq", old="wgmma_wait<0>();", new="", check="misuse",
        ),
        KernelMutant(
            mechanism="rung 1: a tile loaded over one in use", step="load_q", old="load_tile(sram.q(ring.slot)",
            new="load_tile(sram.q(0)", check="misuse",
        ),
        KernelMutant(
            mechanism="rung 1: D left where it is", step="load_do", old="take_away(dp, sram.delta(slot));", new="",
            check="equal_keys", case="aligned",
        ),
    ],
    2: [
        KernelMutant(
            mechanism="rung 2: the other warpgroup's dS not waited for", step="dq",
            old="mbarrier_wait(sram.ds_full(slot), ring.parity);", new="", check="misuse",
        ),
        KernelMutant(
            mechanism="rung 2: dS said to be there before it is", step="ds",
            old="store_operand(sram.ds(slot), own_row, ds); fence_async(); release(sram.ds_full(slot));",
            new="release(sram.ds_full(slot)); store_operand(sram.ds(slot), own_row, ds); fence_async();", check="misuse",
        ),
        KernelMutant(
            mechanism="rung 2: dO given back before dV is there", step="dk", old="wgmma_wait<1>();", new="", check="misuse",
        ),
        KernelMutant(
            mechanism="rung 2: a slot waited for in the wrong phase", step="load_do", old="ring.parity ^ 1); load_tile",
            new="ring.parity); load_tile", check="misuse", hangs=True,
        ),
        KernelMutant(
            mechanism="rung 2: the LSE written over one in use", step="load_q",
            old="mbarrier_wait(sram.q_empty(ring.slot), ring.parity ^ 1); numbers", new="numbers", check="misuse",
        ),
    ],
    3: [
        KernelMutant(
            mechanism="rung 3: dQ of this tile", step="dq", old="sram.ds(before.slot), sram.k(), consumer); multiply_dkv",
            new="sram.ds(ring.slot), sram.k(), consumer); multiply_dkv", check="misuse",
        ),
        KernelMutant(
            mechanism="rung 3: dS written over what the other warpgroup multiplies", step="ds",
            old="mbarrier_wait(sram.ds_full(before.slot), before.parity);", new="", check="misuse",
        ),
        KernelMutant(
            mechanism="rung 3: dQ added before it is there", step="dq", old="wgmma_wait<2>();", new="", check="rule",
        ),
        KernelMutant(
            mechanism="rung 3: P before S is there", step="scores", old="wgmma_wait<1>();", new="", check="misuse",
        ),
        KernelMutant(
            mechanism="rung 3: the last dQ before all of dS is there", step="dq",
            old="mbarrier_wait(sram.ds_full(before.slot), before.parity);", new="", check="misuse",
        ),
        KernelMutant(
            mechanism="rung 3: dP begins at 0", step="dp", old="sram.dout(slot), 1)", new="sram.dout(slot), 0)",
            check="equal_keys", case="aligned",
        ),
        KernelMutant(
            mechanism="rung 3: each dQ added to the first tile's", step="dk",
            old="sums = sum_tile_of(shape, here.head, here.i);", new="", check="rule",
        ),
    ],
}  # fmt: skip
_CASES = {"misuse": TURNS, "rule": TURNS}
KERNELS = [
    replace(
        each,
        algorithm=f"flash3_backward_{n}",
        file=f"kernels_cu/flash3_backward_{n}.cu",
        case=_CASES.get(each.check, each.case),
    )
    for n, rung in _RUNGS.items()
    for each in rung
]
