"""What published kernels compute, in NumPy: the judge of their numbers in `corpus`.

`_ANSWERS` names kernels by patterns of their files and names, and says how each is called and what comes out. The sizes are the
kernels' own: a multiple of their tiles. Numbers of 16 bits are held to their last bits, others to 1e-5 of the largest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flashlab.emulator.library import Arena, Library

__all__ = ["judged"]

Array = np.ndarray[Any, Any]
_SECONDS = 60


@dataclass(frozen=True)
class Call:
    """A launch: `arguments` in order (None: the answer goes there), and the `answer`. `sram` is dynamic, in bytes."""

    arguments: Sequence[Array | float | None]
    answer: Array
    grid: Sequence[int]
    block: Sequence[int]
    sram: int = 0
    loose: bool = False  # it was computed in 16 bits


def judged(path: Path, library: Library, kernel: str) -> tuple[bool | None, str | None]:
    """Whether a kernel's numbers are NumPy's, and if not, why; twice None if nobody wrote down what it computes."""
    for file, name, made in _ANSWERS:
        match = re.fullmatch(name, kernel)
        if match and path.as_posix().endswith(file):
            wrong = _wrong(library, kernel, made(match))
            return wrong is None, wrong
    return None, None


def _wrong(library: Library, kernel: str, call: Call) -> str | None:
    """What is wrong with a kernel's numbers. A misuse that the emulator has found comes first: it may be the cause."""
    arena = Arena()
    given: list[bytes] = []
    out = ""
    for i, (value, wanted) in enumerate(zip(call.arguments, library.parameters(kernel), strict=True)):
        if value is None or isinstance(value, np.ndarray):
            arena.put(f"arg{i}", np.zeros_like(call.answer) if value is None else value)
            out = f"arg{i}" if value is None else out
            given.append(np.uint64(arena.pointer(f"arg{i}")).tobytes())
        else:
            given.append(np.array(value).astype(f"{wanted.kind}{wanted.size}").tobytes())
    launched = library.launch(
        kernel, call.grid, call.block, given, arena, sram=call.sram, workers=1, time_limit=_SECONDS
    )
    misuse = next((f"{finding}" for finding in launched.findings), None)
    if launched.stopped:
        return misuse or "stopped"
    found = arena.buffers[out].data.view(call.answer.dtype).reshape(call.answer.shape).astype(np.float64)
    expected = call.answer.astype(np.float64)
    tolerance = (2e-2 if call.loose or call.answer.itemsize == 2 else 1e-5) * float(np.abs(expected).max(initial=1))
    error = float(np.abs(found - expected).max())
    return None if error <= tolerance else misuse or f"off by {error:.3g}, where {tolerance:.3g} is rounding"


# What is computed


def _random(*shape: int, dtype: str = "float32", seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def _dtype(match: re.Match[str]) -> tuple[str, int]:
    """The dtype and how many elements a thread takes, as in f32x4."""
    return {"f32": "float32", "f16": "float16"}[match["type"]], int(match["width"] or 1)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": _sigmoid,
    "swish": lambda x: x * _sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "hardshrink": lambda x: np.where(np.abs(x) > 0.5, x, 0),
}


