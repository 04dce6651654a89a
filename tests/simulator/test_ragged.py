"""Ragged batches: what they are, and that each is the sum of its sequences, in numbers and in bytes."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from simulator import Device, Problem, SramOverflow, Tile, ragged
from simulator.counts import Counts, Entry
from simulator.operations.attention import ATTENTION
from simulator.operations.pairs import distances, hidden_pairs
from tests.simulator.problems import ROOMY, devices, kernel_tiles, problems, scores, taken_by, tiles
from tests.tiers import examples

KNOWING = {name: row.support for name, row in fl.catalogue.of().items() if "lengths" in row.support.masks}
ALGORITHMS = [name for name, support in KNOWING.items() if not support.same_queries]
EVEN = [name for name, support in KNOWING.items() if support.same_queries]
"""Those for which sequences have as many queries each."""
ONE: dict[str, Any] = {"batch": 1, "heads": 1, "head_dim": 8, "dtype": "float16"}
LENGTHS = [(70, 41), 0, (3, 100), (64, 64), (33, 0), (0, 5)]
OFFSETS = ("offsets_q", "offsets_kv")


@st.composite
def batches(draw: st.DrawFn, *, longest: int = 60, most: int = 6) -> Problem:
    """Ragged problems: empty sequences, one long one among short ones, one sequence alone."""
    length = st.integers(0, 5) | st.integers(0, longest)
    lengths = draw(st.lists(length | st.tuples(length, length), min_size=1, max_size=most))
    return draw(problems(scores=scores)).replace(batch=1, len_q=None, len_kv=None, lengths=lengths)


def cut(p: Problem, s: int, arrays: dict[str, Any]) -> dict[str, Any]:
    """The operands of a sequence."""
    rows, keys = p.spans[s]
    where = {"len_q": slice(rows.start, rows.stop), "len_kv": slice(keys.start, keys.stop)}
    return {name: ATTENTION.operand(name).cut(x, where) for name, x in arrays.items()}


def alone(p: Problem, s: int) -> Problem:
    return p.sequences[s].replace(lengths=None)


def simulated(algorithm: str, p: Problem, arrays: dict[str, Any], tile: Tile | None = None) -> Any:
    return fl.simulate(algorithm, **arrays, **p.masks, tile=tile, device=ROOMY, lse=True)


def test_they_are_equal_however_they_are_said() -> None:
    p = Problem(**ONE, lengths=[5, (3, 4), (0, 0)])
    same = Problem(**ONE, len_q=8, len_kv=9, lengths=np.array([(5, 5), (3, 4), (0, 0)]))
    assert p == same and hash(p) == hash(same) and p.lengths == ((5, 5), (3, 4), (0, 0))
    assert (p.len_q, p.len_kv, p.offsets) == (8, 9, 4)
    assert p == Problem(**dataclasses.asdict(p)) == eval(repr(p), {"Problem": Problem})
    assert p.replace(lengths=[2]).len_kv == 2 and p.replace(lengths=None, len_q=3).lengths is None
    assert p.words == ["lengths 5,3:4,0"] and Problem(**ONE, lengths=[7] * 9).words[0].endswith(",… (9 sequences)")
    assert p.padded == Problem(**{**ONE, "batch": 3}, len_q=5) and p.padded.padded == p.padded
    assert [one.lengths for one in p.sequences] == [((5, 5),), ((3, 4),), ((0, 0),)]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"lengths": []}, "lengths = []: expected a list with the length of each sequence: n, or (queries, keys)"),
    ({"lengths": 5}, "lengths = 5: expected a list with the length of each sequence: n, or (queries, keys)"),
    ({"lengths": [4, -1]}, "lengths[1] = -1: expected an integer of at least 0, or a pair of them, (queries, keys)"),
    ({"lengths": [(1, 2, 3)]}, "lengths[0] = (1, 2, 3): expected an integer of at least 0, or a pair"),
    ({"lengths": [2.5]}, "lengths[0] = 2.5: expected an integer"),
    ({"lengths": [True]}, "lengths[0] = True: expected an integer"),
    ({"lengths": "5,7"}, "lengths = '5,7': expected a list with the length of each sequence"),
    ({"lengths": [5, 7], "len_q": 13}, "lengths = 12 queries in all: expected 13, the len_q"),
    ({"lengths": [5, (7, 8)], "len_kv": 12}, "lengths = 13 keys in all: expected 12, the len_kv"),
    ({"lengths": [5], "batch": 2}, "batch = 2: expected 1 with lengths: the sequences lie in the rows of one batch"),
    ({}, "len_q = None: expected an integer of at least 0, or lengths"),
]


@pytest.mark.parametrize(("changes", "line"), BAD, ids=[line for _, line in BAD])
def test_bad_lengths_get_one_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(fl.UsageError) as refused:
        Problem(**{**ONE, **changes})
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def test_what_knows_no_sequences_refuses_them() -> None:
    p = Problem(**ONE, lengths=LENGTHS)
    arrays = ATTENTION.draw(p)
    for name in fl.CATALOGUE:
        if fl.CATALOGUE[name].operation is ATTENTION and name not in KNOWING:
            with pytest.raises(fl.UsageError, match=rf"^(lengths = .*: expected nothing: {name} knows|dtype = )"):
                fl.count(name, p)
    for name in EVEN:
        line = f"^lengths = 0 to 70 queries: expected as many of each sequence for {name}: use flash2 or flash3$"
        with pytest.raises(fl.UsageError, match=line):
            fl.count(name, p)
    with pytest.raises(
        fl.UsageError, match="expected nothing: flash1_backward knows causal, window, scale, dropout, dlse$"
    ):
        fl.count("flash1_backward", p)
    with pytest.raises(fl.UsageError, match="expected nothing: the model of time knows"):
        fl.timeline("flash2", p)
    with pytest.raises(fl.UsageError, match="^trace = True: expected None for a ragged batch: trace a sequence alone$"):
        fl.simulate("flash2", **arrays, **p.masks, trace=True)
    right = ATTENTION.operand("offsets_kv").left_out(p)
    assert right.tolist() == [0, 41, 41, 141, 205, 205, 210] and right.dtype == np.int32
    assert simulated("flash2", p, {**arrays, "offsets_kv": right}).counts == fl.count("flash2", p, device=ROOMY)
    with pytest.raises(
        fl.UsageError, match=r"^offsets_kv\[2\] = 42: expected what the lengths say: it may be left out$"
    ):
        simulated("flash2", p, {**arrays, "offsets_kv": right + (np.arange(7) == 2).astype(np.int32)})


@examples(60)
@given(p=batches(longest=12))
def test_both_judges_see_each_sequence_alone(p: Problem) -> None:
    """And so do the rule's bounds, the mask and the distances."""
    arrays = ATTENTION.draw(p)
    whole, loop = fl.naive(**arrays, **p.masks), fl.naive_loop(**arrays, **p.masks)
    bounds = ATTENTION.bounds(p, arrays, whole._asdict())
    seen = ~hidden_pairs(p)
    assert [np.flatnonzero(row).tolist() for row in seen] == [list(p.visible_keys(i)) for i in range(p.len_q)]
    for s, (rows, keys) in enumerate(p.spans):
        one, own = alone(p, s), cut(p, s, arrays)
        truth, place = fl.naive(**own, **one.masks), (slice(rows.start, rows.stop), slice(keys.start, keys.stop))
        for found in (whole, loop):
            np.testing.assert_allclose(found.out[:, :, place[0]], truth.out, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(found.lse[:, :, place[0]], truth.lse, rtol=1e-9, atol=1e-12)
        for name, bound in ATTENTION.bounds(one, own, truth._asdict()).items():
            np.testing.assert_allclose(bounds[name][:, :, place[0]], bound, rtol=1e-6)
        assert (seen[place] == ~hidden_pairs(one)).all() and not np.delete(seen[place[0]], keys, axis=1).any()
        assert (distances(p)[place] == distances(one)).all()


def test_the_judges_do_not_look_at_neighbours() -> None:
    p = Problem(**ONE, lengths=[7, (5, 9), 4], causal=True)
    arrays = ATTENTION.draw(p)
    rows, keys = p.spans[1]
    littered = {name: np.full_like(x, np.nan) for name, x in arrays.items()}
    for name, place in (("q", rows), ("k", keys), ("v", keys)):
        littered[name][:, :, place.start : place.stop] = arrays[name][:, :, place.start : place.stop]
    with np.errstate(invalid="ignore"):
        for judge in (fl.naive, fl.naive_loop):
            clean, found = judge(**arrays, **p.masks), judge(**littered, **p.masks)
            for a, b in ((clean.out, found.out), (clean.lse, found.lse)):
                place = slice(rows.start, rows.stop)  # another way to sum, for NaN must not matter
                np.testing.assert_allclose(a[:, :, place], b[:, :, place], rtol=1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@examples(60)
@given(p=batches(), tile=tiles | kernel_tiles)
def test_run_on_data_and_on_shapes_and_formula_agree(algorithm: str, p: Problem, tile: Tile) -> None:
    counts = fl.count(algorithm, p, tile=tile, device=ROOMY)
    assert counts == fl.shape_run(algorithm, p, tile=tile, device=ROOMY)
    run = simulated(algorithm, p, ATTENTION.draw(p), tile)
    assert run.counts == counts and run.counts.problem == p
    assert counts.compulsory_read <= counts.dram.estimate <= counts.hbm.read
    for name, spec in counts.tensors.items():  # of the whole batch
        assert spec == ATTENTION.operand(name).spec(p, tile, spec.role)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@examples(60)
@given(p=batches(longest=150), tile=kernel_tiles)
def test_counts_are_those_of_the_sequences(algorithm: str, p: Problem, tile: Tile) -> None:
    """Beside them, only the offsets are read; and flash3 clears rows of Q and V in SRAM."""
    whole = fl.count(algorithm, p, tile=tile, device=ROOMY)
    each = [fl.count(algorithm, alone(p, s), tile=tile, device=ROOMY) for s in range(len(p.spans))]
    total = Counter[Entry]()
    for counts in each:
        total.update(counts.launches[0].ledger)
    beside = {entry: n - total[entry] for entry, n in whole.launches[0].ledger.items() if n != total[entry]}
    cleared = (
        {Entry("load_q", "q", "sram.write"), Entry("load_v", "v", "sram.write")}
        if algorithm == "flash3"
        else set[Entry]()
    )
    assert set(beside) <= {Entry("load_q", name, "hbm.read") for name in OFFSETS} | cleared
    assert whole.flops.matmul == sum(counts.flops.matmul for counts in each)
    assert whole.exp == sum(counts.exp for counts in each)
    assert whole.sram.peak == max((counts.sram.peak for counts in each), default=0)
    empty = whole.launches[0].blocks - sum(counts.launches[0].blocks for counts in each)
    assert 0 <= empty <= p.heads * len(p.spans)
    assert asked(whole) == sum(
        n * (2 + ragged.halvings(len(p.spans))[s]) for s, n in enumerate(ragged.places(p, tile.rows))
    )


def asked(counts: Counts) -> int:
    """How many numbers of the offsets a warp asks for, over the blocks of a head."""
    config = counts.config
    assert config is not None
    warps = 4 * config.consumers + 1 if config.consumers else config.warps
    nbytes = sum(counts.launches[0].bytes("hbm.read", name) for name in OFFSETS)
    return nbytes // (4 * warps * counts.problem.heads)


@examples(300)
@given(p=batches(longest=300, most=20), rows=st.integers(1, 200))
def test_places_suffice_and_a_block_finds_its_own(p: Problem, rows: int) -> None:
    """As the kernels look for it: by halves, for the last sequence whose first place isn't behind."""
    room = ragged.places(p, rows)
    if not p.len_q:
        assert len(room) == 0
        return
    assert all(0 <= n - one.row_tiles(Tile(rows, 16)) <= 1 for n, one in zip(room, p.sequences, strict=True))
    assert sum(room) == p.len_q // rows + len(p.spans)
    offsets, halvings = ATTENTION.operand("offsets_q").left_out(p).tolist(), ragged.halvings(len(p.spans))
    place = 0
    for s, n in enumerate(room):
        for tile in range(n):
            low, high, looks = 0, len(p.spans), 0
            while high - low > 1:
                middle, looks = (low + high) // 2, looks + 1
                low, high = (middle, high) if offsets[middle] // rows + middle <= place else (low, middle)
            assert (low, place - offsets[low] // rows - low, looks) == (s, tile, halvings[s])
            place += 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@examples(30)
@given(p=batches(), tile=kernel_tiles)
def test_a_sequence_has_the_bits_that_it_has_alone(algorithm: str, p: Problem, tile: Tile) -> None:
    arrays = ATTENTION.draw(p)
    whole = simulated(algorithm, p, arrays, tile)
    for s, (rows, _) in enumerate(p.spans):
        one = simulated(algorithm, alone(p, s), cut(p, s, arrays), tile)
        place = slice(rows.start, rows.stop)
        assert whole.out[:, :, place].tobytes() == one.out.tobytes()
        assert whole.lse[:, :, place].tobytes() == one.lse.tobytes()


@st.composite
def even_batches(draw: st.DrawFn) -> Problem:
    """As many queries of each sequence, and any keys."""
    n, keys = draw(st.integers(0, 5)), draw(st.lists(st.integers(0, 400), min_size=1, max_size=6))
    p = draw(problems(scores=scores.filter(lambda s: not s.get("alibi"))))
    return p.replace(batch=1, len_q=None, len_kv=None, lengths=[(n, length) for length in keys])


@pytest.mark.parametrize("algorithm", EVEN)
@examples(40)
@given(p=even_batches(), tile=st.sampled_from([Tile(8, 16), Tile(16, 16), Tile(16, 32)]))
def test_sequences_with_as_many_queries(algorithm: str, p: Problem, tile: Tile) -> None:
    """Counts are the formula's: those of each sequence, beside offsets and what warps tell themselves. The bits are those that a
    sequence has alone, whatever lies in its neighbours' rows."""
    arrays = ATTENTION.draw(p)
    whole = simulated(algorithm, p, arrays, tile)
    assert whole.counts == fl.count(algorithm, p, tile=tile, device=ROOMY, lse=True)
    assert whole.counts == fl.shape_run(algorithm, p, tile=tile, device=ROOMY, lse=True)
    config, total = whole.counts.config, whole.counts.launches[0]
    blocks = config.grid(p, ROOMY, total.blocks) if p.len_q else 0
    read = {entry.tensor: n for entry, n in total.ledger.items() if entry.tensor in OFFSETS}
    assert read == ({"offsets_kv": 8 * len(p.spans) * config.walks * blocks} if blocks else {})
    for s, (rows, keys) in enumerate(p.spans):
        one = simulated(algorithm, alone(p, s), cut(p, s, arrays), tile)
        littered = {name: np.full_like(x, np.nan) if name in "qkv" else x for name, x in arrays.items()}
        for name, place in (("q", rows), ("k", keys), ("v", keys)):
            littered[name][:, :, place.start : place.stop] = arrays[name][:, :, place.start : place.stop]
        with np.errstate(invalid="ignore"):
            loud = simulated(algorithm, p, littered, tile)
        place = slice(rows.start, rows.stop)
        assert whole.out[:, :, place].tobytes() == one.out.tobytes() == loud.out[:, :, place].tobytes()
        assert whole.lse[:, :, place].tobytes() == one.lse.tobytes() == loud.lse[:, :, place].tobytes()


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *EVEN])
@examples(40)
@given(p=batches(longest=300), queries=st.integers(0, 5), device=devices)
def test_the_default_tile_is_the_formulas(algorithm: str, p: Problem, queries: int, device: Device) -> None:
    """To the byte, SRAM as well: how many stages a device leaves room for says how much a warp tells itself."""
    if algorithm in EVEN:
        p = p.replace(len_q=None, len_kv=None, lengths=[(queries, keys) for _, keys in p.lengths or ()])
    p = taken_by(algorithm, p)
    try:
        formula = fl.count(algorithm, p, device=device)
    except SramOverflow:
        assert fl.CATALOGUE[algorithm].refuses(p, device)
        return
    assert formula == fl.shape_run(algorithm, p, device=device)


def test_sequences_of_one_length_are_counted_once() -> None:
    """So a million tokens in a thousand sequences of two lengths are little work."""
    p = Problem(batch=1, heads=8, lengths=[1000, 1001] * 500, head_dim=64, dtype="float16", causal=True)
    counts, few = fl.count("flash2", p), fl.count("flash2", p.replace(len_q=None, len_kv=None, lengths=[1000, 1001]))
    assert [(one.problem.len_q, n) for one, n in counts.sequences] == [(1000, 500), (1001, 500)]
    assert counts.flops.matmul == 500 * few.flops.matmul
    assert counts.dram.low == counts.compulsory_read <= counts.dram.estimate <= counts.dram.high == counts.hbm.read
    formula = fl.CATALOGUE["flash2"].formula
    assert formula is not None
    evaluated = list[Problem]()

    def noted(book: Any, problem: Problem, *rest: Any, **named: Any) -> None:
        evaluated.append(problem)
        formula(book, problem, *rest, **named)

    fl.check_formula("flash2", noted, p)
    assert len(evaluated) == 2


def test_boxes_lie_where_the_sequence_does() -> None:
    """What TMA loads is told of the whole array: by it the counters of whole sectors are foreseen."""
    p = Problem(batch=1, heads=2, lengths=[(70, 41), (64, 130)], head_dim=64, dtype="float16")
    boxes = fl.shape_run("flash3", p, tile=(64, 64)).launches[0].boxes
    assert {(box.tensor, box.row): n for box, n in boxes.items()} == {
        ("q", 0): 2, ("q", 64): 2, ("q", 70): 2,
        ("k", 0): 4, ("v", 0): 4, **{(name, 41 + row): 2 for name in "kv" for row in (0, 64, 128)},
    }  # fmt: skip


@fl.program
def with_a_workspace(m: Any, q: Any, k: Any, v: Any, problem: Problem, tile: Tile) -> Any:
    """A program of one's own: S goes through HBM."""
    out, s = m.output("out"), m.workspace("s", problem.len_kv)
    column = m.workspace("column", 1, vector=True)
    for block in m.launch("copy", rows=problem.row_tiles(tile), warps=4):
        block.step("copy")
        block.store(column, block.full(tile.rows, 1, 0.0), block.i, tile.rows)
        block.store(s, block.full(tile.rows, problem.len_kv, 0.0), block.i, tile.rows)
        block.store(out, block.fetch(q, block.i, tile.rows), block.i, tile.rows)
    return out


def test_ones_own_program_is_given_one_sequence_at_a_time() -> None:
    p = Problem(batch=1, heads=2, lengths=[(100, 30), (7, 9)], head_dim=8, dtype="float16")
    arrays = ATTENTION.draw(p)
    run = fl.simulate(with_a_workspace, **arrays, lengths=p.lengths)
    assert run.out.tobytes() == arrays["q"].tobytes() and run.counts == fl.count(with_a_workspace, p)
    sizes = {name: spec.nbytes for name, spec in run.counts.tensors.items()}
    rows = [spec.row_bytes for spec in (fl.count(with_a_workspace, one).tensors["s"] for one in p.sequences)]
    assert sizes["column"] == 2 * 4 * 107 and sizes["s"] == 2 * (100 * rows[0] + 7 * rows[1])
    assert sizes["q"] == 2 * 107 * 16 and sizes["offsets_q"] == 12


def test_threads_know_the_callers_errstate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    p = Problem(**ONE, lengths=[20, 30])
    arrays = {name: np.full_like(x, np.inf) for name, x in ATTENTION.draw(p).items()}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("error")
        simulated("flash2", p, arrays)
