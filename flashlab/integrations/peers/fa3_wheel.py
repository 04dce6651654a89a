"""FlashAttention-3 as the wheel `flash-attn3-jax` has it: built with CUDA 12.4, head dim 128 alone.

The wheel is made for JAX, whose runtime has streams of its own. Its handlers are C functions (XLA's foreign function interface,
xla/ffi/api/c_api.h), which ask their caller for a stream and for memory. Here they get torch's. So they are queued, timed and
captured like any other peer, and JAX isn't needed.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint8, c_void_p, cast, sizeof
from itertools import accumulate
from typing import Any

from simulator.errors import Unavailable

__all__ = ["HEAD_DIM", "Handler", "handler", "prepare", "prepare_backward"]

HEAD_DIM = 128
"""The only one that its kernels were compiled for."""
_TILES = 64, 80
"""Query rows of a tile of its backward pass: with a mask, and without one."""
Window = Sequence[int | None]
Lengths = Sequence[Sequence[int]]
TYPES = {"int32": 4, "float16": 10, "float32": 11, "bfloat16": 16}
"""XLA_FFI_DataType, by torch's names."""
_PRED, _S32, _S64, _F64 = 1, 4, 5, 12
_BUFFER, _SCALAR = 1, 3  # XLA_FFI_ArgType and RetType, XLA_FFI_AttrType
_EXECUTE = 3  # XLA_FFI_ExecutionStage


def _struct(name: str, *fields: tuple[str, Any]) -> type[ctypes.Structure]:
    """A struct of the interface. All begin with their size and a list of extensions."""
    return type(name, (ctypes.Structure,), {"_fields_": [("struct_size", c_size_t), ("extensions", c_void_p), *fields]})


_Named = type("Named", (ctypes.Structure,), {"_fields_": [("text", c_char_p), ("length", c_size_t)]})
_Scalar = type("Scalar", (ctypes.Structure,), {"_fields_": [("dtype", c_int32), ("value", c_void_p)]})
_Buffer = _struct("Buffer", ("dtype", c_int32), ("data", c_void_p), ("rank", c_int64), ("dims", POINTER(c_int64)))
_Listed = _struct("Listed", ("size", c_int64), ("types", POINTER(c_int32)), ("each", POINTER(c_void_p)))
_Attributes = _struct(
    "Attributes", ("size", c_int64), ("types", POINTER(c_int32)), ("names", POINTER(c_void_p)), ("each", POINTER(c_void_p))
)  # fmt: skip
_Frame = _struct(
    "Frame", ("api", c_void_p), ("context", c_void_p), ("stage", c_int32), ("arguments", _Listed), ("results", _Listed),
    ("attributes", _Attributes), ("future", c_void_p),  # what it puts out isn't part of a frame's size
)  # fmt: skip
_Version = _struct("Version", ("major", c_int32), ("minor", c_int32))
_Error = _struct("Error", ("message", c_char_p), ("code", c_int32))
_Answer = _struct("Answer", ("context", c_void_p), ("value", c_void_p))  # of whatever is asked with one thing to answer
_Ordinal = _struct("Ordinal", ("context", c_void_p), ("value", c_int32))
_Memory = _struct("Memory", ("context", c_void_p), ("size", c_size_t), ("alignment", c_size_t), ("data", c_void_p))
_Freed = _struct("Freed", ("context", c_void_p), ("size", c_size_t), ("data", c_void_p))

_ASKED = (
    "error", "message", "destroy", "register", "stream", "type", "context", "set", "get", "allocate", "free", "schedule",
    "threads", "future", "available", "failed", "run", "device",
)  # fmt: skip
"""What a handler may ask for, in the order of struct XLA_FFI_Api. Older ones have "device" where newer ones have "run"."""
_Api = _struct("Api", ("version", _Version), ("internal", c_void_p), *((name, c_void_p) for name in _ASKED))


