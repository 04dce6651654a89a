"""FlashAttention-3 in FP8: quantisation (e4m3, a scale a block, rotation), the launch, accuracy, speed.

The experiment is that of the FlashAttention-3 paper (arXiv 2407.08608, section 4.3): inputs N(0, 1) with one entry in a
thousand from N(0, 100) besides, the root mean square error of the output against float64.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from flashlab import bench, compiler, gpu, tma
from flashlab.arrays import cupy
from simulator import Problem, naive
from simulator.config import Config, heads_that_share_the_l2
from simulator.devices import Device
from simulator.dtypes import Array
from simulator.errors import Unavailable, UsageError
from simulator.problem import Tile, round_up
from simulator.programs.flash3 import MBARRIERS, configure

__all__ = [
    "KEYS", "Fp8Report", "Launch", "Quantized", "accuracy", "attention", "launch", "problem_of", "quantize", "rotation", "run",
]  # fmt: skip

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = 448.0


def tile_of(head_dim: int, length: int) -> Tile:
    """The kernel's tile for `length` keys: rows of Q and keys that share a scale. Up to head dim 128 the softmax binds, and three
    warpgroups a block get through more of it than two, if the sequence is long enough for their tile."""
    return Tile(192, 128) if head_dim <= 128 and length > 4096 else Tile(128, 128)


KEYS = np.array([2 * (slot // 4) + slot % 2 + 8 * (slot % 4 // 2) for slot in range(16)])
"""Which of 16 keys stands in each place of the transposed V: the order in which P's accumulators lie as an operand."""


@dataclass(frozen=True)
class Quantized:
    """What the kernel takes: q and k (batch, heads, length, head_dim), v (batch, kv_heads, head_dim, length padded to 16), all
    e4m3, v's keys in the order of `KEYS`; scales float32 by (batch, head, tile), of k and v by key tile."""

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
    """q, k, v (batch, heads, length, head_dim) in e4m3. `blocks`: a scale for each tile of each, else one for all;
    `rotate`: Q and K times the same rotation first, which leaves Q Kᵀ as it is."""
    q, k, v = (np.asarray(x, np.float32) for x in (q, k, v))
    if rotate:
        turn = rotation(q.shape[-1]).astype(np.float32)
        q, k = q @ turn, k @ turn
    tile = tile_of(q.shape[-1], k.shape[2])
    q8, q_scale = _quantized(q, tile.rows, blocks)
    k8, k_scale = _quantized(k, tile.cols, blocks)
    v8, v_scale = _quantized(v, tile.cols, blocks)
    length = v.shape[2]
    turned = np.zeros((*v.shape[:2], v.shape[3], round_up(length, 16)), E4M3)
    turned[..., :length] = v8.swapaxes(-1, -2)
    ordered = turned.reshape(*turned.shape[:3], -1, 16)[..., KEYS].reshape(turned.shape)
    return Quantized(q8, k8, ordered, q_scale, k_scale, v_scale)


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
    problem = problem_of(x, causal=causal, dtype=dtype)
    given = {name: cp.asarray(np.ascontiguousarray(getattr(x, name)).view(np.uint8)) for name in "qkv"}
    given |= {name: cp.asarray(getattr(x, name)) for name in ("q_scale", "k_scale", "v_scale")}
    out, lse = cp.empty(x.q.shape, np.uint16), cp.empty(x.q.shape[:3], np.float32)
    pointers = {name: array.data.ptr for name, array in (given | {"out": out, "lse": lse}).items()}
    prepared(problem, pointers)()
    values = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    return out.get().view(values), lse.get()


def problem_of(x: Quantized, *, causal: bool = False, dtype: str = "float16") -> Problem:
    """The problem whose inputs these are; `dtype` is the output's."""
    batch, heads, len_q, head_dim = x.q.shape
    return Problem(
        batch=batch, heads=heads, kv_heads=x.k.shape[1], len_q=len_q, len_kv=x.k.shape[2], head_dim=head_dim,
        dtype=dtype, causal=causal,
    )  # fmt: skip


def prepared(problem: Problem, pointers: dict[str, int]) -> Callable[[], None]:
    """The launch on contiguous arrays at these pointers, ready to be repeated."""
    x = launch(problem, gpu.current_device())
    kernel = gpu.kernel_of("flash3_fp8", "flash3_fp8", x.macros, "sm_90a", x.sram)
    arguments = x.arguments(
        pointers, lambda pointer, shape, strides, rows: tma.descriptor(pointer, shape, strides, "uint8", rows)
    )
    return lambda: kernel((x.blocks,), (x.threads,), arguments, shared_mem=x.sram)


Describe = Callable[[int, tuple[int, ...], tuple[int, ...], int], Any]
"""`describe(pointer, shape, strides, rows)`: TMA's descriptor of a 4-D array of bytes, for boxes of so many rows."""


