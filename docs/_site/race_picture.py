"""Draws docs/pictures/race.gif, the race of docs/race.md as a moving picture: `python -m docs._site.race_picture`.

Both algorithms ask for the same bytes per frame. On the left their bars grow, tensor by tensor. On the right stands the table of
scores: what lies in the GPU's main memory stays coloured. The file's comment is the digest of what it shows, which a test reads.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from docs._site import race
from flashlab.base.files import replace_file
from flashlab.views import palette

PICTURE = Path(__file__).resolve().parents[1] / "pictures" / "race.gif"
WIDTH, HEIGHT, LEFT, BAR = 1000, 350, 24, 640
FRAMES, MILLISECONDS, LAST = 54, 90, 4000
"""Frames that move, how long each is shown, and how long the last one is."""
INK, FAINT, GROUND = "#1B2027", "#D9DDE2", "#FFFFFF"
COLOURS = {name: palette.LIGHT[kind] for name, kind in palette.KINDS.items()}
Moves = Sequence[tuple[str, str, int]]


def digest(data: Any) -> str:
    """What the picture shows, as a digest: of the race's data and of how it is drawn."""
    drawn = [data, FRAMES, COLOURS, Path(__file__).read_text(encoding="utf-8")]
    return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()


@cache
def font(size: int, *, bold: bool = False) -> ImageFont.FreeTypeFont:
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name, size)


def so_far(moves: Moves, clock: float) -> tuple[dict[str, int], int, bool]:
    """The bytes by tensor once this many have been asked for, how many moves that are, and whether it is the end."""
    found, total = dict[str, int](), 0
    for n, (_, tensor, nbytes) in enumerate(moves):
        if total + nbytes > clock:
            return found, n, False
        total += nbytes
        found[tensor] = found.get(tensor, 0) + nbytes
    return found, len(moves), True


def tiles(moves: Moves) -> tuple[int, int | None]:
    """How many tiles of S lie in main memory, and which one is in SRAM alone: counted by what is stored and read of them."""
    stored = sum(step == "store_s" for step, _, _ in moves)
    keys = sum(tensor == "k" for _, tensor, _ in moves)
    return stored, None if stored or not keys else keys - 1


def frames(data: Any) -> Iterator[Image.Image]:
    total = max(sum(n for *_, n in each["moves"]) for each in data["programs"])
    for n in range(FRAMES + 1):
        yield frame(data, total * n / FRAMES, total)


def frame(data: Any, clock: float, total: int) -> Image.Image:
    """One picture, drawn at twice its size, so that edges are smooth."""
    big = Image.new("RGB", (2 * WIDTH, 2 * HEIGHT), GROUND)
    pen = ImageDraw.Draw(big)

    def text(x: float, y: float, words: str, size: int = 15, *, bold: bool = False, colour: str = INK) -> None:
        pen.text((2 * x, 2 * y), words, fill=colour, font=font(2 * size, bold=bold))

    def box(x: float, y: float, wide: float, high: float, colour: str, edge: str | None = None) -> None:
        if wide >= 1:
            pen.rectangle((2 * x, 2 * y, 2 * (x + wide) - 1, 2 * (y + high) - 1), fill=colour, outline=edge, width=2)

    text(LEFT, 16, "The same attention, the same numbers. Bytes asked of the GPU's main memory:", 17, bold=True)
    for lane, program in enumerate(data["programs"]):
        y, moves = 58 + 122 * lane, program["moves"]
        found, done, ended = so_far(moves, clock)
        text(LEFT, y, program["title"], 16, bold=True)
        text(LEFT + 250, y, f"{sum(found.values()):,} bytes{', done' if ended else ''}", 16)
        box(LEFT, y + 28, BAR, 44, "#F1F3F6", FAINT)
        x = float(LEFT)
        for tensor, nbytes in found.items():
            wide = BAR * nbytes / total
            box(x, y + 28, wide, 44, COLOURS[tensor])
            if wide > 26:
                words, colour = tensor if tensor == "out" else tensor.upper(), INK if tensor in "kp" else GROUND
                text(x + 6, y + 41, words, 13, bold=True, colour=colour)
            x += wide
        table(box, moves[:done], y + 8, ended)
        stored, _ = tiles(moves[:done])
        said = "S is stored, and read back" if lane == 0 else "S is never stored"
        text(LEFT + BAR + 148, y + 16, said, 13)
        text(LEFT + BAR + 148, y + 36, f"{stored} of 16 tiles of S" if lane == 0 else "one tile at a time,", 13)
        text(LEFT + BAR + 148, y + 56, "in main memory" if lane == 0 else "in SRAM", 13)
    if clock >= total:
        ends = [sum(n for *_, n in each["moves"]) for each in data["programs"]]
        text(LEFT, 308, f"{ends[0] / ends[1]:.1f} times fewer bytes: S and P never leave the chip.", 20, bold=True)
    else:
        text(LEFT, 312, data["problem"], 13, colour="#5B6470")
    return big.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)


def table(box: Any, moves: Moves, y: float, ended: bool) -> None:
    """S as 4 × 4 tiles: coloured where one lies in main memory, outlined where one is in SRAM alone."""
    stored, current = tiles(moves)
    for tile in range(16):
        row, column = divmod(tile, 4)
        here = tile < stored
        lit = current is not None and not ended and tile == current % 16
        box(LEFT + BAR + 26 + 27 * column, y + 18 * row, 25, 16, COLOURS["s"] if here else "#FBE3D3" if lit else "#F1F3F6",
            COLOURS["s"] if lit else FAINT)  # fmt: skip


def drawn(data: Any) -> bytes:
    """The file."""
    found = [each.quantize(64, dither=Image.Dither.NONE) for each in frames(data)]
    content = io.BytesIO()
    found[0].save(
        content, "GIF", save_all=True, append_images=found[1:], loop=0, optimize=True, comment=digest(data),
        duration=[MILLISECONDS] * FRAMES + [LAST],
    )  # fmt: skip
    return content.getvalue()


if __name__ == "__main__":
    replace_file(PICTURE, drawn(race.data()))
