"""FlashAttention-3 in FP8: quantisation (e4m3, a scale a block, rotation), the launch, accuracy, speed.

The experiment is that of the FlashAttention-3 paper (arXiv 2407.08608, section 4.3): inputs N(0, 1) with one entry in a
thousand from N(0, 100) besides, the root mean square error of the output against float64.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from flashlab import bench, compiler, gpu, tma
from flashlab.arrays import cupy
from simulator import Problem, naive
from simulator.config import Config, heads_that_share_the_l2
from simulator.dtypes import Array
from simulator.errors import Unavailable, UsageError
from simulator.problem import Tile, round_up
from simulator.programs.flash3 import MBARRIERS, configure

__all__ = ["KEYS", "Fp8Report", "Quantized", "accuracy", "attention", "quantize", "rotation", "run"]

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = 448.0


def tile_of(head_dim: int, length: int) -> Tile:
    """The kernel's tile for `length` keys: rows of Q and keys that share a scale. Up to head dim 128 the softmax binds, and three
    warpgroups a block get through more of it than two, if the sequence is long enough for their tile."""
    return Tile(192, 96) if head_dim <= 128 and length > 4096 else Tile(128, 128)


KEYS = np.array([2 * (slot // 4) + slot % 2 + 8 * (slot % 4 // 2) for slot in range(16)])
"""Which of 16 keys stands in each place of the transposed V: the order in which P's accumulators lie as an operand."""


@dataclass(frozen=True)
class Quantized:
    """What the kernel takes: q and k (batch, heads, length, head_dim), v (batch, kv_heads, head_dim, length padded to 16), all
    e4m3, v's keys in the order of `KEYS`; scales float32 by (batch, head, tile), of v by (batch, head)."""

    q: Array
    k: Array
    v: Array
    q_scale: Array
    k_scale: Array
    v_scale: Array


def rotation(head_dim: int, seed: int = 0) -> Array:
    """An orthogonal matrix that spreads an outlier over all columns: random signs, then a Hadamard matrix.

    >>> m = rotation(64)
    >>> bool(np.allclose(m @ m.T, np.eye(64)))
    True
    """
    if head_dim & (head_dim - 1):
        raise UsageError("head_dim", head_dim, "a power of two, for a Hadamard matrix")
    hadamard = np.ones((1, 1))
    while hadamard.shape[0] < head_dim:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], head_dim)
    return signs[:, None] * hadamard / math.sqrt(head_dim)


def quantize(q: Array, k: Array, v: Array, *, blocks: bool = True, rotate: bool = False) -> Quantized:
    """q, k, v (batch, heads, length, head_dim) in e4m3. `blocks`: a scale for each tile of Q and K, else one for all;
    `rotate`: Q and K times the same rotation first, which leaves Q Kᵀ as it is."""
    q, k, v = (np.asarray(x, np.float32) for x in (q, k, v))
    if rotate:
        turn = rotation(q.shape[-1]).astype(np.float32)
        q, k = q @ turn, k @ turn
    tile = tile_of(q.shape[-1], k.shape[2])
    q8, q_scale = _quantized(q, tile.rows, blocks)
    k8, k_scale = _quantized(k, tile.cols, blocks)
    v8, v_scale = _quantized(v, max(1, v.shape[2]), blocks)
    length = v.shape[2]
    turned = np.zeros((*v.shape[:2], v.shape[3], round_up(length, 16)), E4M3)
    turned[..., :length] = v8.swapaxes(-1, -2)
    ordered = turned.reshape(*turned.shape[:3], -1, 16)[..., KEYS].reshape(turned.shape)
    return Quantized(q8, k8, ordered, q_scale, k_scale, v_scale[..., 0])


