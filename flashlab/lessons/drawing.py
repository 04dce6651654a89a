"""A drawing: shapes of SVG, and the figures that they were drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import NamedTuple

BLUE, ORANGE, GREEN, PINK, GREY, INK = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#D9DDE2", "#1B2027"
WIDTH = 520
"""Units across. On a phone of 400 pixels, letters keep 10 of them."""


class Drawing(NamedTuple):
    """What a drawing shows: its title, its height, its shapes, and the figures that it was drawn from."""

    title: str
    height: int
    shapes: list[str]
    figures: dict[str, float]

    @property
    def svg(self) -> str:
        body = "\n".join(self.shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
            f'height="{self.height}" role="img" '
            f'font-family="sans-serif" font-size="13" fill="{INK}">\n<title>{escape(self.title)}</title>\n'
            f'<rect width="{WIDTH}" height="{self.height}" fill="white"/>\n{body}\n</svg>\n'
        )


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}" fill="{fill}" stroke="white"/>'


def text(x: float, y: float, said: str, anchor: str = "start", fill: str = INK) -> str:
    return f'<text x="{x:.4g}" y="{y:.4g}" text-anchor="{anchor}" fill="{fill}">{escape(said)}</text>'


def size(n: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:,.4g} {unit}"
        n /= 1024
    raise AssertionError


def legend(x: float, y: float, meanings: Mapping[str, str]) -> list[str]:
    """What colours mean, side by side: a dot of each, and a word or two."""
    shapes = list[str]()
    for said, fill in meanings.items():
        shapes += [f'<circle cx="{x + 6:.4g}" cy="{y - 5:.4g}" r="6" fill="{fill}"/>', text(x + 18, y, said)]
        x += 36 + 7 * len(said)
    return shapes
