"""FlashAttention-2, forward: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from simulator.algorithm import Algorithm, Kernel
from simulator.algorithms.common import FORWARD, OPTIONAL, PACK, TRAINED
from simulator.config import Config, dividing, features, heads_that_share_the_l2, padded, warps_for
from simulator.devices import Device
from simulator.errors import SramOverflow
from simulator.formulas import flash2 as formula
from simulator.problem import Problem, Tile
from simulator.programs.flash2 import flash2
from simulator.support import Support
from simulator.time.schedules import flash2 as schedule


@flash2.configured
def configure(problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None) -> Config:
    """The kernel's configuration. The default tile depends on the device, the head dim and the dtype.

    In 16 bits two blocks share an SM, so that the matrix products of one hide the exponentials of the other. So this
    takes the first candidate that leaves room for two blocks, else the first that fits at all. K and V are
    double-buffered where that fits. Q's fragments stay in registers where those have room for them.
    """
    d, dv, capability = padded(problem.head_dim), padded(problem.head_dim_v), device.compute_capability
    half = problem.itemsize == 2
    if tile is not None:
        asked = Tile.parse(tile)
        candidates = [(*asked, 2), (*asked, 1)] if half else [(*asked, 1)]
    elif not half and d == 208:  # with 16 columns, ptxas spills here
        candidates = [(64, 32, 1), (32, 32, 1)]
    elif not half:
        candidates = [(64, max(16, min(64, 4096 // d // 16 * 16)), 1), (32, 16, 1)]
    elif d <= 48 or (d <= 64 and capability >= (9, 0)):
        candidates = [(128, 128, 2), (128, 64, 2), (128, 64, 1)]
    elif d <= 96 or (d == 128 and capability >= (9, 0)):
        candidates = [(128, 64, 2), (128, 64, 1), (64, 32, 1)]
    elif d <= 128:
        candidates = [(128, 32, 2), (128, 32, 1), (64, 32, 1)]
    else:
        candidates = [(64, 64, 1), (64, 32, 1)]
    bent = problem.soft_cap or problem.alibi or problem.mask
    if tile is None and half and d <= 128 and (bent or problem.dropout):  # these need registers, too
        least = 16 if bent else 32  # of 16 columns, a lane's random bytes are half for nothing
        candidates = [(rows, max(cols // 2, least), stages) for rows, cols, stages in candidates]
    elif tile is None and half and d in (64, 128) and capability >= (9, 0) and problem.lengths:  # so does a sequence
        candidates = [(rows, cols * 3 // 4, stages) for rows, cols, stages in candidates]
    if tile is None and problem.mask == "blocks":
        rows, cols = problem.block
        candidates = [(dividing(m, rows), dividing(n, cols), stages) for m, n, stages in candidates]
    if capability < (8, 0):  # without cp.async there is nothing to load ahead
        candidates = [c for c in candidates if c[2] == 1]

    def sram(rows: int, cols: int, stages: int) -> int:
        return (padded(rows) * d + stages * padded(cols) * (d + dv)) * problem.itemsize

    last_resort = [(16, 16, 1)] if tile is None else []
    roomy = [c for c in candidates if half and sram(*c) <= device.sram_per_block // 2]
    fitting = roomy + [c for c in candidates + last_resort if sram(*c) <= device.sram_per_block]
    if not fitting:
        rows, cols, stages = (candidates + last_resort)[-1]
        needed, most = sram(rows, cols, stages), device.sram_per_block
        raise SramOverflow("tile", f"{rows}x{cols}", needed=needed, limit=most, device=device.name)
    rows, cols, stages = fitting[0]
    return Config(
        tile=Tile(rows, cols),
        warps=warps_for(rows),
        stages=stages,
        q_in_registers=half and d <= 64 and cols == 64,
        heads_together=heads_that_share_the_l2(problem, device),
        blocks_per_sm=2,
        constants=features(problem),
    )


ABOUT = {
    "flash2": {
        "load_q": "Fetch this block's queries once. Its rows of O, m and ℓ never leave the registers.",
        "load_k": "Walk on: fetch the next tile of keys that the mask leaves to these rows.",
        "scores": "Multiply the query tile by the transposed key tile: one tile of S, each query's scores for these keys.",
        "mask": "Set the scores that the mask hides to −∞, so that their exponential is 0.",
        "softmax": "The new row maximum m, and P = exp(S − m). Nothing is divided yet.",
        "rescale": "Where the maximum rose, what was summed up before shrinks: ℓ and the accumulator times α = exp(m_old − m_new).",
        "load_v": "Fetch the values of the same keys.",
        "output": "Weigh the values with P, and add them to the accumulator.",
        "normalize": "After the last key tile, and only now, divide the accumulator by ℓ.",
        "store_o": "Write the finished rows of the output to HBM, for the first and only time.",
        "store_lse": "Write each row's log-sum-exp, m + log ℓ, to HBM: all that a backward pass needs to know of the softmax.",
    },
}
"""What each step of each launch is for, in a sentence or two: the player's words."""

ROW = Algorithm(
    "flash2",
    flash2,
    formula.flash2,
    schedule=schedule.launches,
    kernels=(PACK, Kernel("flash2", "flash2", (*FORWARD, *OPTIONAL, "rng_state"))),
    support=Support(masks=(*TRAINED, "dropout")),
    about=ABOUT,
    follows="flash1",
    rank=1,
    lesson="04_flash2",
)