def _quantized(x: Array, rows: int, blocks: bool) -> tuple[Array, Array]:
    batch, heads, length, dim = x.shape
    tiles = -(-length // rows)
    whole = np.zeros((batch, heads, tiles * rows, dim), np.float32)
    whole[:, :, :length] = x
    cut = whole.reshape(batch, heads, tiles, rows, dim)
    top = np.abs(cut).max(axis=(-1, -2), initial=0.0) if blocks else np.full(cut.shape[:3], np.abs(x).max(initial=0.0))
    scale = (np.where(top > 0, top, 1.0) / LARGEST).astype(np.float32)
    rounded = (cut / scale[..., None, None]).astype(E4M3).reshape(whole.shape)
    return np.ascontiguousarray(rounded[:, :, :length]), scale


def attention(x: Quantized, *, causal: bool = False, dtype: str = "float16") -> tuple[Any, Any]:
    """The kernel on one Hopper GPU: NumPy in, (out, lse) as NumPy out, `out` in `dtype`."""
    cp = cupy()
    batch, heads, len_q, head_dim = x.q.shape
    problem = Problem(
        batch=batch, heads=heads, kv_heads=x.k.shape[1], len_q=len_q, len_kv=x.k.shape[2], head_dim=head_dim,
        dtype=dtype, causal=causal,
    )  # fmt: skip
    given = {name: cp.asarray(np.ascontiguousarray(getattr(x, name)).view(np.uint8)) for name in "qkv"}
    given |= {name: cp.asarray(getattr(x, name)) for name in ("q_scale", "k_scale", "v_scale")}
    out = cp.empty((batch, heads, len_q, head_dim), np.uint16)
    lse = cp.empty((batch, heads, len_q), np.float32)
    pointers = {name: array.data.ptr for name, array in (given | {"out": out, "lse": lse}).items()}
    prepared(problem, pointers)()
    values = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    return out.get().view(values), lse.get()


def prepared(problem: Problem, pointers: dict[str, int]) -> Callable[[], None]:
    """The launch on contiguous arrays at these pointers, ready to be repeated."""
    p, device = problem, gpu.current_device()
    gpu.check_hopper("flash3_fp8", p, device)
    gpu.check_problem(p, device)
    config = _config(p)
    width, keys = round_up(p.head_dim, 16), round_up(p.kv_length, 16)
    if p.head_dim % 16:
        raise UsageError("head_dim", p.head_dim, "a multiple of 16, for rows of whole 16 bytes")
    shapes = {
        "q": (p.batch, p.heads, p.len_q, width), "k": (p.batch, p.num_kv_heads, p.kv_length, width),
        "v": (p.batch, p.num_kv_heads, width, keys),
    }  # fmt: skip
    tile = config.tile
    rows = {"q": tile.rows, "k": tile.cols, "v": _padded_dim(p)}
    maps = [
        tma.descriptor(pointers[name], shape, tuple(math.prod(shape[i:]) for i in (1, 2, 3)), "uint8", rows[name])
        for name, shape in shapes.items()
    ]
    pitch = p.head_dim * 2
    place = (pointers["out"], p.heads * p.len_q * pitch, p.len_q * pitch, pitch)
    rest = [np.uintp(pointers[name]) for name in ("q_scale", "k_scale", "v_scale")]
    arguments = (
        *maps, *rest, np.array(place, gpu.TENSOR)[()], np.uintp(pointers["lse"]), gpu.shape_struct(p, config.heads_together),
    )  # fmt: skip
    macros = tuple(
        x for x in compiler.defines(config, p.dtype, p.head_dim) if not x.startswith("-DHEAD_DIM")
    ) + (f"-DHEAD_DIM={_padded_dim(p)}",)  # fmt: skip
    dim, v_keys = _padded_dim(p), round_up(tile.cols, 128)  # V's panels are whole
    sram = dim * (tile.rows + config.stages * (tile.cols + v_keys)) + 4 * MBARRIERS
    kernel = gpu.kernel_of("flash3_fp8", "flash3_fp8", macros, "sm_90a", sram)
    grid = (config.grid(p, device, p.batch * p.heads * p.row_tiles(tile)),)
    return lambda: kernel(grid, (32 * config.warps,), arguments, shared_mem=sram)


def _padded_dim(p: Problem) -> int:
    return round_up(p.head_dim, 128)


def _config(p: Problem) -> Config:
    device, tile = gpu.current_device(), tile_of(p.head_dim, p.kv_length)
    config = configure(p, device, Tile(tile.rows, 64))  # as many keys as fit in 16 bit: the rest doesn't depend on them
    return replace(config, tile=tile, heads_together=heads_that_share_the_l2(p, device))


@dataclass(frozen=True)
class Accuracy:
    """The root mean square error of one way of computing, against float64."""

    kernel: str
    rmse: float


@dataclass(frozen=True)
class Speed:
    """TFLOP/s of one cell in FP8 and in bfloat16, and the ratio of the times, the median of the rounds."""

    head_dim: int
    causal: bool
    length: int
    tflops: float
    tflops_bfloat16: float
    ratio: float


@dataclass(frozen=True)
class Fp8Report:
    """What `run` found."""

    device: str
    inputs: str
    accuracy: tuple[Accuracy, ...]
    speed: tuple[Speed, ...]

    @property
    def passed(self) -> bool:
        """Every number came out finite."""
        return all(math.isfinite(row.rmse) for row in self.accuracy)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "passed": self.passed, "device": self.device, "inputs": self.inputs,
            "accuracy": [asdict(row) for row in self.accuracy], "speed": [asdict(row) for row in self.speed],
        }  # fmt: skip

    def print(self) -> None:
        """Two tables."""
        from flashlab.cli.output import line, table

        line(self.inputs)
        table("error", ("kernel", "RMSE"), [(row.kernel, f"{row.rmse:.2e}") for row in self.accuracy], left=1)
        rows = [
            (str(s.head_dim), "causal" if s.causal else "full", f"{s.length:,}", f"{s.tflops:.0f}",
             f"{s.tflops_bfloat16:.0f}", f"{s.ratio:.2f}")
            for s in self.speed
        ]  # fmt: skip
        table("speed", ("head dim", "mask", "length", "TFLOP/s", "bfloat16", "ratio"), rows, left=2)


