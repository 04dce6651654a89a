"""The drawings of docs/in-pictures.md have the figures of formulas and programs, and the files are what the code draws."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from docs._site.drawings import PICTURES, drawn
from flashlab.lessons import drawings, latent, paging, pipelines, several, show
from flashlab.lessons.drawing import BLUE, GREEN, GREY, ORANGE, PINK, WIDTH, Drawing
from flashlab.lessons.drawings import DECODE, DRAWINGS, LONG, SHORTER, SMALL, TILE, bars, holder
from flashlab.lessons.pipelines import LEFT, READ, TILES, Chart
from flashlab.parallel import layouts
from simulator.errors import UsageError
from simulator.operations.backward import BACKWARD
from simulator.philox import kept_weights
from simulator.programs import flash_decoding

PAGE = PICTURES.parent / "in-pictures.md"
SVG = "{http://www.w3.org/2000/svg}"


def filled(drawing: Drawing, fill: str) -> list[ElementTree.Element]:
    """The boxes of a colour."""
    return [each for each in ElementTree.fromstring(drawing.svg).iter(f"{SVG}rect") if each.get("fill") == fill]


def slots(drawing: Drawing, fill: str) -> list[tuple[float, ...]]:
    """The bars of a colour as row, begin and length, row by row."""
    return sorted(tuple(float(each.get(key, 0)) for key in ("y", "x", "width")) for each in filled(drawing, fill))


def test_the_files_are_what_the_code_draws() -> None:
    for path, svg in drawn():
        assert path.read_text(encoding="utf-8") == svg, f"{path.name} is old: python -m docs._site.drawings"
        assert len(svg) < 60_000


def test_the_page_shows_each_drawing() -> None:
    shown = re.findall(r"pictures/drawn_(\w+)\.svg", PAGE.read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(DRAWINGS)


def test_areas_are_bytes() -> None:
    drawing, device = drawings.memories(), fl.DEVICES["h100"]
    areas = [float(filled(drawing, fill)[0].get("width", 0)) ** 2 for fill in (GREEN, ORANGE)]
    assert areas[1] / areas[0] == pytest.approx(device.l2 / device.sram_per_sm, rel=0.01)


def test_bars_are_as_long_as_their_figures() -> None:
    long, short = (float(filled(bars("two", {"a": 400, "b": 100}), fill)[0].get("width", 0)) for fill in (BLUE, ORANGE))
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
    assert len(filled(drawing, ORANGE)) == cut
    assert len(filled(drawing, GREY)) == hidden


def test_the_warps_bytes_are_those_of_the_formula() -> None:
    for name, nbytes in drawings.splits().figures.items():
        sram = fl.count(name, LONG, tile=TILE, device="h100").sram
        assert nbytes == sram.read + sram.write


def test_as_many_sms_work_as_there_are_blocks() -> None:
    """On 132 SMs. flash_decoding deals out its 128 runs; the others have a block for each head, KV head, or chunk of 128 keys."""
    drawing = drawings.token()
    assert drawing.figures == {"flash2": 32, "flash_decoding_1": 8, "flash_decoding_2": 8 * 64, "flash_decoding": 128}
    assert len(filled(drawing, BLUE)) == 32 + 8 + 132 + 128
    assert "K and V 4 times" in drawing.svg and drawing.svg.count("K and V once") == 3


def test_the_tree_has_the_programs_nodes() -> None:
    """By what a run of the program would climb: the parents of all chunks."""
    s = drawings.Splits(DECODE, fl.Tile(16, 128), run=1)
    climbed = {node.counter for chunk in s.chunks(0) for node in list(s.upward(0, chunk))[:1]}
    assert drawings.tree().figures == {"chunks": len(s.chunks(0)), "nodes": len(climbed), "rounds": 7}


def test_a_node_of_the_tree_merges_as_a_run_does() -> None:
    """Two by two, by numbers: it is one binary tree, wherever a part of it lies."""
    pairs: list[tuple[int, int]] = []

    def joined(block: None, left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
        pairs.append((left[0], right[1]))
        return left[0], right[1]

    def merged(numbers: dict[int, tuple[int, int]]) -> tuple[int, int]:
        return flash_decoding.merged(None, numbers)  # pyright: ignore

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_decoding, "joined", joined)
        whole = merged({n: (n, n + 1) for n in range(80)})
        at_once, pairs = pairs, []
        for width in (32, 4):  # through nodes of 32 children, and of runs of 4 chunks
            pairs.clear()
            below = {n: merged({m: (m, m + 1) for m in range(80) if m // width == n}) for n in range(-(-80 // width))}
            assert merged(below) == whole == (0, 80)
            assert sorted(pairs) == sorted(at_once)


def test_idle_sms_are_those_without_a_tile() -> None:
    """One token has 8 blocks of all 256 tiles, or 512 of four. What is dealt out has shares that differ by a tile."""
    figures = list(drawings.idle().figures.values())
    assert figures[:4] == pytest.approx([256, 1 - 8 / 132, 4 * -(-512 // 132), 1 - 512 / 132 / 4])
    tiles = [-(-length // 32) for length in drawings.RAGGED for _ in range(8)]
    longest, share = max(tiles), -(-sum(tiles) // 132)
    assert figures[4:] == pytest.approx(
        [longest, 1 - sum(tiles) / (132 * longest), share, 1 - sum(tiles) / (132 * share)]
    )


def test_recomputation_saves_what_the_formula_says() -> None:
    peaks = [fl.count(f"{name}_backward", LONG, tile=TILE, device="h100").hbm.peak for name in ("standard", "flash2")]
    assert list(drawings.recomputed().figures.values()) == peaks


def test_the_loops_swap_as_the_formulas_say() -> None:
    p = fl.Problem(batch=1, heads=1, len_q=64, head_dim=16, dtype="float16", causal=True)
    figures, tile = drawings.swapped().figures, 16 * 16 * 2
    for name in ("flash2", "flash2_backward"):
        moved = fl.count(name, p, tile=SMALL).by_tensor
        for tensor in "qk":
            assert figures[f"{name}: tiles of {tensor} loaded"] == moved[tensor].hbm_read / tile
    assert figures["additions to dq"] == fl.count("flash2_backward", p, tile=SMALL).hbm.atomic / (2 * tile)
    shown = {fill: len(filled(drawings.swapped(), fill)) for fill in (BLUE, PINK)}
    assert shown == {BLUE: 1 + 4, PINK: 4 + 1}  # the first block, forwards and backwards, and the last one


def test_both_passes_drop_what_philox_says() -> None:
    figures = drawings.unstored().figures
    p = fl.Problem(batch=1, heads=1, len_q=32, head_dim=32, dtype="float32", dropout=0.25)
    kept = kept_weights(p, BACKWARD.draw(p, seed=1)["rng_state"]) > 0
    assert figures["dropped"] == (~kept).sum()
    assert figures["dropped in one pass only"] == figures["bytes of a mask"] == 0


def test_the_swizzle_reads_a_column_in_one_pass() -> None:
    """By bytes: the banks of each word of a chunk, over all columns."""
    for place, passes in ((drawings.plain, 8), (drawings.swizzled, 1)):
        for column in range(8):
            words = [4 * place(row, column) + word for row in range(8) for word in range(4)]
            assert max(map(words.count, words)) == passes
        assert all({place(row, column) for column in range(8)} == set(range(8)) for row in range(8))
    assert drawings.banks().figures == {"plain": 8, "swizzled": 1}


FRAGMENT = """
#include <cuda_fp16.h>
__global__ void fragment(float* y) {
  __shared__ __align__(16) __half a[16][16], b[16][8];
  for (int n = threadIdx.x; n < 256; n += 32) a[n / 16][n % 16] = __float2half(n % 16 == 0 ? 8 * (n / 16) : n % 16 == 1);
  for (int n = threadIdx.x; n < 128; n += 32) b[n / 8][n % 8] = __float2half(n / 8 == 0 ? 1 : n / 8 == 1 ? n % 8 : 0);
  __syncwarp();
  unsigned x[4], z[2];
  float s[4] = {};
  const unsigned from_a = __cvta_generic_to_shared(&a[threadIdx.x % 16][threadIdx.x / 16 * 8]);
  const unsigned from_b = __cvta_generic_to_shared(&b[threadIdx.x % 16][0]);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from_a));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(z[0]), "=r"(z[1]) : "r"(from_b));
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
               : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(z[0]), "r"(z[1]));
  for (int n = 0; n < 4; ++n) y[threadIdx.x * 4 + n] = s[n];
}
"""


@pytest.mark.compiler
def test_lanes_hold_what_the_emulated_instruction_gives_them(tmp_path: Path) -> None:
    """The product has 8 · row + column at (row, column), so that each number says where it is from."""
    file = tmp_path / "fragment.cu"
    file.write_text(FRAGMENT, encoding="utf-8")
    run = fl.emulate_file(file, {"y": fl.Empty((128,))}, grid=1, block=32)
    assert run.passed
    for row in range(16):
        for column in range(8):
            lane, register = holder(row, column)
            assert run.arrays["y"][4 * lane + register] == 8 * row + column
    assert drawings.quad().figures == {"lanes per row": 4, "rows per quad": 2}


def misorders(drawing: Drawing) -> int:
    """How often a slot is read before its tile has arrived, or filled before it was read."""
    orange, blue = (slots(drawing, fill) for fill in (ORANGE, BLUE))
    assert len(orange) == len(blue) == 2 * TILES
    early = sum(flies + long > reads + 0.2 for (_, flies, long), (_, reads, _) in zip(orange, blue, strict=True))
    lost = sum(
        row == after and reads + long > flies + 0.2
        for (row, reads, long), (after, flies, _) in zip(blue, orange[1:], strict=False)
    )
    return early + lost


@pytest.mark.parametrize("draw", [pipelines.cp_async, pipelines.tma])
def test_a_slot_is_filled_then_read_then_filled_again(draw: Callable[[], Drawing]) -> None:
    drawing = draw()
    assert misorders(drawing) == 0
    shown, away, beside = drawing.figures.values()
    assert 0 < beside <= away <= shown


def test_a_tile_that_is_read_too_early_is_found() -> None:
    shown = fl.timeline("flash2", pipelines.FLASH2, device="a100")
    assert misorders(pipelines.ring("", shown, lambda copies, n: copies[n].end + 5_000)) > 0


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


@given(SPANS, SPANS)
def test_time_beside_others_is_that_of_a_count_cycle_by_cycle(
    one: list[pipelines.Span], other: list[pipelines.Span]
) -> None:
    these, others = (pipelines.merged(each, 5, 25) for each in (one, other))
    alone = sum(any(a <= n < b for a, b in one) and not any(a <= n < b for a, b in other) for n in range(5, 25))
    assert pipelines.length(pipelines.outside(these, others)) == alone


def test_consumers_take_turns() -> None:
    """Once for each tile and consumer. In the rung without turns they come in between each other all the time."""
    shown, busy, passed = pipelines.ping_pong().figures.values()
    assert passed <= 2 * TILES
    assert busy > 0.9 * shown
    shown, busy, passed = pipelines.consumers(
        "", fl.timeline("flash3_2", pipelines.HOPPER, device="h200")
    ).figures.values()
    assert passed > 2 * TILES
    assert busy < 0.9 * shown


def test_a_bar_is_as_long_as_its_time() -> None:
    chart = Chart(100, 200, LEFT)
    assert (chart.x(100), chart.x(200), chart.x(150)) == (LEFT, WIDTH - 12, (LEFT + WIDTH - 12) / 2)
    events = fl.timeline("flash2", pipelines.FLASH2, device="a100").events
    for copy, product in READ.items():
        tiles = sum(event.name == copy for event in events)
        firsts = [pipelines.used(events, product, n, tiles)[0] for n in range(tiles)]
        assert firsts == sorted(firsts)


def test_pages_are_those_of_the_manager() -> None:
    """Three requests grow by nine tokens each. After a fork all pages are shared, and a token more takes one."""
    prompts = (9, 4, 6)
    tokens, taken, wasted = paging.pages().figures.values()
    assert tokens == sum(prompts) + 9 * len(prompts)
    assert (taken, wasted) == (sum(-(-(n + 9) // 4) for n in prompts), 4 * taken - tokens)
    drawing = paging.copied()
    assert list(drawing.figures.values()) == [3, 3, 4, 1]
    assert [len(filled(drawing, fill)) for fill in (PINK, BLUE, ORANGE)] == [3 + 2, 3 + 1, 1]


def test_a_causal_square_is_dealt_pair_by_pair() -> None:
    """A rank has as many cells as its rows see chunks, and its bar is as long as their area below the diagonal."""
    drawing, n = several.dealt(), 64
    for layout in layouts.LAYOUTS:
        for rank in range(4):
            rows = layouts.rows(layout, n, 4, rank)
            pairs = sum(key <= row for row in rows for key in range(n)) - n / 8  # without half of the diagonal
            assert drawing.figures[f"{layout} {rank}"] == pytest.approx(pairs / (n / 8) ** 2)
    cells = [each for each in filled(drawing, GREY) if each.get("width") == each.get("height")]
    assert len(cells) == 2 * sum(range(8))


def test_each_rank_computes_as_many_pairs_in_each_step() -> None:
    drawing = several.turns()
    assert set(drawing.figures.values()) == {2.0} and len(drawing.figures) == 16
    squares, triangles = (
        sum(len(filled(drawing, each)) for each in (BLUE, ORANGE, GREEN, PINK)),
        drawing.svg.count("h12z"),
    )
    assert squares + triangles / 2 == sum(drawing.figures.values()) and triangles == 8


def test_ranks_wait_as_long_as_the_timeline_says() -> None:
    drawing = several.waits()
    assert drawing.figures["contiguous"] > 1.7 * drawing.figures["zigzag"]
    one, other = (
        fl.parallel.timeline(fl.parallel.count("ring", several.LONG, ranks=4, layout=layout))
        for layout in layouts.LAYOUTS
    )
    assert [one.seconds, other.seconds] == list(drawing.figures.values())
    drawn_waits = sum(float(each.get("width", 0)) for each in filled(drawing, ORANGE))
    scale = (WIDTH - 76) / one.seconds
    assert drawn_waits == pytest.approx(scale * (sum(one.waits) + sum(other.waits)), rel=0.02)


def test_words_stay_inside() -> None:
    """By a width of 7.2 units for a letter of 13."""
    for name, draw in DRAWINGS.items():
        for each in ElementTree.fromstring(draw().svg).iter(f"{SVG}text"):
            x, long = float(each.get("x", 0)), 7.2 * len(each.text or "")
            left = {"start": x, "middle": x - long / 2, "end": x - long}[each.get("text-anchor", "start")]
            assert left >= -1, (name, each.text)
            assert left + long <= WIDTH, (name, each.text)


def test_a_lesson_shows_a_drawing_with_its_figures() -> None:
    shown = show.drawn("banks")
    assert shown.svg == drawings.banks().svg
    assert shown.rows == [["plain", 8], ["swizzled", 1]]
    with pytest.raises(UsageError, match="drawing = 'bank'.*did you mean banks"):
        show.drawn("bank")


def test_tiles_move_as_often_as_the_mask_says() -> None:
    """The last of four row tiles sees four key tiles, and loads each once. The page says where in the player that is."""
    assert drawings.tiles().figures == {"q": 1, "k": 4, "v": 4, "out": 1}
    problem = fl.Problem(batch=1, heads=1, len_q=64, head_dim=16, dtype="float16", causal=True)
    trace = fl.simulate("flash2", *fl.random_inputs(problem), causal=True, tile=(16, 16), trace=(0, 0)).trace
    assert trace is not None
    of_last = [n for n, event in enumerate(trace.events, 1) if event.block == trace.events[-1].block]
    assert f"steps {of_last[0]} to {of_last[-1]} of `flash2`" in PAGE.read_text(encoding="utf-8")


def test_a_tokens_area_is_its_bytes() -> None:
    """In each of the four caches, by what a token has: K and V, a row, or codes and scales."""
    drawing, due = latent.caches(), (128 * 2 * 128 * 2, 8 * 2 * 128 * 2, 576 * 2, 8 * 2 * (128 + 4))
    sides = [float(filled(drawing, fill)[0].get("width", 0)) for fill in (BLUE, ORANGE, GREEN, PINK)]
    assert list(drawing.figures.values()) == list(due)
    assert [(side / sides[0]) ** 2 * due[0] for side in sides] == pytest.approx(due, rel=0.01)


def test_both_forms_are_drawn_as_they_count() -> None:
    """Bytes of a row, and of 128 heads' keys and values; FLOPs of both; and where times cross."""
    drawing, due = latent.forms(), [576 * 2, 128 * (192 + 128) * 2, 2 * (576 + 512), 2 * (192 + 128), 171]
    assert list(drawing.figures.values()) == due
    widths = [float(each.get("width", 0)) for fill in (GREEN, BLUE) for each in filled(drawing, fill)]
    assert widths == pytest.approx([430 * due[0] / due[1], 430, 430, 430 * due[3] / due[2]], rel=0.01)
    lines = re.findall(r'<path d="M([^"]+)" fill="none" stroke="(#\w+)"', drawing.svg)
    at = {fill: [tuple(map(float, point.split())) for point in path.split("L")] for path, fill in lines}
    below = [one[1] > other[1] for one, other in zip(at[GREEN], at[BLUE], strict=True)]  # y goes down: less time
    assert below == [2**n < 171 for n in range(13)]
