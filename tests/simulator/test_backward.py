"""The backward pass as a tile program: its numbers by the rule of its operation, its bytes three ways."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashlab as fl
from simulator import DEVICES, Problem, Tile
from simulator.algorithms.flash3_backward import choose_parts
from simulator.counts import Entry
from simulator.operations.attention import ATTENTION
from simulator.operations.backward import BACKWARD
from simulator.ragged import places
from tests.simulator.problems import ROOMY, SLOW, problems, tiles
from tests.simulator.test_ragged import batches
from tests.tiers import examples

ALGORITHMS = sorted(fl.catalogue.of(BACKWARD))


def ratios(p: Problem, arrays: dict[str, Any], outputs: Any) -> dict[str, float]:
    """The worst row of each gradient, as a share of the rule's bound."""
    truth = BACKWARD.judge(p, arrays)
    bounds = BACKWARD.bounds(p, arrays, truth)
    found: dict[str, float] = {}
    for name, exact in truth.items():
        error = np.abs(np.asarray(outputs[name], np.float64) - exact)
        if bounds[name].ndim < error.ndim:
            error = np.linalg.norm(error, axis=-1)
        found[name] = float((error / np.maximum(bounds[name], 1e-300)).max(initial=0.0))
    return found


@pytest.mark.alike(
    "standard_backward", "flash1_backward", "flash2_backward", "flash2_backward_deterministic", "flash3_backward"
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@examples(40)
@given(
    problem=problems(longest=90, dims=st.sampled_from([8, 16, 40, 64])),
    dlse=st.booleans(),
    tile=tiles,
    seed=st.integers(0, 3),
)
def test_gradients_keep_to_the_rule(algorithm: str, problem: Problem, dlse: bool, tile: Tile, seed: int) -> None:
    problem = problem.replace(dlse=dlse)
    arrays: dict[str, Any] = BACKWARD.draw(problem, seed)
    run = fl.simulate(algorithm, **arrays, **problem.masks, tile=tile, device=ROOMY)
    assert max(ratios(problem, arrays, run.outputs).values()) <= 1
    assert run.counts == fl.count(algorithm, problem, tile=tile, device=ROOMY)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@examples(60)
@given(problem=problems(longest=80), dlse=st.booleans(), tile=tiles)
def test_formula_equals_shape_run(algorithm: str, problem: Problem, dlse: bool, tile: Tile) -> None:
    formula_equals_shape_run(algorithm, problem.replace(dlse=dlse), tile)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=300)
@given(problem=problems(longest=200), dlse=st.booleans(), tile=tiles)
def test_formula_equals_shape_run_far_and_wide(algorithm: str, problem: Problem, dlse: bool, tile: Tile) -> None:
    formula_equals_shape_run(algorithm, problem.replace(dlse=dlse), tile)


RAGGED = [name for name in ALGORITHMS if "lengths" in fl.CATALOGUE[name].support.masks]
_QUERIES = Entry("load_q", "q", "sram.write"), Entry("load_do", "dout", "sram.write")
_TOLD = {step: {Entry(step, "work", way) for way in ("sram.read", "sram.write")} for step in ("load_kv", "load_q")}
OF_BOXES: dict[str, set[Entry]] = {
    "flash3_backward": {
        *_QUERIES, *(Entry("load_kv", name, "sram.write") for name in "kv"), *_TOLD["load_kv"],
        Entry("load_kv", "drawn", "hbm.atomic"),
    },
    "flash3_backward_wide": {
        *_QUERIES, *(Entry(f"load_{name}", name, "sram.write") for name in "kv"), *_TOLD["load_kv"], *_TOLD["load_q"],
    },
}  # fmt: skip
"""What TMA's boxes cost beside a sequence alone: they are cleared where it ends, and a block is told which tiles are its own."""


