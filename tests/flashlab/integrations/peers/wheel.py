"""FlashAttention-3's wheel without a GPU: handlers that read the frame of a call, and compute what the wheel would."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from ctypes import POINTER, c_double, c_int32, c_int64, c_void_p, cast
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.integrations.peers import fa3_wheel
from simulator.dtypes import Array, numpy_dtype
from simulator.operations.attention import ATTENTION
from simulator.operations.backward import BACKWARD

NAMES = {number: name for name, number in fa3_wheel.TYPES.items()}


def frame_at(address: int) -> Any:
    return cast(address, POINTER(fa3_wheel._Frame)).contents


def buffer(address: int) -> tuple[int, list[int], int]:
    """A buffer's type, shape and address."""
    found: Any = cast(address, POINTER(fa3_wheel._Buffer)).contents
    return found.dtype, found.dims[: found.rank], found.data


def buffers(listed: Any) -> list[tuple[int, list[int], int]]:
    return [buffer(listed.each[i]) for i in range(listed.size)]


def attributes(listed: Any) -> list[tuple[str, int, Any]]:
    """Names, types and values."""

    def attribute(i: int) -> tuple[str, int, Any]:
        name: Any = cast(listed.names[i], POINTER(fa3_wheel._Named)).contents
        scalar: Any = cast(listed.each[i], POINTER(fa3_wheel._Scalar)).contents
        kind: Any = {1: ctypes.c_uint8, 4: c_int32, 5: c_int64, 12: c_double}[scalar.dtype]
        return name.text[: name.length].decode(), scalar.dtype, cast(scalar.value, POINTER(kind)).contents.value

    return [attribute(i) for i in range(listed.size)]


def array(found: tuple[int, list[int], int]) -> Array:
    """The memory of a buffer."""
    number, shape, data = found
    dtype = numpy_dtype(NAMES[number])
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(data) if size else bytearray(), dtype).reshape(shape)


class Wheel:
    """The wheel's module, whose handlers do on a CPU what the wheel's do. It notes what goes wrong in them."""

    def __init__(self) -> None:
        kind = ctypes.CFUNCTYPE(c_void_p, c_void_p)
        passes = {"flash_mha_fwd": self.forward, "flash_mha_bwd": self.backward}
        self.functions = {name: kind(self.noting(does)) for name, does in passes.items()}
        self.calls, self.wrong = 0, list[str]()

    def get_ffi_registrations(self) -> dict[str, Any]:
        new: Any = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [c_void_p, ctypes.c_char_p, c_void_p]
        return {name: new(cast(function, c_void_p).value, None, None) for name, function in self.functions.items()}

    def noting(self, does: Any) -> Any:
        def called(address: int) -> None:
            frame = frame_at(address)
            said = {name: value for name, _, value in attributes(frame.attributes)}
            try:
                does([array(x) for x in buffers(frame.arguments)], [array(x) for x in buffers(frame.results)], said)
                self.calls += 1
            except Exception as error:  # no exception leaves a C function
                self.wrong.append(repr(error))

        return called

    @staticmethod
    def problem(q: Array, k: Array, begins: list[Array], said: dict[str, Any]) -> fl.Problem:
        window = tuple(None if n < 0 else n for n in (said["window_size_left"], said["window_size_right"]))
        assert said["softmax_scale_has_value"] and said["max_seqlen_q_has_value"] and said["max_seqlen_k_has_value"]
        sizes: dict[str, Any] = {"batch": q.shape[0], "len_q": q.shape[1], "len_kv": k.shape[1]}
        if begins[0].size:
            assert q.ndim == k.ndim == 3
            sizes = {"batch": 1, "lengths": list(zip(*(np.diff(x).tolist() for x in begins), strict=True))}
        return fl.Problem(
            heads=q.shape[-2], kv_heads=k.shape[-2], head_dim=q.shape[-1], dtype=str(q.dtype), **sizes,
            causal=bool(said["is_causal"]), window=None if window == (None, None) else window,
            scale=said["softmax_scale_val"],
        )  # fmt: skip

    @staticmethod
    def longest(p: fl.Problem) -> list[int]:
        return [max(len(each[axis]) for each in p.spans) for axis in (0, 1)]

    def forward(self, given: list[Array], results: list[Array], said: dict[str, Any]) -> None:
        assert len(given) == 21 and len(results) == 4
        p = self.problem(given[0], given[1], given[6:8], said)
        assert [said["max_seqlen_q"], said["max_seqlen_k"]] == self.longest(p)
        arrays = {name: ours(x) for name, x in zip("qkv", given, strict=False)}
        out, lse = ours(results[0]), results[1].reshape(p.batch, p.heads, p.len_q)
        for one, cut in sequences(p):
            truth = ATTENTION.judge(one, {name: cut(name, x) for name, x in arrays.items()})
            cut("out", out)[...], cut("lse", lse)[...] = truth["out"], truth["lse"] if p.len_kv else np.inf

    def backward(self, given: list[Array], results: list[Array], said: dict[str, Any]) -> None:
        assert len(given) == 10 and len(results) == 5
        dout, q, k, v, out, lse, *begins = given
        p = self.problem(q, k, begins[:2], said)
        assert [said["max_seqlen_q_val"], said["max_seqlen_k_val"]] == self.longest(p)
        tile = 64 if p.causal or p.window else 80
        rows = p.len_q + (len(begins[0]) - 1) * tile if p.lengths else p.len_q
        for padded in results[3:]:
            padded.reshape(-1, padded.shape[-1])[: p.batch * p.heads, -(-rows // tile) * tile - 1] = 0
        names = {"dout": dout, "q": q, "k": k, "v": v, "out": out}
        arrays = {name: ours(x) for name, x in names.items()} | {"lse": lse.reshape(p.batch, p.heads, p.len_q)}
        for one, cut in sequences(p):
            truth = BACKWARD.judge(one, {name: cut(name, x) for name, x in arrays.items()})
            for name, x in zip(("dq", "dk", "dv"), results, strict=False):
                cut(name, ours(x))[...] = truth[name]


def sequences(p: fl.Problem) -> Iterator[tuple[fl.Problem, Callable[[str, Array], Array]]]:
    """Each sequence of a ragged batch, and what cuts its rows out of an array. Of another problem, it and all rows."""
    for s, (rows, keys) in enumerate(p.spans if p.lengths else [(range(p.len_q), range(p.len_kv))]):
        one = p.sequences[s].replace(lengths=None) if p.lengths else p

        def cut(name: str, x: Array, rows: range = rows, keys: range = keys) -> Array:
            span = keys if name.lstrip("d") in ("k", "v") else rows
            return x[:, :, span.start : span.stop]

        yield one, cut


def ours(x: Array) -> Array:
    """(batch, heads, length, head_dim) of (batch, length, heads, head_dim), or of a ragged batch's (length, heads, head_dim)."""
    return (x[None] if x.ndim == 3 else x).swapaxes(1, 2)


def installed(monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """The wheel, as if it were there."""
    found = Wheel()
    monkeypatch.setitem(sys.modules, "flash_attn3_jax_lib", SimpleNamespace(flash_api=found))
    monkeypatch.setitem(sys.modules, "flash_attn3_jax_lib.flash_api", found)
    return found
