"""FlashAttention-2's backward pass on Hopper: TMA loads whole boxes, warpgroups multiply, P and dS stay in their registers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from simulator.block import Block
from simulator.config import WORK, Config
from simulator.devices import Device
from simulator.machine import Machine
from simulator.operations.backward import BACKWARD
from simulator.problem import Problem, Tile, round_up
from simulator.program import program
from simulator.programs import flash2_backward as flash2
from simulator.programs.dropout import dropped, kept_sum, of_kept, of_kept_sum, read_state
from simulator.programs.flash2_backward import convert, prepare, sink_gradient
from simulator.programs.flash3 import MBARRIERS, PANEL, counter
from simulator.tensors import HbmTensor

KEYS = 64
"""Keys of a tile per warpgroup."""
PART_ROWS = 16
"""Rows per block of the launch that adds up parts."""
ROUNDS = 8
"""Where blocks run in about so many rounds or fewer, a launch's end is a part of it that counts."""


def warpgroups(tile: Tile) -> tuple[int, int]:
    """The warpgroups form a grid over a tile of dQ: how many lie along its rows, 64 each, and how many across its columns."""
    all_of_them = max(1, tile.cols // KEYS)
    above = max(1, min(all_of_them, tile.rows // 64))
    return above, all_of_them // above


def work_bytes(problem: Problem) -> int:
    """Bytes that say which key tile is next, and which tiles of queries see it. In a ragged batch they also say its sequence."""
    return 32 if problem.lengths is not None else 16


def listeners(config: Config) -> int:
    """The warps that are told which key tile is next: those that multiply, and three that load."""
    return 4 * config.consumers + 3


def mbarriers(problem: Problem, *, in_turn: bool = False) -> int:
    """Room for the mbarriers and for what is next, in float32 elements. Mbarriers leave 16 bytes of it, but none with turns."""
    return MBARRIERS + round_up((work_bytes(problem) - 16) // 4, 16) + 16 * in_turn


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
    return int(not p.alike)


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


@program(operation=BACKWARD)
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
