"""What the axes of plots are called, how they are scaled, and how their ticks read. Bytes are in binary units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.ticker import FuncFormatter, NullLocator

from flashlab.views import figures
from simulator.problem import FIELDS

__all__ = ["AXES", "BYTES", "formatter", "said", "scale_of", "tick", "tokens", "unit_of"]

BYTES = {
    "hbm_read": "HBM read, bytes requested",
    "hbm_write": "HBM written, bytes requested",
    "hbm_atomic": "HBM atomics, bytes requested",
    "hbm_peak": "HBM taken at once",
    "sram_read": "SRAM read",
    "sram_write": "SRAM written",
    "sram_peak": "SRAM taken at once by a block",
    "compulsory": "compulsory bytes",
    "compulsory_read": "compulsory bytes read",
    "dram_low": "DRAM read, lower bound",
    "dram_estimate": "DRAM read, estimate",
    "dram_high": "DRAM read, upper bound",
    "sram_per_block": "SRAM that a block may use",
}
AXES = {
    **BYTES,
    **{name: known.label for name, known in FIELDS.items()},
    "intensity": "FLOPs per requested byte",
    "flops_matmul": "matmul FLOPs",
    "flops_other": "other FLOPs",
    "exp": "exponentials",
}


def scale_of(ax: Any, key: str, figures: Sequence[float]) -> None:
    """Set the y axis: logarithmic if the figures span a factor of 20 or more, with ticks at round numbers of a unit."""
    positive = [n for n in figures if n > 0]
    if not positive:
        ax.set_yticks([0])
        ax.set_ylim(0, 1)
    elif len(positive) == len(figures) and max(positive) >= 20 * min(positive):
        ax.set_yscale("log", base=2 if key in BYTES else 10)
        ax.yaxis.set_minor_locator(NullLocator())
    else:
        ax.set_ylim(bottom=0)
        if key in BYTES:
            size, _ = unit_of(max(positive, default=1))
            ax.yaxis.set_major_formatter(formatter(key))
            step = _nice(max(positive, default=1) / size / 5) * size
            ax.set_yticks([step * i for i in range(int(max(positive, default=1) / step) + 2)])
            return
    ax.yaxis.set_major_formatter(formatter(key))


def _nice(step: float) -> float:
    """The smallest round number (1, 2 or 5 times a power of ten) that is no less than `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= step * 0.999)


def formatter(key: str) -> FuncFormatter:
    """Ticks of an axis of `key`, as `tick` writes them."""

    def text(n: float, _: int | None) -> str:
        return tick(key, n)

    return FuncFormatter(text)


def tick(key: str, n: float) -> str:
    """A figure of `key`, as a tick of its axis says it: 4k (tokens), 64 KiB, 1.5 G."""
    if key in BYTES:
        amount, unit = figures.nbytes(n).split()
        return f"{float(amount.replace(',', '')):g} {unit}"
    if key in FIELDS and FIELDS[key].unit == "tokens":
        return tokens(int(n))
    if n < 10_000:
        return f"{n:g}"
    amount, unit = figures.count(n).split()
    return f"{float(amount.replace(',', '')):g} {unit}"


def said(key: str, value: object) -> str:
    """A field and its value, as a legend says them: `head dim 64`, `SRAM 64 KiB`; an algorithm by its name alone."""
    if key == "algorithm":
        return str(value)
    if key == "sram_per_block" and isinstance(value, int):
        return f"SRAM {tick(key, value)}"
    if key in ("device", "dtype"):
        return str(value)
    return f"{key.replace('_', ' ')} {value}"


def tokens(n: int) -> str:
    """Tokens as people say them, in whole multiples of 1024 where possible: 4k, 128k, 1M."""
    for size, unit in ((1024 * 1024, "M"), (1024, "k")):
        if n >= size and n % size == 0:
            return f"{n // size}{unit}"
    return f"{n:,}"


def unit_of(most: float) -> tuple[int, str]:
    """The unit (bytes per unit, name) of an axis that reaches `most` bytes."""
    steps = max(0, min(6, int(math.log(max(most, 1), 1024) + 1e-9)))
    return 1024**steps, ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")[steps]
