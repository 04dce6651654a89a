"""Lesson 03, FlashAttention-1: its exercises and predictions."""

from __future__ import annotations

from random import Random

from flashlab.lessons.exercise import Budget, Case, Exercise, attention_truth, counted
from flashlab.lessons.lesson01 import attention_cases
from flashlab.lessons.prediction import Prediction
from simulator import DEVICES, Device, Problem, Tile, count
from simulator.names import DType

_ROOMY = DEVICES["h100"].replace(name="roomy", sram_per_block=1 << 30)
"""For counting: the formula asks whether the tile fits flash1's own kernel, which needs more SRAM than the exercises."""


def paper_tile(problem: Problem, device: Device) -> Tile:
    """Br and Bc of Algorithm 1, line 1, rounded down to multiples of 16; M in elements."""
    cols = device.sram_per_block // problem.itemsize // (4 * problem.head_dim) // 16 * 16
    return Tile(min(cols, problem.head_dim) // 16 * 16, cols)


def _tile_slips(problem: Problem, device: Device) -> dict[str, Tile]:
    """Of line 1: another M, another number of tiles, another rounding."""
    d, m, right = problem.head_dim, device.sram_per_block, paper_tile(problem, device)

    def tile(elements: int, tiles: int = 4, step: int = 16) -> Tile:
        cols = elements // (tiles * d) // step * step
        return Tile(min(cols, d) // step * step, cols)

    size = problem.itemsize
    return {
        "M is counted in elements, not in bytes": tile(m),
        "M is the device's, and not an H100's": tile(DEVICES["h100"].sram_per_block // size),
        "an element is problem.itemsize bytes, and not always 4": tile(m // 4),
        "an element is problem.itemsize bytes, and not always 2": tile(m // 2),
        "four tiles must fit, and not three": tile(m // size, 3),
        "four tiles must fit, and not one": tile(m // size, 1),
        "four tiles must fit, and not eight": tile(m // size, 8),
        "down to a multiple of 16, and not of 8": tile(m // size, step=8),
        "down to a multiple of 16, not up": Tile(right.rows, -(-(m // size // (4 * d)) // 16) * 16),
        "rows and columns are mixed up": Tile(right.cols, right.rows),
        "Br is at most d": Tile(right.cols, right.cols),
    }


def _budget(problem: Problem, tile: Tile) -> Budget:
    return counted(count("flash1", problem, tile=tile, device=_ROOMY))


def _sized_cases(draw: Random) -> list[Case]:
    """Longer than the tiles that are right, on devices that differ in SRAM. Head dim 40 is no multiple of 16.

    There an A100 has M / 4d = 521: down to a multiple of 16 is not down to one of 8.
    """

    def case(device: str, length: int, dim: int, dtype: DType) -> Case:
        problem = Problem(batch=1, heads=1, len_q=length, head_dim=dim, dtype=dtype)
        tile = paper_tile(problem, Device.named(device))
        return Case(problem, tile, draw.getrandbits(32), device=device, own_tile=True)

    return [
        case("a100", 1024, 64, "float16"),
        case("t4", draw.randint(300, 600), 32, "float16"),
        case("a100", draw.randint(600, 900), 40, "float16"),
        case("h100", draw.randint(500, 900), 128, draw.choice(("float16", "float32"))),
        case(draw.choice(("t4", "4090")), draw.randint(300, 700), 64, "float32"),
    ]


EXERCISES = (
    Exercise(
        name="03.1",
        title="The update",
        task="Everything is loaded and stored for you. For each query, m, ℓ and O lie in HBM. O is kept *divided* by ℓ, as "
        "the paper prints it. Take in one more tile of keys: new m, new ℓ, new O.",
        cases=attention_cases,
        truth=attention_truth,
        budget=_budget,
        hints=(
            "It is 02.3 with one difference: o_i is already divided by l_i. Multiply by l_i first.",
            "`o_i * (l_i * alpha)` is what the tiles so far have summed up, relative to the new maximum.",
            '`block.matmul(p.round(problem.dtype), v_j, split=("rows", "none"), acc=…)` adds the new tile; then divide.',
        ),
        afterwards="Next: dividing and multiplying back at every tile costs work and saves nothing. FlashAttention-2 divides once.",
    ),
    Exercise(
        name="03.2",
        title="Algorithm 1",
        task="All of it: what is loaded when, and what is written back. The budget is that of the paper: K and V once, Q, O, ℓ "
        "and m once for every tile of keys, and the first O, ℓ, m written by the kernel itself.",
        cases=attention_cases,
        truth=attention_truth,
        budget=_budget,
        hints=(
            "`m.workspace` gives arrays that are in HBM, filled with nothing: O, ℓ and m have to be initialised tile by tile.",
            "K_j and V_j are loaded outside of the loop over i, and stay in SRAM throughout it.",
            "In the last round O goes to out, not to o: `block.store(out if j == last else o, …)`.",
        ),
        slips={
            "k": "K_j is loaded once, outside of the loop over i.",
            "v": "V_j is loaded once, outside of the loop over i.",
            "q": "Q_i is loaded at every (j, i): Tc times in all.",
            "o": "O_i is read at every (j, i), written at every one but the last j, and initialised once.",
            "l": "ℓ_i is read and written at every (j, i), and initialised once.",
            "m": "m_i is read and written at every (j, i), and initialised once.",
            "out": "The last round writes out, and no other does.",
        },
        afterwards="Next: look at o in the table. It is float32, and it is what FlashAttention-2 gets rid of.",
    ),
    Exercise(
        name="03.3",
        title="Br and Bc from the size of SRAM",
        task="The program is complete; its block sizes are missing. `my_blocks` chooses them for a device: Bc = M / 4d and "
        "Br = min(Bc, d), each rounded down to a multiple of 16. M is the paper's size of SRAM. In which unit?",
        cases=_sized_cases,
        truth=attention_truth,
        budget=_budget,
        hints=(
            "Four tiles must fit: K_j, V_j, Q_i and O_i, each Bc × d at most. So 4 · Bc · d ≤ M, in *elements*.",
            "`device.sram_per_block // problem.itemsize` is M in elements; `n // 16 * 16` rounds down.",
        ),
        tile_slips=_tile_slips,
        afterwards="Next: twice the SRAM is twice the Bc, and half the bytes of Q and O. That is Theorem 2 of the paper.",
    ),
)


# -- predictions --------------------------------------------------------------------------------------------------

LENGTH, DIM = 4096, 64
_P = Problem(batch=1, heads=1, len_q=LENGTH, head_dim=DIM, dtype="float16")
_TILES = LENGTH // 64
_M = DEVICES["a100-40"].sram_per_block


def _read(cols: int, length: int = LENGTH) -> int:
    return count("flash1", _P.replace(len_q=length), tile=(64, cols), device=_ROOMY).hbm.read


PREDICTIONS = (
    Prediction(
        name="03.1",
        truth=lambda: {
            "k": count("flash1", _P, tile=(64, 64)).by_tensor["k"].hbm_read,
            "o": count("flash1", _P, tile=(64, 64)).by_tensor["o"].hbm_read,
        },
        slips=lambda: {
            "k": {
                "elements, not bytes": LENGTH * DIM,
                "K once for every tile of queries: that is FlashAttention-2": LENGTH * DIM * 2 * _TILES,
            },
            "o": {
                "float16: but O so far is float32": LENGTH * DIM * 2 * _TILES,
                "elements, not bytes, and once only": LENGTH * DIM,
                "once: but it comes back for every tile of keys": LENGTH * DIM * 4,
                "reads and writes together": LENGTH * DIM * 4 * _TILES * 2,
            },
        },
        because="K is in the outer loop: each tile is loaded once, N·d·2 bytes. O is in the inner loop: all of it is read once for "
        "each of the 64 tiles of keys, N·d·4·64 bytes.",
    ),
    Prediction(
        name="03.2",
        truth=lambda: {"Bc": -(-(_M // 2) // (4 * DIM)), "Br": min(-(-(_M // 2) // (4 * DIM)), DIM)},
        slips=lambda: {
            "Bc": {
                "M in bytes: the paper counts elements": -(-_M // (4 * DIM)),
                "192 KB: that is L1 and SRAM together": -(-(192 * 1024 // 2) // (4 * DIM)),
                "three tiles instead of four": (_M // 2) // (3 * DIM),
                "one tile instead of four": (_M // 2) // DIM,
            },
            "Br": {"d does not cap it: but it does, min(Bc, d)": -(-(_M // 2) // (4 * DIM))},
        },
        because="163 KB are 166,912 bytes, M = 83,456 elements of float16; divided by 4 · 64, rounded up as the paper does, 326. "
        "Br is capped at d = 64, so that the tile of S, Br × Bc, takes no more than M / 4 elements.",
    ),
    Prediction(
        name="03.3",
        truth=lambda: {"length_doubled": _read(128, 2 * LENGTH) / _read(128), "sram_doubled": _read(256) / _read(128)},
        slips=lambda: {
            "length_doubled": {"linear in the length: that is the memory taken, not the bytes moved": 2, "cubic": 8},
            "sram_doubled": {
                "as if SRAM did not matter": 1.0,
                "a quarter: only one of the two loops gets shorter": 0.25,
            },
        },
        because="N²d²/M (Theorem 2): four times for twice the length, half for twice the SRAM. K and V, which are read once, "
        "make it a little less than four and a little more than half.",
    ),
)
