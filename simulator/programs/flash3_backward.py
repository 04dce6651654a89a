"""FlashAttention-2's backward pass on Hopper: TMA loads whole boxes, warpgroups multiply, P and dS stay in their registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapreplace

from simulator.block import Block
from simulator.config import WORK, Config, features, heads_that_share_the_l2, padded
from simulator.devices import Device
from simulator.errors import SramOverflow
from simulator.formulas.walk import walk
from simulator.machine import Machine
from simulator.operations.backward import BACKWARD
from simulator.problem import Problem, Tile, round_up
from simulator.program import program
from simulator.programs import flash2_backward as flash2
from simulator.programs.dropout import dropped, kept_sum, of_kept, of_kept_sum, read_state
from simulator.programs.flash2_backward import about, convert, prepare, sink_gradient
from simulator.programs.flash3 import MBARRIERS, PANEL, counter, triangular
from simulator.tensors import HbmTensor

KEYS = 64
"""Keys of a tile per warpgroup."""
REACHED = 0.7
"""The share of the tensor cores' rate that the kernel reaches, about."""
LAUNCH = 3e-6
"""Seconds that one more launch takes, about."""
EDGES = 2
"""How many tiles of queries a block could take while it begins and ends, about."""
PART_ROWS = 16
"""Rows per block of the launch that adds up parts."""
AT_ONCE = 16
"""So many key tiles of a head run at once, about."""
ROUNDS = 8
"""In so many rounds of blocks, about, the end is a part of the launch that counts."""
WORTH = 0.9
"""Heads are taken in parts where that takes at most this share of the time, or where sequences are in an order."""


