"""Masks that an array says: the judges agree, tile programs equal them, and counts are those of the tiles that are seen."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.verify.rule import expect, judge
from simulator import Problem, Tile, UsageError
from simulator.dtypes import Array
from simulator.operations.attention import ATTENTION
from simulator.operations.pairs import mask_operand, packed_bits, shown_pairs
from tests.simulator.masks import blocky, formed, masks
from tests.simulator.problems import problems, tiles
from tests.tiers import examples

ALGORITHMS = ("flash2", "flash3")
FORMS = st.sampled_from(["dense", "bits"])
LENGTHS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=4)
FEW_KEYS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), min_size=1, max_size=4)
P = Problem(batch=1, heads=2, kv_heads=1, len_q=97, len_kv=150, head_dim=40, dtype="float16")


def drawn(p: Problem, mask: Array) -> dict[str, Any]:
    """The inputs of a problem, with the mask."""
    return {**ATTENTION.draw(p), mask_operand(p): mask}


@examples(30)
@given(st.data(), problems(longest=90), tiles)
def test_tile_programs_equal_the_judge(data: st.DataObject, problem: Problem, tile: Tile) -> None:
    p = of_any_form(data, problem.replace(head_dim_v=None))
    mask = data.draw(masks(p))
    inputs = drawn(p, mask)
    expected = expect(p, **inputs)
    loop = fl.naive_loop(**inputs, **p.masks)
    np.testing.assert_allclose(loop.out, expected.out, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(loop.lse, expected.lse, rtol=1e-9, atol=1e-9)
    for algorithm in ALGORITHMS:
        run = fl.simulate(algorithm, **inputs, **p.masks, tile=tile, device="b200", lse=True)
        assert judge(expected, run.out, run.lse).message is None
        assert run.counts.hbm.read <= fl.count(algorithm, p, tile=tile, device="b200").hbm.read


def of_any_form(data: st.DataObject, problem: Problem) -> Problem:
    """The problem with a mask of any form, perhaps as a ragged batch."""
    p = problem.replace(mask=data.draw(FORMS))
    ragged = data.draw(st.none() | LENGTHS)
    return p if ragged is None else p.replace(batch=1, len_q=None, len_kv=None, lengths=ragged)


@examples(60)
@given(st.data(), problems(), tiles, st.sampled_from(ALGORITHMS))
def test_without_data_all_tiles_are_mixed(data: st.DataObject, problem: Problem, tile: Tile, algorithm: str) -> None:
    p = of_any_form(data, problem)
    assert fl.shape_run(algorithm, p, tile=tile, device="b200") == fl.count(algorithm, p, tile=tile, device="b200")
    stripes = formed(p, np.indices((p.len_q, p.len_kv)).sum(0) % 2 == 0)
    if tile.rows > 1 < tile.cols and not p.causal and p.window is None:
        # a tile of one row or of one key may show all or nothing
        lone = any(1 in (len(rows) % tile.rows, len(keys) % tile.cols) for rows, keys in p.spans)
        run = fl.simulate(algorithm, **drawn(p, stripes), **p.masks, tile=tile, device="b200")
        assert lone or run.counts == fl.count(algorithm, p, tile=tile, device="b200")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(st.data(), problems(longest=90), tiles)
@examples(15)
def test_forms_say_the_same(algorithm: str, data: st.DataObject, problem: Problem, tile: Tile) -> None:
    """Bits and booleans give the same bits of the output, and beside the mask itself count the same bytes."""
    p = of_any_form(data, problem).replace(mask="bits")
    mask = data.draw(masks(p))
    shown = shown_pairs(p, mask)
    np.testing.assert_array_equal(packed_bits(p, shown), mask)
    a, b = (fl.simulate(algorithm, **drawn(p, x), **p.masks, tile=tile, device="b200", lse=True) for x in (mask, shown))
    assert a.out.tobytes() == b.out.tobytes()
    assert a.counts.launches[1].ledger == b.counts.launches[1].ledger


def test_bits_are_flashinfers() -> None:
    """One row of pairs behind the other, the lowest bit first; each sequence begins with a byte."""
    p = Problem(batch=1, heads=1, lengths=[(3, 5), (0, 4), (2, 3)], head_dim=16, dtype="float16", mask="bits")
    shown = np.zeros((5, 12), bool)
    shown[0, 1] = shown[1, 4] = shown[2, 0] = shown[3, 9] = shown[4, 11] = True
    assert packed_bits(p, shown).tolist() == [0b10, 0b110, 0b100001]
    q, k, v = fl.random_inputs(P)
    mask = blocky(P, seed=5, density=0.5, block=40)
    flat = np.packbits(mask.reshape(-1), bitorder="little")
    assert fl.naive(q, k, v, mask=flat).out.tobytes() == fl.naive(q, k, v, mask=mask).out.tobytes()


def test_the_bytes_of_bits_are_counted_row_by_row() -> None:
    """Rows of 3 keys: 5 of them have 15 bits, in 2 bytes. A row's bits lie in a byte, or across two."""
    p = Problem(batch=1, heads=1, len_q=5, len_kv=3, head_dim=16, dtype="float16", mask="bits")
    packing = fl.count("flash2", p, tile=(16, 16)).launches[0]
    assert packing.bytes("hbm.read", "mask") == 1 + 1 + 2 + 1 + 1
    assert packing.distinct["mask", "read"] == 2
    wide = fl.count("flash2", p.replace(len_q=64, len_kv=64), tile=(16, 16)).launches[0]
    assert wide.bytes("hbm.read", "mask") == 64 * 64 // 8


