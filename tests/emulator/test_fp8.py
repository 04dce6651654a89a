"""flash3_fp8 on the emulator: the kernel as `flashlab.fp8` launches it, against float64 attention of what its operands stand for.

How far it may be off follows from e4m3, which has 3 bits of a mantissa and ends at 2^-9: rounding changes a P (16 times the
exponential, of which the row's largest is then at least 16) by up to 2^-4 of itself, or 2^-10 where that is more, which is
2^-14 of the row's largest exponential. That error of key j, e_j, doesn't depend on V, whose signs are drawn at random: so the
error of an output, sum of e_j v_j, exceeds t with a chance of at most 2 exp(-t² / (2 sum (e_j v_j)²)), as Hoeffding has it.

That isn't all: the tensor cores cut what one instruction adds, 32 products and the sum so far, below 2^-13 of the largest of
them, and the new sum likewise. None of these is larger than the sum of |P V| so far, of the tile: for each tile is folded into
float32 by itself.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import flashlab as fl
import kernels_cu
from flashlab import fp8
from flashlab.emulator.build import build
from flashlab.emulator.library import Arena, Launched
from flashlab.emulator.maps import tensor_map
from simulator import naive
from simulator.dtypes import Array, numpy_dtype
from tests.emulator.mutant import kept

pytestmark = pytest.mark.compiler

CHANCE = 1e-9
"""That a sound kernel fails on one of the outputs of a problem, at most."""
FLOAT32 = 2.0**-16
"""Of the sum of |P V|, and of an LSE: sums of a few hundred products in float32, exponents of up to 2^5 among them."""
CUT = 2.0**-13
"""What the tensor cores cut, of the largest that one instruction adds."""
HALF_ULP = {"float16": 2.0**-11, "bfloat16": 2.0**-8}

FULL = fl.Problem(batch=2, heads=4, kv_heads=2, len_q=130, len_kv=270, head_dim=128, dtype="float16")
CAUSAL = FULL.replace(batch=1, len_q=300, len_kv=260, causal=True)
PROBLEMS = {
    "full, batch 2, GQA": FULL,
    "causal, 40 rows without a key": CAUSAL,
    "causal, more keys than rows, MQA": CAUSAL.replace(kv_heads=1, len_q=150, len_kv=413),
    "head dim 64": FULL.replace(head_dim=64, batch=1),
    "head dim 64, causal": CAUSAL.replace(head_dim=64, heads=2, kv_heads=1),
    "head dim 80, no whole panel": FULL.replace(head_dim=80, batch=1, heads=1, kv_heads=1),
    "head dim 256": FULL.replace(head_dim=256, dtype="bfloat16", heads=2, kv_heads=1),
    "one row, one key": FULL.replace(len_q=1, len_kv=1),
}
LONG = fl.Problem(batch=1, heads=1, len_q=200, len_kv=4100, head_dim=64, dtype="float16")
"""From 4,097 keys on the tiles are others, and three warpgroups compute."""


class Ran(NamedTuple):
    """Out in float64, LSE, the launch, and bytes of the outputs that nobody wrote."""

    out: Array
    lse: Array
    launched: Launched
    unwritten: int


def run(x: fp8.Quantized, p: fl.Problem, source: Path | None = None, *, sanitize: bool = True) -> Ran:
    """The launch of `flashlab.fp8` with the emulator's descriptors."""
    launch = fp8.launch(p, fl.DEVICES["h200"])
    arena = Arena()
    for name in ("q", "k", "v", "q_scale", "k_scale", "v_scale"):
        values: Array = getattr(x, name)
        arena.put(name, values.view(np.uint8) if values.itemsize == 1 else values)
        arena.buffers[name].read_only = True
    out = arena.put("out", np.empty(x.q.shape, np.uint16), written=False)
    lse = arena.put("lse", np.empty(x.q.shape[:3], np.float32), written=False)

    def describe(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], rows: int) -> bytes:
        return tensor_map(pointer, 1, shape[::-1], strides[::-1], (128, rows, 1, 1))

    arguments = launch.arguments({name: arena.pointer(name) for name in arena.buffers}, describe)
    given = [one if isinstance(one, bytes) else np.asarray(one).tobytes() for one in arguments]
    library = build(source or kernels_cu.source("flash3_fp8"), launch.macros, watch=False)
    launched = library.launch(
        "flash3_fp8", (launch.blocks,), (launch.threads,), given, arena,
        sram=launch.sram, sanitize=sanitize, time_limit=60,
    )  # fmt: skip
    unwritten = sum(int((arena.buffers[name].written == 0).sum()) for name in ("out", "lse")) if sanitize else 0
    return Ran(out.view(numpy_dtype(p.dtype)).astype(np.float64), lse, launched, unwritten)


