"""A CuPy whose GPU memory is the CPU's, and a torch over it.

The kernels are Python here, but reach arrays as the CUDA ones do: through pointers and strides in structs passed by
value; they read nothing but the elements, and write whole 16-byte chunks, rubbish in the pads. The one in Triton gets its
parameters one by one, as its source names them.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import math
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import simulator
from flashlab.run import abi, arrays, devices, facade, kernels, tritonc
from flashlab.run import plan as plans
from simulator.algorithm import Kernel as Row
from simulator.counts import Counts
from simulator.dtypes import numpy_dtype

DTYPES = {0: "float32", 1: "float16", 2: "bfloat16"}
UNBOUNDED = 1 << 30


def at(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """The array at an address."""
    low = pointer + sum(min(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
    high = pointer + sum(max(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True)) + np.dtype(dtype).itemsize
    memory = (ctypes.c_char * (high - low)).from_address(low)
    return np.ndarray(shape, dtype, memory, pointer - low, strides)


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = 0) -> None:
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


class Thread(threading.local):
    """Which fake this thread has a context of, and its streams, the current one last."""

    context: Any = None

    def __init__(self) -> None:
        self.handles = [0]


THREAD = Thread()


class ndarray:
    """A strided array in "GPU memory"; `.host` is the same memory as NumPy sees it. `copiers`: the code that copies needed."""

    copiers: ClassVar[set[tuple[Any, ...]]] = set()

    def __init__(self, shape: Any, dtype: Any, memptr: MemoryPointer, strides: Any) -> None:
        self.size = int(np.prod(shape, dtype=int))
        self.data, self.shape, self.strides, self.dtype = (
            memptr,
            tuple(shape),
            tuple(strides),
            np.dtype(dtype),
        )

    @property
    def host(self) -> np.ndarray[Any, Any]:
        return at(self.data.ptr, self.shape, self.strides, self.dtype)

    def __setitem__(self, key: Any, value: ndarray) -> None:
        if axes := self.walked_beside(value):
            self.copiers.add((self.dtype, axes, self.is_dense, value.is_dense))
        self.host[key] = value.host

    def walked_beside(self, other: ndarray) -> int:
        """Over how many axes CuPy walks to copy, which decides its code; 0 where the bytes lie alike and are copied as such."""
        merged: list[tuple[int, int, int]] = []
        for n, mine, its in zip(self.shape, self.strides, other.strides, strict=True):
            if n == 1:
                continue
            if merged and (merged[-1][1], merged[-1][2]) == (n * mine, n * its):
                merged[-1] = (merged[-1][0] * n, mine, its)
            else:
                merged.append((n, mine, its))
        return 0 if self.strides == other.strides and self.is_dense else len(merged)

    @property
    def is_dense(self) -> bool:
        dense = [
            int(np.prod(self.shape[axis + 1 :], dtype=int)) * self.dtype.itemsize for axis in range(len(self.shape))
        ]
        return all(n == 1 or has == wants for n, has, wants in zip(self.shape, self.strides, dense, strict=True))

    def __dlpack__(self) -> None:
        raise NotImplementedError


ndarray.__module__ = "cupy"


class FakeCupy:
    """The module. `log` holds the bytes of every allocation, `launches` the kernels that ran and with what, `queued` on which
    GPU and stream, `compiled` the sources that were compiled. While `capturing`, it refuses what a captured stream refuses."""

    def __init__(self, capability: tuple[int, int] = (9, 0), name: str = "NVIDIA H200") -> None:
        self.log: list[int] = []
        self.synchronized = 0
        self.compiled: list[str] = []
        self.queued: list[tuple[int, int]] = []
        self.capturing = False
        self.cleared = list[tuple[int, int, int]]()
        self.compiling = 0.0  # seconds that it takes to compile
        self.launches: list[tuple[str, tuple[int, ...], tuple[int, ...], int]] = []
        self.cuda = self
        self.runtime = self
        self.driver = self
        self.kernels: list[Kernel] = []
        self.CUDARuntimeError = OSError
        self.ndarray, self.MemoryPointer, self.UnownedMemory = ndarray, MemoryPointer, UnownedMemory
        self.capability, self.name, self.here = capability, name, 0
        ndarray.copiers.clear()

    @property
    def ptr(self) -> int:
        """Of the current stream."""
        return THREAD.handles[-1]

    def setDevice(self, index: int) -> None:
        self.here = index
        THREAD.context = self

    def getDevice(self) -> int:
        return self.here

    def getDeviceCount(self) -> int:
        return 2

    @contextlib.contextmanager
    def Device(self, index: int) -> Any:
        before = self.here
        self.setDevice(index)
        yield
        self.setDevice(before)

    def getDeviceProperties(self, index: int) -> dict[str, Any]:
        del index
        name, (major, minor) = self.name.encode(), self.capability
        return {
            "name": name,
            "major": major,
            "minor": minor,
            "multiProcessorCount": 132,
            "l2CacheSize": 60 << 20,
            "sharedMemPerBlockOptin": 227 * 1024,
            "sharedMemPerMultiprocessor": 228 * 1024,
            "totalGlobalMem": 141 * 10**9,
            "maxThreadsPerMultiProcessor": 2048,
        }

    def deviceGetAttribute(self, attribute: int, index: int) -> int:
        del index
        return {13: 1_980_000, 36: 3_201_000, 37: 6144}[attribute]

    @staticmethod
    def from_dlpack(x: Any) -> ndarray:
        return x.x

    def launchKernel(
        self, function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, sram: int, stream: int, arguments: int,
        extra: int,
    ) -> None:  # fmt: skip
        assert (gy, gz, by, bz, extra) == (1, 1, 1, 1, 0)
        assert THREAD.context is self, "CUDA_ERROR_INVALID_CONTEXT"
        self.queued.append((self.here, stream))
        self.kernels[function].launch(gx, bx, sram, arguments)

    def get_current_stream(self) -> FakeCupy:
        return self

    def is_capturing(self) -> bool:
        return self.capturing

    def streamIsCapturing(self, stream: int) -> bool:
        del stream
        return self.capturing

    def synchronize(self) -> None:
        assert not self.capturing, "cudaErrorStreamCaptureUnsupported"
        self.synchronized += 1

    class Stream:
        """Streams by their handle, current in one thread; `entered` lists those that were current for a while."""

        null: ClassVar[FakeCupy.Stream]
        entered: ClassVar[list[int]] = []

        def __init__(self, handle: int) -> None:
            self.handle = handle

        @classmethod
        def from_external(cls, stream: Any) -> FakeCupy.Stream:
            return cls(stream.__cuda_stream__()[1])

        def __enter__(self) -> None:
            self.entered.append(self.handle)
            THREAD.handles.append(self.handle)

        def __exit__(self, *_: object) -> None:
            THREAD.handles.pop()

    def alloc(self, nbytes: int) -> MemoryPointer:
        """Memory full of NaNs, on a 256-byte boundary as CuPy's, followed by guard bytes."""
        self.log.append(nbytes)
        raw = np.full(nbytes + 512, 0xFF, np.uint8)
        offset = -raw.ctypes.data % 256
        return MemoryPointer(UnownedMemory(raw.ctypes.data, raw.nbytes, raw, self.here), offset)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> ndarray:
        dtype = np.dtype(dtype)
        strides = [int(np.prod(shape[axis + 1 :], dtype=int)) * dtype.itemsize for axis in range(len(shape))]
        return ndarray(shape, dtype, self.alloc(int(np.prod(shape, dtype=int)) * dtype.itemsize), strides)

    def memsetAsync(self, pointer: int, value: int, nbytes: int, stream: int) -> None:
        assert value == 0
        self.cleared.append((pointer, nbytes, stream))

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> ndarray:
        assert not self.capturing, "cudaErrorStreamCaptureUnsupported"
        made = self.empty(shape, dtype)
        made.host[...] = 0
        return made

    def asarray(self, x: np.ndarray[Any, Any]) -> ndarray:
        """An array beginning where the NumPy array does, sharing its memory and strides."""
        assert not self.capturing, "cudaErrorStreamCaptureUnsupported"
        owner = UnownedMemory(x.__array_interface__["data"][0], x.nbytes, x, self.here)
        return ndarray(x.shape, x.dtype, MemoryPointer(owner, 0), x.strides)

    def RawModule(self, *, code: str = "", options: tuple[str, ...] = (), path: str = "") -> Any:
        """Of a source, or of a file that somebody else compiled."""
        assert not self.capturing, "cudaErrorStreamCaptureUnsupported"
        assert "extern" in code or path
        image = Path(path).read_bytes() if path else b""
        macros = dict(option[2:].split("=") for option in options if option.startswith("-D"))

        class Module:
            @staticmethod
            def get_function(entry: str) -> Any:
                time.sleep(self.compiling)
                self.compiled.append(entry)
                if image.startswith(IN_TRITON):
                    dtype, head_dim = image.removeprefix(IN_TRITON).decode().split()
                    return TritonKernel(self, entry, dtype, int(head_dim))
                return Kernel(self, entry, DTYPES[int(macros.get("FL_DTYPE", 1))])

        return Module


