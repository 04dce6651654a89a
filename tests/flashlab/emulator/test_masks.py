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
from tests.patches import patched
from tests.simulator.masks import blocky, masks
from tests.tiers import one_of_each

pytestmark = pytest.mark.compiler

P = fl.Problem(batch=2, heads=2, kv_heads=1, len_q=150, len_kv=203, head_dim=40, dtype="float16", mask="dense")
TILES = {"flash2": [(64, 48), (128, 16), (32, 80), None], "flash3": [(64, 48), (128, 16), (64, 80), None]}
"""Of one word of 64 columns, cut or whole, and of two; one row tile and several."""


def complaints(algorithm: str, p: fl.Problem, mask: Any, tile: Any) -> list[str]:
    """What is wrong with a run: findings, bytes other than the simulator's on this mask, numbers off by the rule."""
    inputs: dict[str, Any] = {**ATTENTION.draw(p), "mask": mask}
    run = fl.emulate(algorithm, **inputs, **p.masks, tile=tile, lse=True)
    message = judge(expect(p, **inputs), run.out, run.lse).message
    return run.complaints() + [message] * (message is not None)


@pytest.mark.parametrize(
    "case", one_of_each([(a, t) for a, tiles in TILES.items() for t in tiles], lambda case: case[0])
)
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_kernels_equal_the_judge_and_the_simulator(case: tuple[str, Any], data: st.DataObject) -> None:
    algorithm, tile = case
    lengths, sides = st.integers(0, 150), st.none() | st.integers(0, 100)
    p = P.replace(
        len_q=data.draw(lengths), len_kv=data.draw(lengths), batch=data.draw(st.integers(1, 2)),
        causal=data.draw(st.booleans()), window=data.draw(st.none() | st.tuples(sides, sides)),
        scale=data.draw(st.sampled_from([None, -0.2])),
    )  # fmt: skip
    assert complaints(algorithm, p, data.draw(masks(p)), tile) == []


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("algorithm", TILES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_with_all_that_changes_the_scores(algorithm: str, dtype: str, head_dim: int) -> None:
    if algorithm == "flash3" and dtype == "float32":
        dtype = "float16"
    p = P.replace(head_dim=head_dim, dtype=dtype, causal=True, soft_cap=3.0, sinks=True, alibi=True)
    assert complaints(algorithm, p, blocky(p, seed=head_dim, density=0.5, block=40), None) == []


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


PACK, HEADER = "mask.cu", "include/packed_mask.cuh"
WIDE = (64, 80)
"""A tile of two words a row. The other has 19 key tiles: more than are packed together."""
FAULTS = [
    Fault(name="a mixed tile listed as visible", file=PACK, old="2 * j + any_lane(!every)", new="2 * j"),
    Fault(name="the last word of a row forgotten", file=HEADER, tile=WIDE,
          old="words[w] = load_global<unsigned>(from + 32 * w)", new="words[w] = w ? ~0u : load_global<unsigned>(from)"),
    Fault(name="the mask ignored in the last tile", file="flash2.cu",
          old="hidden[i].hide(s[i], here);", new="if (j < tiles.last) hidden[i].hide(s[i], here);"),
    Fault(name="values of the next tile", file="flash3.cu", algorithm="flash3",
          old="key_tile(j, here) * BC;", new="key_tile(j, next) * BC;"),
    Fault(name="bits in the opposite order", file=PACK, old="* 0x01020408 >> 24", new="* 0x08040201 >> 24"),
    Fault(name="rows 8 apart swapped", file=PACK, old="own |= found << 16 * half", new="own |= found << 16 * (1 - half)"),
    Fault(name="columns of the neighbour in the quad", file=PACK, old="lane_id() - t + source", new="lane_id() - t + (source ^ 1)"),
    Fault(name="a hidden tile listed", file=PACK, old="if (any_lane(some)) visit.entry =", new="visit.entry ="),
    Fault(name="a visible tile listed as mixed", file=PACK, old="every &= !asked || found == 0xffff;", new="every = false;"),
    Fault(name="entries not moved up", file=PACK, old="listed + count_below(seen)", new="listed + lane_id()"),
    Fault(name="lists begin anew with each 16 tiles", file=PACK, old="listed += count_bits(seen)", new="listed = count_bits(seen)"),
    Fault(name="the last row left out", file=PACK,
          old="row(i, half) < shape.len_q && column(w) < BC && j * BC",
          new="row(i, half) + 1 < shape.len_q && column(w) < BC && j * BC"),
    Fault(name="the causal mask not in the bits", file=PACK, causal=True,
          old="& left_to(shape, row(i, half), j * BC + column(w))", new=""),
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
]  # fmt: skip


@pytest.mark.parametrize("fault", one_of_each(FAULTS, lambda fault: fault.algorithm, lambda fault: fault.name))
def test_a_seeded_fault_is_caught(fault: Fault, tmp_path: Path) -> None:
    p = P.replace(batch=1, len_kv=300, causal=fault.causal)
    mask = blocky(p, seed=1, density=0.5, block=40)
    mask[:64, :80] = True  # a visible tile
    mask[64:128, 160:240] = False  # a hidden one
    folder = shutil.copytree(kernels_cu.source("mask").parent, tmp_path / "kernels_cu")
    path = folder / fault.file
    path.write_text(patched(path.read_text(encoding="utf-8"), fault.old, fault.new), encoding="utf-8")
    with kernels_cu.sources_in(folder):
        assert complaints(fault.algorithm, p, mask, fault.tile) != []
