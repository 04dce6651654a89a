"""How a kernel runs a problem on a device: tile, warps, stages, what stays in registers, the order of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from simulator.devices import Device
from simulator.errors import SramOverflow
from simulator.problem import CACHES, MASK_FORMS, SCALES, Problem, Tile, round_up

WORK = "work"
"""What a thread tells the other warps of its block, by its name in SRAM."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a kernel. Tile program, formula and CUDA launch all use this one.

    - `tile`: Br rows of Q and Bc keys.
    - `warps`: warps per block.
    - `stages`: stages of the ring that holds K and V.
    - `q_in_registers`: Q leaves SRAM once, not once per key tile.
    - `heads_together`: how many (batch, head) pairs run their blocks side by side before the next pairs start.
      Elsewhere this is a head swizzle for the L2.
    - `blocks_per_sm`: the most blocks per SM that the kernel's registers leave room for (its launch bounds).
    - `consumers`: warpgroups that multiply. Each reads operands for itself, as a warp does in other kernels. With 0 the
      warps multiply.
    - `persistent`: there is one block per SM, and it takes row tiles one after the other.
    - `dynamic`: after its first one, a persistent block draws each row tile from a counter that all blocks share.
    - `told`: one thread works out which tiles its block takes, and where they lie. It tells the block's other warps in SRAM.
    - `walks`: how often a block goes through the lengths of all sequences, where K and V lie in pages or a batch is ragged.
    - `sorted`: blocks take the row tiles of long requests first, where K and V lie in pages. For each tile a warp looks at the
      lengths of the 32 requests around it.
    - `fragment_rows`: how many rows of Q a fragment of the tensor cores has. It is 8 where rows of Q are columns of its products.
    - `constants`: further macros for the compiler, such as `(("SPLITS", 4),)`.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=8, len_q=4096, head_dim=64, dtype="float16")
    >>> fl.count("flash2", p).config.warps
    4
    """

    tile: Tile
    warps: int
    stages: int = 1
    q_in_registers: bool = False
    heads_together: int = 1
    blocks_per_sm: int = 16
    consumers: int = 0
    persistent: bool = False
    dynamic: bool = False
    told: bool = False
    walks: int = 0
    sorted: bool = False
    fragment_rows: int = 16
    constants: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        Tile.parse(self.tile)  # 64.0 rows would fail somewhere inside

    @property
    def page_box(self) -> int:
        """How many rows of a page TMA brings in one box. 0: warps copy rows one by one, or there are no pages."""
        return dict(self.constants).get("PAGE_BOX", 0)

    @property
    def parts(self) -> int:
        """How many parts a backward pass makes of the query heads of a group: a block has one key tile and one part."""
        return dict(self.constants).get("PARTS", 1)

    @property
    def ordered(self) -> bool:
        """Does the first launch of a backward pass put the key tiles of all sequences in an order, the longest first?"""
        return "ORDERED" in dict(self.constants)

    @property
    def readers(self) -> int:
        """How many warpgroups or warps read an operand that is not split: the warpgroups that multiply, or else all warps."""
        return self.consumers or self.warps

    def grid(self, problem: Problem, device: Device, blocks: int) -> int:
        """The number of blocks that are launched for `blocks` row tiles (those of all heads).

        >>> import flashlab as fl
        >>> p = fl.Problem(batch=1, heads=11, len_q=4096, head_dim=64, dtype="float16", causal=True)
        >>> fl.count("flash3", p).config.grid(p, fl.DEVICES["h100"], 242)
        132
        """
        return min(blocks, device.sms) if self.persistent else blocks


def features(problem: Problem) -> tuple[tuple[str, int], ...]:
    """The macros for what only some problems have. A kernel is compiled with those of its problem alone."""
    p = problem
    has = {
        "SOFT_CAP": p.soft_cap is not None,
        "ALIBI": p.alibi,
        "SINKS": p.sinks,
        "RAGGED": p.ragged,
        "MASK": p.mask and 1 + MASK_FORMS.index(p.mask),
        "DROPOUT": p.dropout is not None,
        "DLSE": p.dlse,
        "PARTIAL": p.partial and p.itemsize < 4,
        "EXACT_LSE": p.exact_lse,
        "DRAFTS": p.drafts,
        "VARLEN": p.varlen,
    }
    has |= {"CACHE": p.quantized and 1 + CACHES.index(p.kv_dtype)}
    has |= {
        name.upper(): form and 1 + SCALES.index(form) for name in ("k_scale", "v_scale") if (form := getattr(p, name))
    }
    blocks = {"BLOCK_ROWS": p.block.rows, "BLOCK_COLS": p.block.cols} if p.mask == "blocks" else {}
    return tuple((name, int(asked)) for name, asked in {**has, **blocks}.items() if asked)


def dividing(side: int, block: int, least: int = 16) -> int:
    """The longest side of a tile up to `side` that divides the side of a mask's block, in multiples of `least`; else `side`.

    >>> dividing(48, 128), dividing(192, 128, 64), dividing(128, 72)
    (32, 128, 128)
    """
    return next((n for n in range(side, 0, -least) if block % n == 0), side)


def padded(n: int, fragment: int = 16) -> int:
    """`n` rows, columns or head dims, rounded up to whole fragments of the tensor cores (16 x 8 x 16)."""
    return round_up(n, fragment)


def warps_for(length: int, most: int = 4) -> int:
    """How many warps split a `length` of rows or columns into whole fragments of 16: at most `most`."""
    fragments = padded(length) // 16
    return next(w for w in range(min(most, fragments), 0, -1) if fragments % w == 0)


def choose(
    candidates: Iterable[Tile | tuple[int, int]],
    tile: Tile | tuple[int, int] | str | None,
    device: Device,
    sram: Callable[[Tile], int],
) -> Tile:
    """The tile that was asked for, else the first candidate that fits the device. `sram(tile)` is its bytes per block.

    Raises `SramOverflow` if the tile that was asked for does not fit, or if no candidate does.
    """
    asked = [] if tile is None else [Tile.parse(tile)]
    last = Tile(1, 1)
    for last in asked or [Tile(*pair) for pair in candidates]:
        if sram(last) <= device.sram_per_block:
            return last
    raise SramOverflow("tile", str(last), needed=sram(last), limit=device.sram_per_block, device=device.name)


def heads_that_share_the_l2(problem: Problem, device: Device) -> int:
    """How many (batch, head) pairs to run side by side so that their K and V stay in the L2.

    They may take a third of the L2. It keeps what every SM reads twice, once in each half: on an H200, re-reads by all
    SMs were served up to about half of the 60 MB. Q and out pass through the L2 as well. All groups have the same size,
    so that no small last group starts its long rows alone. Of a ragged batch the longest sequence counts.
    """
    kv = problem.padded.len_kv * (problem.head_dim + problem.head_dim_v) * problem.itemsize
    kv_heads = problem.batch * problem.kv_heads
    most = max(1, min(kv_heads, device.l2 // 3 // max(1, kv)))
    return problem.queries_per_kv * next(n for n in range(most, 0, -1) if kv_heads % n == 0)
