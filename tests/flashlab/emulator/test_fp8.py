"""flash3_fp8 on the emulator, with scales, against float64 attention of what its operands stand for.

`flashlab verify` runs it on operands without scales, by a rule that has to do for strangers' kernels; this one is tighter.

How far it may be off follows from e4m3, which has 3 bits of a mantissa and ends at 2^-9: rounding changes a P (32 times the
exponential, of which the row's largest is then at least 32) by up to 2^-4 of itself, or 2^-10 where that is more, which is
2^-15 of the row's largest exponential. That error of key j, e_j, doesn't depend on V, whose signs are drawn at random: so the
error of an output, sum of e_j v_j, exceeds t with a chance of at most 2 exp(-t² / (2 sum (e_j v_j)²)), as Hoeffding has it.

That isn't all: the tensor cores cut what one instruction adds, 32 products and the sum so far, below 2^-13 of the largest of
them, and the new sum likewise. None of these is larger than the sum of |P V| so far, of the tile: for each tile is folded into
float32 by itself.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import flashlab as fl
import kernels_cu
from flashlab.measure import fp8
from simulator.algorithms.flash3_fp8 import TILE
from simulator.dtypes import Array
from tests.flashlab.emulator.mutant import kept
from tests.patches import patched
from tests.tiers import one_of_each

pytestmark = pytest.mark.compiler

CHANCE = 1e-9
"""That a sound kernel fails on one of the outputs of a problem, at most."""
FLOAT32 = 2.0**-16
"""Of the sum of |P V|, and of an LSE: sums of a few hundred products in float32, exponents of up to 2^5 among them."""
CUT = 2.0**-13
"""What the tensor cores cut, of the largest that one instruction adds."""
HALF_ULP = 2.0**-8
"""Of bfloat16, the output's dtype, relative."""

FULL = fl.Problem(batch=2, heads=4, kv_heads=2, len_q=130, len_kv=270, head_dim=128, dtype="float8_e4m3fn")
CAUSAL = FULL.replace(batch=1, len_q=300, len_kv=260, causal=True)
PROBLEMS = {
    "full, batch 2, GQA": FULL,
    "causal, 40 rows without a key": CAUSAL,
    "causal, more keys than rows, MQA": CAUSAL.replace(kv_heads=1, len_q=150, len_kv=413),
    "head dim 64": FULL.replace(head_dim=64, batch=1),
    "head dim 64, causal": CAUSAL.replace(head_dim=64, heads=2, kv_heads=1),
    "head dim 72, no whole panel": FULL.replace(head_dim=72, batch=1, heads=1, kv_heads=1),
    "head dim 256": FULL.replace(head_dim=256, heads=2, kv_heads=1),
    "one row, one key": FULL.replace(len_q=1, len_kv=1),
}
LONG = fl.Problem(batch=1, heads=1, len_q=64, len_kv=16384, head_dim=64, dtype="float8_e4m3fn")
WIDE = PROBLEMS["head dim 256"].replace(causal=True)
"""Of which nothing is computed beside anything else."""


FEW = fl.DEVICES["h200"].replace(sms=4)


def run(x: fp8.Quantized, p: fl.Problem, source: Path | None = None, *, sanitize: bool = True) -> fl.Emulation:
    """The launches on the emulator of an H200 with so few SMs that blocks take several row tiles; one that hangs is stopped."""
    return fl.emulate(
        "flash3_fp8", x.q, x.k, x.v, scales=x.scales, causal=p.causal, lse=True, device=FEW, source=source,
        sanitize=sanitize, time_limit=60,
    )  # fmt: skip


