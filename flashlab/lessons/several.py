"""Drawings of several GPUs: who computes which part of a causal square, and who waits for whom."""

from __future__ import annotations

from flashlab.lessons.drawing import BLUE, GREEN, GREY, INK, ORANGE, PINK, WIDTH, Drawing, box, legend, text
from flashlab.parallel import layouts
from flashlab.parallel.formulas import count
from flashlab.parallel.times import timeline
from simulator import Problem

__all__ = ["dealt", "turns", "waits"]

LONG = Problem(batch=1, heads=32, len_q=32_768, head_dim=128, dtype="bfloat16", causal=True)
RANKS = 4
_COLOURS = (BLUE, ORANGE, GREEN, PINK)


def dealt() -> Drawing:
    """The visible pairs of a causal square in chunks of rows and keys, in the colour of the rank whose rows they are."""
    chunks, side, shapes, figures = 2 * RANKS, 28, list[str](), dict[str, float]()
    for n, layout in enumerate(("contiguous", "zigzag")):
        left = 12 + 260 * n
        shapes.append(text(left, 18, f"{layout}: rows of four ranks"))
        for rank in range(RANKS):
            rows = layouts.rows(layout, chunks, RANKS, rank).tolist()
            for row in rows:
                for key in range(chunks):
                    shown = _COLOURS[rank] if key <= row else GREY
                    shapes.append(box(left + side * key, 28 + side * row, side, side, shown))
            pairs = sum(row + 0.5 for row in rows)  # the chunk on the diagonal is seen by half
            figures[f"{layout} {rank}"] = pairs
            y = 44 + side * chunks + 20 * rank
            shapes += [box(left + 54, y - 12, 9 * pairs, 15, _COLOURS[rank]), text(left, y, f"rank {rank}")]
            shapes.append(text(left + 60 + 9 * pairs, y, f"{pairs:g}"))
    shapes.append(
        text(12, 134 + side * chunks, "bars: pairs of chunks that a rank computes; keys go from left to right")
    )
    return Drawing("A causal square dealt to four ranks", 146 + side * chunks, shapes, figures)


def turns() -> Drawing:
    """A ring with its zigzag, step by step: whose keys each rank has, and which pairs of its chunks' rows it computes with them."""
    chunks, side, shapes, figures = 2 * RANKS, 12, list[str](), dict[str, float]()
    wide = side * chunks
    for rank in range(RANKS):
        left = 58 + (wide + 18) * rank
        shapes.append(text(left + wide / 2, 18, f"rank {rank}", "middle"))
        rows = layouts.rows("zigzag", chunks, RANKS, rank).tolist()
        for step in range(RANKS):
            of, top = (rank - step) % RANKS, 28 + (wide + 14) * step
            some, keys, causal = layouts.seen("zigzag", rank, of, 2, 2, causal=True) or (slice(0), slice(0), False)
            shown = [(r, k) for r in rows[some] for k in layouts.rows("zigzag", chunks, RANKS, of).tolist()[keys]]
            shapes += [box(left, top + side * row, wide, side, GREY) for row in rows]
            for row, key in shown:
                x, y = left + side * key, top + side * row
                if key < row or not causal:
                    shapes.append(box(x, y, side, side, _COLOURS[of]))
                elif key == row:  # a chunk on the diagonal is seen by half
                    shapes.append(f'<path d="M{x} {y}v{side}h{side}z" fill="{_COLOURS[of]}"/>')
            shapes.append(f'<path d="M{left} {top}v{wide}h{wide}z" fill="none" stroke="{INK}" stroke-width="0.6"/>')
            figures[f"rank {rank}, step {step}"] = sum(0.5 if r == k else r > k for r, k in shown)
            if not rank:
                shapes.append(text(8, top + wide / 2 + 5, f"step {step}"))
    end = 28 + (wide + 14) * RANKS
    shapes += legend(
        58, end + 14, {f"{'' if rank else 'keys of rank '}{rank}": _COLOURS[rank] for rank in range(RANKS)}
    )
    shapes.append(text(8, end + 38, "grey: the rows of a rank, all along; keys go from left to right"))
    return Drawing("A causal ring with a zigzag, step by step", end + 50, shapes, figures)


def waits() -> Drawing:
    """The ring over time, with contiguous rows and with a zigzag: when each rank computes, waits and sends."""
    found = {layout: timeline(count("ring", LONG, ranks=RANKS, layout=layout)) for layout in ("contiguous", "zigzag")}
    longest, shapes, figures = max(each.seconds for each in found.values()), list[str](), dict[str, float]()
    scale, left = (WIDTH - 76) / longest, 64
    for n, (layout, each) in enumerate(found.items()):
        top = 30 + 136 * n
        figures[layout] = each.seconds
        shapes.append(text(8, top - 10, f"{layout}: {each.seconds * 1e3:.3g} ms, ranks compute {each.busy:.0%} of it"))
        shapes += [text(8, top + 26 * rank + 14, f"rank {rank}") for rank in range(RANKS)]
        for span in each.spans:
            x, y, width = left + scale * span.begin, top + 26 * span.rank, max(1.0, scale * (span.end - span.begin))
            if span.what == "sends":
                shapes.append(box(x, y + 17, width, 6, INK))
            else:
                shapes.append(box(x, y, width, 17, ORANGE if span.what == "waits" else BLUE))
    shapes += legend(left, 306, {"computes": BLUE, "waits": ORANGE, "sends K and V": INK})
    return Drawing("A causal ring of four ranks over time, predicted", 320, shapes, figures)
