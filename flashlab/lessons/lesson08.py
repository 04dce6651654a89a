"""Lesson 08, FlashAttention-3 on Hopper: its exercises and predictions."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import replace
from random import Random

from flashlab.lessons.exercise import Budget, Case, Exercise, attention_truth_with_lse, counted, far
from flashlab.lessons.lesson01 import LEVELS
from flashlab.lessons.prediction import Prediction
from flashlab.lessons.rules import v_lags_k
from simulator import DEVICES, Device, Problem, Tile, count
from simulator.problem import round_up

PANEL, ROWS, STAGES, MBARRIERS = 64, 128, 2, 128
"""Columns of a box; the ring exercise's Br and stages; bytes of its mbarriers."""
WIDEST = 256
"""Rows of a box at most (cuTensorMapEncodeTiled, CUDA driver API)."""


def ring_tile(problem: Problem, device: Device) -> Tile:
    """The widest tile whose ring of two stages fits: Q, K and V in whole panels, and the mbarriers."""
    row = round_up(problem.head_dim, PANEL) * problem.itemsize
    left = device.sram_per_block - MBARRIERS - ROWS * row
    return Tile(ROWS, min(left // (STAGES * 2 * row) // 16 * 16, WIDEST))


def _tile_slips(problem: Problem, device: Device) -> dict[str, Tile]:
    """Of the ring: what was forgotten, or taken twice."""
    bytes_, whole = device.sram_per_block, round_up(problem.head_dim, PANEL)

    def tile(
        mbarriers: int = MBARRIERS,
        q: int = 1,
        tiles: int = 2 * STAGES,
        row: int = whole * problem.itemsize,
        most: int = WIDEST,
    ) -> Tile:
        return Tile(ROWS, min((bytes_ - mbarriers - q * ROWS * row) // (tiles * row) // 16 * 16, most))

    return {
        "the mbarriers take 128 bytes": tile(mbarriers=0),
        "there are two stages, and K and V in each": tile(tiles=STAGES),
        "there are two stages, and not three": tile(tiles=6),
        "Q takes room, too": tile(q=0),
        "Q is there once": tile(q=2),
        "SRAM is counted in bytes: an element is problem.itemsize of them": tile(row=whole),
        "a box has 64 columns, even where the head dim ends before them": tile(row=problem.head_dim * problem.itemsize),
        "a box has 256 rows at most": tile(most=1 << 30),
        "a box may have 256 rows": tile(most=128),
    }


def _rung_cases(draw: Random) -> list[Case]:
    """Full and causal, ragged in both directions; far fewer keys than queries leave a whole row tile without any.

    One has a window, so that the second row tile walks over no tile 0. The last one is `far`, has three warpgroups a tile, and
    72 columns: a box of 64, and an eighth of another.
    """
    first = Problem(batch=1, heads=2, len_q=256, head_dim=64, dtype="float16")
    n = draw.randint(130, 300)
    others = [
        first.replace(len_q=n, len_kv=n + draw.randint(1, 90), head_dim=draw.choice((40, 72)), causal=True),
        first.replace(len_q=n + 128, len_kv=n - draw.randint(64, 90), head_dim=draw.choice((24, 104)), causal=True),
        first.replace(len_q=draw.randint(140, 190), kv_heads=1, head_dim=draw.choice((72, 104)), window=(40, None)),
    ]
    cases = [
        Case(
            p,
            Tile(128, 64)
            if p is first
            else Tile(128 if p.left else draw.choice((128, 192)), draw.choice((32, 64, 80))),
            draw.getrandbits(32),
            level=(level[1], level[0]),  # tiles are walked from the last to the first
        )
        for p, level in zip((first, *others), LEVELS, strict=True)
    ]
    return [*cases, far(first.replace(len_q=draw.randint(200, 300), head_dim=72, causal=True), Tile(192, 32), draw)]


def _ring_cases(draw: Random) -> list[Case]:
    """Head dims whose tiles differ, and devices: each condition of the task decides somewhere.

    At head dim 64 an H100 has room for more than 256 rows, and a T4 for 16 more if there were no mbarriers.
    """

    def case(device: str, length: int, dim: int) -> Case:
        problem = Problem(batch=1, heads=1, len_q=length, head_dim=dim, dtype="float16")
        return Case(
            problem, ring_tile(problem, Device.named(device)), draw.getrandbits(32), device=device, own_tile=True
        )

    return [
        case("h100", 960, 128),
        case("h100", draw.randint(400, 900), draw.choice((40, 64))),
        case("t4", draw.randint(200, 400), draw.choice((40, 64))),
        case("h100", draw.randint(400, 900), draw.choice((72, 96))),
        case(draw.choice(("h100", "a100")), draw.randint(300, 700), draw.choice((192, 256))),
    ]


def _budget(problem: Problem, tile: Tile) -> Budget:
    """What flash3 moves, without the counter from which its blocks draw their tiles: the exercise has a block per tile."""
    found = counted(count("flash3", problem, tile=tile, device=_ROOMY))
    return replace(found, tensors={name: moved for name, moved in found.tensors.items() if name != "drawn"})


def _sram_budget(problem: Problem, tile: Tile) -> Budget:
    """The same, with what each warpgroup reads from SRAM."""
    moved = count("flash3", problem, tile=tile, device=_ROOMY).by_tensor
    sram = {name: (moved[name].sram_read, moved[name].sram_write) for name in ("q", "k", "v")}
    return replace(_budget(problem, tile), sram=sram)


_ROOMY = DEVICES["h100"].replace(name="roomy", sram_per_block=1 << 30)
"""For counting: two stages always fit, and stages move no bytes."""


EXERCISES = (
    Exercise(
        name="08.1",
        title="Rung 1: whole boxes, 64 rows a warpgroup",
        task="FlashAttention-2 with Hopper's two engines. TMA brings Q, K and V in boxes of 64 columns (`panel=64`), and a "
        "box counts whole: rows and columns outside of the array are zeros, but they are moved. A warpgroup, four warps, "
        "multiplies 64 rows of Q by all of K_j, straight from SRAM. How many warpgroups share a tile, and how often is K_j read?",
        cases=_rung_cases,
        truth=attention_truth_with_lse,
        budget=_sram_budget,
        hints=(
            "A tile of 128 rows is two warpgroups of 64. `readers` of the launch says how many of them read an operand.",
            "`block.load(q, block.i, tile.rows, panel=64)` is a box wherever it lies; the same for k and v with `j, tile.cols`.",
            '`split=("rows", "none")`: the warpgroups share out the rows of Q (or P), and each reads all of K_j (or V_j).',
        ),
        slips={
            "q": "Q's boxes come once, and count whole: Br rows of all their columns, 64 at a time.",
            "k": "K_j comes once for each tile that is visited, in whole boxes; each warpgroup (not each warp) reads it.",
            "v": "V_j comes once for each tile that is visited, in whole boxes; each warpgroup (not each warp) reads it.",
        },
        afterwards="Next: the bytes are settled. Every rung from here on moves the same ones; what changes is when.",
    ),
    Exercise(
        name="08.2",
        title="Rung 2: room for the ring",
        task="The program is complete; its tile is missing. Br is 128. K and V go round a ring of two stages, so that one "
        "tile is on its way while the other is used. How wide may Bc be, if Q, the ring and 128 bytes of mbarriers are to "
        "fit into a block's SRAM? A multiple of 16, and at most 256: a box has no more rows.",
        cases=_ring_cases,
        truth=attention_truth_with_lse,
        budget=_budget,
        hints=(
            "A row of K in SRAM: head_dim rounded up to whole boxes of 64 columns, times problem.itemsize.",
            "Q takes 128 such rows. What is left holds two stages of Bc rows of K and Bc rows of V.",
            "`n // 16 * 16` rounds down to a multiple of 16.",
        ),
        tile_slips=_tile_slips,
        afterwards="Next: at d = 256 you found Bc = 80, the tile that FlashAttention-3 has there. At d = 128 a block's "
        "registers, which hold S, say stop before its SRAM does.",
    ),
    Exercise(
        name="08.3",
        title="Rung 3: V lags K by one",
        task="The heart of FlashAttention-3: S = Q Kᵀ of this tile is issued *before* O += P V of the tile before, so that "
        "the tensor cores have that to do while the softmax of this one is computed. Numbers and bytes stay what they were. "
        "Tiles are walked from the last to the first, so the tile before j is j + 1.",
        cases=_rung_cases,
        truth=attention_truth_with_lse,
        budget=_budget,
        hints=(
            "P is None until the first softmax. Where it isn't, load V of tile j + 1 and add P V to acc.",
            "Only then comes the softmax: alpha rescales an acc that already contains the tile before.",
            "After the loop one P is still waiting, that of the tile visited last: `block.walk[0]`. With no tiles there is none.",
        ),
        slips={
            "k": "K_j is loaded once for each tile that is visited.",
            "v": "V is loaded once for each tile that is visited: in the round after K's, and once more after the loop.",
        },
        rules=(v_lags_k,),
        afterwards="Next: compare with flash3_3.cu, which does this in the same order.",
    ),
)


# -- predictions --------------------------------------------------------------------------------------------------

RAGGED = Problem(batch=1, heads=1, len_q=1030, head_dim=80, dtype="float16")
_EDGE, _TILES = 128, 9
_RING = Problem(batch=1, heads=1, len_q=4096, head_dim=128, dtype="float16")
ROW_TILES, SMS = 48, 16
CLOCK = 1.83e9
"""Hz: with it the data sheet's 989.4 TFLOP/s are 4,096 FLOPs a cycle and SM (Shah et al. 2024, section 3.1, note)."""
EXPONENTIALS = 16
"""A cycle and SM (CUDA C++ Programming Guide, throughput of native arithmetic instructions)."""


def finish(work: Iterable[int], sms: int) -> int:
    """When all is done, if each SM takes the next piece as soon as it is free.

    >>> finish([1, 1, 4], 2), finish([4, 1, 1], 2)
    (5, 4)
    """
    free = [0] * sms
    for piece in work:
        heapq.heapreplace(free, free[0] + piece)
    return max(free)


def _boxes() -> dict[str, int]:
    moved = count("flash3", RAGGED, tile=(_EDGE, _EDGE)).by_tensor
    return {"q": moved["q"].hbm_read, "k": moved["k"].hbm_read}


def _cycles(head_dim: int) -> float:
    """Of both products of 64 queries with 128 keys, on the tensor cores of one SM."""
    h100 = DEVICES["h100"]
    return 2 * 2 * 64 * 128 * head_dim / (h100.tensor_flops / h100.sms / CLOCK)


def _box_slips(times: int) -> dict[str, float]:
    n, d = RAGGED.len_q, RAGGED.head_dim
    whole = _TILES * _EDGE
    return {
        "the array's own bytes: but a box counts whole": times * n * d * 2,
        "only the rows are rounded up: so are the columns, to 64": times * whole * d * 2,
        "only the columns are rounded up: so are the rows, to 128": times * n * 128 * 2,
        "elements, not bytes": times * whole * 128,
    }


PREDICTIONS = (
    Prediction(
        name="08.1",
        truth=_boxes,
        slips=lambda: {
            "q": _box_slips(1),
            "k": _box_slips(_TILES)
            | {"once: but each of the 9 tiles of queries asks for all of it": _TILES * _EDGE * 128 * 2},
        },
        because="9 tiles of 128 rows, each in two boxes of 64 columns, 2 bytes an element: 9 · 128 · 128 · 2. K: the same, "
        "once for each of the 9 tiles of queries. The rows and columns outside are zeros that nobody stored, and they count.",
    ),
    Prediction(
        name="08.2",
        truth=lambda: {"sram": count("flash3_2", _RING, tile=(128, 128)).sram.peak},
        slips=lambda: {
            "sram": {
                "one stage, or K without V": 3 * 128 * 128 * 2,
                "Q is there, too": 4 * 128 * 128 * 2,
                "elements, not bytes": 5 * 128 * 128,
                "O is in registers": 6 * 128 * 128 * 2,
            }
        },
        because="Five tiles of 128 × 128, 2 bytes an element: Q, two of K, two of V. And 128 bytes of mbarriers. S, P and O "
        "are in registers.",
    ),
    Prediction(
        name="08.3",
        truth=lambda: {
            "products_64": _cycles(64),
            "products_128": _cycles(128),
            "exponentials": 64 * 128 / EXPONENTIALS,
        },
        slips=lambda: {
            "products_64": _cycle_slips(64),
            "products_128": _cycle_slips(128),
            "exponentials": {
                "one for each lane and cycle: but there are 16 such units, not 128": 64 * 128 / 128,
                "one for each row": 64 / EXPONENTIALS,
                "one SM's four quarters do 16 each: they do 4 each": 64 * 128 / (4 * EXPONENTIALS),
            },
        },
        because="2 products · 2 · 64 · 128 · d FLOPs at 4,096 a cycle: 8 d cycles. 64 · 128 exponentials at 16 a cycle: 512, "
        "whatever d is. At d = 64 both take equally long: one after the other is twice the time of the tensor cores alone.",
    ),
    Prediction(
        name="08.4",
        truth=lambda: {
            "shortest_first": finish(range(1, ROW_TILES + 1), SMS),
            "longest_first": finish(range(ROW_TILES, 0, -1), SMS),
        },
        slips=lambda: {
            "shortest_first": {
                "shared out evenly: but the longest comes last, alone": ROW_TILES * (ROW_TILES + 1) / 2 / SMS,
                "three pieces of average length, 25 each: but the longest comes last, alone": 75,
                "the longest alone": ROW_TILES,
                "all on one SM": ROW_TILES * (ROW_TILES + 1) / 2,
            },
            "longest_first": {
                "shared out evenly: near, but 48 pieces don't divide so well": ROW_TILES * (ROW_TILES + 1) / 2 / SMS,
                "three pieces of average length, 25 each: near, but 48 pieces don't divide so well": 75,
                "the longest alone": ROW_TILES,
                "all on one SM": ROW_TILES * (ROW_TILES + 1) / 2,
                "no better than in order": finish(range(1, ROW_TILES + 1), SMS),
            },
        },
        because="Shortest first: one SM takes the pieces 16, 32 and 48, one after the other. Longest first: after two rounds "
        "each SM has had 65 (48 and 17, 47 and 18, …), and takes one of the pieces 16 to 1. Evenly it would be 73.5.",
    ),
)


def _cycle_slips(head_dim: int) -> dict[str, float]:
    right = _cycles(head_dim)
    return {
        "one product, or a multiply-add counted once: there are two products, and it counts 2": right / 2,
        "128 rows: a warpgroup has 64": right * 2,
        "one of the two products, and a multiply-add counted once": right / 4,
    }
