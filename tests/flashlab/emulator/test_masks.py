"""The kernels of a mask that an array says, on the emulator: numbers, bytes and findings; and faults seeded in them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashlab as fl
import kernels_cu
from flashlab.verify.rule import expect, judge
from simulator.operations.attention import ATTENTION
from simulator.operations.pairs import mask_operand
from tests.patches import patched
from tests.simulator.masks import blocky, formed, masks
from tests.tiers import examples, one_of_each

pytestmark = pytest.mark.compiler

P = fl.Problem(batch=2, heads=2, kv_heads=1, len_q=150, len_kv=203, head_dim=40, dtype="float16", mask="dense")
TILES = {"flash2": [(64, 48), (128, 16), (32, 80), None], "flash3": [(64, 48), (128, 16), (64, 80), None]}
"""Of one word of 64 columns, cut or whole, and of two; one row tile and several."""


LENGTHS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 150)), min_size=1, max_size=4)


def complaints(algorithm: str, p: fl.Problem, mask: Any, tile: Any) -> list[str]:
    """What is wrong with a run: findings, bytes other than the simulator's on this mask, numbers off by the rule."""
    inputs: dict[str, Any] = {**ATTENTION.draw(p), mask_operand(p): mask}
    run = fl.emulate(algorithm, **inputs, **p.masks, tile=tile, lse=True)
    message = judge(expect(p, **inputs), run.out, run.lse).message
    return run.complaints() + [message] * (message is not None)


@pytest.mark.long
@pytest.mark.parametrize(
    "case", one_of_each([(a, t) for a, tiles in TILES.items() for t in tiles], lambda case: case[0])
)
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_kernels_equal_the_judge_and_the_simulator(case: tuple[str, Any], data: st.DataObject) -> None:
    algorithm, tile = case
    lengths, sides = st.integers(0, 150), st.none() | st.integers(0, 100)
    ragged = data.draw(st.none() | LENGTHS)
    shape: dict[str, Any] = {
        "len_q": data.draw(lengths),
        "len_kv": data.draw(lengths),
        "batch": data.draw(st.integers(1, 2)),
    }
    p = P.replace(
        mask=data.draw(st.sampled_from(["dense", "bits"])),
        **(shape if ragged is None else {"batch": 1, "len_q": None, "len_kv": None, "lengths": ragged}),
        causal=data.draw(st.booleans()), window=data.draw(st.none() | st.tuples(sides, sides)),
        scale=data.draw(st.sampled_from([None, -0.2])),
    )  # fmt: skip
    assert complaints(algorithm, p, data.draw(masks(p)), tile) == []


BLOCKS = [("flash2", (64, 48)), ("flash2", (32, 16)), ("flash3", (64, 48))]