@examples(150)
@given(problems(longest=150), st.builds(Tile, *[st.sampled_from([8, 16, 24, 64])] * 2), st.none() | LENGTHS | FEW_KEYS)
def test_the_closed_form_of_bits_counts_each_row(problem: Problem, tile: Tile, lengths: Any) -> None:
    """In tiles whose sides are multiples of 8, as all kernels have: what blocks on shapes ask for row by row."""
    p = problem.replace(mask="bits", head_dim=8, head_dim_v=None, heads=1, kv_heads=1)
    p = p.replace(batch=1) if lengths is None else p.replace(batch=1, len_q=None, len_kv=None, lengths=lengths)
    found = (count("flash2", p, tile=tile, device="b200").launches[0] for count in (fl.shape_run, fl.count))
    run, formula = ((x.bytes("hbm.read", "mask"), x.distinct.get(("mask", "read"), 0)) for x in found)
    assert run == formula


@examples(20)
@given(st.data(), problems(longest=90), st.sampled_from([(16, 16), (48, 24), (5, 7)]), st.sampled_from(ALGORITHMS))
def test_blocks(data: st.DataObject, problem: Problem, block: tuple[int, int], algorithm: str) -> None:
    """By tiles that divide them. Without data all are visible, and all tiles mixed."""
    p = problem.replace(mask="blocks", block_size=block, head_dim_v=None)
    tile = tuple(data.draw(st.sampled_from([n for n in range(1, side + 1) if side % n == 0])) for side in block)
    inputs = drawn(p, data.draw(masks(p)))
    loop, expected = fl.naive_loop(**inputs, **p.masks), expect(p, **inputs)
    np.testing.assert_allclose(loop.out, expected.out, rtol=1e-9, atol=1e-9)
    run = fl.simulate(algorithm, **inputs, **p.masks, tile=tile, device="b200", lse=True)
    assert judge(expected, run.out, run.lse).message is None
    counted = fl.count(algorithm, p, tile=tile, device="b200")
    assert fl.shape_run(algorithm, p, tile=tile, device="b200") == counted
    assert run.counts.hbm.read <= counted.hbm.read
    q = p.replace(mask="dense", block_size=None)
    dense = drawn(q, shown_pairs(p, inputs["block_mask"]))
    other = fl.simulate(algorithm, **dense, **q.masks, tile=tile, device="b200", lse=True)
    assert other.out.tobytes() == run.out.tobytes()


def test_blocks_that_are_hidden_cost_nothing() -> None:
    p = Problem(batch=1, heads=2, len_q=256, len_kv=384, head_dim=64, dtype="float16", mask="blocks")
    lists = np.array([[1, 2, -5, 99], [0, 7, 7, 7]], np.int32)  # behind the listed ones anything may stand
    packing, attention = fl.simulate("flash2", **drawn(p, lists), tile=(64, 64)).counts.launches
    assert packing.bytes("hbm.read") == 4 * (
        4 * 16 + 2 * 6 * 1
    )  # each warp asks how many; of 6 tiles each, the one listed
    assert attention.bytes("hbm.read", "k") == p.heads * 2 * 128 * 64 * 2
    assert "mask_bits" not in {entry.tensor for entry in attention.ledger}  # no tile is mixed


def test_default_tiles_divide_blocks() -> None:
    for algorithm, dim, size in product(ALGORITHMS, (40, 64, 80, 128, 192, 256), ((128, 128), (64, 64), (256, 64))):
        p = Problem(batch=1, heads=1, len_q=512, head_dim=dim, dtype="float16", mask="blocks", block_size=size)
        tile = fl.count(algorithm, p, device="h200").tile
        assert size[0] % tile.rows == 0 and size[1] % tile.cols == 0


BLOCKS = Problem(
    batch=1, heads=2, len_q=97, len_kv=150, head_dim=16, dtype="float16", mask="blocks", block_size=(64, 48)
)
LISTS = np.zeros((2, 5), np.int32)


