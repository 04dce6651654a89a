"""A handler of XLA's interface gets torch's tensors, stream and memory. Here it is a function in Python."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_int32, c_int64, c_void_p, cast
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashlab.measure import fa3_wheel
from flashlab.measure.fa3_wheel import Handler
from simulator.errors import Unavailable

STREAM, DEVICE = 4711, 3


class Tensor:
    """What of a torch tensor is read."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.array = np.zeros(shape, {"bfloat16": "u2", "float32": "f4", "uint8": "u1"}[dtype])
        self.shape, self.ndim, self.dtype = shape, len(shape), f"torch.{dtype}"

    def data_ptr(self) -> int:
        return self.array.ctypes.data


TORCH: Any = SimpleNamespace(
    cuda=SimpleNamespace(current_stream=lambda: SimpleNamespace(cuda_stream=STREAM), current_device=lambda: DEVICE),
    empty=lambda size, dtype, device: Tensor((size,), dtype),
    uint8="uint8",
)


class Callee:
    """A handler that notes what it is given, asks for all that it may, and refuses if `refuses` says why."""

    def __init__(self, refuses: bytes = b"") -> None:
        self.refuses = refuses
        self.function = ctypes.CFUNCTYPE(c_void_p, c_void_p)(self.called)

    @property
    def address(self) -> int:
        return cast(self.function, c_void_p).value or 0

    def called(self, address: int) -> int | None:
        frame: Any = cast(address, POINTER(fa3_wheel._Frame)).contents
        api = cast(frame.api, POINTER(fa3_wheel._Api)).contents

        def ask(name: str, asked: Any) -> Any:
            answer = ctypes.CFUNCTYPE(c_void_p, c_void_p)(getattr(api, name))
            self.error = answer(ctypes.addressof(asked))
            return asked

        if self.refuses:
            ask("error", fa3_wheel._Error(0, None, self.refuses, 3))
            return self.error
        self.size, self.stage = frame.struct_size, frame.stage
        self.buffers = [
            self.buffer(each.each[i]) for each in (frame.arguments, frame.results) for i in range(each.size)
        ]
        self.attributes = [self.attribute(frame.attributes, i) for i in range(frame.attributes.size)]
        self.stream = ask("stream", fa3_wheel._Answer(0, None, None, None)).value
        self.devices = [ask(name, fa3_wheel._Ordinal(0, None, None, -1)).value for name in ("run", "device")]
        self.block = ask("allocate", fa3_wheel._Memory(0, None, None, 1000, 16, None)).data
        ask("free", fa3_wheel._Freed(0, None, None, 1000, self.block))
        return None

    def buffer(self, address: int) -> tuple[int, list[int], int]:
        found: Any = cast(address, POINTER(fa3_wheel._Buffer)).contents
        return found.dtype, found.dims[: found.rank], found.data

    def attribute(self, listed: Any, i: int) -> tuple[str, int, Any]:
        name: Any = cast(listed.names[i], POINTER(fa3_wheel._Named)).contents
        scalar: Any = cast(listed.each[i], POINTER(fa3_wheel._Scalar)).contents
        kind: Any = {1: ctypes.c_uint8, 4: c_int32, 5: c_int64, 12: c_double}[scalar.dtype]
        return name.text[: name.length].decode(), scalar.dtype, cast(scalar.value, POINTER(kind)).contents.value


def test_a_handler_gets_tensors_attributes_stream_and_memory() -> None:
    callee, q, out = Callee(), Tensor((1, 5, 2, 128), "bfloat16"), Tensor((1, 2, 5), "float32")
    handler = Handler(TORCH, callee.address)
    call = handler.prepare([q, q], [out], {"scale": 0.5, "causal": True, "splits": 1, "few": c_int32(7)})
    for _ in range(2):  # a call leaves nothing behind
        call()
        assert (callee.size, callee.stage) == (168, 3)
        assert callee.buffers == [(16, [1, 5, 2, 128], q.data_ptr())] * 2 + [(11, [1, 2, 5], out.data_ptr())]
        assert callee.attributes == [("causal", 1, 1), ("few", 4, 7), ("scale", 12, 0.5), ("splits", 5, 1)]
        assert (callee.stream, callee.devices) == (STREAM, [DEVICE] * 2)
        assert callee.block and not handler._memory


def test_what_a_handler_refuses_is_raised() -> None:
    callee = Callee(b"Wrong number of arguments")
    with pytest.raises(RuntimeError, match="^Wrong number of arguments$"):
        Handler(TORCH, callee.address).prepare([], [], {})()


def test_a_wheel_that_is_not_there_and_other_head_dims_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match=r"^flash_attn3_jax_lib cannot be imported .*: pip install flash-attn3-jax$"):
        fa3_wheel.handler()
    monkeypatch.setattr(fa3_wheel.importlib, "import_module", lambda name: TORCH)
    q = Tensor((1, 5, 2, 64), "bfloat16")
    with pytest.raises(Unavailable, match="^flash-attn3-jax has head dim 128 alone, not 64$"):
        fa3_wheel.prepare(q, q, q, True, 0.1)