@pytest.mark.parametrize("algorithm", RAGGED)
@examples(20)
@given(problem=batches(longest=90), tile=tiles, seed=st.integers(0, 3))
def test_ragged_batches(algorithm: str, problem: Problem, tile: Tile, seed: int) -> None:
    """Each sequence has the gradients that it has alone, and what is counted of it is, but for the offsets."""
    p = problem.replace(alibi=False, head_dim=max(16, problem.head_dim))
    if "soft_cap" not in fl.CATALOGUE[algorithm].support.masks:
        p = p.replace(soft_cap=None)
    arrays = BACKWARD.draw(p, seed)
    run = fl.simulate(algorithm, **arrays, **p.masks, tile=tile, device=ROOMY)
    assert max(ratios(p, arrays, run.outputs).values()) <= 1
    assert run.counts == fl.count(algorithm, p, tile=tile, device=ROOMY)
    assert run.counts == fl.shape_run(algorithm, p, tile=tile, device=ROOMY)
    alone = [fl.count(algorithm, one.replace(lengths=None), tile=tile, device=ROOMY) for one in p.sequences]
    counts = run.counts
    assert counts.config is not None and counts.config.parts == 1  # or sequences alone could have other parts
    for i, launch in enumerate(counts.launches):
        total = sum((Counter(each.launches[i].ledger) for each in alone), Counter[Entry]())
        own = {entry: n for entry, n in launch.ledger.items() if not entry.tensor.startswith("offsets")}
        beside = {entry for entry in {*own, *total} if own.get(entry) != total[entry]}
        assert beside <= OF_BOXES.get(algorithm, set())
    assert counts.compulsory_read <= counts.dram.estimate <= counts.hbm.read + counts.hbm.atomic


@examples(100)
@given(problem=problems(longest=200), tile=tiles)
def test_turns(problem: Problem, tile: Tile) -> None:
    """The key tiles that a query tile sees are those that visit it, one behind the other: so a block's turn is its distance
    from the first."""
    key_tiles = Tile(tile.cols, tile.rows)
    for i in range(problem.row_tiles(tile)):
        visiting = [j for j in range(problem.key_tiles(tile)) if i in problem.transposed.tiles_of_row(j, key_tiles)]
        assert visiting == list(problem.tiles_of_row(i, tile))