@pytest.mark.parametrize(
    ("lists", "options", "said"),
    [
        (np.zeros((3, 5), np.int32), {}, "block_mask.shape = (3, 5): expected (2, 5), its axes are row_blocks, block_list"),
        (np.zeros((2, 5), np.int64), {}, "block_mask.dtype = 'int64': expected int32 (row_blocks, 1 + key_blocks)"),
        (np.zeros(5, np.int32), {}, "block_mask.shape = (5,): expected int32 (row_blocks, 1 + key_blocks)"),
        (np.array([[0, 0, 0, 0, 0], [5, 0, 1, 2, 3]], np.int32), {},
         "block_mask[1, 0] = 5: expected how many key blocks are visible, 0 to 4"),
        (np.array([[0, 0, 0, 0, 0], [2, 0, 4, 2, 3]], np.int32), {}, "block_mask[1, 2] = 4: expected a key block, 0 to 3"),
        (np.array([[3, 1, 2, 1, 0], [2, 0, 1, 2, 3]], np.int32), {},
         "block_mask[0, 3] = 1: expected a key block, which the row hasn't listed before"),
        ("blocks", {}, "block_mask = 'str': expected an array of"),
        (LISTS, {"tile": (64, 32)}, "tile = '64x32': expected sides that divide those of a block of the mask, 64 x 48"),
        (LISTS, {"mask": np.ones((97, 150), bool)}, "block_mask = 'given': expected None beside a mask"),
        (LISTS, {"block_size": (0, 4)}, "block_size = 0: expected a pair (left, right), each None or an integer"),
        (LISTS, {"block_size": (None, 4)}, "block_size = (None, 4): expected a pair (queries, keys)"),
    ],
)  # fmt: skip
def test_bad_lists_are_refused_in_a_line(lists: Any, options: dict[str, Any], said: str) -> None:
    inputs = {name: x for name, x in ATTENTION.draw(BLOCKS).items() if name != "block_mask"}
    for call in (fl.simulate, fl.emulate):
        with pytest.raises(UsageError) as error:
            call("flash2", **inputs, block_mask=lists, **{"block_size": (64, 48), **options})
        assert said in str(error.value) and "\n" not in str(error.value)


def test_blocks_are_of_a_mask_of_blocks_alone() -> None:
    with pytest.raises(UsageError, match=r"block_size = \(64, 64\): expected nothing: only a mask of blocks has them"):
        P.replace(block_size=(64, 64))
    with pytest.raises(UsageError, match="mask = 'blocks': expected dense, bits or None with lengths"):
        Problem(batch=1, heads=1, lengths=[5, 7], head_dim=16, dtype="float16", mask="blocks")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_hidden_costs_nothing(algorithm: str) -> None:
    """Of 4 x 4 tiles row tile 0 sees one in part and one whole, row tile 1 none, and the others one whole each."""
    p, tile = P.replace(len_q=256, len_kv=256, mask="dense"), (64, 64)
    mask = np.zeros((256, 256), bool)
    mask[5, 70] = mask[:64, 128:192] = mask[128:192, :64] = mask[192:, 192:] = True
    counts = fl.simulate(algorithm, **drawn(p, mask), tile=tile).counts
    packing, attention = counts.launches
    readers = 4 if algorithm == "flash2" else 5
    assert packing.bytes("hbm.read") == 256 * 256
    assert packing.bytes("hbm.write", "mask_bits") == 256 * 256 // 8
    assert packing.bytes("hbm.write", "mask_tiles") == 4 * (4 + 4)
    assert attention.bytes("hbm.read", "mask_bits") == p.heads * 64 * 64 // 8
    assert attention.bytes("hbm.read", "mask_tiles") == p.heads * readers * 4 * (4 + 4)
    for name in "kv":
        width = 48 if algorithm == "flash2" else 64
        assert attention.bytes("sram.write", name) == p.heads * 4 * 64 * width * 2


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("masked", [{"causal": True}, {"window": (40, 7)}])
def test_a_mask_is_worth_what_it_says(algorithm: str, masked: dict[str, Any]) -> None:
    """A causal mask as booleans, or both, give the same bits as the causal mask."""
    p = P.replace(**masked)
    inputs = ATTENTION.draw(p)
    seen = np.array([[j in p.visible_keys(i) for j in range(p.len_kv)] for i in range(p.len_q)])
    plain = fl.simulate(algorithm, **inputs, **p.masks, tile=(64, 32), lse=True)
    for more in ({}, p.masks):
        run = fl.simulate(algorithm, **inputs, mask=seen, **more, tile=(64, 32), lse=True)
        assert run.out.tobytes() == plain.out.tobytes()
        assert run.lse is not None and plain.lse is not None and run.lse.tobytes() == plain.lse.tobytes()


