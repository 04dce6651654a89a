"""FlashAttention-3, backward: its configuration, the player's words, and its row of the catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from heapq import heapreplace

from simulator.algorithm import Algorithm, Kernel
from simulator.algorithms.common import OFFSETS
from simulator.algorithms.flash2_backward import about
from simulator.algorithms.flash3 import triangular
from simulator.config import Config, features, heads_that_share_the_l2, padded
from simulator.devices import Device
from simulator.errors import SramOverflow
from simulator.formulas import flash3_backward as formula
from simulator.formulas.flash3_backward import sram_bytes
from simulator.formulas.walk import ends_of_row, walk
from simulator.lanes import largest, most
from simulator.problem import COMMON_MASKS, Problem, Tile, round_up
from simulator.programs.flash3 import PANEL
from simulator.programs.flash3_backward import KEYS, ROUNDS, flash3_backward, order
from simulator.support import Support
from simulator.time.schedules import flash3_backward as schedule

REACHED = 0.7
"""The share of the tensor cores' rate that the kernel reaches, about."""
LAUNCH = 3e-6
"""Seconds that one more launch takes, about."""
EDGES = 2
"""How many tiles of queries a block could take while it begins and ends, about."""
AT_ONCE = 16
"""So many key tiles of a head run at once, about."""
WORTH = 0.9
"""Heads are taken in parts where that takes at most this share of the time, or where sequences are in an order."""


def choose_tile(problem: Problem) -> Tile:
    """The widest head dims leave registers for 64 queries, the narrower ones for 128."""
    return Tile(128 if round_up(max(problem.head_dim, problem.head_dim_v), PANEL) == PANEL else 64, 128)


def accepts(tile: Tile, problem: Problem) -> str | None:
    """None for the kernel's tile, else what is accepted."""
    chosen = choose_tile(problem)
    return None if tile == chosen else f"{chosen}: 64 keys for each of two warpgroups, whose registers hold no other"


