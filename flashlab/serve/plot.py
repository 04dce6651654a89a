"""A server's day as a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashlab.serve.day import Day

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw"]


def draw(day: Day) -> Figure:
    """Pages in use, with and without sharing, and tokens computed per step, over the predicted time in milliseconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.4), layout="constrained")
    pages, tokens = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    points = [(0.0, 0, 0, 0)]  # when, tables, blocks, tokens
    for step in day.steps:
        if step.begin > points[-1][0]:
            points.append((step.begin, step.tables, step.blocks, step.tokens))
        points[-1] = (step.begin, step.tables, step.blocks, step.tokens)
        points.append((step.begin + step.seconds, 0, 0, 0))  # idle, unless the next step begins then
    at = [1e3 * point[0] for point in points]
    pages.step(at, [point[1] for point in points], where="post", label="without sharing", color="#b5361c", linewidth=1)
    pages.step(at, [point[2] for point in points], where="post", label="in use", color="#004a80")
    pages.axhline(day.num_blocks - 1, color="#5f6873", linewidth=1, linestyle="--", label="the pool")
    pages.set_ylabel(f"pages of {day.block_size}")
    pages.set_ylim(bottom=0)
    pages.legend(loc="upper right")
    pages.set_title(f"{day.trace}: {len(day.requests):,} requests, {day.policy}, {day.backend}")
    tokens.step(at, [point[3] for point in points], where="post", color="#00785a", linewidth=1)
    tokens.set_ylabel("tokens in a step")
    tokens.set_xlabel("milliseconds, predicted")
    return figure
