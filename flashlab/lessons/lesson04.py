"""Lesson 04, FlashAttention-2: its exercises and predictions."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from flashlab.lessons.exercise import Budget, Case, Exercise, attention_truth_with_lse, counted, far
from flashlab.lessons.lesson00 import tiles
from flashlab.lessons.lesson01 import LEVELS, attention_cases
from flashlab.lessons.lesson02 import LONG, TOO_LONG
from flashlab.lessons.prediction import Prediction
from flashlab.lessons.rules import divides_at_the_end
from simulator import DEVICES, Problem, Tile, count
from simulator.config import padded

WARPS = 4


def _full_cases(draw: Random) -> list[Case]:
    """No mask: every tile is visited."""
    return [replace(c, problem=c.problem.replace(causal=False)) for c in attention_cases(draw)]


def _long_cases(draw: Random) -> list[Case]:
    """The same, and keys of which a strip of S is too long for a block's registers."""
    long = Problem(batch=1, heads=1, len_q=LONG.rows, len_kv=draw.randint(*TOO_LONG), head_dim=24, dtype="float16")
    return [*_full_cases(draw), Case(long, LONG, draw.getrandbits(32))]


def _causal_cases(draw: Random) -> list[Case]:
    """More keys than queries, as many, and fewer: then the first row tile sees no key at all.

    In one case the last row tile reaches past the last query by more than a tile of keys: there it tells whether
    `visible` knows where the queries end. In another the last key that a row tile sees is the first of its tile of keys.
    The last one is `far`, and its keys fill their tiles where its queries don't.
    """
    first = Problem(batch=1, heads=2, len_q=256, head_dim=64, dtype="float16", causal=True)
    n, ragged = draw.randint(60, 150), 64 * draw.randint(1, 2) + draw.randint(1, 16)
    others = [
        (first.replace(len_q=ragged, len_kv=ragged + draw.randint(1, 60), head_dim=40), Tile(64, 16)),
        (first.replace(len_q=n, len_kv=n - draw.randint(16, 40), dtype="float32"), Tile(16, tiles(draw).cols)),
        (first.replace(len_q=(full := 32 * draw.randint(3, 6)), len_kv=full + 1), Tile(32, 16)),
    ]
    cases = [
        Case(problem, tile, draw.getrandbits(32), level=level)
        for (problem, tile), level in zip([(first, Tile(64, 64)), *others], LEVELS, strict=True)
    ]
    return [
        *cases,
        far(first.replace(len_q=draw.randint(65, 90), len_kv=96, head_dim=24, dtype="float32"), Tile(32, 32), draw),
    ]


def _budget(problem: Problem, tile: Tile) -> Budget:
    return counted(count("flash2", problem, tile=tile, device="h100"))


def _lean_budget(problem: Problem, tile: Tile) -> Budget:
    """Q leaves SRAM once; every warp reads all of K_j and V_j."""
    p = problem
    d, dv, bc = padded(p.head_dim) * p.itemsize, padded(p.head_dim_v) * p.itemsize, padded(tile.cols)
    row_tiles = p.batch * p.heads * p.row_tiles(tile)
    pairs, q = row_tiles * p.key_tiles(tile), row_tiles * padded(tile.rows) * d
    sram = {
        "q": (q, q),
        "k": (WARPS * pairs * bc * d, pairs * bc * d),
        "v": (WARPS * pairs * bc * dv, pairs * bc * dv),
    }
    return replace(_budget(p, tile), sram=sram)


EXERCISES = (
    Exercise(
        name="04.1",
        title="FlashAttention-2",
        task="Queries outside, keys inside: one block for each tile of queries. m, ℓ and O live in registers, O is divided once at "
        "the end, and the LSE, m + log ℓ, is stored beside it. (No causal mask here: 04.2 has one.)",
        cases=_long_cases,
        rules=(divides_at_the_end,),
        truth=attention_truth_with_lse,
        budget=_budget,
        hints=(
            "Inside the loop it is 02.3 with Q Kᵀ in front: scores, mask, m_new, p, alpha, l_i, acc.",
            "Nothing is fetched from HBM but q_i, once, and k_j and v_j, once for each j.",
            "After the loop: `acc / l_i.nonzero()` goes to out, `m_i + block.log(l_i)` to lse.",
        ),
        slips={
            "q": "Q_i is loaded once, before the loop over j.",
            "k": "Each block loads each tile of K once.",
            "v": "Each block loads each tile of V once.",
            "o": "There is no O in HBM: acc stays in registers.",
            "lse": "The LSE is stored once for each row, 4 bytes.",
        },
        afterwards="Next: this is what runs on GPUs today, but for the order of its instructions.",
    ),
    Exercise(
        name="04.2",
        title="Skip what the mask hides",
        task="Under a causal mask a block need not visit tiles that lie wholly in the future. `visible(i)` says which tiles row "
        "tile i visits. The budget holds exactly those: one tile too many is a byte too many, one too few is a wrong number.",
        cases=_causal_cases,
        truth=attention_truth_with_lse,
        budget=_budget,
        hints=(
            "The *last* query of the tile sees the most. Which is its last key?",
            "With more keys than queries, query 0 already sees several keys: add problem.len_kv − problem.len_q.",
            "If the last key is number n, the tiles are 0 to n // tile.cols; if n is negative, there are none.",
        ),
        slips={
            "k": "Tiles wholly in the future are not loaded; the one on the diagonal is.",
            "v": "Tiles wholly in the future are not loaded; the one on the diagonal is.",
        },
        afterwards="Next: nearly half of the tiles are gone, and with them nearly half of the products.",
    ),
    Exercise(
        name="04.3",
        title="Bytes of SRAM: split-Q, and Q in registers",
        task="The budget has SRAM on it now. Four warps share the *rows* of Q_i (split-Q). Each needs its own rows of Q, which fit "
        "into its registers, so Q leaves SRAM once. And each needs all of K_j and V_j.",
        cases=_full_cases,
        truth=attention_truth_with_lse,
        budget=_lean_budget,
        hints=(
            "`block.to_registers(tile)` reads a tile from SRAM once; what is in registers costs nothing when it is used.",
            '`split=("rows", "none")`: the first operand\'s rows are shared out, the second is read whole by each warp.',
        ),
        slips={
            "q": "Q's tile leaves SRAM once, before the loop.",
            "k": "Each of the four warps reads all of K_j.",
            "v": "Each of the four warps reads all of V_j.",
        },
        afterwards="Next: K and V leave SRAM four times now. Still it is less than split-K's way, as the lesson counts.",
    ),
)