def choose_parts(problem: Problem, device: Device, tile: Tile) -> int:
    """In how many parts to take the query heads of a group. With few key tiles, SMs would have nothing to do.

    A block has one key tile and one part. With n parts there are n times as many blocks, each with its share of the work.
    But their sums of dK and dV pass through HBM in float32, and one more launch adds them up. Whole parts are taken, in the
    number that takes the least time by this count:

    - The blocks run in rounds, one on each SM. Under a causal mask they are dealt out the longest first, so short ones fill
      the last round, but for half a block. Of sequences in an `order`, blocks are dealt out one by one here, if they aren't
      many. Other sequences are taken as they come: there the longest block may come last.
    - A visit of a tile of queries takes the time of its five products. A block's begin and end take that of `EDGES` visits.
    - The parts of dK and dV are written and read once.

    >>> from simulator import DEVICES
    >>> p = Problem(batch=1, heads=8, kv_heads=2, len_q=4096, head_dim=128, dtype="bfloat16")
    >>> [choose_parts(p.replace(batch=n), DEVICES["h200"], Tile(64, 128)) for n in (1, 2, 3, 8)]
    [2, 1, 2, 1]
    """
    p, square = problem, Tile(tile.cols, tile.rows)
    tiles = p.total(lambda one: one.key_tiles(tile))
    if p.queries_per_kv == 1 or not tiles:
        return 1
    visits = p.total(lambda one: walk(one.transposed, square).pairs) / tiles
    few = tiles <= ROUNDS * device.sms
    each = [
        len(one.transposed.tiles_of_row(j, square))
        for one, times in (p.different.items() if p.lengths and few else ())
        for j in [*range(one.key_tiles(tile))] * times
    ]

    def most_visits(one: Problem) -> int:
        """Under a causal mask the first key tile has most to do, in a window that in the middle, and in some the last one."""
        n = one.key_tiles(tile)
        ends = [ends_of_row(one.transposed, j, square) for j in (0, n // 2, n - 1)]
        return (n > 0) * reduce(most, [stop - start for start, stop in ends])

    longest = max(largest(visits) for visits, _ in p.of_sequences(most_visits))
    uneven = not p.alike
    heads, d, boxes = p.batch * p.kv_heads, padded(p.head_dim) + padded(p.head_dim_v), round_up(p.head_dim, PANEL)
    visit = 2 * tile.rows * tile.cols * (2 * d + boxes) / (REACHED * device.tensor_flops / device.sms)

    def in_order(parts: int) -> bool:
        return order(p, device, heads * tiles * parts) > 0

    def seconds(parts: int) -> float:
        members, blocks = p.queries_per_kv // parts, heads * tiles * parts
        mean, most = members * visits + EDGES, members * longest + EDGES
        if in_order(parts) and blocks <= ROUNDS * device.sms:
            busy = finish(sorted((members * n + EDGES for n in each), reverse=True), heads * parts, device.sms)
        elif in_order(parts):
            busy = max((blocks / device.sms + 1 / 2) * mean, most)
        elif uneven:
            busy = blocks / device.sms * mean + most
        elif triangular(p):
            busy = max((blocks / device.sms + 1 / 2) * mean, most)
        else:
            busy = max(-(-blocks // device.sms) * mean, most)
        summed = 8 * parts * heads * p.len_kv * (p.head_dim + p.head_dim_v) / device.bandwidth
        return busy * visit + (parts > 1) * (summed + LAUNCH)

    best = min((n for n in range(1, p.queries_per_kv + 1) if p.queries_per_kv % n == 0), key=seconds)
    return best if in_order(best) or seconds(best) <= WORTH * seconds(1) else 1


def finish(times: Sequence[float], heads: int, sms: int) -> float:
    """When the last SM is done, if each takes the next block as soon as it is free, and each head has blocks of these times.

    >>> finish([3, 2, 1], heads=1, sms=2), finish([1, 2, 3], heads=1, sms=2)
    (3.0, 4.0)
    """
    free = [0.0] * sms
    for time in times:
        for _ in range(heads):
            heapreplace(free, free[0] + time)
    return max(free)


def heads_side_by_side(problem: Problem, device: Device) -> int:
    """How many (batch, head) pairs run side by side, all query heads of a KV head among them: no more than share the L2, and
    none that would leave each fewer than about `AT_ONCE` key tiles that run at once.

    Blocks of a head read the same Q and dO at about the same time, and add to the same rows of dQ. If more heads ran, the key
    tiles of a short one would come in several rounds, and each round would read all of that from HBM again. Without a mask no
    key tile is longer than others, so none has to come first. Then blocks that each have one key tile go head by head: those of
    a head begin together.

    >>> from simulator import DEVICES
    >>> p = Problem(batch=16, heads=16, len_q=1024, head_dim=128, dtype="bfloat16", causal=True)
    >>> heads_side_by_side(p, DEVICES["h200"]), heads_in_turn(p, DEVICES["h200"], Tile(64, 128))
    (8, 32)
    >>> heads_side_by_side(p.replace(causal=False), DEVICES["h200"])
    1
    """
    kv_heads, members = problem.batch * problem.kv_heads, problem.queries_per_kv
    unmasked = problem.left is None and problem.right is None and problem.lengths is None
    if unmasked and members == 1 and problem.head_dim > PANEL:
        return 1
    most = max(1, min(heads_that_share_the_l2(problem, device) // members, device.sms // AT_ONCE))
    return members * next(n for n in range(most, 0, -1) if kv_heads % n == 0)


def heads_in_turn(problem: Problem, device: Device, tile: Tile) -> int:
    """The same where blocks take turns.

    A block begins to add later than the one before it, by the time that a turn takes to be passed on. So no more key tiles of
    each head run at once than `AT_ONCE` asks for. All of them go over its queries in step, and find Q and dO in the L2 even where
    those of all heads don't fit. But key tiles of a long head come in many rounds, and each reads all of that again: no more heads
    run side by side than have two rounds of blocks together. Under a causal mask each group of heads begins anew, and is late
    anew: then it has as many heads as share the L2, and no fewer than `AT_ONCE` asks for, or twice as many narrow ones.
    """
    kv_heads, members = problem.batch * problem.kv_heads, problem.queries_per_kv
    least = -(-device.sms // AT_ONCE)
    if triangular(problem):
        least *= 2 if problem.head_dim <= PANEL else 1
        least = max(least, heads_that_share_the_l2(problem, device) // members)
    else:
        least = min(least, max(1, 2 * device.sms // max(1, problem.key_tiles(tile))))
    return members * next((n for n in range(min(kv_heads, least), kv_heads + 1) if kv_heads % n == 0), 1)


def fit(
    problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None, *, in_turn: bool = False
) -> tuple[Tile, int]:
    """The tile, and two stages of Q and dO, or one if two don't fit. Raises `SramOverflow` if no configuration fits."""
    chosen = choose_tile(problem) if tile is None else Tile.parse(tile)
    # small tiles are a last resort for float32, wide heads and small GPUs, where the kernel doesn't run anyway
    smaller = [(Tile(64, 64), 1), (Tile(16, 16), 1)] if tile is None else []
    candidates = [(chosen, 2), (chosen, 1), *smaller]
    for chosen, stages in candidates:
        if sram_bytes(problem, chosen, stages, in_turn=in_turn) <= device.sram_per_block:
            return chosen, stages
    chosen, stages = candidates[-1]
    needed = sram_bytes(problem, chosen, stages, in_turn=in_turn)
    raise SramOverflow("tile", str(chosen), needed=needed, limit=device.sram_per_block, device=device.name)


def configure_rung(
    problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None, *, producers: int = 1
) -> Config:
    """The configuration of a rung: a block per key tile, in plain order, with further `producers` or none."""
    chosen, stages = fit(problem, device, tile)
    consumers = max(1, chosen.cols // KEYS)
    return Config(
        tile=chosen,
        warps=4 * (consumers + producers),
        stages=stages,
        consumers=consumers,
        blocks_per_sm=1,
        heads_together=problem.queries_per_kv,
        constants=features(problem),
    )


@flash3_backward.configured
def configure(
    problem: Problem, device: Device, tile: Tile | tuple[int, int] | str | None = None, *, in_turn: bool = False
) -> Config:
    """A producer and a warpgroup per 64 keys, with two stages of Q and dO, or one if two don't fit.

    Blocks that add to dQ `in_turn` draw one key tile each, so that each waits only for blocks that have begun. Raises
    `SramOverflow` if no configuration fits.
    """
    chosen, stages = fit(problem, device, tile, in_turn=in_turn)
    consumers = max(1, chosen.cols // KEYS)
    # beside random bytes, or with wide heads, the kernel has no registers for a list of key tiles
    persistent = not in_turn and not problem.dropout and problem.head_dim <= PANEL
    parts = choose_parts(problem, device, chosen)
    tiles = problem.total(lambda one: one.key_tiles(chosen))
    in_order = order(problem, device, problem.kv_heads * parts * tiles)
    return Config(
        tile=chosen,
        warps=4 * (consumers + 1),
        stages=stages,
        consumers=consumers,
        blocks_per_sm=1,
        heads_together=heads_in_turn(problem, device, chosen) if in_turn else heads_side_by_side(problem, device),
        constants=(
            *([("IN_TURN", 1)] if in_turn else []),
            *([("PARTS", parts)] if parts > 1 else []),
            *([("ORDERED", in_order)] if in_order else []),
            *features(problem),
        ),
        persistent=persistent,
        dynamic=in_turn or (persistent and (triangular(problem) or not problem.alike)),
        told=in_turn or persistent or problem.lengths is not None,
    )


ABOUT = about(
    "flash3_backward",
    {
        "load_kv": "TMA brings a tile of keys and their values, once. Their gradients never leave the registers.",
        "load_q": "TMA brings the next tile of queries that see any of these keys. A warp of the producer fetches their LSE.",
        "load_do": "TMA brings dO of the same queries, and the warp their D. The sums of dP begin at −D.",
        "scores": "Each warpgroup multiplies its 64 keys by the queries: the tile of S again, transposed.",
        "dp": "dP = V dOᵀ, in the background: how the loss depends on each probability.",
        "mask": "Set the scores that the mask hides to −∞, so that their exponential is 0.",
        "exp": "P = exp(S − LSE): with the LSE kept, no maximum and no sum are needed.",
        "ds": "dS = P (dP − D): the derivative of the softmax. It goes to SRAM for the other warpgroup, and stays in registers.",
        "dv": "dV of these keys gains Pᵀ dO, with P straight from the registers.",
        "dk": "dK of these keys gains dSᵀ Q, with dS straight from the registers.",
        "dq": "dS K belongs to dQ of these queries. Blocks of other key tiles add to the same rows, so atomics add it up in HBM.",
        "store_dkv": "Write dK, times the scale, and dV to HBM, for the first and only time. Or what a part of the heads gives.",
    },
) | {
    "flash3_backward_parts": {
        "add_parts": "dK and dV are the sums over the parts of the group's heads, in one order, rounded to the storage dtype.",
    }
}
"""What each step of each launch is for, in a sentence or two: the player's words."""


def rung_about(name: str, changes: dict[str, str]) -> dict[str, dict[str, str]]:
    """The player's words for a rung. Its first and its last launch are those of `flash3_backward`."""
    main = {
        "load_q": "TMA brings the next tile of queries that see any of these keys, and a warp fetches their LSE.",
        "load_do": "TMA brings dO of the same queries, and a warp fetches their D.",
        "dp": "dP = V dOᵀ: how the loss depends on each probability.",
        "store_dkv": "Write dK, times the scale, and dV to HBM, for the first and only time.",
    }
    others = {launch: ABOUT[launch] for launch in ("flash3_backward_delta", "flash3_backward_convert")}
    return others | {name: ABOUT["flash3_backward"] | main | changes}


BOXES = ("q", "rows"), ("k", "cols"), ("v", "cols"), ("dout", "rows")
OF_ROWS = ("out", "dout", "dlse", "delta", "dq_sum", "dq", *OFFSETS)
OF_PARTS = ("dk_parts", "dv_parts")


def launches(*, waits: bool = False) -> tuple[Kernel, ...]:
    """The launches of the backward pass for Hopper. If it `waits`, the blocks of the main one take turns."""
    file, arch = "flash3_backward", "sm_90a"
    order = "turns" if waits else "order"
    main = ("q", "k", "v", "lse", "dout", "delta", "dq_sum", "dq"), (*OFFSETS, "rng_state", "drawn", order)
    return (
        Kernel(file, "flash3_backward_delta", (*OF_ROWS, order), arch=arch),
        *(
            Kernel(file, file, (*main[0], *sums, *main[1]), BOXES, arch, persistent=True, parts=parts, waits=waits)
            for parts, sums in ((False, ("dk", "dv")), (True, OF_PARTS))
        ),
        *(() if waits else (Kernel(file, "flash3_backward_convert", ("dq_sum", "dq", "offsets_q"), arch=arch),)),
        Kernel(file, "flash3_backward_parts", (*OF_PARTS, "dk", "dv"), arch=arch, parts=True),
        Kernel(
            file,
            "flash3_backward_sinks",
            ("sinks", "lse", "delta", "dsinks", "offsets_q"),
            arch=arch,
            when=lambda p: p.sinks,
        ),
    )


HOPPER = Support(
    dtypes=("float16", "bfloat16"),
    only=(9, 0),
    head_dims=range(1, 129),
    tile=accepts,
    masks=(*COMMON_MASKS, "sinks", "lengths", "dropout", "dlse", "partial"),
    instead="flash2_backward",
)
ROW = Algorithm(
    "flash3_backward",
    flash3_backward,
    formula.flash3_backward,
    schedule=schedule.launches,
    kernels=launches(),
    support=HOPPER,
    about=ABOUT,
    follows="flash3_backward_3",
    atomics=("dq",),
    rank=4,
)