def accuracy(*, heads: int = 8, length: int = 4096, head_dim: int = 128, seed: int = 0) -> tuple[str, list[Accuracy]]:
    """The paper's experiment on one problem; what was done, and the errors."""
    p = Problem(batch=1, heads=heads, len_q=length, head_dim=head_dim, dtype="float16")
    random = np.random.default_rng(seed)
    shape = (1, heads, length, head_dim)
    q, k, v = (
        random.standard_normal(shape) + 10 * random.standard_normal(shape) * (random.random(shape) < 1e-3)
        for _ in "qkv"
    )
    half = [x.astype(np.float16) for x in (q, k, v)]
    exact = naive(*half).out

    def error(out: Array) -> float:
        return float(np.sqrt(np.mean((out.astype(np.float64) - exact) ** 2)))

    cp = cupy()
    found = [Accuracy("flash3, float16", error(gpu.attention(*map(cp.asarray, half), algorithm="flash3").get()))]
    ways = {"one scale": (False, False), "a scale a tile": (True, False), "a scale a tile, rotated": (True, True)}
    for said, (blocks, rotate) in ways.items():
        out, _ = attention(quantize(*half, blocks=blocks, rotate=rotate))
        found.append(Accuracy(f"flash3_fp8, {said}", error(out)))
    return f"{p.heads} heads × {length} × {head_dim}, N(0, 1) + N(0, 100) · Bernoulli(0.001)", found


def speed(cells: Sequence[bench.Cell], seconds: float = 0.5) -> list[Speed]:
    """FP8 beside bfloat16, calls interleaved; quantisation isn't timed."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise Unavailable("the benchmark needs PyTorch, for its events: pip install torch") from None
    found: list[Speed] = []
    for cell in cells:
        p = cell.problem
        shape = (p.batch, p.heads, p.len_q, p.head_dim)
        full = [torch.randn(shape, device="cuda") for _ in "qkv"]
        plain = [x.to(torch.bfloat16) for x in full]
        eight = [x.to(torch.float8_e4m3fn) for x in full]
        eight[2] = eight[2].view(torch.uint8).transpose(-1, -2).contiguous()
        tile = tile_of(p.head_dim, p.kv_length)
        ones = {"q_scale": p.row_tiles(tile) * p.heads * p.batch, "k_scale": p.key_tiles(tile) * p.heads * p.batch,
                "v_scale": p.heads * p.batch}  # fmt: skip
        arrays = dict(zip("qkv", eight, strict=True)) | {name: torch.ones(n, device="cuda") for name, n in ones.items()}
        arrays |= {"out": torch.empty_like(plain[0]), "lse": torch.empty(shape[:3], device="cuda")}
        launch = prepared(p, {name: x.data_ptr() for name, x in arrays.items()})
        stream = cupy().cuda.Stream.from_external(torch.cuda.current_stream())
        out = torch.empty_like(plain[0])

        def ours(launch: Callable[[], None] = launch, stream: Any = stream) -> None:
            with stream:
                launch()

        def bfloat16(plain: list[Any] = plain, out: Any = out, causal: bool = p.causal) -> Any:
            return gpu.attention(*plain, algorithm="flash3", causal=causal, out=out)

        times = bench.interleaved(torch, [ours, bfloat16], seconds)
        tflops = [cell.flops / statistics.median(t) / 1e9 for t in times]
        ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
        found.append(Speed(p.head_dim, p.causal, p.len_q, tflops[0], tflops[1], ratio))
    return found


def run(*, lengths: Sequence[int] = (1024, 4096, 16384), head_dims: Sequence[int] = (128, 256)) -> Fp8Report:
    """Accuracy and speed. Raises `Unavailable` without a Hopper GPU."""
    inputs, errors = accuracy()
    cells = bench.cells(("bfloat16",), head_dims, (False, True), lengths)
    return Fp8Report(gpu.current_device().title, inputs, tuple(errors), tuple(speed(cells)))
