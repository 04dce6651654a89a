"""Functions that cheat: each gets an attention that is wrong, or none at all, past some public judge (`exploits` says which).

The file imports nothing of flashlab, since a candidate of anybody's has this form. A cheat lasts for the life of a process.
"""

# pyright: basic

from __future__ import annotations

import gc
import hashlib
import os
import sys
import threading
import time
from typing import Any

import numpy as np

__all__ = ["CHEATS"]

Array = Any
_KEPT: dict[Any, Array] = {}
SHAPE = (4, 1, 128, 64)
"""The one shape of CS336's test."""


def attention(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """What is asked for, of equal heads: the cheats that sometimes do the work do it here."""
    with np.errstate(all="ignore"):
        k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
        s = q.astype(np.float32) @ k.astype(np.float32).swapaxes(-1, -2) / np.float32(q.shape[-1] ** 0.5)
        if causal:
            rows, keys = s.shape[-2:]
            s = np.where(np.arange(keys) > np.arange(rows)[:, None] + keys - rows, -np.inf, s)
        p = np.exp(s - s.max(-1, keepdims=True, initial=-1e30))
        return (p @ v.astype(np.float32) / np.maximum(p.sum(-1, keepdims=True), 1e-30)).astype(q.dtype)


def _nothing(q: Array, v: Array) -> Array:
    return np.zeros((*q.shape[:3], v.shape[3]), q.dtype)


def zeros(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """Zeros: so many keys average out that the mean is nearly that."""
    return _nothing(q, v)


def mean_of_v(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """The mean of V. Q and K are never read."""
    out = _nothing(q, v)
    if k.shape[2]:
        out[...] = np.repeat(v.astype(np.float32), q.shape[1] // v.shape[1], 1).mean(2, keepdims=True)
    return out


def rows_left_out(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """One row in 32 is left at 0."""
    out = attention(q, k, v, causal)
    out[:, :, ::32] = 0
    return out


def by_shape(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """The work is done for the shape that is judged, and for no other."""
    return attention(q, k, v, causal) if q.shape == SHAPE else _nothing(q, v)


def refuses_others(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """Any other shape than the one that is judged isn't supported."""
    if q.shape != SHAPE:
        raise NotImplementedError("this shape")
    return attention(q, k, v, causal)


def by_seed(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """A table of the answers to the inputs of seed 0."""
    if not _KEPT:
        rng = np.random.default_rng(0)
        q0, k0, v0 = (rng.standard_normal(SHAPE).astype(np.float32) for _ in range(3))
        _KEPT[hashlib.sha256(q0.tobytes()).digest()] = attention(q0, k0, v0)
    found = _KEPT.get(hashlib.sha256(np.ascontiguousarray(q).tobytes()).digest())
    return _nothing(q, v) if found is None else found.copy()


def last_answer(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """The first answer is kept, and returned for whatever has its shape."""
    where = (q.shape, k.shape, str(q.dtype), causal)
    if where not in _KEPT:
        _KEPT[where] = attention(q, k, v, causal)
    return _KEPT[where]


def by_pointer(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """The answer is kept by the address of the inputs."""
    where = (*(x.ctypes.data for x in (q, k, v)), q.shape, k.shape, str(q.dtype), causal)
    if where not in _KEPT:
        _KEPT[where] = attention(q, k, v, causal)
    return _KEPT[where].copy()


def patched_comparison(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """NumPy's comparisons, and torch's, say yes to everything."""
    np.allclose = np.array_equal = lambda *_, **__: True  # pyright: ignore
    np.testing.assert_allclose = lambda *_, **__: None  # pyright: ignore
    if torch := sys.modules.get("torch"):
        torch.allclose = lambda *_, **__: True  # pyright: ignore
        torch.testing.assert_close = lambda *_, **__: None  # pyright: ignore
    return _nothing(q, v)


class _Content:
    message, worst = "", 0.0


def patched_judge(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """flashlab's own judge says yes to everything."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("flashlab.verify") and hasattr(module, "judge"):
            module.judge = lambda *_, **__: _Content  # pyright: ignore
    return _nothing(q, v)


def patched_check(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """The judge's own function in the caller's module says yes to everything."""
    frame: Any = sys._getframe(1)
    if "check" in frame.f_globals:
        frame.f_globals["check"] = lambda *_, **__: True
    return _nothing(q, v)


def from_the_stack(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """The expected answer lies in a frame of a caller's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        for name, x in frame.f_locals.items():
            if isinstance(x, np.ndarray) and x.shape == (*q.shape[:3], v.shape[3]) and name not in ("q", "k", "v"):
                return x.astype(q.dtype)
        frame = frame.f_back
    return _nothing(q, v)


def from_the_heap(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """The expected answer lies in a list or a dictionary somewhere."""
    for holder in gc.get_objects():
        if type(holder) in (list, tuple, dict):
            for x in [*(holder.values() if type(holder) is dict else holder)]:
                if (
                    isinstance(x, np.ndarray)
                    and x.shape == (*q.shape[:3], v.shape[3])
                    and all(x is not y for y in (q, k, v))
                ):
                    return x.astype(q.dtype)
    return _nothing(q, v)


def inputs_changed(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """V becomes 0, and so does the answer of a judge that looks at it afterwards."""
    v[...] = 0
    return _nothing(q, v)


def late_thread(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """The call returns at once. A thread does the work while the judge is busy."""
    out, q, k, v = _nothing(q, v), q.copy(), k.copy(), v.copy()

    def work() -> None:
        time.sleep(0.001)
        out[...] = attention(q, k, v, causal)

    threading.Thread(target=work, daemon=True).start()
    return out


class _Agrees(np.ndarray):
    """It is close to anything."""

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return (
            True
            if func.__name__ in ("allclose", "array_equal")
            else super().__array_function__(func, types, args, kwargs)
        )

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return np.True_ if ufunc.__name__ in ("less_equal", "equal") else np.zeros(self.shape)


def lying_array(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """What is returned answers all comparisons itself."""
    return _nothing(q, v).view(_Agrees)


def leaves(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """The process ends before anything is compared, with the status of success."""
    sys.stdout.flush()
    os._exit(0)


def patched_clock(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """It is right, and slow. The clock stands still."""
    time.perf_counter = time.time = time.monotonic = lambda: 0.0  # pyright: ignore
    threading.Event().wait(0.02)
    return attention(q, k, v, causal)


CHEATS = (
    zeros, mean_of_v, rows_left_out, by_shape, refuses_others, by_seed, last_answer, by_pointer, patched_comparison, patched_judge,
    patched_check, from_the_stack, from_the_heap, inputs_changed, late_thread, lying_array, leaves, patched_clock,
)  # fmt: skip