class Handler:
    """A handler of XLA's foreign function interface, called with torch's tensors on torch's current stream.

    `address` is that of the C function.
    """

    def __init__(self, torch: Any, address: int) -> None:
        self._torch, self._said = torch, ""
        self._memory: dict[int, Any] = {}
        self._call = ctypes.CFUNCTYPE(c_void_p, c_void_p)(address)
        answers = {
            "error": self._fails, "stream": self._streams, "allocate": self._allocates, "free": self._frees,
            "run": self._numbers, "device": self._numbers,
        }  # fmt: skip
        self._kept = {name: ctypes.CFUNCTYPE(c_void_p, c_void_p)(answer) for name, answer in answers.items()}
        named = {name: cast(answer, c_void_p) for name, answer in self._kept.items()}
        self._api = _Api(sizeof(_Api), None, _Version(sizeof(_Version), None, 0, 1), None, **named)

    def prepare(
        self, tensors: Sequence[Any], results: Sequence[Any], attributes: Mapping[str, Any]
    ) -> Callable[[], None]:
        """A call of it on these tensors. Booleans, integers (64 bits, or 32 as `c_int32`) and numbers are attributes.

        Raises `ValueError` for tensors that aren't contiguous: it is told no strides. When it is called and refuses, raises
        `RuntimeError` with what it says.
        """
        if not all(x.is_contiguous() for x in (*tensors, *results)):
            raise ValueError("a handler is told no strides: its tensors must be contiguous")
        names = sorted(attributes)  # as the interface has them
        texts = [name.encode() for name in names]
        spans = [_Named(text, len(text)) for text in texts]
        values = [_value(attributes[name]) for name in names]
        scalars = [_Scalar(dtype, cast(byref(value), c_void_p)) for dtype, value in values]
        lists = [self._buffers(each) for each in (tensors, results)]
        frame = _Frame(
            _Frame.future.offset, None, cast(byref(self._api), c_void_p), 1, _EXECUTE, lists[0][0], lists[1][0],
            _Attributes(
                sizeof(_Attributes), None, len(names), _array(c_int32, [_SCALAR] * len(names)), _addresses(spans),
                _addresses(scalars),
            ), None,
        )  # fmt: skip
        named = texts, spans, values, scalars, lists, tensors, results  # the frame has only their addresses

        def call(kept: object = named) -> None:
            if self._call(cast(byref(frame), c_void_p)):
                raise RuntimeError(self._said)

        return call

    def _buffers(self, tensors: Sequence[Any]) -> tuple[Any, Any]:
        buffers = [
            _Buffer(
                sizeof(_Buffer), None, TYPES[str(x.dtype).removeprefix("torch.")], x.data_ptr(), x.ndim,
                _array(c_int64, list(x.shape)),
            )
            for x in tensors
        ]  # fmt: skip
        listed = _Listed(
            sizeof(_Listed), None, len(buffers), _array(c_int32, [_BUFFER] * len(buffers)), _addresses(buffers)
        )
        return listed, buffers

    # What it asks for. An answer of None is "no error"; any other is an error's handle.

    def _fails(self, asked: int) -> int:
        self._said = cast(asked, POINTER(_Error)).contents.message.decode(errors="replace")
        return 1

    def _streams(self, asked: int) -> None:
        cast(asked, POINTER(_Answer)).contents.value = self._torch.cuda.current_stream().cuda_stream

    def _numbers(self, asked: int) -> None:
        cast(asked, POINTER(_Ordinal)).contents.value = self._torch.cuda.current_device()

    def _allocates(self, asked: int) -> None:
        memory = cast(asked, POINTER(_Memory)).contents
        block = self._torch.empty(max(1, memory.size), dtype=self._torch.uint8, device="cuda")  # aligned to 512 bytes
        self._memory[block.data_ptr()] = block
        memory.data = block.data_ptr()

    def _frees(self, asked: int) -> None:
        del self._memory[cast(asked, POINTER(_Freed)).contents.data]


def _value(value: Any) -> tuple[int, Any]:
    """An attribute's XLA_FFI_DataType and its bytes."""
    if isinstance(value, bool):
        return _PRED, c_uint8(value)
    if isinstance(value, c_int32):
        return _S32, value
    return (_S64, c_int64(value)) if isinstance(value, int) else (_F64, c_double(value))


def _array(kind: Any, values: Sequence[Any]) -> Any:
    return (kind * len(values))(*values)


def _addresses(structs: Sequence[Any]) -> Any:
    return _array(c_void_p, [ctypes.addressof(each) for each in structs])


def handler(name: str = "flash_mha_fwd") -> Handler:
    """A pass of the wheel: `flash_mha_fwd` or `flash_mha_bwd`. Raises `Unavailable` without it."""
    try:
        registered = importlib.import_module("flash_attn3_jax_lib.flash_api").get_ffi_registrations()
    except ImportError as error:
        raise Unavailable(f"flash_attn3_jax_lib cannot be imported ({error}): pip install flash-attn3-jax") from None
    api: Any = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetPointer.restype = c_char_p, c_void_p
    api.PyCapsule_GetName.argtypes = [ctypes.py_object]
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, c_char_p]
    capsule = registered[name]
    address = api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule))
    return Handler(importlib.import_module("torch"), address)