def _activation(match: re.Match[str]) -> Call:
    dtype, width = _dtype(match)
    x = _random(1024, dtype=dtype)
    y = _ACTIVATIONS[match["function"]](x.astype(np.float64)).astype(dtype)
    return Call([x, None, x.size], y, (4,), (256 // width,))


def _added(match: re.Match[str]) -> Call:
    dtype, width = _dtype(match)
    a, b = _random(1024, dtype=dtype), _random(1024, dtype=dtype, seed=1)
    return Call([a, b, None, a.size], a + b, (4,), (256 // width,))


def _embedded(match: re.Match[str]) -> Call:
    dtype, width = _dtype(match)
    weight, index = _random(50, 64, dtype=dtype), np.arange(7, 27, dtype=np.int32)
    return Call([index, weight, None, 20, 64], weight[index], (20,), (64 // width,))


def _dot(match: re.Match[str]) -> Call:
    dtype, width = _dtype(match)
    threads = int(match["threads"] or 256 // width)
    a, b = _random(4 * threads * width, dtype=dtype), _random(4 * threads * width, dtype=dtype, seed=1)
    total = np.array([a.astype(np.float64) @ b.astype(np.float64)], np.float32)
    return Call([a, b, None, a.size], total, (4,), (threads,), loose=dtype == "float16")


def _histogram(match: re.Match[str]) -> Call:
    a = np.random.default_rng(0).integers(0, 10, 1024).astype(np.int32)
    return Call([a, None, a.size], np.bincount(a).astype(np.int32), (4,), (256 // int(match["width"] or 1),))


def _transposed(match: re.Match[str]) -> Call:
    x, width = _random(64, 32), int(match["width"] or 1)
    return Call([x, None, 64, 32], np.ascontiguousarray(x.T), (64 * 32 // width // 256,), (256,))


def _transposed_2d(match: re.Match[str]) -> Call:
    x = _random(64, 64)
    return Call([x, None, 64, 64], np.ascontiguousarray(x.T), (4, 4), (16, 16))


def _softmax(x: Array) -> Array:
    powers = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return (powers / powers.sum(-1, keepdims=True)).astype(x.dtype)


def _softmax_per_token(match: re.Match[str]) -> Call:
    dtype, width = _dtype(match)
    threads = int(match["threads"] or 256 // width)
    x = _random(8, threads * width, dtype=dtype)
    return Call([x, None, x.size], _softmax(x), (8,), (threads,))


def _rms_norm(match: re.Match[str]) -> Call:
    dtype, width = _dtype(match)
    threads = int(match["threads"] or 256 // width)
    x = _random(8, threads * width, dtype=dtype)
    wide = x.astype(np.float64)
    y = (wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * 0.5).astype(dtype)
    return Call([x, None, 0.5, *x.shape], y, (8,), (threads,))


def _layer_norm(match: re.Match[str]) -> Call:
    dtype, width = _dtype(match)
    threads = int(match["threads"] or 256 // width)
    x = _random(8, threads * width, dtype=dtype)
    wide = x.astype(np.float64)
    y = ((wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5) * 0.5 + 0.25).astype(dtype)
    return Call([x, None, 0.5, 0.25, *x.shape], y, (8,), (threads,))


def _product(tile: tuple[int, int], block: tuple[int, ...]) -> Callable[[re.Match[str]], Call]:
    """C = A · B; a block has a tile of C."""

    def made(_: re.Match[str]) -> Call:
        a, b = _random(256, 64), _random(64, 256, seed=1)
        return Call([a, b, None, 256, 256, 64], a @ b, (256 // tile[1], 256 // tile[0]), block)

    return made


def _matrix_by_vector(k: int) -> Callable[[re.Match[str]], Call]:
    def made(_: re.Match[str]) -> Call:
        a, x = _random(64, k), _random(k, 1, seed=1)
        return Call([a, x, None, 64, k], a @ x, (16 if k > 16 else 8,), (32, 4))

    return made


def _sum_of_vectors(_: re.Match[str]) -> Call:
    a, b = _random(1000), _random(1000, seed=1)
    return Call([a, b, None, 1000], a + b, (4,), (256,))


def _cuda_matrix_product(match: re.Match[str]) -> Call:
    side = int(match["side"])
    a, b = _random(64, 96), _random(96, 64, seed=1)
    return Call([None, a, b, 96, 64], a @ b, (64 // side, 64 // side), (side, side))


def _sample_transpose(match: re.Match[str]) -> Call:
    x = _random(64, 64)
    return Call([None, x, 64, 64], x.copy() if match["copies"] else np.ascontiguousarray(x.T), (2, 2), (32, 16))


def _gelu(_: re.Match[str]) -> Call:
    x = _random(1024)
    return Call([None, x, x.size], _ACTIVATIONS["gelu"](x.astype(np.float64)).astype("f4"), (8,), (128,))


def _residual(_: re.Match[str]) -> Call:
    a, b = _random(1024), _random(1024, seed=1)
    return Call([None, a, b, 1024], a + b, (4,), (256,))


def _rows_softmax(warps: int, sram: int = 0, *, rows_by_thread: bool = False) -> Callable[[re.Match[str]], Call]:
    def made(_: re.Match[str]) -> Call:
        x = _random(32, 96)
        grid = 1 if rows_by_thread else 32
        return Call([None, x, *x.shape], _softmax(x), (grid,), (32 * warps,), sram)

    return made


def _linear(block: tuple[int, ...], *, rows_and_tokens: bool) -> Callable[[re.Match[str]], Call]:
    """out = inp · weightᵀ + bias."""

    def made(_: re.Match[str]) -> Call:
        inp, weight, bias = _random(128, 64), _random(128, 64, seed=1), _random(128, seed=2)
        sizes = (128, 64, 128) if rows_and_tokens else (64, 128)
        grid = (128 // block[0], 128 // block[1]) if rows_and_tokens else (1, 1)
        return Call([None, inp, weight, bias, *sizes], inp @ weight.T + bias, grid, block)

    return made


_TYPED = r"(?P<type>f32|f16)(?:x(?P<width>\d))?(?:_pack)?"
_THREADS = r"<(?P<threads>\d*)>"
_LEET = "LeetCUDA/kernels/"
_ANSWERS: Sequence[tuple[str, str, Callable[[re.Match[str]], Call]]] = (
    *(
        (f"{_LEET}{name}/{name}.cu", rf"(?P<function>{name})_{_TYPED}_kernel", _activation)
        for name in _ACTIVATIONS
    ),
    (f"{_LEET}elementwise/elementwise.cu", rf"elementwise_add_{_TYPED}_kernel", _added),
    (f"{_LEET}embedding/embedding.cu", rf"embedding_{_TYPED}_kernel", _embedded),
    (f"{_LEET}dot-product/dot_product.cu", rf"dot_prod_{_TYPED}_f32_kernel{_THREADS}", _dot),
    (f"{_LEET}histogram/histogram.cu", r"histogram_i32(?:x(?P<width>\d))?_kernel", _histogram),
    (f"{_LEET}mat-transpose/mat_transpose.cu", r"mat_transpose_f32(?:x(?P<width>\d))?_(?:col2row|row2col)_kernel", _transposed),
    (f"{_LEET}mat-transpose/mat_transpose.cu", r"mat_transpose_f32_(?:diagonal|col2row|row2col)2d_kernel", _transposed_2d),
    (f"{_LEET}softmax/softmax.cu", rf"(?:safe_)?softmax_{_TYPED}(?:_f32)?_per_token_kernel{_THREADS}", _softmax_per_token),
    (f"{_LEET}rms-norm/rms_norm.cu", rf"rms_norm_{_TYPED}(?:_f16|_f32)?_kernel{_THREADS}", _rms_norm),
    (f"{_LEET}layer-norm/layer_norm.cu", rf"layer_norm_{_TYPED}(?:_f16|_f32)?_kernel{_THREADS}", _layer_norm),
    (f"{_LEET}sgemm/sgemm.cu", r"sgemm_naive_f32_kernel", _product((32, 32), (32, 32))),
    (f"{_LEET}sgemm/sgemm.cu", r"sgemm_sliced_k_f32_kernel<>", _product((32, 32), (32, 32))),
    (f"{_LEET}sgemm/sgemm.cu", r"sgemm_t_8x8_sliced_k_f32x4\w*_kernel<>", _product((128, 128), (16, 16))),
    (f"{_LEET}sgemv/sgemv.cu", r"sgemv_k32_f32_kernel", _matrix_by_vector(32)),
    (f"{_LEET}sgemv/sgemv.cu", r"sgemv_k128_f32x4_kernel", _matrix_by_vector(128)),
    (f"{_LEET}sgemv/sgemv.cu", r"sgemv_k16_f32_kernel<>", _matrix_by_vector(16)),
    (".cu", r"(?:vectorAdd|VecAdd_kernel|vectorAddGPU|add_kernel)", _sum_of_vectors),
    ("matrixMul/matrixMul.cu", r"MatrixMulCUDA<(?P<side>\d+)>", _cuda_matrix_product),
    ("matrixMul_kernel.cu", r"matrixMul(?:_bs|CUDA_block)(?P<side>\d+)(?:_64bit)?", _cuda_matrix_product),
    ("transpose/transpose.cu", r"(?:(?P<copies>copy\w*)|transpose(?:Naive|Coalesced|NoBankConflicts|Diagonal))", _sample_transpose),
    ("train_gpt2_fp32.cu", r"gelu_forward_kernel", _gelu),
    ("train_gpt2_fp32.cu", r"residual_forward_kernel", _residual),
    ("train_gpt2_fp32.cu", r"matmul_forward_kernel4", _linear((16, 16), rows_and_tokens=False)),
    ("matmul_forward.cu", r"matmul_forward_kernel1", _linear((16, 16), rows_and_tokens=True)),
    ("matmul_forward.cu", r"matmul_forward_kernel4", _linear((16, 16), rows_and_tokens=False)),
    ("softmax_forward.cu", r"softmax_forward_kernel1", _rows_softmax(1, rows_by_thread=True)),
    ("softmax_forward.cu", r"softmax_forward_kernel2", _rows_softmax(2, 256)),
    ("softmax_forward.cu", r"softmax_forward_kernel3", _rows_softmax(1, 128)),
    ("softmax_forward.cu", r"softmax_forward_kernel4", _rows_softmax(2, 16)),
    ("softmax_forward.cu", r"softmax_forward_online_kernel1", _rows_softmax(1, rows_by_thread=True)),
    ("softmax_forward.cu", r"softmax_forward_online_kernel[28]", _rows_softmax(1)),
)  # fmt: skip