FakeCupy.Stream.null = FakeCupy.Stream(0)


class Kernel:
    max_dynamic_shared_size_bytes = 0
    attributes: ClassVar[dict[str, int]] = {}

    def __init__(self, cupy: FakeCupy, entry: str, dtype: str) -> None:
        self.cupy, self.entry, self.dtype = cupy, entry, dtype
        self.kernel, self.ptr = self, len(cupy.kernels)
        cupy.kernels.append(self)

    def launch(self, grid: int, block: int, sram: int, arguments: int) -> None:
        """`arguments` is where the pointers to the arguments lie."""
        assert sram <= max(48 * 1024, self.max_dynamic_shared_size_bytes)
        self.cupy.launches.append((self.entry, (grid,), (block,), sram))
        if self.entry == "flash2":
            kinds = [*[abi.TENSOR] * 4, *[np.dtype(np.uintp)] * 8, abi.SHAPE]
            pointers = at(arguments, (len(kinds),), (8,), np.uintp)
            self.flash2(*[at(int(p), (1,), (kind.itemsize,), kind)[0] for p, kind in zip(pointers, kinds, strict=True)])

    def flash2(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, sinks: Any, alibi_slopes: Any, offsets_q: Any,
        offsets_kv: Any, *rest: Any,
    ) -> None:  # fmt: skip
        *packed_mask, rng_state, shape = rest
        assert not any(packed_mask), "the stand-in packs none"
        assert [x.dtype for x in (q, k, v, out)] == [abi.TENSOR] * 4
        b, heads, kv_heads, len_q, len_kv, dim = (int(shape[name]) for name in abi.SHAPE.names[:6])
        left, right = (None if shape[side] == UNBOUNDED else int(shape[side]) for side in ("left", "right"))
        q, k, v = (
            self.load(x, (b, h, n, dim))
            for x, h, n in ((q, heads, len_q), (k, kv_heads, len_kv), (v, kv_heads, len_kv))
        )
        pointers = {"sinks": int(sinks), "alibi_slopes": int(alibi_slopes)}
        of_head = {name: at(pointer, (heads,), (4,), "f4").copy() for name, pointer in pointers.items() if pointer}
        scale, cap = float(shape["scale"]), float(shape["soft_cap"])
        lengths = None
        if n := int(shape["sequences"]):
            ends = (at(int(x), (n + 1,), (4,), "i4").tolist() for x in (offsets_q, offsets_kv))
            lengths = list(zip(*([b - a for a, b in pairwise(each)] for each in ends), strict=True))
        state = at(int(rng_state), (2,), (8,), "i8").copy() if rng_state else None
        dropout = 1 - int(shape["kept"]) / 256
        right_answer = simulator.naive(
            q, k, v, lengths=lengths, window=(left, right), scale=scale, soft_cap=cap, dropout=dropout, rng_state=state,
            **of_head,
        )  # fmt: skip
        width = -(-dim * q.itemsize // 16) * 16
        target = at(*self.place(out, (b, heads, len_q, width)), "u1")
        target[...] = 0xEE  # what lies in the pads
        target.view(q.dtype)[..., :dim] = right_answer.out.astype(q.dtype)
        at(int(lse), (b, heads, len_q), (heads * len_q * 4, len_q * 4, 4), "f4")[...] = right_answer.lse

    def load(self, x: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        dtype = numpy_dtype(self.dtype)
        if 0 in shape:
            return np.zeros(shape, dtype)
        pointer, (b, h, n, d), strides = self.place(x, shape)
        return at(pointer, (b, h, n, d), (*strides[:3], dtype.itemsize), dtype).copy()

    @staticmethod
    def place(x: Any, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        assert not any(int(x[field]) % 16 for field in abi.TENSOR.names)
        return int(x["data"]), shape, (int(x["batch"]), int(x["head"]), int(x["row"]), 1)


class TritonKernel(Kernel):
    """flash2 in Triton: strides are in elements, and two pointers follow that no kernel of ours uses."""

    def __init__(self, cupy: FakeCupy, entry: str, dtype: str, head_dim: int) -> None:
        super().__init__(cupy, entry, dtype)
        self.head_dim = head_dim

    def launch(self, grid: int, block: int, sram: int, arguments: int) -> None:
        assert sram <= max(48 * 1024, self.max_dynamic_shared_size_bytes)
        self.cupy.launches.append((self.entry, (grid,), (block,), sram))
        names, width = parameters(abi.source_of(ROW), self.entry), numpy_dtype(self.dtype).itemsize
        kinds = {name: abi.SHAPE[name] if name in abi.SHAPE.names else np.dtype("i8") for name in names}
        *pointers, first, second = at(arguments, (len(names) + 2,), (8,), np.uintp)
        assert at(int(first), (1,), (8,), "u8")[0] == at(int(second), (1,), (8,), "u8")[0] == 0
        told = {name: at(int(p), (1,), (8,), kinds[name])[0] for name, p in zip(names, pointers, strict=True)}
        tensors = [
            np.array((told[x], *(told[f"{x}_{axis}"] * width for axis in ("batch", "head", "row"))), abi.TENSOR)[()]
            for x in ("q", "k", "v", "out")
        ]
        none = {"soft_cap": 0, "sequences": 0, "kept": 256}
        self.flash2(*tensors, told["lse"], *[0] * 7, told | none | {"head_dim": self.head_dim})


ROW = simulator.catalogue.get("flash2_triton").kernels[0]
IN_TRITON = b"in Triton: "


def parameters(path: Path, entry: str) -> list[str]:
    """What a launch passes to a kernel in Triton, by its source: constants are in capitals."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    (kernel,) = (node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == entry)
    return [argument.arg for argument in kernel.args.args if not argument.arg.isupper()]


def compile_in_triton(kernel: Row, counts: Counts) -> tritonc.Compiled:
    """What stands for a kernel, compiled."""
    assert counts.config is not None
    return tritonc.Compiled(
        cubin=IN_TRITON + f"{counts.problem.dtype} {counts.problem.head_dim}".encode(),
        ptx=b"",
        arguments=(*parameters(abi.source_of(kernel), kernel.entry), None, None),
        warps=counts.config.warps,
        sram=counts.sram.peak,
    )


@contextlib.contextmanager
def installed(module: Any) -> Iterator[Any]:
    """A `cupy` in place of the real one, or none, with nothing remembered of another."""
    caches = (arrays.cupy, arrays._framework_named, arrays._framework_of, arrays._external_stream, arrays.warm_copies,
              devices._device, kernels._compiled, kernels._loaded, plans._constant, facade._plan)  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", module)
        patch.setattr(arrays, "_unread", {})
        patch.setattr(facade, "_warm", {})
        patch.setattr(tritonc, "compile_kernel", compile_in_triton)
        for cache in caches:
            cache.cache_clear()
        yield module
    for cache in caches:
        cache.cache_clear()


class Tensor:
    """Enough of a torch tensor, over a fake GPU's memory."""

    requires_grad, is_cuda, device = False, True, "cuda:0"

    def __init__(self, x: ndarray) -> None:
        self.x, self.shape, self.dtype = x, x.shape, f"torch.{x.dtype.name}"

    def stride(self) -> tuple[int, ...]:
        if 0 in self.shape:  # torch counts an axis without elements as one of 1
            return tuple(math.prod(max(n, 1) for n in self.shape[i:]) for i in range(1, len(self.shape) + 1))
        return tuple(n // self.x.dtype.itemsize for n in self.x.strides)

    def data_ptr(self) -> int:
        return self.x.data.ptr

    def get_device(self) -> int:
        return self.x.data.device_id if self.is_cuda else -1

    def __dlpack__(self) -> None:
        raise NotImplementedError


Tensor.__module__ = "torch"