def inputs(p: fl.Problem, seed: int = 0) -> tuple[Array, Array, Array]:
    """Normal; all change in size from tile to tile, so that no scale is its neighbour's."""
    random = np.random.default_rng(seed)
    q, k, v = (
        random.standard_normal((p.batch, heads, length, p.head_dim))
        for heads, length in ((p.heads, p.len_q), (p.num_kv_heads, p.kv_length), (p.num_kv_heads, p.kv_length))
    )
    tile = fp8.tile_of(p.head_dim, p.kv_length)
    q_size, k_size = (1 + np.arange(n) // side % 3 / 2 for n, side in ((p.len_q, tile.rows), (p.kv_length, tile.cols)))
    return q * q_size[:, None], k * k_size[:, None], v * k_size[::-1, None]


def stands_for(x: fp8.Quantized, p: fl.Problem) -> tuple[Array, Array, Array]:
    """Q, K, V that the operands stand for, float64, by the layout in the kernel's head."""
    tile = fp8.tile_of(p.head_dim, p.kv_length)
    q, k, turned = (one.astype(np.float64) for one in (x.q, x.k, x.v))
    q *= x.q_scale[:, :, np.arange(p.len_q) // tile.rows, None]
    k *= x.k_scale[:, :, np.arange(p.kv_length) // tile.cols, None]
    v = np.zeros(turned.shape)
    for place in range(v.shape[-1]):  # a lane's 4 operands are two accumulators of each of two fragments, 8 keys apart
        lane, which = divmod(place % 16, 4)
        v[..., place // 16 * 16 + 8 * (which // 2) + 2 * lane + which % 2] = turned[..., place]
    v = v[..., : p.kv_length].swapaxes(-1, -2) * x.v_scale[:, :, np.arange(p.kv_length) // tile.cols, None]
    return q, k, v


class Expected(NamedTuple):
    """Out and LSE in float64, and by how much each output may be off."""

    out: Array
    lse: Array
    tolerance: Array


def expect(q: Array, k: Array, v: Array, p: fl.Problem) -> Expected:
    """Attention written out once more, and the tolerance of this file's head."""
    group = p.heads // p.num_kv_heads
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(p.head_dim)
    row, key = np.arange(p.len_q)[:, None], np.arange(p.kv_length)
    if p.causal:
        scores = np.where(key <= row + p.kv_length - p.len_q, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    share = np.divide(1.0, total, out=np.zeros_like(total), where=total > 0)
    with np.errstate(divide="ignore"):
        lse = (np.where(np.isfinite(top), top, 0.0) + np.log(total))[..., 0]
    out = weights @ v * share
    cols = fp8.tile_of(p.head_dim, p.kv_length).cols
    instructions = (cols - key % cols + 31) // 32  # from a key's own to the last of its tile
    lost = FLOAT32 + 34 * CUT * instructions
    most = np.where(weights > 0, np.maximum(2.0**-4 * weights, 2.0**-14), 0.0)
    spread = np.sqrt(2 * math.log(2 * out.size / CHANCE) * (most**2 @ v**2))
    tolerance = (spread + weights * lost @ np.abs(v)) * share + HALF_ULP[p.dtype] * np.abs(out) * (1 + 2.0**-4)
    return Expected(out, lse, tolerance + 2.0**-25)  # half of float16's smallest step


def wrong(ran: Ran, wanted: Expected) -> set[str]:
    """Which outputs are off."""
    off = {"out"} if not (np.abs(ran.out - wanted.out) <= wanted.tolerance).all() else set[str]()
    return off if np.allclose(ran.lse, wanted.lse, rtol=FLOAT32, atol=FLOAT32) else {*off, "lse"}


@pytest.mark.parametrize("name", PROBLEMS)
def test_attention(name: str) -> None:
    """Within the tolerance, no finding of any sanitiser, and every byte written."""
    p = PROBLEMS[name]
    check(p, fp8.quantize(*inputs(p)))


def test_three_warpgroups_take_long_sequences() -> None:
    check(LONG, fp8.quantize(*inputs(LONG)))


def check(p: fl.Problem, x: fp8.Quantized) -> None:
    ran = run(x, p)
    assert not ran.launched.findings, "\n".join(map(str, ran.launched.findings))
    assert not ran.unwritten
    assert wrong(ran, expect(*stands_for(x, p), p)) == set()


SINK = fl.Problem(batch=1, heads=1, len_q=64, len_kv=256, head_dim=64, dtype="float16")


def sink() -> tuple[Array, Array, Array]:
    """All rows attend to the last key, which the kernel meets first and whose V is 0: the other P lie near 2^-10.5 of its own."""
    q, k, v = inputs(SINK)
    q, k = q / 4, k / 4
    q[..., 0], k[..., 0] = 4.0, 0.0
    k[..., -1, :], v[..., -1, :] = 0.0, 0.0
    k[..., -1, 0] = 10.5 * math.log(2) * math.sqrt(SINK.head_dim) / 4
    return q, k, v


NEIGHBOURS = {"q_scale": {"out", "lse"}, "k_scale": {"out", "lse"}, "v_scale": {"out"}}
"""What is off if two tiles have each other's scale."""


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_a_neighbours_scale_is_seen(name: str) -> None:
    """Two tiles of one head have each other's."""
    x = fp8.quantize(*inputs(CAUSAL))
    swapped: Array = getattr(x, name).copy()
    swapped[0, 0, :2] = swapped[0, 0, 1::-1]
    assert wrong(run(replace(x, **{name: swapped}), CAUSAL), expect(*stands_for(x, CAUSAL), CAUSAL)) == NEIGHBOURS[name]


def test_keys_of_v_in_their_own_order_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(FULL)
    wanted = expect(*stands_for(fp8.quantize(*given), FULL), FULL)
    monkeypatch.setattr(fp8, "KEYS", np.arange(16))
    assert wrong(run(fp8.quantize(*given), FULL), wanted) == {"out"}


FAULTS = {
    "offset forgotten in P": ("flash3.cuh", "- (m[e / 2] - LARGEST_P));", "- m[e / 2]);", {"out", "lse"}),
    "no offset at all": ("flash3.cuh", "LARGEST_P = 4;", "LARGEST_P = 0;", {"out"}),
    "offset forgotten in the LSE": ("flash3_fp8.cu", "softmax.m[half] - LARGEST_P +", "softmax.m[half] +", {"lse"}),
}
"""File, text, what takes its place, what is off then."""


@pytest.mark.parametrize("fault", FAULTS)
def test_the_offset_of_p_is_needed(fault: str) -> None:
    file, old, new, off = FAULTS[fault]
    x = fp8.quantize(*sink())
    wanted = expect(*stands_for(x, SINK), SINK)
    assert wrong(run(x, SINK), wanted) == set()
    assert wrong(run(x, SINK, patched(file, old, new)), wanted) == off


def test_a_mask_skipped_is_seen() -> None:
    x = fp8.quantize(*inputs(CAUSAL))
    wanted, mask = expect(*stands_for(x, CAUSAL), CAUSAL), "softmax.mask(s, shape, lane_row, j, full);"
    assert wrong(run(x, CAUSAL, patched("flash3_fp8.cu", mask, "")), wanted) == {"out", "lse"}


def test_a_scale_of_v_forgotten_is_seen() -> None:
    x = fp8.quantize(*inputs(FULL))
    wanted, fold = expect(*stands_for(x, FULL), FULL), "+= scale * t[n][e];"
    assert wrong(run(x, FULL, patched("flash3_fp8.cu", fold, "+= t[n][e];")), wanted) == {"out"}


def patched(file: str, old: str, new: str) -> Path:
    """The kernel with `old`, which occurs once in `file`, replaced: in a folder with its header."""
    real = kernels_cu.source("flash3_fp8")
    header = kernels_cu.include_dir() / "flash3.cuh"
    files = {path.name: path.read_text(encoding="utf-8") for path in (real, header)}
    assert files[file].count(old) == 1
    files[file] = files[file].replace(old, new)
    return kept(files) / real.name


def test_accuracy_is_in_the_papers_order() -> None:
    """One scale, a scale a tile, rotated besides: each is nearer to float64 than the one before."""
    p = fl.Problem(batch=1, heads=1, len_q=1024, head_dim=128, dtype="float16")
    random = np.random.default_rng(0)
    half = [fp8.outliers(random, (1, 1, 1024, 128)).astype(np.float16) for _ in "qkv"]
    exact = naive(*half).out
    plain, blocks, rotated = (
        np.sqrt(np.mean((run(fp8.quantize(*half, blocks=blocks, rotate=rotate), p, sanitize=False).out - exact) ** 2))
        for blocks, rotate in fp8.WAYS.values()
    )
    assert plain > blocks > rotated


@pytest.mark.parametrize("argument", ["algorithm", "target"])
def test_names_how_fp8_is_run(argument: str) -> None:
    """One line, from `attention` and from `verify`."""
    q, k, v = fl.random_inputs(SINK)
    says = f"^{argument} = 'flash3_fp8': .*flashlab fp8.*flashlab.fp8.attention"
    with pytest.raises(fl.UsageError, match=says) as said:
        if argument == "target":
            fl.verify("flash3_fp8")
        else:
            fl.attention(q, k, v, algorithm="flash3_fp8", backend="emulator")
    assert "\n" not in str(said.value)