def prepare(
    q: Any, k: Any, v: Any, causal: bool, scale: float, window: Window = (None, None), lengths: Lengths | None = None
) -> Callable[[], tuple[Any, Any]]:
    """A call that returns `out` and its natural LSE (batch, heads, length), on torch tensors (batch, length, heads, head_dim).

    `window` is (left, right), None for open. `lengths` are the (queries, keys) of each sequence of a ragged batch. Raises
    `Unavailable` for other head dims.
    """
    torch: Any = importlib.import_module("torch")
    said = _said(q, k, causal, scale, window, lengths, "max_seqlen_q", "max_seqlen_k")
    out = torch.full_like(q, float("nan"))
    batch, length, heads, _ = q.shape
    lse, *parts = (
        torch.empty(shape, dtype=torch.float32, device=q.device)
        for shape in ((batch, heads, length), (1, 1, 1, 1), (1, 1, 1))
    )
    like, whole, single = (
        torch.empty(0, dtype=dtype, device=q.device) for dtype in (q.dtype, torch.int32, torch.float32)
    )
    # k_new, v_new, q_v; cu_seqlens of q, k and k_new; seqused (2), page_table, kv_batch_idx, leftpad_k; rotary (2);
    # seqlens_rotary; q, k and v descale; scheduler_metadata
    optional = [like] * 3 + _offsets(torch, q, lengths) + [whole] * 5 + [like] * 2 + [whole] + [single] * 3 + [whole]
    attributes = {
        **said, "pack_gqa_val": False, "pack_gqa_has_value": False, "attention_chunk": 0, "is_rotary_interleaved": False,
        "num_splits": 1,
    }  # fmt: skip
    tensors, results = ([x if lengths is None else x[0] for x in each] for each in ((q, k, v), (out, lse)))
    run = handler().prepare([*tensors, *optional], [*results, *parts], attributes)

    def call() -> tuple[Any, Any]:
        run()
        return out, lse

    return call


def prepare_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, scale: float, window: Window = (None, None),
    lengths: Lengths | None = None,
) -> Callable[[], list[Any]]:  # fmt: skip
    """A call that returns dq, dk and dv, for the `out` and the LSE of a forward pass. Tensors and masks are as in `prepare`.

    It is all of its launches: D, the gradients, and dQ (of grouped heads dK and dV, too) out of their sums.
    """
    torch: Any = importlib.import_module("torch")
    said = _said(q, k, causal, scale, window, lengths, "max_seqlen_q_val", "max_seqlen_k_val")
    gradients = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    batch, length, heads, _ = q.shape
    # D and the LSE have whole tiles of rows. The wheel's own Python allots multiples of 128: too few for tiles of 80.
    sequences = 0 if lengths is None else len(lengths)
    rows = max(-(-(length + sequences * tile) // tile) * tile for tile in _TILES) or 1
    padded = [torch.empty((batch, heads, rows), dtype=torch.float32, device=q.device) for _ in range(2)]
    whole = torch.empty(0, dtype=torch.int32, device=q.device)
    optional = [*_offsets(torch, q, lengths)[:2], whole, whole]  # cu_seqlens (2), seqused (2)
    tensors, results = (
        [x if lengths is None else x[0] for x in each]
        for each in ((dout, q, k, v, out, lse), (*gradients, *padded))
    )  # fmt: skip
    run = handler("flash_mha_bwd").prepare([*tensors, *optional], results, {**said, "deterministic": False})

    def call() -> list[Any]:
        run()
        return gradients

    return call


def _said(
    q: Any, k: Any, causal: bool, scale: float, window: Window, lengths: Lengths | None, *longest: str
) -> dict[str, Any]:
    """The attributes that both passes have. `longest` is what a pass calls the greatest numbers of queries and of keys."""
    if q.shape[-1] != HEAD_DIM:
        raise Unavailable(f"flash-attn3-jax has head dim {HEAD_DIM} alone, not {q.shape[-1]}")
    most = (q.shape[1], k.shape[1]) if lengths is None else [max(each) for each in zip(*lengths, strict=True)]
    left, right = (-1 if side is None else side for side in window)
    return {
        **dict(zip(longest, most, strict=True)), "max_seqlen_q_has_value": True, "max_seqlen_k_has_value": True,
        "softmax_scale_val": float(scale), "softmax_scale_has_value": True, "is_causal": causal,
        "window_size_left": left, "window_size_right": right, "softcap": 0.0, "sm_margin": 0,
    }  # fmt: skip


def _offsets(torch: Any, q: Any, lengths: Lengths | None) -> list[Any]:
    """Where the queries of each sequence begin, where its keys do, and nothing for new keys. Nothing at all, if all are equal."""
    begins = [] if lengths is None else [[0, *accumulate(each)] for each in zip(*lengths, strict=True)]
    return [torch.tensor(each, dtype=torch.int32, device=q.device) for each in [*begins, [], [], []][:3]]