# -- predictions --------------------------------------------------------------------------------------------------

LENGTH, DIM, EDGE = 4096, 64, 64
HEADS, ROWS = 8, 128
_P = Problem(batch=1, heads=1, len_q=LENGTH, head_dim=DIM, dtype="float16")
_T = LENGTH // EDGE
_FEW = 8
"""Rows of tiles of prediction 04.2: so few that a forgotten diagonal is no rounding."""


def _moves() -> dict[str, int]:
    moved = count("flash2", _P, tile=(EDGE, EDGE)).by_tensor
    return {"k": moved["k"].hbm_read, "out": moved["out"].hbm_write, "lse": moved["lse"].hbm_write}


def _visited() -> dict[str, int]:
    p = _P.replace(len_q=EDGE * _FEW)
    full, causal = (count("flash2", p.replace(causal=c), tile=(EDGE, EDGE)).flops.matmul for c in (False, True))
    return {"tiles": _FEW * _FEW * causal // full}


PREDICTIONS = (
    Prediction(
        name="04.1",
        truth=_moves,
        slips=lambda: {
            "k": {
                "once: that is FlashAttention-1": LENGTH * DIM * 2,
                "half: elements, not bytes": LENGTH * DIM * _T,
                "float32 instead of float16": LENGTH * DIM * 4 * _T,
            },
            "out": {
                "elements, not bytes": LENGTH * DIM,
                "float32: but out has the storage dtype": LENGTH * DIM * 4,
                "written at every tile of keys: that is FlashAttention-1's O": LENGTH * DIM * 4 * _T,
            },
            "lse": {
                "float16: but the LSE is float32": LENGTH * 2,
                "padded to 16 bytes a row: vectors are not": LENGTH * 16,
                "m and ℓ, two numbers a row": LENGTH * 8,
            },
        },
        because="Now K is in the inner loop: each of the 64 blocks reads all of it. out and LSE are written once.",
    ),
    Prediction(
        name="04.2",
        truth=_visited,
        slips=lambda: {
            "tiles": {
                "no tile skipped": _FEW * _FEW,
                "half of them: but those on the diagonal are visited whole": _FEW * _FEW // 2,
                "the diagonal left out: but half of each of its tiles is visible": _FEW * (_FEW - 1) // 2,
                "the diagonal only": _FEW,
                "a quarter": _FEW * _FEW // 4,
            }
        },
        because="A triangle with its diagonal: T(T + 1)/2 of T² tiles, here 36 of 64. On the diagonal half of each tile is "
        "hidden, and computed all the same.",
    ),
    Prediction(
        name="04.3",
        truth=lambda: {
            "flash1_blocks": count("flash1", _P.replace(heads=HEADS), tile=(64, 64)).launches[0].blocks,
            "flash2_blocks": count("flash2", _P.replace(heads=HEADS), tile=(ROWS, 64)).launches[0].blocks,
        },
        slips=lambda: {
            "flash1_blocks": {
                "one for each tile of keys: but the loop over them is inside the block": HEADS * LENGTH // 64,
                "one for each SM": DEVICES["h100"].sms,
                "one in all: but heads are independent": 1,
            },
            "flash2_blocks": {
                "one head only": LENGTH // ROWS,
                "one for each tile of S": HEADS * LENGTH // ROWS * LENGTH // 64,
                "one for each head": HEADS,
            },
        },
        because="FlashAttention-1 has one block a head: 8 of 132 SMs work. FlashAttention-2 has one for each of the 32 tiles of "
        "queries as well.",
    ),
)
