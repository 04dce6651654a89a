"""Drawings of what a cache costs: four caches to scale, and both forms of latent attention."""

from __future__ import annotations

from math import log

from flashlab.lessons.drawing import BLUE, GREEN, GREY, INK, ORANGE, PINK, Drawing, box, legend, text
from flashlab.lessons.lesson15 import CACHES, DIM, HEADS, ROPE, absorbed, cached, crossing, unfolded
from simulator import DEVICES, Problem, count
from simulator.operations.latent import latent_problem

__all__ = ["caches", "forms"]

KEYS = 65_536


def caches() -> Drawing:
    """A token in each of four caches, as squares to scale: what a launch reads of it."""
    shapes, figures, x = list[str](), dict[str, float](), 8.0
    for fill, name in zip((BLUE, ORANGE, GREEN, PINK), CACHES, strict=True):
        figures[name] = cached(name)
        side = 0.85 * figures[name] ** 0.5
        shapes += [box(x, 226 - side, side, side, fill), text(x, 248, name), text(x, 266, f"{figures[name]:,.0f}")]
        x += 228 if side > 200 else 70 if name == "8 heads" else 106
    shapes.append(text(236, 20, "areas are bytes"))
    return Drawing("A token of one layer in four caches, in bytes", 276, shapes, figures)


def forms() -> Drawing:
    """Absorbed and unfolded: what is read for a key, what a query of a head computes for it, and how long both forms take."""
    rows = 64  # of a tile in both
    plain = Problem(
        batch=1, heads=HEADS, len_q=rows, len_kv=KEYS, head_dim=DIM + ROPE, head_dim_v=DIM, dtype="bfloat16"
    )
    row = count("mla", latent_problem(heads=rows, len_kv=KEYS), device="h200")
    whole = count("flash2", plain, tile=(rows, 64), device="h200")
    figures: dict[str, float] = {
        "bytes read for a key, absorbed": row.by_tensor["latent"].hbm_read // KEYS,
        "bytes read for a key, unfolded": (whole.by_tensor["k"].hbm_read + whole.by_tensor["v"].hbm_read) // KEYS,
        "FLOPs of a pair, absorbed": row.flops.matmul // (KEYS * rows),
        "FLOPs of a pair, unfolded": whole.flops.matmul // (KEYS * rows * HEADS),
        "queries at which both take as long": crossing("h200", keys=KEYS),
    }
    shapes, colours, numbers = list[str](), {"absorbed": GREEN, "unfolded": BLUE}, list(figures.values())
    for n, said in enumerate((f"bytes read for a key, {HEADS} heads", "FLOPs of a query, a key and a head")):
        top, pair = 20 + 76 * n, numbers[2 * n : 2 * n + 2]
        shapes.append(text(8, top, said))
        for i, (each, fill) in enumerate(zip(pair, colours.values(), strict=True)):
            width = max(2, 430 * each / max(pair))
            shapes += [box(8, top + 8 + 22 * i, width, 20, fill), text(14 + width, top + 23 + 22 * i, f"{each:,.0f}")]
    gpu = DEVICES["h200"]
    queries = [2**n for n in range(13)]
    left, low, wide, high = 40.0, 372.0, 430.0, 168.0
    times = {
        fill: [form(HEADS, n, KEYS).seconds(gpu.bandwidth, gpu.flops("bfloat16")) for n in queries]
        for form, fill in ((absorbed, GREEN), (unfolded, BLUE))
    }
    least, most = (log(f(map(f, times.values()))) for f in (min, max))
    shapes.append(text(8, 180, f"time on an H200 over queries, {KEYS:,} keys"))
    for fill, seconds in times.items():
        at = [
            f"{left + wide * n / 12:.4g} {low - high * (log(t) - least) / (most - least):.4g}"
            for n, t in enumerate(seconds)
        ]
        shapes.append(f'<path d="M{"L".join(at)}" fill="none" stroke="{fill}" stroke-width="3"/>')
    x = left + wide * log(numbers[-1], 2) / 12
    shapes.append(f'<path d="M{x:.4g} {low - high}V{low}" stroke="{INK}" stroke-dasharray="4 4"/>')
    shapes += [box(left, low, wide, 1.5, GREY), text(x, low + 18, f"{numbers[-1]:.0f}", "middle")]
    shapes += [text(left + wide * n / 12, low + 18, f"{2**n:,}", "middle") for n in (0, 2, 4, 10, 12)]
    shapes += legend(150, 410, colours)
    return Drawing("Latent attention, absorbed and unfolded", 422, shapes, figures)