def test_large_problems_are_not_cut_into_parts_that_each_pack_the_mask() -> None:
    p = Problem(batch=2, heads=2, len_q=1024, head_dim=16, dtype="float16", mask="dense", sinks=True)
    mask = blocky(p, seed=0, density=0.5, block=64)
    run = fl.simulate("flash2", **drawn(p, mask), tile=(128, 64))
    one = fl.simulate("flash2", **drawn(p.replace(batch=1), mask), tile=(128, 64))
    assert run.counts.launches[0].ledger == one.counts.launches[0].ledger
    assert run.counts.tensors["sinks"].nbytes == 8


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (np.ones((97, 149), bool), r"mask.shape = (97, 149): expected (97, 150), its axes are len_q, len_kv"),
        (np.ones((1, 2, 97, 150), bool), "mask.shape = (1, 2, 97, 150): expected bool (len_q, len_kv), True where"),
        (np.zeros((97, 150), np.float32), "mask.dtype = 'float32': expected bool (len_q, len_kv), True where a key is visible, "
         "or uint8 with eight of them in a byte, one behind the other; an additive bias isn't taken"),
        (np.zeros((97, 150), np.int64), "mask.dtype = 'int64': expected bool"),
        (np.zeros(1818, np.uint8), "mask.shape = (1818,): expected (1819,), a bit for each of 97 x 150 pairs, in whole bytes"),
        (np.zeros(1819, bool), "mask.shape = (1819,): expected bool (len_q, len_kv)"),
        (np.zeros(1819, np.float16), "mask.dtype = 'float16': expected bool (len_q, len_kv)"),
        ("causal", "mask = 'str': expected an array of"),
    ],
)  # fmt: skip
def test_bad_masks_are_refused_in_a_line(mask: Any, said: str) -> None:
    inputs = ATTENTION.draw(P)
    for call in (fl.simulate, fl.emulate):
        with pytest.raises(UsageError) as error:
            call("flash2", **inputs, mask=mask)
        assert said in str(error.value) and "\n" not in str(error.value)


def test_algorithms_that_know_no_mask_refuse_one() -> None:
    mask = np.ones((97, 150), bool)
    with pytest.raises(UsageError, match="mask = 'dense': expected nothing: flash1 knows causal, window, scale"):
        fl.simulate("flash1", **ATTENTION.draw(P), mask=mask)


def test_a_byte_says_true_by_any_bit() -> None:
    inputs, mask = ATTENTION.draw(P), blocky(P, seed=3, density=0.5, block=40)
    bytes_ = np.where(mask, 128, 0).astype(np.uint8)
    a, b = (fl.simulate("flash2", **inputs, mask=x) for x in (mask, bytes_))
    assert a.out.tobytes() == b.out.tobytes() and a.counts == b.counts
    assert fl.naive(**inputs, mask=mask).out.tobytes() == fl.naive(**inputs, mask=bytes_).out.tobytes()


def wrong(p: Problem, mask: Array) -> list[str]:
    """Which checks complain: the judges of each other, the rule of a run, the formula of the tile program."""
    inputs, said = drawn(p, mask), list[str]()
    expected, loop = expect(p, **inputs), fl.naive_loop(**inputs, **p.masks)
    if not np.allclose(loop.out, expected.out):
        said.append("judges")
    run = fl.simulate("flash2", **inputs, **p.masks, tile=(32, 16), lse=True)
    if judge(expected, run.out, run.lse).message is not None:
        said.append("rule")
    if fl.shape_run("flash2", p, tile=(32, 16)) != fl.count("flash2", p, tile=(32, 16)):
        said.append("formula")
    return said


SEEDED: dict[str, tuple[str, Any, str]] = {
    "pairs the other way round for a judge": (
        "simulator.operations.pairs.shown_pairs", lambda p, mask: shown_pairs(p, mask)[:, ::-1], "judges",
    ),
    "pairs the other way round for the tile program": (
        "simulator.programs.mask.shown_pairs", lambda p, mask: shown_pairs(p, mask)[:, ::-1], "rule",
    ),
    "rows begin with a byte": (
        "simulator.programs.mask.bytes_of_bits", lambda first, bits: (first // 8, first // 8 - -bits // 8), "formula",
    ),
    "a tile at a time": ("simulator.programs.mask.chunks", lambda seen: [[j] for j in seen.around], "formula"),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_fault_of_a_tile_program_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = P.replace(mask="bits", len_kv=301)
    mask = formed(p, blocky(p, seed=7, density=0.5, block=40))
    assert wrong(p, mask) == []
    target, fault, check = SEEDED[name]
    monkeypatch.setattr(target, fault)
    assert check in wrong(p, mask)
