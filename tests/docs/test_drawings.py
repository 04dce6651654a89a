"""The drawings of docs/in-pictures.md have the figures of formulas and programs, and the files are what the code draws."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import flashlab as fl
from docs._site import drawings
from docs._site.drawings import DECODE, DRAWINGS, LONG, SHORTER, SMALL, TILE, Drawing, bars

PAGE = Path(drawings.__file__).resolve().parents[1] / "in-pictures.md"
SVG = "{http://www.w3.org/2000/svg}"


def filled(drawing: Drawing, fill: str) -> list[ElementTree.Element]:
    """The boxes of a colour."""
    return [each for each in ElementTree.fromstring(drawing.svg).iter(f"{SVG}rect") if each.get("fill") == fill]


def test_the_files_are_what_the_code_draws() -> None:
    for path, svg in drawings.drawn():
        assert path.read_text(encoding="utf-8") == svg, f"{path.name} is old: python -m docs._site.drawings"
        assert len(svg) < 60_000


def test_the_page_shows_each_drawing() -> None:
    shown = re.findall(r"pictures/drawn_(\w+)\.svg", PAGE.read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(DRAWINGS)


def test_areas_are_bytes() -> None:
    drawing, device = drawings.memories(), fl.DEVICES["h100"]
    areas = [float(filled(drawing, fill)[0].get("width", 0)) ** 2 for fill in (drawings.GREEN, drawings.ORANGE)]
    assert areas[1] / areas[0] == pytest.approx(device.l2 / device.sram_per_sm, rel=0.01)


def test_bars_are_as_long_as_their_figures() -> None:
    long, short = (
        float(filled(bars("two", {"a": 400, "b": 100}), fill)[0].get("width", 0))
        for fill in (drawings.BLUE, drawings.ORANGE)
    )
    assert long == pytest.approx(4 * short)


def test_the_funnel_is_that_of_the_formula() -> None:
    counts = fl.count("flash2", LONG, tile=TILE, device="h100")
    assert list(drawings.funnel().figures.values()) == [
        counts.hbm.read, counts.compulsory_read, counts.dram.estimate,
    ]  # fmt: skip


def test_the_mask_is_that_of_every_pair() -> None:
    """Pair by pair: a tile is cut if it has both visible and hidden pairs."""
    drawing = drawings.causal()
    tiles: dict[tuple[int, int], set[bool]] = {}
    for row in range(SHORTER.len_q):
        for key in range(SHORTER.len_kv):
            tiles.setdefault((row // SMALL.rows, key // SMALL.cols), set()).add(
                key <= row + SHORTER.len_kv - SHORTER.len_q
            )
    cut, hidden = (sum(pairs == kind for pairs in tiles.values()) for kind in ({True, False}, {False}))
    assert drawing.figures == {"visited": len(tiles) - hidden, "cut": cut, "skipped": hidden}
    assert len(filled(drawing, drawings.ORANGE)) == cut
    assert len(filled(drawing, drawings.GREY)) == hidden


def test_the_warps_bytes_are_those_of_the_formula() -> None:
    for name, nbytes in drawings.splits().figures.items():
        sram = fl.count(name, LONG, tile=TILE, device="h100").sram
        assert nbytes == sram.read + sram.write


def test_the_tree_has_the_programs_nodes() -> None:
    """By what a run of the program would climb: the parents of all chunks."""
    s = drawings.Splits(DECODE, fl.Tile(16, 128), run=1)
    climbed = {node.counter for chunk in s.chunks(0) for node in list(s.upward(0, chunk))[:1]}
    assert drawings.tree().figures == {"chunks": len(s.chunks(0)), "nodes": len(climbed)}


def test_recomputation_saves_what_the_formula_says() -> None:
    peaks = [fl.count(f"{name}_backward", LONG, tile=TILE, device="h100").hbm.peak for name in ("standard", "flash2")]
    assert list(drawings.recomputed().figures.values()) == peaks


def test_the_swizzle_reads_a_column_in_one_pass() -> None:
    """By bytes: the banks of each word of a chunk, over all columns."""
    for place, passes in ((drawings.plain, 8), (drawings.swizzled, 1)):
        for column in range(8):
            words = [4 * place(row, column) + word for row in range(8) for word in range(4)]
            assert max(map(words.count, words)) == passes
        assert all({place(row, column) for column in range(8)} == set(range(8)) for row in range(8))
    assert drawings.banks().figures == {"plain": 8, "swizzled": 1}


def test_tiles_move_as_often_as_the_mask_says() -> None:
    """The last of four row tiles sees four key tiles, and loads each once."""
    assert drawings.tiles().figures == {"q": 1, "k": 4, "v": 4, "out": 1}