@pytest.mark.alike(1)
@pytest.mark.parametrize("case", one_of_each(BLOCKS, lambda case: case[0]))
@examples(8, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_blocks(case: tuple[str, Any], data: st.DataObject) -> None:
    algorithm, tile = case
    p = P.replace(
        len_q=data.draw(st.integers(0, 150)), len_kv=data.draw(st.integers(0, 400)), causal=data.draw(st.booleans()),
        mask="blocks", block_size=(64, 96), batch=1,
    )  # fmt: skip
    assert complaints(algorithm, p, data.draw(masks(p)), tile) == []


TWO = fl.DEVICES["h100"].replace(sms=2)


def complaints_of_persistent_blocks(length: tuple[int, int], causal: bool, masked: bool) -> list[str]:
    """What is wrong where two blocks share out the row tiles of five sequences that are alike, or causal ones have their own."""
    p = P.replace(
        batch=1, len_q=None, len_kv=None, lengths=[length] * 5, causal=causal, mask="dense" if masked else None
    )
    inputs = ATTENTION.draw(p) | ({"mask": blocky(p, seed=2, density=0.5, block=40)} if masked else {})
    run = fl.emulate("flash3", **inputs, **p.masks, tile=(64, 48), lse=True, device=TWO)
    config, message = run.counts.config, judge(expect(p, **inputs), run.out, run.lse).message
    assert config is not None and config.persistent != causal
    return run.complaints() + [message] * (message is not None)


@pytest.mark.alike("length0-True-False", "length1-False-True")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [(70, 90), (128, 128)])
def test_persistent_blocks_of_sequences_that_are_alike(length: tuple[int, int], causal: bool, masked: bool) -> None:
    assert complaints_of_persistent_blocks(length, causal, masked) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("} while (RAGGED && work.first_row >= work.keys); return true;", "} while (false); return true;"),
        (
            "} while (RAGGED && work.first_row >= work.keys); return true;",
            "} while (false); return work.first_row < work.keys;",
        ),
    ],
    ids=["an empty place computed", "an empty place ends the list"],
)
@pytest.mark.long
def test_an_empty_place_is_passed_over(old: str, new: str, tmp_path: Path) -> None:
    folder = shutil.copytree(kernels_cu.source("mask").parent, tmp_path / "kernels_cu")
    path = folder / "include" / "scheduler.cuh"
    path.write_text(patched(path.read_text(encoding="utf-8"), old, new), encoding="utf-8")
    with kernels_cu.sources_in(folder):
        assert complaints_of_persistent_blocks((128, 128), False, False) != []


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("algorithm", TILES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_with_all_that_changes_the_scores(algorithm: str, dtype: str, head_dim: int) -> None:
    if algorithm == "flash3" and dtype == "float32":
        dtype = "float16"
    p = P.replace(head_dim=head_dim, dtype=dtype, causal=True, soft_cap=3.0, sinks=True, alibi=True)
    for q in (p, p.replace(mask="bits", batch=1, len_q=None, len_kv=None, lengths=[(70, 201), 3, (90, 33)])):
        assert complaints(algorithm, q, formed(q, blocky(q, seed=head_dim, density=0.5, block=40)), None) == []


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`old`, code that occurs once in `file`, becomes `new`: then the algorithm's run must complain."""

    name: str
    file: str
    old: str
    new: str
    algorithm: str = "flash2"
    tile: tuple[int, int] = (64, 16)
    causal: bool = False
    mask: str = "dense"
    lengths: tuple[tuple[int, int], ...] | None = None


PACK, HEADER, ARRAY = "mask.cu", "include/packed_mask.cuh", "include/mask_array.cuh"
SOME = ((70, 90), (0, 20), (33, 133), (40, 107))
"""Sequences whose keys and bits begin anywhere."""
WIDE = (64, 80)
"""A tile of two words a row. The other has 19 key tiles: more than are packed together."""
FAULTS = [
    Fault(name="a mixed tile listed as visible", file=PACK, old="2 * j + any_lane(!every)", new="2 * j"),
    Fault(name="the last word of a row forgotten", file=HEADER, tile=WIDE,
          old="words[w] = load_global<unsigned>(from + 32 * w)", new="words[w] = w ? ~0u : load_global<unsigned>(from)"),
    Fault(name="the mask ignored in the last tile", file="flash2.cu",
          old="hidden[i].hide(s[i], here, -INF);", new="if (j < tiles.last) hidden[i].hide(s[i], here, -INF);"),
    Fault(name="values of the next tile", file="flash3.cu", algorithm="flash3",
          old="key_tile(j, here) * BC;", new="key_tile(j, next) * BC;"),
    Fault(name="bits in the opposite order", file=PACK, old="* 0x01020408 >> 24", new="* 0x08040201 >> 24"),
    Fault(name="rows 8 apart swapped", file=PACK, old="own |= found << 16 * half", new="own |= found << 16 * (1 - half)"),
    Fault(name="columns of the neighbour in the quad", file=PACK, old="lane_id() - t + source", new="lane_id() - t + (source ^ 1)"),
    Fault(name="a hidden tile listed", file=PACK, old="any_lane(some) ? 2 * j + any_lane(!every) : -1",
          new="2 * j + any_lane(!every)"),
    Fault(name="a visible tile listed as mixed", file=PACK, old="every &= !asked || found == 0xffff;", new="every = false;"),
    Fault(name="entries not moved up", file=PACK, old="listed + count_below(seen)", new="listed + lane_id()"),
    Fault(name="lists begin anew with each 16 tiles", file=PACK, old="listed += count_bits(seen)", new="listed = count_bits(seen)"),
    Fault(name="the last row left out", file=PACK,
          old="row(i, half) < shape.len_q && column(w) < BC && j * BC",
          new="row(i, half) + 1 < shape.len_q && column(w) < BC && j * BC"),
    Fault(name="the causal mask not in the bits", file=PACK, causal=True,
          old="& left_to<16>(shape, row(i, half), j * BC + column(w))", new=""),
    Fault(name="keys one past the diagonal in the bits", file=PACK, causal=True,
          old="keys.last + 1 - key", new="keys.last + 2 - key"),
    Fault(name="kinds written while they are read", file=PACK, old="listed += count_bits(seen); } barrier();",
          new="listed += count_bits(seen); }"),
    Fault(name="the list of the next row tile", file=HEADER, old="list(tiles + list_of(shape, row_tile))",
          new="list(tiles + list_of(shape, row_tile ^ 1))"),
    Fault(name="bits of the next fragment", file=HEADER, old="words_of(shape, row_tile, visit.tile(), fragment)",
          new="words_of(shape, row_tile, visit.tile(), fragment ^ 1)"),
    Fault(name="the upper row's bits for both", file=HEADER, old="16 * (e / 2) + 2 * (n % 8)", new="2 * (n % 8)"),
    Fault(name="keys of the next tile", file="flash2.cu", old="loader.at(visit.tile())", new="loader.at(visit.tile() ^ 1)"),
    Fault(name="bits of the tile before", file="flash3.cu", algorithm="flash3",
          old="here = next; if (MASK && j > work.tiles.first)",
          new="if (j == work.tiles.first) here = next; if (MASK && j > work.tiles.first)"),
    Fault(name="bits: the highest first", file=PACK, mask="bits", old="(loaded[e] | next << 8) >> before & 0xff",
          new="__brev((loaded[e] | next << 8) >> before & 0xff) >> 24"),
    Fault(name="bits: rows begin with a byte", file=ARRAY, mask="bits", old="before = MASK == 2 ? bit % 8 : 0", new="before = 0"),
    Fault(name="bits: a byte's neighbour forgotten", file=PACK, mask="bits", old="(loaded[e] | next << 8)", new="loaded[e]"),
    Fault(name="bits: the last byte not read", file=PACK, mask="bits",
          old="(from.before + keys + 7) / 8", new="(from.before + keys) / 8"),
    Fault(name="bits: a byte more is read", file=PACK, mask="bits",
          old="(from.before + keys + 7) / 8", new="(from.before + keys + 15) / 8"),
    Fault(name="bits: the byte behind lane 31's", file=PACK, mask="bits", tile=(64, 256),
          old="lane_id() == 0 ? after : loaded[e]", new="loaded[e]"),
    Fault(name="bits: rows 4 apart swapped", file=PACK, mask="bits", old="g < 4 ? of[0] : of[1]", new="g < 4 ? of[1] : of[0]"),
    Fault(name="bits: a pair of columns late", file=PACK, mask="bits",
          old="8 * (g % 4) + 2 * t;", new="8 * (g % 4) + 2 * (t ^ 1);"),
    Fault(name="bits: of other sequences", file=PACK, mask="bits", lengths=SOME,
          old="load_global<long long>(offsets_mask + own.sequence)", new="load_global<long long>(offsets_mask)"),
    Fault(name="bits: rows counted from the first key", file=ARRAY, mask="bits", lengths=SOME, old="row - own.aligned", new="row"),
    Fault(name="booleans: of the batch's first keys", file=ARRAY, lengths=SOME, old="+ own.kv + key", new="+ key"),
    Fault(name="booleans: of the sequence's rows alone", file=ARRAY, lengths=SOME, old="own.q + row)", new="row - own.aligned)"),
    Fault(name="booleans: the last key left out", file=PACK, lengths=SOME, old="/ 8 : keys;", new="/ 8 : keys - 1;"),
    Fault(name="lists as long as the sequence", file=HEADER, lengths=SOME,
          old="round_up(1 + ceil_div(shape.longest, BC), 4)", new="round_up(1 + ceil_div(shape.len_kv, BC), 4)"),
    Fault(name="bits as many as the sequence has", file=HEADER, lengths=SOME,
          old="ceil_div(shape.longest, BC) + key_tile", new="ceil_div(shape.len_kv, BC) + key_tile"),
    Fault(name="a place taken for a row tile", file="include/sequences.cuh", lengths=SOME,
          old="RAGGED ? place : first_row / BR", new="first_row / BR"),
    Fault(name="blocks: the first entry taken for their number", file=ARRAY, mask="blocks",
          old="from + 4 + 4 * at", new="from + 4 * at"),
    Fault(name="blocks: one behind the listed ones, too", file=ARRAY, mask="blocks",
          old="if (at < length)", new="if (at < length + 1)"),
    Fault(name="blocks: a number that the row hasn't", file=ARRAY, mask="blocks",
          old="min(max(load_global<int>(from), 0), ceil_div(shape.len_kv, BLOCK_COLS))", new="ceil_div(shape.len_kv, BLOCK_COLS)"),
    Fault(name="blocks: the row tile for its row of blocks", file=PACK, mask="blocks",
          old="row_tile * BR / BLOCK_ROWS", new="row_tile"),
    Fault(name="blocks: the key tile for its block", file=PACK, mask="blocks", old="j * BC / BLOCK_COLS", new="j"),
    Fault(name="blocks: all are listed", file=PACK, mask="blocks", old="asked && listed ? 0xffff : 0", new="asked ? 0xffff : 0"),
    Fault(name="blocks: the causal mask not in the bits", file=PACK, mask="blocks", causal=True,
          old="& left_to<16>(shape, row(i, half), j * BC + column(w))", new=""),
    Fault(name="V's last tile not cleared", file="flash3.cu", algorithm="flash3", lengths=SOME,
          old="key_tile(work.tiles.last, here) * BC; if (RAGGED", new="work.tiles.last * BC; if (RAGGED"),
]  # fmt: skip


@pytest.mark.alike(
    "values of the next tile",
    "bits: the highest first",
    "a mixed tile listed as visible",
    "booleans: of the batch's first keys",
)
@pytest.mark.parametrize(
    "fault",
    one_of_each(FAULTS, lambda fault: (fault.algorithm, fault.mask, bool(fault.lengths)), lambda fault: fault.name),
)
def test_a_seeded_fault_is_caught(fault: Fault, tmp_path: Path) -> None:
    p = P.replace(batch=1, len_kv=301, causal=fault.causal, mask=fault.mask)
    if fault.mask == "blocks":
        p = p.replace(block_size=(128, 48))
    if fault.lengths is not None:
        p = p.replace(len_q=None, len_kv=None, lengths=fault.lengths)
    shown = blocky(p, seed=1, density=0.5, block=40)
    shown[:64, :80] = True  # a visible tile
    shown[64:128, 160:240] = False  # a hidden one
    mask = formed(p, shown)
    folder = shutil.copytree(kernels_cu.source("mask").parent, tmp_path / "kernels_cu")
    path = folder / fault.file
    path.write_text(patched(path.read_text(encoding="utf-8"), fault.old, fault.new), encoding="utf-8")
    with kernels_cu.sources_in(folder):
        assert complaints(fault.algorithm, p, mask, fault.tile) != []
