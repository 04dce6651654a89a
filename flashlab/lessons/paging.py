"""Drawings of pages, as the block manager gives them out: those of three requests, and a block that is shared, then copied."""

from __future__ import annotations

from flashlab.lessons.drawing import BLUE, GREEN, GREY, INK, ORANGE, PINK, Drawing, box, legend, text
from flashlab.serve.blocks import KVCacheManager
from flashlab.serve.requests import Request

_SIDE = 40
"""Units across of a page."""
_COLOURS = (BLUE, ORANGE, GREEN)


def pages() -> Drawing:
    """The pages of three requests that grow by turns: where they lie in the pool, how full they are, and what each table says."""
    size, prompts, per_row = 4, (9, 4, 6), 12
    manager = KVCacheManager(num_blocks=25, block_size=size, watermark=0)
    requests = [Request(f"{n}", list(range(100 * n, 100 * n + 40))) for n in range(3)]
    for turn in range(10):
        for request, prompt in zip(requests, prompts, strict=True):
            manager.allocate_slots(request, 1 if turn else prompt)
            manager.commit(request)
    shapes = [text(16, 20, f"the pool, in pages of {size} tokens: each is as full as it is dark")]
    owner = {block: n for n, each in enumerate(requests) for block in manager.owned[each].table}
    for block in range(1, manager.num_blocks):
        x, y = 16 + _SIDE * ((block - 1) % per_row), 30 + 48 * ((block - 1) // per_row)
        shapes.append(box(x, y, _SIDE, 44, GREY))
        filled = 0
        if block in owner:
            own = manager.owned[requests[owner[block]]]
            filled = min(size, own.written - size * own.table.index(block))
            shapes.append(box(x, y + 44 - 11 * filled, _SIDE, 11 * filled, _COLOURS[owner[block]]))
        shapes.append(text(x + 20, y + 26, str(block), "middle", "white" if filled > size / 2 else INK))
    for n, each in enumerate(requests):
        own = manager.owned[each]
        y = 140 + 32 * n
        shapes.append(text(16, y + 18, f"request {n}, {own.written} tokens:"))
        for i, block in enumerate(own.table):
            shapes += [
                box(180 + 32 * i, y, 32, 26, _COLOURS[n]),
                text(196 + 32 * i, y + 18, str(block), "middle", "white"),
            ]
    wasted = sum(len(own.table) * size - own.written for own in manager.owned.values())
    shapes.append(text(16, 256, "The tables: in the order of the tokens. The pages lie anywhere."))
    figures: dict[str, float] = {
        "tokens": sum(own.written for own in manager.owned.values()),
        "pages": len(owner),
        "rows without a token": wasted,
    }
    return Drawing("The pages of three requests, and their tables", 270, shapes, figures)


def copied() -> Drawing:
    """A request is forked, and writes: which of its pages are shared before, and which one is copied."""
    size, shapes, figures = 4, list[str](), dict[str, float]()
    manager = KVCacheManager(num_blocks=8, block_size=size, watermark=0)
    parent = Request("a", list(range(10)))
    child = Request("b", [*range(10), 77])
    manager.allocate_slots(parent, 10)
    manager.commit(parent)

    def shown(said: str, y: int, made: tuple[int, int] | None = None) -> None:
        tables = {each.name: own.table for each, own in manager.owned.items()}
        shapes.append(text(16, y, said))
        for block in range(1, manager.num_blocks):
            names = [name for name, table in tables.items() if block in table]
            fill = PINK if len(names) > 1 else {"a": BLUE, "b": ORANGE}[names[0]] if names else GREY
            x = 16 + 48 * (block - 1)
            shapes.append(box(x, y + 8, 46, 36, fill))
            shapes.append(text(x + 23, y + 31, str(block), "middle", "white" if names else INK))
        for n, (name, table) in enumerate(tables.items()):
            shapes.append(text(366, y + 22 + 18 * n, f"{name}: {' '.join(map(str, table))}"))
        if made:
            middles = [39 + 48 * (block - 1) for block in made]
            shapes.append(
                f'<path d="M{middles[0]} {y + 46}v10H{middles[1]}v-8" fill="none" stroke="{INK}" stroke-width="1.5"/>'
            )
            shapes.append(text((middles[0] + middles[1]) / 2, y + 70, "copied", "middle"))
        figures[said] = manager.num_blocks - 1 - manager.num_free_blocks

    shown("a has read a prompt of 10 tokens", 20)
    manager.fork(parent, child)
    shown("b is forked: every page is shared", 90)
    manager.allocate_slots(child, 1)
    copies = manager.take_copies()
    manager.commit(child)
    shown("b writes a token", 160, copies[0])
    shapes += legend(16, 258, {"both": PINK, "a alone": BLUE, "b alone": ORANGE, "free": GREY})
    figures["copied"] = len(copies)
    return Drawing("A page that is shared, then copied", 272, shapes, figures)