def warpgroups(tile: Tile) -> tuple[int, int]:
    """The warpgroups form a grid over a tile of dQ: so many along its rows, 64 each, and so many across its columns."""
    all_of_them = max(1, tile.cols // KEYS)
    above = max(1, min(all_of_them, tile.rows // 64))
    return above, all_of_them // above


def work_bytes(problem: Problem) -> int:
    """Bytes that say which key tile is next, and which tiles of queries see it. In a ragged batch, also of which sequence."""
    return 32 if problem.lengths is not None else 16


def listeners(config: Config) -> int:
    """The warps that are told which key tile is next: those that multiply, and three that load."""
    return 4 * config.consumers + 3


def sram_bytes(problem: Problem, tile: Tile, stages: int, *, in_turn: bool = False) -> int:
    """SRAM bytes per block: K_j and V_j, the stages of Q_i and dO_i with LSE and D, two buffers of dS, the mbarriers."""
    d, dv = round_up(problem.head_dim, PANEL), round_up(problem.head_dim_v, PANEL)
    rows, cols = round_up(tile.rows, 16), round_up(tile.cols, 16)
    tiles = (cols + stages * rows) * (d + dv) + 2 * cols * round_up(tile.rows, PANEL)
    return tiles * problem.itemsize + 4 * (2 * round_up(stages * tile.rows, 16) + mbarriers(problem, in_turn=in_turn))


def mbarriers(problem: Problem, *, in_turn: bool = False) -> int:
    """Room for the mbarriers and for what is next, in float32 elements. They leave 16 bytes of their own room, but for turns."""
    return MBARRIERS + round_up((work_bytes(problem) - 16) // 4, 16) + 16 * in_turn


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
    alone = [(one, one.key_tiles(tile), times) for one, times in p.different.items()]
    tiles = sum(times * n for _, n, times in alone)
    if p.queries_per_kv == 1 or not tiles:
        return 1
    visits = sum(times * walk(one.transposed, square).pairs for one, _, times in alone) / tiles
    few = tiles <= ROUNDS * device.sms
    each = [
        len(one.transposed.tiles_of_row(j, square))
        for one, n, times in alone
        if p.lengths and few
        for j in [*range(n)] * times
    ]
    # under a causal mask the first key tile has most to do, in a window that in the middle, and in some the last one
    longest = max(len(one.transposed.tiles_of_row(j, square)) for one, n, _ in alone if n for j in {0, n // 2, n - 1})
    uneven = len(p.different) > 1
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


def order(problem: Problem, device: Device, blocks: int) -> int:
    """Whether the first launch puts the key tiles of all sequences in an order, the longest first. It does where they take
    different times and not all `blocks` run at once.

    Tiles from this part of the longest sequence on count as alike: 1 is all of it, 4 a quarter, and 0 says that there is no
    order. Under a causal mask, key tiles of one sequence find its queries in the L2 only while they run side by side. So
    only short ones are sorted there, and none where the end of the launch is a small part of it.

    >>> from simulator import DEVICES
    >>> p = Problem(batch=1, heads=1, lengths=[500, 4000], head_dim=128, dtype="bfloat16")
    >>> [order(p.replace(causal=causal), DEVICES["h200"], blocks) for causal in (False, True) for blocks in (100, 200, 2000)]
    [0, 1, 1, 0, 4, 0]
    """
    p = problem
    if p.lengths is None or not p.len_q or p.left is not None or blocks <= device.sms:
        return 0
    if p.right is not None:
        return 4 if blocks <= ROUNDS * device.sms else 0
    return int(len(p.different) > 1)


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
    tiles = sum(n * one.key_tiles(chosen) for one, n in problem.different.items())
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
        dynamic=in_turn or (persistent and (triangular(problem) or len(problem.different) > 1)),
        told=in_turn or persistent or problem.lengths is not None,
    )


class Turns(flash2.Turns):
    """The order in which blocks add to dQ. Here there is none."""

    def __init__(self, m: Machine, k: HbmTensor, problem: Problem, tile: Tile) -> None:
        self.m, self.problem, self.tile = m, problem, tile
        self.dq = m.output("dq")

    def prepare(self, out: HbmTensor, dout: HbmTensor, dq_sum: HbmTensor) -> HbmTensor:
        """The first launch. Returns D."""
        return prepare("flash3_backward", self.m, out, dout, dq_sum, rows=self.tile.rows)

    def apart(self) -> Callable[[int], object] | None:
        """If there is one, key tiles run in lockstep only where it is the same for them."""

    def announce(self, block: Block) -> None:
        """What a warp tells the others of a query tile, as it loads their LSE."""

    def finish(self, dq_sum: HbmTensor) -> None:
        """What is left when all have added."""
        convert("flash3_backward", self.m, dq_sum, self.dq, self.problem, self.tile.rows)


@program(configure=configure, operation=BACKWARD)
def flash3_backward(
    m: Machine,
    q: HbmTensor,
    k: HbmTensor,
    v: HbmTensor,
    out: HbmTensor,
    lse: HbmTensor,
    dout: HbmTensor,
    problem: Problem,
    tile: Tile,
) -> tuple[HbmTensor, ...]:
    """Algorithm 2 of FlashAttention-2 (arXiv 2307.08691), with the engines of Hopper (arXiv 2407.08608).

    q, dq (batch, heads, len_q, d); k, v, dk, dv (batch, kv_heads, len_kv, d); out, dout like q; lse (batch, heads,
    len_q) float32. A block has Bc keys of a KV head, 64 per warpgroup. (A kernel's block takes such key tiles one after
    the other.) dK_j and dV_j stay in its registers, summed over the query heads of the group. S and dP are computed
    transposed, with keys as rows. So P and dS lie in registers as the products for dV and dK want them. Only for dQ,
    which needs all keys, dS passes through SRAM.
    The kernel computes a tile's dQ one tile later. Each warp reads all of LSE and D from SRAM. The sums of dQ lie as the
    accumulators do, so whole tiles of them count, with their rows and columns outside. Warpgroups share dQ by boxes, so its
    product goes over whole ones. In a ragged batch, boxes that reach
    into the next sequence are cleared in SRAM.
    Where key tiles are few, a block has a part of the group's heads, and a launch of its own adds up what the parts gave dK
    and dV. Of a ragged batch, blocks may take the key tiles of all sequences in one order, the longest first. The first
    launch writes it.
    """
    return backward("flash3_backward", m, q, k, v, out, lse, dout, problem, tile)


def backward(
    name: str,
    m: Machine,
    q: HbmTensor,
    k: HbmTensor,
    v: HbmTensor,
    out: HbmTensor,
    lse: HbmTensor,
    dout: HbmTensor,
    problem: Problem,
    tile: Tile,
    order: type[Turns] = Turns,
) -> tuple[HbmTensor, ...]:
    """`flash3_backward`, whose main launch has this name, and blocks that add to dQ in an order."""
    c, ragged = m.config, problem.lengths is not None
    parts = min(c.parts, problem.queries_per_kv)  # of one head, which is traced alone, there is one
    members = problem.queries_per_kv // parts
    dk, dv = m.output("dk"), m.output("dv")
    dq_sum = m.workspace("dq_sum", round_up(q.cols, PANEL), rows=round_up(problem.len_q, tile.rows), flat=True)
    turns = order(m, k, problem, tile)
    delta = turns.prepare(out, dout, dq_sum)
    sums = dk, dv
    if c.parts > 1:
        axes = {"parts": parts}
        sums = tuple(m.workspace(f"{x.name}_parts", x.cols, rows=x.rows, of=x, axes=axes) for x in (dk, dv))
    drawn = counter(m)
    above, across = warpgroups(tile)
    visible = partial(problem.transposed.tiles_of_row, tile=Tile(tile.cols, tile.rows))
    launch = m.launch(
        name,
        rows=problem.key_tiles(tile),
        cols=parts,
        warps=c.warps,
        readers=c.consumers,
        walk=visible,
        apart=turns.apart(),
        of=k,
        along="len_kv",
    )
    for block in launch:
        j = block.i
        ds_shared = block.alloc("ds", tile.cols, tile.rows, problem.dtype, copies=2, panel=PANEL)
        lse_shared, d_shared = (block.alloc(name, c.stages * tile.rows) for name in ("lse", "delta"))
        block.alloc("mbarriers", mbarriers(problem, in_turn=order is not Turns))
        for ring in (q, dout):
            block.alloc(ring.name, tile.rows, ring.cols, ring.dtype, copies=c.stages, panel=PANEL)
        block.step("load_kv")
        if drawn is not None:
            block.arrive(drawn, 0)
        if c.told:
            block.tell(WORK, listeners(c), work_bytes(problem))
        k_j, v_j = (block.load(x, j, tile.cols, panel=PANEL, clear=ragged) for x in (k, v))
        read_state(m, block, 4 * c.consumers)
        dk_j, dv_j = block.full(tile.cols, k.cols, 0.0), block.full(tile.cols, v.cols, 0.0)
        for g in range(block.j * members, (block.j + 1) * members):
            for i in turns.walk(block.walk):
                block.step("load_q")
                q_i = block.load(q.head(g), i, tile.rows, stages=c.stages, panel=PANEL, clear=ragged)
                turns.announce(block)
                block.put(lse_shared, block.fetch(lse.head(g), i, tile.rows))
                block.step("load_do")
                do_i = block.load(dout.head(g), i, tile.rows, stages=c.stages, panel=PANEL, clear=ragged)
                block.put(d_shared, kept_sum(block.fetch(delta.head(g), i, tile.rows), problem))
                d_i = block.get(d_shared, 4 * c.consumers).T
                block.step("scores")
                s = block.matmul(k_j, q_i.T, split=("rows", "none"), scale=problem.scale)
                block.step("dp")
                dp = block.matmul(v_j, do_i.T, split=("rows", "none"))
                block.step("mask")
                s = block.mask(s.T, i, j).T
                block.step("exp")
                p = block.exp(s - block.get(lse_shared, 4 * c.consumers).T.finite())
                block.step("ds")
                dp = dropped(m, block, dp.T, i, j, member=g).T
                ds = (p * (dp - d_i)).round(problem.dtype)
                block.put(ds_shared, ds)
                block.step("dv")
                p = dropped(m, block, p.T, i, j, member=g).T
                dv_j = block.matmul(p.round(problem.dtype), do_i, split=("rows", "none"), acc=dv_j)
                block.step("dk")
                dk_j = block.matmul(ds, q_i, split=("rows", "none"), acc=dk_j)
                block.step("dq")
                dq_i = block.matmul(ds_shared.T, k_j.whole, split=(across, above))
                turns.add(block, dq_sum, dq_i, i, tile.rows, g)
        block.step("store_dkv")
        own = tuple(x.at(parts=block.j) if c.parts > 1 else x for x in sums)
        block.store(own[0], dk_j * of_kept(problem.scale, problem), j, tile.cols)
        block.store(own[1], of_kept_sum(dv_j, problem), j, tile.cols)
    turns.finish(dq_sum)
    if c.parts > 1:
        add_parts(m, sums, (dk, dv))
    return turns.dq, dk, dv, *sink_gradient("flash3_backward", m, lse, delta, problem)


def add_parts(m: Machine, sums: tuple[HbmTensor, ...], gradients: tuple[HbmTensor, ...]) -> None:
    """dK and dV: the sum over the parts of a group's heads, in their order, rounded to the storage dtype."""
    rows, dk = -(-gradients[0].rows // PART_ROWS), gradients[0]
    for block in m.launch("flash3_backward_parts", rows=rows, warps=4, of=dk, along="len_kv", across=PART_ROWS):
        block.step("add_parts")
        for x, dx in zip(sums, gradients, strict=True):
            total = block.fetch(x.at(parts=0), block.i, PART_ROWS)
            for part in range(1, x.spec.planes):
                total = total + block.fetch(x.at(parts=part), block.i, PART_ROWS)
            block.store(dx, total, block.i, PART_ROWS)


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
