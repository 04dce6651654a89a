"""What the kernels of `corpus_defects` are to compute, in NumPy: the judge of what a launch leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np

from flashlab.measure.corpus_defects import Defect
from simulator.dtypes import Array

__all__ = ["error", "nans"]

Given = Mapping[str, Any]


def error(defect: Defect, given: Given, left: Mapping[str, Array]) -> float | None:
    """How far the arrays that a launch left are from the answer in float64, at the element that is farthest.

    NaN is as far as infinity. None: nobody wrote down what the kernel computes.
    """
    computed = _ANSWERS.get(defect.kernel.partition("<")[0])
    if computed is None:
        return None
    wide = {name: cast("Array", x).astype(np.float64) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    apart = [np.abs(left[name].astype(np.float64) - x) for name, x in computed(wide).items()]
    return max(float(np.where(np.isnan(x), np.inf, x).max()) for x in apart)


def nans(arrays: Iterable[Array]) -> int:
    """How many elements are NaN.

    >>> nans([np.array([1, np.nan]), np.array([2])])
    1
    """
    return sum(int(np.isnan(array).sum()) for array in arrays if array.dtype.kind == "f")


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _causal_attention(given: Given) -> dict[str, Array]:
    batch, length, _, width = given["inp"].shape
    heads = given["NH"]
    parts = given["inp"].reshape(batch, length, 3, heads, width // heads).transpose(2, 0, 3, 1, 4)
    q, k, v = parts
    s = q @ k.swapaxes(-1, -2) / np.sqrt(width // heads)
    s[..., np.triu(np.ones((length, length), bool), 1)] = -np.inf
    return {"out": (_softmax(s) @ v).transpose(0, 2, 1, 3).reshape(batch, length, width)}


def _softmax_backward(given: Given) -> dict[str, Array]:
    att, datt = np.tril(given["att"]), np.tril(given["datt"])
    return {"dpreatt": given["scale"] * att * (datt - (att * datt).sum(-1, keepdims=True))}


def _attention(given: Given) -> dict[str, Array]:
    return {"O": _softmax(given["Q"] @ given["K"].T * given["smScale"]) @ given["V"]}


def _kept_boxes(given: Given) -> dict[str, Array]:
    """Box after box: a box is kept unless it overlaps one that was kept before."""
    boxes = given["boxes"]
    kept: list[int] = []
    for i, (x1, y1, x2, y2) in enumerate(boxes):
        for a1, b1, a2, b2 in boxes[kept]:
            common = max(0, min(x2, a2) - max(x1, a1)) * max(0, min(y2, b2) - max(y1, b1))
            if common / ((x2 - x1) * (y2 - y1) + (a2 - a1) * (b2 - b1) - common) > given["iou_threshold"]:
                break
        else:
            kept.append(i)
    return {"keep": np.isin(np.arange(len(boxes)), kept).astype(np.float64)}


def _gelu(given: Given) -> dict[str, Array]:
    x = given["x"]
    return {"y": 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))}


_ANSWERS: Mapping[str, Callable[[Given], dict[str, Array]]] = {
    "softmax_forward_kernel4": lambda given: {"out": _softmax(given["inp"])},
    "attention_forward_fused1": _causal_attention,
    "softmax_autoregressive_backward_kernel7": _softmax_backward,
    "softmax_autoregressive_backward_kernel8": _softmax_backward,
    "flash_attention_v2_kernel": _attention,
    "softmax_naive_kernel": lambda given: {"output": _softmax(given["input"])},
    "sum_v4_kernel": lambda given: {"output": given["input"].sum(-1)},
    "online_safe_softmax_f32_per_token_kernel": lambda given: {"y": _softmax(given["x"])},
    "online_safe_softmax_f32x4_pack_per_token_kernel": lambda given: {"y": _softmax(given["x"])},
    "block_all_reduce_sum_i8x16_pack_i32_kernel": lambda given: {"y": given["a"].sum(keepdims=True)},
    "nms_kernel": _kept_boxes,
    "reduce7": lambda given: {"g_odata": given["g_idata"].reshape(2, -1).sum(-1)},  # a sum per block
    "gelu_f16_kernel": _gelu,
}