@dataclass(frozen=True)
class Launch:
    """How the kernel is launched on a problem, wherever it runs; `sram` in bytes a block, `boxes`: rows of a box of each input."""

    problem: Problem
    config: Config
    macros: tuple[str, ...]
    sram: int
    blocks: int
    boxes: Mapping[str, int]

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.config.warps

    def arguments(self, pointers: Mapping[str, int], describe: Describe) -> tuple[Any, ...]:
        """The kernel's parameters as NumPy scalars (and what `describe` makes), for contiguous arrays at these pointers."""
        p = self.problem
        shapes = {
            "q": (p.batch, p.heads, p.len_q, p.head_dim), "k": (p.batch, p.num_kv_heads, p.kv_length, p.head_dim),
            "v": (p.batch, p.num_kv_heads, p.head_dim, round_up(p.kv_length, 16)),
        }  # fmt: skip
        maps = [
            describe(pointers[name], shape, tuple(math.prod(shape[i:]) for i in (1, 2, 3)), self.boxes[name])
            for name, shape in shapes.items()
        ]
        scales = [np.uintp(pointers[name]) for name in ("q_scale", "k_scale", "v_scale")]
        pitch = p.head_dim * 2
        place = (pointers["out"], p.heads * p.len_q * pitch, p.len_q * pitch, pitch)
        shape = gpu.shape_struct(p, self.config.heads_together)
        return (*maps, *scales, np.array(place, gpu.TENSOR)[()], np.uintp(pointers["lse"]), shape)


def launch(problem: Problem, device: Device) -> Launch:
    """The launch on a problem, its dtype that of the output. Raises `UsageError` and `Unavailable` for what the kernel can't do.

    >>> import flashlab as fl
    >>> x = launch(Problem(batch=1, heads=2, len_q=300, head_dim=64, dtype="float16"), fl.DEVICES["h200"])
    >>> x.blocks, x.threads, x.boxes
    (6, 384, {'q': 128, 'k': 128, 'v': 128})
    """
    p = problem
    gpu.check_hopper("flash3_fp8", p, device)
    gpu.check_problem(p, device)
    if p.head_dim % 16:
        raise UsageError("head_dim", p.head_dim, "a multiple of 16, for rows of whole 16 bytes")
    tile, dim = tile_of(p.head_dim, p.kv_length), round_up(p.head_dim, 128)
    config = configure(p, device, Tile(tile.rows, 64))  # as many keys as fit in 16 bit: the rest doesn't depend on them
    config = replace(config, tile=tile, heads_together=heads_that_share_the_l2(p, device))
    macros = tuple(x for x in compiler.defines(config, p.dtype, p.head_dim) if not x.startswith("-DHEAD_DIM"))
    v_keys = round_up(tile.cols, 128)  # V's panels are whole
    return Launch(
        problem=p, config=config, macros=(*macros, f"-DHEAD_DIM={dim}"),
        sram=dim * (tile.rows + config.stages * (tile.cols + v_keys)) + 4 * MBARRIERS,
        blocks=config.grid(p, device, p.batch * p.heads * p.row_tiles(tile)),
        boxes={"q": tile.rows, "k": tile.cols, "v": dim},
    )  # fmt: skip


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


WAYS = {"one scale": (False, False), "a scale a tile": (True, False), "a scale a tile, rotated": (True, True)}
"""The ways of the paper's experiment, as `blocks` and `rotate` of `quantize`."""


def outliers(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """N(0, 1), and one entry in a thousand plus N(0, 100), float64."""
    return random.standard_normal(shape) + 10 * random.standard_normal(shape) * (random.random(shape) < 1e-3)


def accuracy(*, heads: int = 8, length: int = 4096, head_dim: int = 128, seed: int = 0) -> tuple[str, list[Accuracy]]:
    """The paper's experiment on one problem; what was done, and the errors."""
    p = Problem(batch=1, heads=heads, len_q=length, head_dim=head_dim, dtype="float16")
    random = np.random.default_rng(seed)
    shape = (1, heads, length, head_dim)
    half = [outliers(random, shape).astype(np.float16) for _ in "qkv"]
    exact = naive(*half).out

    def error(out: Array) -> float:
        return float(np.sqrt(np.mean((out.astype(np.float64) - exact) ** 2)))

    cp = cupy()
    found = [Accuracy("flash3, float16", error(gpu.attention(*map(cp.asarray, half), algorithm="flash3").get()))]
    for said, (blocks, rotate) in WAYS.items():
        out, _ = attention(quantize(*half, blocks=blocks, rotate=rotate))
        found.append(Accuracy(f"flash3_fp8, {said}", error(out)))
    return f"{p.heads} heads × {length} × {head_dim}, N(0, 1) + N(0, 100) · Bernoulli(0.001)", found


def on_torch(problem: Problem, q: Any, k: Any, v: Any) -> Callable[[], None]:
    """A call on torch tensors (batch, heads, length, head_dim) that are rounded to e4m3 with scales of 1, ready to be repeated on
    torch's stream; nobody gets the output."""
    torch, p = importlib.import_module("torch"), problem
    eight = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    eight[2] = eight[2].view(torch.uint8).transpose(-1, -2).contiguous()
    tile = tile_of(p.head_dim, p.kv_length)
    tiles = {"q_scale": p.row_tiles(tile), "k_scale": p.key_tiles(tile), "v_scale": p.key_tiles(tile)}
    arrays = dict(zip("qkv", eight, strict=True))
    arrays |= {name: torch.ones(p.batch * p.heads * n, device="cuda") for name, n in tiles.items()}
    arrays |= {"out": torch.empty_like(q, dtype=torch.bfloat16), "lse": torch.empty(q.shape[:3], device="cuda")}
    start = prepared(p, {name: x.data_ptr() for name, x in arrays.items()})
    stream = cupy().cuda.Stream.from_external(torch.cuda.current_stream())

    def call(held: Any = arrays) -> None:
        del held  # the kernel knows only their addresses
        with stream:
            start()

    return call


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
        ours, out = on_torch(p, *full), torch.empty_like(plain[0])

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