def test_blocks_of_a_ragged_batch() -> None:
    """Key tiles have places, and so have the tiles of the sums of dQ. Some stay empty."""
    p = Problem(batch=1, heads=4, kv_heads=2, lengths=[5, (9, 40), 0, (20, 3)], head_dim=16, dtype="float16")
    delta, main, convert = fl.count("flash2_backward", p, tile=(16, 16)).launches
    places = 4 * (34 // 16 + 4)
    assert (delta.blocks, main.blocks, convert.blocks) == (places, 2 * (48 // 16 + 4), places)
    assert delta.flops_other == 2 * 4 * (1 + 1 + 0 + 2) * 16 * 16


def test_blocks_of_a_ragged_batch_on_hopper() -> None:
    """All launches but that of the sinks have places. One thread of a block asks for its sequence, also where the place is empty.
    It tells what follows, and at last that nothing does."""
    p = Problem(batch=1, heads=4, kv_heads=2, lengths=[5, (9, 400), 0, (20, 300)], head_dim=64, dtype="float16")
    counts = fl.count("flash3_backward", p, device="h200")
    delta, main, convert = counts.launches
    places = 2 * (705 // 128 + 4)
    assert (delta.blocks, main.blocks, convert.blocks) == (4 * 4, places, 4 * 4)
    assert main.bytes("hbm.read", "offsets_q") == 2 * 4 * places
    assert counts.config is not None and counts.config.dynamic and main.bytes("hbm.atomic", "drawn") == 4 * places
    tiles = 2 * (1 + 4 + 3)
    assert main.bytes("sram.write", "work") == 32 * (tiles + places) == main.bytes("sram.read", "work") // 11
    assert counts.tensors["dq_sum"].nbytes == 4 * 4 * 128 * 64 * 4
    wide = fl.count("flash3_backward", p.replace(head_dim=128), device="h200").launches[1]
    assert wide.bytes("sram.write", "work") == 32 * places and not wide.bytes("hbm.atomic", "drawn")


@examples(30)
@given(problem=batches(longest=90), tile=tiles, seed=st.integers(0, 3))
def test_an_order_of_key_tiles(problem: Problem, tile: Tile, seed: int) -> None:
    """Blocks that outnumber the SMs take the key tiles of uneven sequences in an order: they look for nothing."""
    p, few = problem.replace(alibi=False, soft_cap=None, head_dim=max(8, problem.head_dim)), ROOMY.replace(sms=1)
    arrays: dict[str, Any] = BACKWARD.draw(p, seed)
    run = fl.simulate("flash3_backward", **arrays, **p.masks, tile=tile, device=few)
    counts, config = run.counts, run.counts.config
    assert counts == fl.count("flash3_backward", p, tile=tile, device=few)
    assert counts == fl.shape_run("flash3_backward", p, tile=tile, device=few)
    assert counts.compulsory_read <= counts.dram.estimate <= counts.hbm.read + counts.hbm.atomic
    assert config is not None and config.ordered == ("order" in counts.tensors)
    if config.ordered:
        delta, main = counts.launches[:2]
        assert counts.tensors["order"].nbytes == 32 * sum(places(p, tile.cols, "len_kv"))
        assert delta.bytes("hbm.write", "order") == counts.tensors["order"].nbytes
        assert main.bytes("hbm.read", "order") == 32 * main.blocks
        assert main.bytes("hbm.read", "offsets_q") == main.bytes("hbm.read", "offsets_kv") == 0


@pytest.mark.parametrize(
    ("lengths", "heads", "dim", "causal", "parts"),
    [  # measured in the order of the sequences, the first and the last one in four parts: 0.91, 1.14 and 0.92 times
        # as fast as FlashAttention-4
        ([1406, 3466, 8110], (16, 4), 96, True, 1),
        ([636, 674, 638, 952, 778, 810, 665, 618, 139, 903, 467, 669, 262, 134, 481, 760, 257, 992, 381, 653, 938, 770,
          397, 658, 189, 644, 521], (32, 4), 128, False, 1),
        ([822, 2284, 2456, 1551, 834, 2107, 2524, 3701], (8, 2), 64, False, 2),
    ],
)  # fmt: skip
def test_an_order_spares_parts(lengths: list[int], heads: tuple[int, int], dim: int, causal: bool, parts: int) -> None:
    sizes: dict[str, Any] = {"batch": 1, "heads": heads[0], "kv_heads": heads[1], "head_dim": dim, "causal": causal}
    config = fl.count("flash3_backward", Problem(**sizes, lengths=lengths, dtype="float16"), device="h100").config
    assert config is not None and config.ordered and config.parts == parts
    alike = fl.count(
        "flash3_backward", Problem(**sizes, lengths=lengths[:1] * 40, dtype="float16"), device="h100"
    ).config
    assert alike is not None and not alike.ordered  # or there are too many


@examples(60)
@given(
    problem=problems(longest=90, dims=st.sampled_from([8, 40, 64])) | batches(longest=90),
    dropout=st.sampled_from([None, 0.25]),
    tile=tiles,
    seed=st.integers(0, 3),
)
def test_parts_of_a_group(problem: Problem, dropout: float | None, tile: Tile, seed: int) -> None:
    """On a slow device a block has a part of a group's heads wherever that leaves fewer SMs idle."""
    p = problem.replace(alibi=False, soft_cap=None, head_dim=max(8, problem.head_dim))
    p = p if p.lengths else p.replace(dropout=dropout)
    arrays: dict[str, Any] = BACKWARD.draw(p, seed)
    run = fl.simulate("flash3_backward", **arrays, **p.masks, tile=tile, device=SLOW)
    assert max(ratios(p, arrays, run.outputs).values()) <= 1
    assert run.counts == fl.count("flash3_backward", p, tile=tile, device=SLOW)
    assert run.counts == fl.shape_run("flash3_backward", p, tile=tile, device=SLOW)
    config, names = run.counts.config, [launch.name for launch in run.counts.launches]
    assert config is not None and p.queries_per_kv % config.parts == 0
    assert ("flash3_backward_parts" in names) == ("dk_parts" in run.counts.tensors) == (config.parts > 1)


@pytest.mark.parametrize(
    ("sizes", "dim", "causal", "parts"),
    [
        ((1, 8, 2, 4372, 6750), 64, True, 4),  # measured with whole groups: 0.76 times as fast as FlashAttention-4
        ((5, 16, 2, 2062, 2062), 128, False, 2),  # 0.77 times
        ((5, 8, 2, 5835, 8700), 64, True, 1),
        ((5, 8, 2, 437, 848), 96, False, 1),
        ((5, 32, 8, 4309, 4309), 128, True, 1),
        ((1, 32, 8, 7425, 7425), 96, True, 1),
        ((1, 16, 16, 100, 100), 64, False, 1),  # no group
        ((1, 32, 1, 512, 512), 128, True, 32),
        ((1, 32, 1, 512, 0), 128, True, 1),
    ],
)
def test_parts_are_taken_where_sms_would_idle(sizes: tuple[int, ...], dim: int, causal: bool, parts: int) -> None:
    names = "batch", "heads", "kv_heads", "len_q", "len_kv"
    given: dict[str, Any] = dict(zip(names, sizes, strict=True))
    p = Problem(**given, head_dim=dim, dtype="bfloat16", causal=causal)
    assert choose_parts(p, DEVICES["h200"], Tile(128 if dim == 64 else 64, 128)) == parts


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1024, 4096, 16384])
def test_groups_stay_whole_where_key_tiles_are_plenty(head_dim: int, causal: bool, tokens: int) -> None:
    """The problems that are timed have 16,384 tokens and a hidden size of 2,048 or 4,096."""
    for heads, kv_heads in ((4096 // head_dim, 8), (2048 // head_dim, 2048 // head_dim)):
        sizes = {"batch": 16384 // tokens, "heads": heads, "kv_heads": kv_heads, "len_q": tokens, "head_dim": head_dim}
        config = fl.count("flash3_backward", Problem(**sizes, dtype="float16", causal=causal), device="h200").config
        assert config is not None and config.parts == 1


def test_wide_heads_of_a_ragged_batch() -> None:
    """Key tiles and row tiles have places. One thread of each block asks for its sequence, and tells all warps."""
    p = Problem(batch=1, heads=4, kv_heads=2, lengths=[5, (9, 400), 0, (20, 300)], head_dim=256, dtype="float16")
    counts = fl.count("flash3_backward_wide", p, device="h200")
    delta, keys, queries = counts.launches
    assert (delta.blocks, keys.blocks, queries.blocks) == (4, 2 * (705 // 64 + 4), 4 * 4)
    for launch, read in ((keys, "offsets_q"), (queries, "offsets_kv")):
        assert launch.bytes("hbm.read", read) == 2 * 4 * launch.blocks
        assert launch.bytes("sram.write", "work") == 32 * launch.blocks == launch.bytes("sram.read", "work") // 12
    alone = fl.count("flash3_backward_wide", p.sequences[1].replace(lengths=None), device="h200")
    assert counts.sram.peak == alone.sram.peak


def formula_equals_shape_run(algorithm: str, problem: Problem, tile: Tile) -> None:
    found = fl.shape_run(algorithm, problem, tile=tile, device=ROOMY)
    assert fl.count(algorithm, problem, tile=tile, device=ROOMY) == found


@examples(20)
@given(
    problem=problems(longest=12, dims=st.sampled_from([4, 8])),
    soft_cap=st.sampled_from([None, 0.7, 3.0]),
    dlse=st.booleans(),
    seed=st.integers(0, 3),
)
def test_the_judge_is_the_derivative_of_the_forward(
    problem: Problem, soft_cap: float | None, dlse: bool, seed: int
) -> None:
    """Against the forward's float64 judge alone: <dout, f(x + h dx) - f(x - h dx)> / 2h = <grad, dx>, with the LSE's part."""
    p = problem.replace(dtype="float32", soft_cap=soft_cap, dlse=dlse)
    drawn = BACKWARD.draw(p, seed)
    forward = ATTENTION.judge(p, drawn)
    arrays: dict[str, Any] = {name: x.astype(np.float64) for name, x in drawn.items()}
    arrays |= {"out": forward["out"], "lse": forward["lse"]}
    gradients, random, h = BACKWARD.judge(p, arrays), np.random.default_rng(seed), 1e-5
    for name in "qkv":
        direction = random.standard_normal(arrays[name].shape)
        moved = [_float64_forward(p, arrays | {name: arrays[name] + sign * h * direction}) for sign in (1, -1)]
        slope = sum(
            float((arrays.get(f"d{of}", 0.0) * (moved[0][of] - moved[1][of])).sum()) for of in ("out", "lse")
        ) / (2 * h)
        assert slope == pytest.approx(float((gradients[f"d{name}"] * direction).sum()), rel=1e-5, abs=1e-6)


def _float64_forward(p: Problem, arrays: dict[str, Any]) -> dict[str, Any]:
    """Attention on float64 operands, query by query: it shares no line with the judge. A row without keys has an LSE of 0."""
    out, lse = np.zeros((p.batch, p.heads, p.len_q, p.head_dim_v)), np.zeros((p.batch, p.heads, p.len_q))
    for b, h, i in np.ndindex(p.batch, p.heads, p.len_q):
        keys, kv = p.visible_keys(i), h // p.queries_per_kv
        if keys:
            logits = p.scale * arrays["k"][b, kv, keys.start : keys.stop] @ arrays["q"][b, h, i]
            logits = p.soft_cap * np.tanh(logits / p.soft_cap) if p.soft_cap else logits
            weights = np.exp(logits - logits.max())
            lse[b, h, i] = logits.max() + np.log(weights.sum())
            out[b, h, i] = weights / weights.sum() @ arrays["v"][b, kv, keys.start : keys.stop]
    return {"out": out, "lse": lse}


MUTANTS: dict[str, Callable[[Problem, dict[str, Any], dict[str, Any]], None]] = {
    "no D": lambda p, a, o: a.update(out=np.zeros_like(a["out"])),
    "scale off by 1 %": lambda p, a, o: o.update(dq=o["dq"] * 1.01),
    "a key dropped": lambda p, a, o: o["dv"].__setitem__((0, 0, 3), 0),
    "the LSE off by 1 %": lambda p, a, o: a.update(lse=a["lse"] * 1.01),
    "the gradient of the LSE left out": lambda p, a, o: a.pop("dlse"),
    "dK of one query head of the group": lambda p, a, o: o.update(dk=o["dk"] / p.queries_per_kv),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_rule_sees_what_is_wrong(mutant: str) -> None:
    """Seeded bugs in inputs or outputs: the rule, which judges by the inputs as they should be, refuses each."""
    p = Problem(batch=1, heads=4, kv_heads=2, len_q=60, head_dim=32, dtype="float16", causal=True, dlse=True)
    right = BACKWARD.draw(p, 0)
    assert max(ratios(p, right, BACKWARD.judge(p, right)).values()) == 0
    given: dict[str, Any]
    given, outputs = dict(right), dict(BACKWARD.judge(p, right))
    MUTANTS[mutant](p, given, outputs)
    if given.keys() != right.keys() or any(given[name] is not right[name] for name in right):
        outputs = dict(fl.simulate("flash2_backward", **given, causal=True).outputs)
    assert max(ratios(p, right, outputs).values()) > 1


def test_a_key_tile_that_no_query_sees_has_gradients_of_zero() -> None:
    p = Problem(batch=1, heads=2, len_q=20, len_kv=100, head_dim=16, dtype="float16", window=(5, 0))
    run = fl.simulate("flash2_backward", *BACKWARD.draw(p, 0).values(), window=(5, 0), tile=(16, 16))
    assert (run.outputs["dk"][:, :, :64] == 0).all() and (run.outputs["dv"][:, :, :64] == 0).all()


def test_inputs_are_named_where_they_are_missing_or_wrong() -> None:
    p = Problem(batch=1, heads=2, len_q=20, head_dim=16, dtype="float16")
    arrays = BACKWARD.draw(p, 0)
    with pytest.raises(fl.UsageError, match=r"lse = None: expected an array: backward takes q, k, v, out, lse, dout"):
        fl.simulate("flash2_backward", *list(arrays.values())[:4], dout=arrays["dout"])
    with pytest.raises(fl.UsageError, match=r"lse.dtype = 'float64': expected float32"):
        fl.simulate("flash2_backward", **{**arrays, "lse": arrays["lse"].astype(np.float64)})
    with pytest.raises(fl.UsageError, match=r"dout.shape = \(1, 2, 19, 16\): expected \(1, 2, 20, 16\)"):
        fl.simulate("flash2_backward", **{**arrays, "dout": arrays["dout"][:, :, 1:]})
