"""The drawings of the lessons and of docs/in-pictures.md.

Nothing is drawn by hand. A drawing is a function of figures, and the figures come from formulas, devices, tile programs
or the model of time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from flashlab.lessons.drawing import BLUE, GREEN, GREY, INK, ORANGE, PINK, WIDTH, Drawing, box, legend, size, text
from flashlab.lessons.latent import caches, forms
from flashlab.lessons.paging import copied, pages
from flashlab.lessons.pipelines import cp_async, ping_pong, tma
from flashlab.lessons.several import dealt, turns, waits
from flashlab.views.palette import LIGHT
from simulator import CATALOGUE, DEVICES, Problem, count, random_inputs, simulate
from simulator.catalogue import ladder
from simulator.dtypes import Array
from simulator.operations.backward import BACKWARD
from simulator.problem import Tile
from simulator.programs.flash_decoding import CHILDREN, Splits

LONG = Problem(batch=4, heads=16, len_q=4096, head_dim=64, dtype="float16", causal=True)
SHORTER = Problem(batch=1, heads=1, len_q=96, len_kv=160, head_dim=64, dtype="float16", causal=True)
DECODE = Problem(batch=1, heads=1, len_q=1, len_kv=40_960, head_dim=64, dtype="float16")
TOKEN = Problem(batch=1, heads=32, kv_heads=8, len_q=1, len_kv=8192, head_dim=128, dtype="bfloat16")
TILE, SMALL = Tile(64, 64), Tile(16, 16)


def bars(title: str, figures: dict[str, float]) -> Drawing:
    """A bar for each figure, all on one scale of bytes."""
    most, shapes = max(figures.values()), list[str]()
    for n, (name, nbytes) in enumerate(figures.items()):
        y, width = 22 + 56 * n, max(1, 400 * nbytes / most)
        shapes += [text(8, y, name), box(8, y + 6, width, 26, (BLUE, ORANGE, GREEN)[n % 3])]
        shapes.append(text(16 + width, y + 24, size(nbytes)))
    return Drawing(title, 12 + 56 * len(figures), shapes, figures)


def memories() -> Drawing:
    """The memories of an H100, as squares to scale: an area is so many bytes."""
    device = DEVICES["h100"]
    figures = {"SRAM of an SM": device.sram_per_sm, "SRAM of all SMs": device.sram_per_sm * device.sms, "L2": device.l2}
    widest = 200
    side, x, shapes = widest / device.l2**0.5, 10.0, list[str]()
    for n, (name, nbytes) in enumerate(figures.items()):
        width = side * nbytes**0.5
        shapes += [box(x, 10, width, width, (GREEN, BLUE, ORANGE)[n])]
        shapes += [text(x, widest + 32, name), text(x, widest + 50, size(nbytes))]
        x += max(width, 120) + 14
    edge = (device.memory / device.l2) ** 0.5
    shapes.append(
        text(10, widest + 76, f"HBM, {size(device.memory)}, would be a square {edge:.0f} times as wide as the L2's.")
    )
    return Drawing("The memories of an H100 to scale", widest + 90, shapes, {**figures, "HBM": device.memory})


def funnel() -> Drawing:
    """What instructions request, what they request at least once, and what DRAM is estimated to serve."""
    counts = count("flash2", LONG, tile=TILE, device="h100")
    return bars(
        "What flash2 reads: requested, distinct, and from DRAM by the model of the L2",
        {
            "requested": counts.hbm.read,
            "distinct (compulsory)": counts.compulsory_read,
            "from DRAM, estimated": counts.dram.estimate,
        },
    )


def causal() -> Drawing:
    """Which tiles a causal mask leaves where there are more keys than queries: the last query sees the last key."""
    rows, cols, side = SHORTER.row_tiles(SMALL), SHORTER.key_tiles(SMALL), 36
    shapes, visited, cut = list[str](), 0, 0
    for i in range(rows):
        seen = SHORTER.tiles_of_row(i, SMALL)
        for j in range(cols):
            whole = j in seen and (j + 1) * SMALL.cols <= SHORTER.visible_keys(i * SMALL.rows).stop
            visited, cut = visited + (j in seen), cut + (j in seen and not whole)
            fill = BLUE if whole else ORANGE if j in seen else GREY
            shapes.append(box(70 + j * side, 24 + i * side, side, side, fill))
    shapes += [text(70, 16, f"{SHORTER.len_kv} keys →"), text(4, 46, "queries"), text(4, 62, f"0–{SMALL.rows - 1}")]
    shapes += legend(70, 46 + rows * side, {"all visible": BLUE, "cut by the mask": ORANGE, "skipped": GREY})
    figures: dict[str, float] = {"visited": visited, "cut": cut, "skipped": rows * cols - visited}
    return Drawing("A causal mask, aligned bottom-right", 60 + rows * side, shapes, figures)


def splits() -> Drawing:
    """How four warps share S: FlashAttention-1 by keys, FlashAttention-2 by queries; and the SRAM bytes of a forward pass."""
    shapes, figures = list[str](), dict[str, float]()
    for n, (name, said) in enumerate(
        (("flash1", "split-K: a warp has columns"), ("flash2", "split-Q: a warp has rows"))
    ):
        moved = count(name, LONG, tile=TILE, device="h100").sram
        figures[name] = moved.read + moved.write
        for warp in range(4):
            fill = (BLUE, ORANGE, GREEN, PINK)[warp]
            part = (40 * warp, 0, 40, 160) if name == "flash1" else (0, 40 * warp, 160, 40)
            shapes.append(box(16 + 260 * n + part[0], 40 + part[1], part[2], part[3], fill))
        shapes += [
            text(16 + 260 * n, 24, f"{name}, {said}"),
            text(16 + 260 * n, 222, f"{size(figures[name])} through SRAM"),
        ]
    return Drawing("Split-K and split-Q: who computes which part of a tile of S", 240, shapes, figures)


def token() -> Drawing:
    """The SMs of an H100 that have work while one token is made, rung by rung, and how often K and V are read."""
    device, once = DEVICES["h100"], 2 * TOKEN.kv_heads * TOKEN.len_kv * TOKEN.head_dim * TOKEN.itemsize
    shapes, figures = list[str](), dict[str, float]()
    for n, name in enumerate(ladder("flash_decoding", "flash2")):
        counts = count(name, TOKEN, device=device)
        kernel, launch, x = CATALOGUE[name].kernels[-1], counts.launches[0], 10 + 128 * n
        assert counts.config is not None
        blocks = counts.config.grid(TOKEN, device, launch.blocks) if kernel.persistent else launch.blocks
        for sm in range(device.sms):
            busy = sm < blocks
            shapes.append(box(x + 10 * (sm % 11), 40 + 10 * (sm // 11), 10, 10, BLUE if busy else GREY))
        read = sum(counts.by_tensor[tensor].hbm_read for tensor in "kv") // once
        said = [f"{blocks} blocks", f"K and V {'once' if read == 1 else f'{read} times'}"]
        said += ["and a second launch"] * (len(counts.launches) - 1)
        shapes += [text(x, 28, name), *(text(x, 180 + 18 * line, each) for line, each in enumerate(said))]
        figures[name] = blocks
    shapes += legend(10, 246, {"an SM with work": BLUE, "an SM without": GREY})
    return Drawing("Who works for one token: a query of 32 heads, 8 KV heads, 8,192 keys", 256, shapes, figures)


def tree() -> Drawing:
    """The tree of flash_decoding over the chunks of one row tile: two by two, and through HBM only every fifth time."""
    s = Splits(DECODE, Tile(16, 128), run=1)
    levels, figures = [len(s.chunks(0))], dict[str, float]()
    while levels[-1] > 1:
        levels.append(-(-levels[-1] // 2))
    rounds = CHILDREN.bit_length() - 1  # until as many as a node has children are one
    width, high = WIDTH - 20, 168 / (len(levels) - 1)
    at = [[10 + width * (n + 0.5) / levels[0] for n in range(levels[0])]]
    for nodes in levels[1:]:
        pairs = [at[-1][2 * n : 2 * n + 2] for n in range(nodes)]
        at.append([sum(pair) / len(pair) for pair in pairs])
    lines, dots = list[str](), list[str]()
    for level, xs in enumerate(at):
        y, root = 190 - high * level, level + 1 == len(at)
        stored = level % rounds == 0 and not root
        radius = 2.8 if level == 0 else 4.5 if stored or root else 1.4
        fill = LIGHT["out"] if root else LIGHT["o"] if stored else INK
        for n, x in enumerate(xs):
            if not root:
                up = f"L{at[level + 1][n // 2]:.4g} {y - high:.4g}"
                lines.append(f'<path d="M{x:.4g} {y:.4g} {up}" stroke="{INK}" stroke-width="0.6"/>')
            dots.append(f'<circle cx="{x:.4g}" cy="{y:.4g}" r="{radius}" fill="{fill}"/>')
    figures |= {"chunks": levels[0], "nodes": levels[rounds], "rounds": len(levels) - 1}
    said = f"{levels[0]} chunks of {4 * 128} keys, merged two by two in {len(levels) - 1} rounds"
    meanings = {f"in HBM: what a chunk has, and a node of up to {CHILDREN}": LIGHT["o"], "the output": LIGHT["out"]}
    shapes = [*lines, *dots, text(10, 218, said), *legend(10, 242, meanings)]
    return Drawing("How flash_decoding merges its partial results", 254, shapes, figures)


RAGGED = (60_000, 9_000, 7_000, 5_000, 4_500, 3_000, 2_600, 2_200, 1_500, 1_200, 900, 700, 500, 300, 200, 100)
"""Keys of the requests of a batch, as a server has them: most are short, and one is long."""


def idle() -> Drawing:
    """Which SMs of an H100 have work, and when: one token and a ragged batch, each with a block per KV head and dealt out.

    A block takes a tile of keys at a time, as its trace says. An SM takes one block after another, the next one from the queue.
    """
    sms, kv_heads = DEVICES["h100"].sms, TOKEN.kv_heads

    def walks(name: str) -> list[int]:
        """How many tiles of keys each block of all KV heads walks over."""
        one = TOKEN.replace(heads=TOKEN.queries_per_kv, kv_heads=1, head_dim=8)
        trace = simulate(name, *random_inputs(one), trace=(0, 0)).trace
        assert trace is not None
        blocks = [event.block for event in trace.events if event.launch == name and event.step == "load_k"]
        return list(Counter(blocks).values()) * kv_heads

    def dealt(tiles: int) -> list[int]:
        return [(n + 1) * tiles // sms - n * tiles // sms for n in range(sms)]

    tile = count("flash_decoding_1", TOKEN, device="h100").tile
    whole = [TOKEN.replace(len_kv=length).key_tiles(tile) for length in RAGGED for _ in range(kv_heads)]
    panels = {
        "one token: a block for a KV head": walks("flash_decoding_1"),
        "one token: a block for a chunk": walks("flash_decoding_2"),
        f"{len(RAGGED)} requests: a block for each": whole,
        f"{len(RAGGED)} requests: dealt out in tiles": dealt(sum(whole)),
    }
    shapes, figures = list[str](), dict[str, float]()
    for n, (said, blocks) in enumerate(panels.items()):
        busy = [0] * sms
        for walk in blocks:
            busy[busy.index(min(busy))] += walk
        left, top, wide, end = 10 + 260 * (n % 2), 30 + 200 * (n // 2), 236, max(busy)
        rows = "".join(
            f"M{left} {top + y}h{wide * work / end:.4g}v1h-{wide * work / end:.4g}z"
            for y, work in enumerate(busy)
            if work
        )
        idle = 1 - sum(busy) / (sms * end)
        shapes += [text(left, top - 8, said), box(left, top, wide, sms, GREY), f'<path d="{rows}" fill="{BLUE}"/>']
        shapes.append(text(left, top + sms + 18, f"{end:,} tiles long, {idle:.0%} idle"))
        figures |= {f"{said}, tiles": end, f"{said}, idle": idle}
    shapes += legend(10, 412, {"an SM with work, over time": BLUE, "without": GREY})
    return Drawing(
        "Idle SMs over time: 132 rows are SMs, and each picture ends with its last block", 424, shapes, figures
    )


def recomputed() -> Drawing:
    """The most bytes that a backward pass has allocated at once: with P stored, and with P computed again."""
    figures: dict[str, float] = {
        f"{name}, most at once": count(name, LONG, tile=TILE, device="h100").hbm.peak
        for name in ("standard_backward", "flash2_backward")
    }
    return bars("What recomputation saves: the most bytes allocated at once", figures)


def swapped() -> Drawing:
    """Which tile of S a block visits as its n-th, forwards and backwards, from traces. A block has a colour."""
    problem = Problem(batch=1, heads=1, len_q=64, head_dim=16, dtype="float16", causal=True)
    colours, side = (BLUE, ORANGE, GREEN, PINK), 46
    arrays: dict[str, Any] = dict(BACKWARD.draw(problem))
    shapes, figures = list[str](), dict[str, float]()
    for n, (name, walked, said) in enumerate(
        (("flash2", "k", "forwards: a block has queries"), ("flash2_backward", "q", "backwards: a block has keys"))
    ):
        given = arrays if name == "flash2_backward" else {x: arrays[x] for x in "qkv"}
        trace = simulate(name, **given, causal=True, tile=(16, 16), trace=(0, 0)).trace
        assert trace is not None
        moved = [(event, t) for event in trace.events for t in event.transfers if event.launch == name and t.rows]
        for tensor in "qk":
            figures[f"{name}: tiles of {tensor} loaded"] = sum(t.tensor == tensor for _, t in moved)
        if name == "flash2_backward":
            figures["additions to dq"] = sum(t.tensor == "dq_sum" for _, t in moved)
        visits = [(event.block[0], (t.rows or (0, 0))[0] // 16) for event, t in moved if t.tensor == walked]
        left = 40 + 260 * n
        shapes += [text(left - 24, 18, said), text(left, 62 + 4 * side, "queries ↓, keys →")]
        for at, (block, other) in enumerate(visits):
            i, j = (block, other) if name == "flash2" else (other, block)
            turn = sum(before == block for before, _ in visits[:at]) + 1
            x, y = left + side * j, 40 + side * i
            shapes.append(box(x, y, side, side, colours[block]))
            shapes.append(text(x + side / 2, y + side / 2 + 5, str(turn), "middle", INK if block == 3 else "white"))
    return Drawing(
        "The loops before and after they swap: a colour for each block, its tiles by their turn", 262, shapes, figures
    )


def unstored() -> Drawing:
    """Which weights dropout drops, as both passes find it at tiles of their own. With one-hot V and dO they write P ∘ Z out."""
    size, cell, keep = 32, 7, 0.75
    problem = Problem(batch=1, heads=1, len_q=size, head_dim=size, dtype="float32", dropout=1 - keep)
    arrays: dict[str, Any] = dict(BACKWARD.draw(problem, seed=1))
    arrays["v"] = arrays["dout"] = np.eye(size, dtype=np.float32)[None, None]
    given = {x: arrays[x] for x in ("q", "k", "v", "rng_state")}
    forward, backward = (16, 16), (16, 32)
    one = simulate("flash2", **given, dropout=1 - keep, tile=forward)
    other = simulate("flash2_backward", **arrays, dropout=1 - keep, tile=backward)
    masks = one.out[0, 0] == 0, other.outputs["dv"][0, 0].T == 0
    shapes = list[str]()
    for n, (mask, tile, said) in enumerate(zip(masks, (forward, backward), ("forwards", "backwards"), strict=True)):
        left, top, long = 16 + 260 * n, 40, size * cell
        shapes += [text(left, 22, f"{said}, in tiles of {tile[0]} × {tile[1]}"), box(left, top, long, long, GREY)]
        shapes.append(_cells(mask, left, top, cell))
        lines = [f"M{left} {top + y * cell}h{long}" for y in range(0, size + 1, tile[0])]
        lines += [f"M{left + x * cell} {top}v{long}" for x in range(0, size + 1, tile[1])]
        shapes.append(f'<path d="{"".join(lines)}" stroke="{INK}" stroke-width="1.2"/>')
    without = count("flash2_backward", problem.replace(dropout=0.0), tile=backward).hbm
    hbm, state = other.counts.hbm, other.counts.by_tensor["rng_state"].hbm_read
    figures: dict[str, float] = {
        "dropped": int(masks[0].sum()),
        "dropped in one pass only": int((masks[0] != masks[1]).sum()),
        "bytes of seed and offset": arrays["rng_state"].nbytes,
        "bytes of a mask": hbm.read + hbm.write + hbm.atomic - without.read - without.write - without.atomic - state,
        "bytes that a mask of bits would take": size * size // 8,
    }
    shapes.append(text(16, 40 + size * cell + 24, "dark: dropped, as a seed and the place say; no mask is stored"))
    return Drawing("The mask that nobody stores", 50 + size * cell + 26, shapes, figures)


def _cells(marked: Array, left: int, top: int, cell: int) -> str:
    """The marked cells of a grid, as one shape."""
    parts = (f"M{left + int(x) * cell} {top + int(y) * cell}h{cell}v{cell}h-{cell}z" for y, x in np.argwhere(marked))
    return f'<path d="{"".join(parts)}" fill="{BLUE}"/>'


def banks() -> Drawing:
    """Where chunks of 16 bytes of eight rows lie in the banks. A column of them is read at once, a chunk per row."""
    rows, chunks, side = 8, 8, 29  # a row of 128 bytes has eight chunks, which take four of the 32 banks each
    shapes, figures = list[str](), dict[str, float]()
    for n, (name, place) in enumerate((("plain", plain), ("swizzled", swizzled))):
        asked = [place(row, 0) for row in range(rows)]
        figures[name] = max(asked.count(chunk) for chunk in asked)
        shapes.append(text(16 + 260 * n, 22, f"{name}: column 0, {figures[name]} of 8 turns"))
        for row in range(rows):
            for column in range(chunks):
                x, y = 16 + 260 * n + side * place(row, column), 34 + side * row
                shapes += [
                    box(x, y, side, side, ORANGE if column == 0 else GREY),
                    text(x + 15, y + 19, str(column), "middle"),
                ]
    return Drawing("Eight rows of 128 bytes in the banks, before and after the swizzle", 280, shapes, figures)


def plain(row: int, column: int) -> int:
    """The group of four banks in which a chunk lies, where rows of 128 bytes follow each other."""
    del row
    return column


def swizzled(row: int, column: int) -> int:
    """The same with the swizzle of 128 bytes."""
    return column ^ row % 8


def tiles() -> Drawing:
    """What flash2 moves for one row tile, step by step, from a trace."""
    problem = Problem(batch=1, heads=1, len_q=64, head_dim=16, dtype="float16", causal=True)
    trace = simulate("flash2", *random_inputs(problem), causal=True, tile=(16, 16), trace=(0, 0)).trace
    assert trace is not None
    last = [event for event in trace.events if event.block == trace.events[-1].block]
    moved = [
        (event.step, each.tensor, each.rows)
        for event in last
        for each in event.transfers
        if each.rows and each.tensor in _LANES and any(kind.startswith("hbm") for kind in each.nbytes)
    ]
    shapes, width = list[str](), 440 / len(moved)
    for lane, (name, fill) in enumerate(_LANES.items()):
        shapes.append(text(16, 60 + 84 * lane, name))
        for at, (_, tensor, rows) in enumerate(moved):
            shapes.append(box(60 + width * at, 24 + 84 * lane, width, 64, GREY))
            if tensor == name:
                top, bottom = (64 * n / problem.len_q for n in rows)
                shapes.append(box(60 + width * at, 24 + 84 * lane + top, width, bottom - top, fill))
    shapes.append(text(60, 374, "step after step → a column is a matrix, first row on top"))
    figures: dict[str, float] = {name: sum(tensor == name for _, tensor, _ in moved) for name in _LANES}
    return Drawing("Which tiles of Q, K, V and O the last block of flash2 moves", 390, shapes, figures)


def holder(row: int, column: int) -> tuple[int, int]:
    """The lane that holds an element of a 16 × 8 accumulator of `mma.sync`, and in which of its four registers."""
    return row % 8 * 4 + column // 2, row // 8 * 2 + column % 2


def quad() -> Drawing:
    """Which lane holds each element of a fragment of S, with one quad in colour: it holds two whole rows."""
    shown, side, high, shapes = 2, 42, 26, list[str]()
    colours = (BLUE, ORANGE, GREEN, PINK)
    for row in range(16):
        for column in range(8):
            lane, register = holder(row, column)
            x, y, own = 66 + side * column, 30 + high * row, lane // 4 == shown
            shapes.append(box(x, y, side, high, colours[lane % 4] if own else GREY))
            shapes.append(
                text(
                    x + side / 2, y + 18, f"{lane}·c{register}", "middle", INK if not own or lane % 4 == 3 else "white"
                )
            )
        shapes.append(text(58, 48 + high * row, f"row {row}", "end"))
    rows = [{holder(row, column)[0] for column in range(8)} for row in range(16)]
    whose = [row for row, lanes in enumerate(rows) if lanes == rows[shown]]
    shapes += [
        text(66, 20, "8 columns of S: lane · register"),
        text(416, 48, f"quad {shown}"),
        text(416, 68, f"lanes {min(rows[shown])}–{max(rows[shown])}"),
        text(416, 88, "rows " + " and ".join(map(str, whose))),
    ]
    figures: dict[str, float] = {"lanes per row": max(map(len, rows)), "rows per quad": len(whose)}
    return Drawing("Which lane holds which element of a fragment of S", 460, shapes, figures)


_LANES = {name: LIGHT[name] for name in ("q", "k", "v", "out")}

DRAWINGS: dict[str, Callable[[], Drawing]] = {
    draw.__name__: draw
    for draw in (
        memories, tiles, funnel, causal, splits, quad, banks, cp_async, tma, ping_pong, token, tree, idle, recomputed, swapped,
        unstored, pages, copied, dealt, turns, waits, caches, forms,
    )
}  # fmt: skip
"""The drawings by name, in the order of docs/in-pictures.md."""