def inputs(p: fl.Problem, seed: int = 0) -> tuple[Array, Array, Array]:
    """Normal; all change in size from tile to tile, so that no scale is its neighbour's."""
    random = np.random.default_rng(seed)
    q, k, v = (
        random.standard_normal((p.batch, heads, length, p.head_dim))
        for heads, length in ((p.heads, p.len_q), (p.kv_heads, p.len_kv), (p.kv_heads, p.len_kv))
    )
    q_size, k_size = (1 + np.arange(n) // side % 3 / 2 for n, side in ((p.len_q, TILE.rows), (p.len_kv, TILE.cols)))
    return q * q_size[:, None], k * k_size[:, None], v * k_size[::-1, None]


class Expected(NamedTuple):
    """Out and LSE in float64, and by how much each output may be off."""

    out: Array
    lse: Array
    tolerance: Array
    lse_tolerance: Array


def expect(q: Array, k: Array, v: Array, p: fl.Problem) -> Expected:
    """Attention written out once more, and the tolerance of this file's head."""
    group = p.heads // p.kv_heads
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(p.head_dim)
    row, key = np.arange(p.len_q)[:, None], np.arange(p.len_kv)
    if p.causal:
        scores = np.where(key <= row + p.len_kv - p.len_q, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    share = np.divide(1.0, total, out=np.zeros_like(total), where=total > 0)
    with np.errstate(divide="ignore"):
        lse = (np.where(np.isfinite(top), top, 0.0) + np.log(total))[..., 0]
    out = weights @ v * share
    cols = TILE.cols
    instructions = (cols - key % cols + 31) // 32  # from a key's own to the last of its tile
    lost = FLOAT32 + 34 * CUT * instructions
    most = np.where(weights > 0, np.maximum(2.0**-4 * weights, 2.0**-15), 0.0)
    spread = np.sqrt(2 * math.log(2 * out.size / CHANCE) * (most**2 @ v**2))
    sums = ((most + weights * lost).sum(axis=-1, keepdims=True)) * share  # how far their sum may be off, relative to it
    tolerance = (spread + weights * lost @ np.abs(v)) * share * (1 + sums) + np.abs(out) * (
        sums + HALF_ULP * (1 + 2.0**-4)
    )
    cut = (
        34 * CUT * math.ceil(p.head_dim / 32) * (np.abs(q) @ np.abs(k).swapaxes(-1, -2)) / math.sqrt(p.head_dim)
    )  # of a score
    lse_tolerance = (
        (weights * cut).sum(axis=-1) * share[..., 0]
        + FLOAT32 * (1 + np.abs(np.nan_to_num(lse, neginf=0.0)))
        - np.log(1 - sums[..., 0])
    )
    return Expected(out, lse, tolerance, lse_tolerance)


def wrong(ran: fl.Emulation, wanted: Expected) -> set[str]:
    """Which outputs are off."""
    off = {"out"} if not (np.abs(ran.out.astype(np.float64) - wanted.out) <= wanted.tolerance).all() else set[str]()
    return off if np.isclose(ran.lse, wanted.lse, rtol=0, atol=wanted.lse_tolerance).all() else {*off, "lse"}  # pyright: ignore


@pytest.mark.alike("head dim 64, causal", "causal, 40 rows without a key", "full, batch 2, GQA", "one row, one key")
@pytest.mark.parametrize("name", PROBLEMS)
def test_attention(name: str) -> None:
    """Within the tolerance, no finding of any sanitiser, every output written, and the formula's bytes."""
    p = PROBLEMS[name]
    check(p, fp8.quantize(*inputs(p)))


def check(p: fl.Problem, x: fp8.Quantized) -> None:
    ran = run(x, p)
    assert ran.complaints() == []
    assert wrong(ran, expect(*x.values(), p)) == set()


@pytest.mark.parametrize("head_dim", [64, 72])
def test_quantised_values_are_near(head_dim: int) -> None:
    """Within half a step of e4m3, of what each stands for; with a rotation of Q and K their scores still are."""
    p = FULL.replace(head_dim=head_dim)
    given = inputs(p)
    for x, near in zip(given, fp8.quantize(*given).values(), strict=True):
        assert (np.abs(near - x) <= np.maximum(2.0**-4 * np.abs(x), np.abs(x).max() / 448 * 2.0**-10 * 1.01)).all()
    if head_dim == 64:
        q, k, _ = fp8.quantize(*given, rotate=True).values()
        k, exact_k = (np.repeat(x, 2, axis=1) for x in (k, given[1]))
        scores, exact = (a @ b.swapaxes(-1, -2) for a, b in ((q, k), (given[0], exact_k)))
        assert np.sqrt(np.mean((scores - exact) ** 2)) < 0.06 * np.sqrt(np.mean(exact**2))


SINK = fl.Problem(batch=1, heads=1, len_q=64, len_kv=256, head_dim=64, dtype="float8_e4m3fn")


def sink() -> tuple[Array, Array, Array]:
    """All rows attend to the last key, which the kernel meets first and whose V is 0: the other P lie near 2^-10.5 of its own."""
    q, k, v = inputs(SINK)
    q, k = q / 4, k / 4
    q[..., 0], k[..., 0] = 4.0, 0.0
    k[..., -1, :], v[..., -1, :] = 0.0, 0.0
    k[..., -1, 0] = 10.5 * math.log(2) * math.sqrt(SINK.head_dim) / 4
    return q, k, v


NEIGHBOURS = {"q": {"out", "lse"}, "k": {"out", "lse"}, "v": {"out"}}
"""What is off if two tiles have each other's scale."""


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_a_neighbours_scale_is_seen(name: str) -> None:
    """Two tiles of one head have each other's."""
    x = fp8.quantize(*inputs(CAUSAL))
    swapped: Array = getattr(x.scales, name).copy()
    swapped[0, 0, :2] = swapped[0, 0, 1::-1]
    ran = run(replace(x, scales=x.scales._replace(**{name: swapped})), CAUSAL)
    assert wrong(ran, expect(*x.values(), CAUSAL)) == NEIGHBOURS[name]


FAULTS = {
    "offset forgotten in P": ("softmax.cuh", "- (m[e / 2] - LARGEST_P));", "- m[e / 2]);", {"out", "lse"}),
    "no offset at all": ("e4m3.cuh", "LARGEST_P = 5;", "LARGEST_P = 0;", {"out", "lse"}),
    "offset forgotten in the LSE": ("flash3.cuh", "(m - LARGEST_P + log2_approx", "(m + log2_approx", {"lse"}),
}
"""Of P: file, code, what takes its place, what is off then."""
LOOP = "for (int j = work.tiles.last - 1; j >= work.tiles.first; --j) { … "
"""Over the consumers' key tiles, all but the first, where P V runs beside the scores."""
MORE_FAULTS = {
    "no mask": ("softmax.cuh", "mask_side<Side::AFTER>(s, shape, row, key, value);", "", {"out", "lse"}),
    "no scale of V": ("fp8.cuh", "+= scale * t[n][e];", "+= t[n][e];", {"out"}),
    "no rescale of O": (
        "flash3_fp8.cu",
        LOOP + "rescale(o, alpha);",
        "",
        {"out"},
    ),
    "no rescale of O at the end": (
        "flash3_fp8.cu",
        "factor_v = next_v; … rescale(o, alpha); softmax.rescale(alpha);",
        "",
        {"out", "lse"},
    ),
    "no rescale of l": ("fp8.cuh", "rounded[0] *= alpha[0], rounded[1] *= alpha[1];", "", {"out", "lse"}),
    "no ones": ("flash3_fp8.cu", "FOUR = 0x38383838;", "FOUR = 0;", {"out", "lse"}),
    "a half for a one": ("flash3_fp8.cu", "FOUR = 0x38383838;", "FOUR = 0x30383838;", {"out", "lse"}),
    "the sums of other rows": (
        "fp8.cuh",
        "rounded[0] += sums[0], rounded[1] += sums[2];",
        "rounded[0] += sums[2], rounded[1] += sums[0];",
        {"out", "lse"},
    ),
    "V's keys in another order": (
        "flash3_fp8.cu",
        "const int k = 2 * quad;",
        "const int k = 2 * (quad ^ 1);",
        {"out"},
    ),
    "V's neighbour keys": ("flash3_fp8.cu", "key = 16 * (i / 2", "key = 16 * (1 + i / 2", {"out"}),
}


IN_TURN = "if (any_lane(softmax.risen(s))) { … "
WIDE_FAULTS = {
    "the sums of a tile are V's": (
        "flash3_fp8.cu",
        "multiply_pv(sums, p, v_tile, D);",
        "multiply_pv(sums, p, v_tile, D - 8);",
    ),
    "no scale of V": MORE_FAULTS["no scale of V"][:3],
    "no rescale of O": ("flash3_fp8.cu", IN_TURN + "rescale(o, alpha);", ""),
    "no rescale of l": ("flash3_fp8.cu", IN_TURN + "softmax.rescale(alpha);", ""),
}


@pytest.mark.alike("offset forgotten in P")
@pytest.mark.parametrize("fault", one_of_each(FAULTS, lambda name: FAULTS[name][0]))
def test_the_offset_of_p_is_needed(fault: str) -> None:
    file, old, new, off = FAULTS[fault]
    x = fp8.quantize(*sink())
    wanted = expect(*x.values(), SINK)
    assert wrong(run(x, SINK), wanted) == set()
    assert wrong(run(x, SINK, changed((file, old, new))), wanted) == off


@pytest.mark.alike("no mask")
@pytest.mark.parametrize("fault", one_of_each(MORE_FAULTS, lambda name: tuple(sorted(MORE_FAULTS[name][3]))))
def test_a_fault_is_seen(fault: str) -> None:
    file, old, new, off = MORE_FAULTS[fault]
    x = fp8.quantize(*inputs(CAUSAL))
    assert wrong(run(x, CAUSAL, changed((file, old, new)), sanitize=False), expect(*x.values(), CAUSAL)) == off


@pytest.mark.parametrize("fault", one_of_each(WIDE_FAULTS, lambda name: "wide"))
def test_a_fault_of_wide_heads_is_seen(fault: str) -> None:
    x = fp8.quantize(*inputs(WIDE))
    ran = run(x, WIDE, changed(WIDE_FAULTS[fault]), sanitize=False)
    assert "out" in wrong(ran, expect(*x.values(), WIDE))


SYNCHRONISATION_FAULTS = {
    "K isn't waited for": (CAUSAL, "flash3_fp8.cu", LOOP + "mbarrier_wait(sram.k_full(k_ring.slot), k_ring.parity);", ""),
    "V isn't waited for": (CAUSAL, "flash3_fp8.cu", LOOP + "mbarrier_wait(sram.v_full(v_ring.slot), v_ring.parity);", ""),
    "S isn't waited for": (CAUSAL, "flash3_fp8.cu", LOOP + "wgmma_wait<1>();", ""),
    "T isn't waited for": (CAUSAL, "flash3_fp8.cu", LOOP + "wgmma_wait<0>(); settle(t);", ""),
    "K goes early": (
        CAUSAL, "flash3_fp8.cu", LOOP + "const float factor_k =", "release(sram.k_empty(k_ring.slot)); const float factor_k =",
    ),
    "the ones are shown to nobody": (CAUSAL, "flash3_fp8.cu", "fence_async();", ""),
    "a chunk of wide heads isn't waited for": (WIDE, "flash3_fp8.cu", "i + 1 < CHUNKS ? wgmma_wait<1>() : wgmma_wait<0>();", ""),
    "Q never goes": (
        CAUSAL.replace(heads=300, kv_heads=300, len_q=40, len_kv=40), "flash3_fp8.cu",
        "if (work.tiles.first == work.tiles.last) release(sram.q_empty());", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", one_of_each(SYNCHRONISATION_FAULTS, lambda name: SYNCHRONISATION_FAULTS[name][1]))
def test_a_fault_of_synchronisation_is_found(fault: str) -> None:
    p, file, old, new = SYNCHRONISATION_FAULTS[fault]
    assert run(fp8.quantize(*inputs(p)), p, changed((file, old, new))).findings


def changed(*changes: tuple[str, str, str]) -> Path:
    """The kernel with these changes (file, old code, new), in a folder with all headers; how code is found: tests/patches.py."""
    real = kernels_cu.source("flash3_fp8")
    headers = sorted(kernels_cu.include_dir().glob("*.cuh"))
    files = {path.name: path.read_text(encoding="utf-8") for path in (real, *headers)}
    for file, old, new in changes:
        files[file] = patched(files[file], old, new)
    return kept(files) / real.name


ONE_ACCUMULATOR = [
    ("flash3_fp8.cu", "float t[O_FRAGMENTS + 1][4];", "float t[O_FRAGMENTS + 1][4] = {};"),
    ("fp8.cuh", "o[first + n][e] += scale * t[n][e];", "o[first + n][e] = t[n][e];"),
    ("fp8.cuh", "rounded[0] += sums[0], rounded[1] += sums[2];", "rounded[0] = sums[0], rounded[1] = sums[2];"),
    (
        "flash3_fp8.cu",
        LOOP + "round_p(p, s);",
        "round_p(p, s); if (risen) rescale(t, alpha);",
    ),
    ("fp8.cuh", "operand_step<VTile>(dim, 16 * i), i > 0)", "operand_step<VTile>(dim, 16 * i), 1)"),
]
"""P V of all key tiles, and the sums of P, in one accumulator of the tensor cores, as flash3 has it; without scales of V."""


def ones(keys: int, first: int = 0) -> tuple[fp8.Quantized, fl.Problem]:
    """V = 1 from key `first` on."""
    p = LONG.replace(len_kv=keys)
    x = fp8.quantize(*inputs(p))
    v = np.ones_like(x.v)
    v[:, :, :first] = 0
    return replace(x, v=v, scales=x.scales._replace(v=np.ones_like(x.scales.v))), p


@pytest.mark.long
@pytest.mark.parametrize("first", [0, 8192])
def test_what_adds_up_is_kept(first: int) -> None:
    """At 16,384 keys: out within 0.5 % and what bfloat16 rounds, the LSE within 0.01. With one accumulator for all tiles the sum of
    the weights loses as much as that of V = 1, so that their ratio stays 1; but the LSE shows it, and a half of the keys, whose sum
    loses less, counts for more than its share."""
    x, p = ones(16384, first)
    wanted = expect(*x.values(), p)
    ran, lossy = (run(x, p, source, sanitize=False) for source in (None, changed(*ONE_ACCUMULATOR)))
    assert (np.abs(ran.out.astype(np.float64) - wanted.out) < (0.005 + HALF_ULP) * wanted.out).all()
    assert np.abs(ran.lse - wanted.lse).max() < 0.01
    assert (lossy.lse - wanted.lse).mean() < -0.1
    assert ((lossy.out.astype(np.float64) / wanted.out).mean() > 1.05) == (first > 0)


def test_accuracy_is_in_the_papers_order() -> None:
    """One scale, a scale a tile, rotated besides: each is nearer to float64 than the one before."""
    p = fl.Problem(batch=1, heads=1, len_q=1024, head_dim=128, dtype="float8_e4m3fn")
    own, papers = (fp8.drawn(1024, rounded=rounded, heads=1) for rounded in (True, False))
    assert all((x == y).all() for x, y in zip(own.half, papers.half, strict=True)), "the same inputs, another reference"
    assert 0 < np.abs(own.exact - papers.exact).max() < 0.05 and own.exact.shape == (1, 1, 1024, 128)
    outs = [
        run(fp8.quantize(*own.half, blocks=blocks, rotate=rotate), p, sanitize=False).out
        for blocks, rotate in fp8.WAYS.values()
    ]
    for x in (own, papers):
        plain, blocks, rotated = (np.sqrt(np.mean((out - x.exact) ** 2)) for out in outs)
        assert plain > blocks > rotated


@pytest.mark.parametrize("wrong", ["NaN", "lengths", "rotation"])
def test_what_cant_be_quantised_is_refused(wrong: str) -> None:
    q, k, v = inputs(SINK)
    if wrong == "NaN":
        k[0, 0, 3, 5] = np.nan
    if wrong == "lengths":
        v = v[:, :, 1:]
    if wrong == "rotation":
        q, k, v = (x[..., :48] for x in (q, k, v))
    with pytest.raises(
        fl.UsageError, match={"NaN": "^k = 'NaN", "lengths": "^v.shape", "rotation": "^head_dim"}[wrong]
    ):
        fp8.quantize(q, k, v, rotate=True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-43, 1e-37, 1.0, 3e38])
def test_scales_are_normal_numbers_at_any_size(size: float) -> None:
    """A subnormal scale divides by 0 on a machine that takes it for 0."""
    given = [np.float32(size) * np.sign(x) for x in inputs(SINK)]
    x = fp8.quantize(*given)
    for scale in x.scales:
        assert (scale >= np.finfo(np.float32).tiny).all() and np.isfinite(scale).all()
    for near, exact in zip(x.values(), given, strict=True):
        assert np.abs(near - exact).max() <= max(abs(float(exact.max())) / 16, 1e-40)


def test_a_rotation_beyond_float32_is_refused() -> None:
    top = np.full((1, 1, 8, 64), 3e38, np.float32)
    with pytest.raises(fl.UsageError, match="^q = values near float32's largest: expected values whose rotation"):
        fp8.quantize(top, top, top, rotate=True)


@pytest.mark.parametrize(("name", "bad"), [(n, x) for n in "qkv" for x in (np.inf, -np.inf, np.nan)] + [("q", -1.0)])
def test_scales_are_finite(name: str, bad: float) -> None:
    x = fp8.quantize(*inputs(SINK))
    scale = getattr(x.scales, name).copy()
    scale.flat[-1] = bad
    with pytest.raises(fl.UsageError, match=rf"^scales\.{name}\[.*\] = {bad}: expected a "):
        fl.simulate("flash3_fp8", x.q, x.k, x.v, scales=x.scales._replace(**{name: scale}))


@pytest.mark.parametrize("scales", [(1, 2, 3), 7, (np.ones(3, np.float32),) * 2, (np.ones((1, 1, 1)),) * 3])
def test_scales_that_are_none_are_refused(scales: Any) -> None:
    """In one line, wherever they are given."""
    x = fp8.quantize(*inputs(SINK))
    for run in (
        functools.partial(fl.simulate, "flash3_fp8"),
        functools.partial(fl.attention, algorithm="flash3_fp8", backend="emulator"),
    ):
        with pytest.raises(fl.UsageError, match="^scales"):
            run(x.q, x.k, x.v, scales=scales)
    good = fp8.quantize(*inputs(SINK)).scales
    run(x.q, x.k, x.v, scales=tuple(good))
