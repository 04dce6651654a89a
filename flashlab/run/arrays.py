"""Arrays of CuPy, torch, JAX and any library that speaks DLPack, as a kernel sees them: a pointer, a shape, strides, a stream.

With `flashlab.base.host`, which reads and makes arrays on the CPU, this is the one door for arrays. Nothing here imports a
framework before an array of it turns up. CuPy, which allocates and copies, is imported late.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib import import_module
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np

from flashlab.base.host import UNREADABLE, check_no_grad, first_line, lies_on_a_cpu, package_of, refused, title_of
from simulator.dtypes import Array, numpy_dtype
from simulator.errors import Unavailable, UsageError
from simulator.problem import FP8, ITEMSIZE, WIDTH, row_bytes

__all__ = [
    "EMULATOR",
    "Allocate",
    "Framework",
    "Read",
    "View",
    "cache_refused",
    "check_apart",
    "check_contiguous",
    "checked",
    "copy",
    "cupy",
    "dense",
    "framework",
    "framework_of",
    "from_the_pool",
    "host_view",
    "is_aligned",
    "padded_like",
    "read",
    "unread",
    "warm_copies",
    "with_state",
]

_INSTALL = "pip install 'cupy-cuda12x[ctk]' (a CUDA 12 driver) or 'cupy-cuda13x[ctk]'"
EMULATOR = 'backend="emulator" runs the kernels on the CPU'
"""What to do without a GPU."""
_ON_GPU = f"a CuPy, torch or JAX array in GPU memory ({EMULATOR})"
_DTYPES = " or ".join(ITEMSIZE)  # of q, k and v; other operands may be of any in WIDTH
_CUDA, _CUDA_MANAGED = 2, 13  # DLPack's device types
_NOT_READ = (*UNREADABLE, StopIteration, Unavailable)
_ANYWHERE = nullcontext()


@functools.cache
def cupy() -> Any:
    """CuPy, once it is sure that it finds a GPU. Raises `Unavailable`."""
    try:
        cupy: Any = import_module("cupy")
    except ImportError:
        raise Unavailable(f"the GPU backend needs CuPy: {_INSTALL}") from None
    except OSError as error:
        raise cache_refused(error) from None
    runtime = cupy.cuda.runtime
    try:
        devices = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise Unavailable(f"CuPy finds no GPU ({error}): the GPU backend needs an NVIDIA GPU and its driver") from None
    if not devices:
        raise Unavailable("CuPy finds no GPU: the GPU backend needs an NVIDIA GPU that this process may see")
    return cupy


def cache_refused(error: OSError) -> Unavailable:
    """CuPy keeps what it compiles, and does nothing where it can't."""
    return Unavailable(
        f"CuPy can't keep what it compiles ({error}): set CUPY_CACHE_DIR to a folder that can be written"
    )


class View(NamedTuple):
    """An array in GPU memory. `pointer` is that of its first element, `strides` are bytes, `owner` keeps it alive."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int
    owner: Any

    @property
    def span(self) -> tuple[int, int]:
        """The addresses from the first byte to one past the last."""
        if 0 in self.shape:
            return self.pointer, self.pointer
        low = high = self.pointer
        for n, stride in zip(self.shape, self.strides, strict=True):
            if stride > 0:
                high += (n - 1) * stride
            else:
                low += (n - 1) * stride
        return low, high + WIDTH[self.dtype]


Read = tuple[Mapping[str, Any], list[Any], list[int]]
"""Arrays by name as a framework's `view` takes them, what a call needs to know of them beside pointers, and the pointers. The
framework comes first among what it needs to know."""

Allocate = Callable[[int], tuple[int, Any]]
"""Bytes of GPU memory, uninitialised: a pointer, and what holds it."""

_captured: list[Any] = []  # what a graph's replays go on using
_unread: dict[tuple[int, int], Any] = {}  # never given back, for the same reason


def from_the_pool(nbytes: int) -> tuple[int, Any]:
    """Memory of CuPy's pool; in a captured stream it is never given back, because the graph's replays use it."""
    cuda = cupy().cuda
    memory = cuda.alloc(nbytes)
    if cuda.get_current_stream().is_capturing():
        _captured.append(memory)
    return memory.ptr, memory


def unread(nbytes: int, device: int) -> Any:
    """Memory of the current `device` for what a kernel writes and no code reads: all calls share it, on any stream."""
    key = device, max(0, nbytes - 1).bit_length()
    if key not in _unread:
        _unread.setdefault(key, cupy().cuda.alloc(1 << key[1]))
    return _unread[key]


class Framework(ABC):
    """What differs between the frameworks."""

    writable = True
    """Whether arrays can be written in place, as `out=`. If not, they are not the framework's own that kernels get: `shared` is."""
    pointer: ClassVar[Any]
    """The function that says where an array of `maker` lies."""

    def shared(self, given: dict[str, Any]) -> dict[str, Any]:
        """Arrays by name, as `view` takes them. They must be held while kernels may use their memory."""
        return given

    @abstractmethod
    def view(self, name: str, x: Any) -> View:
        """An array as a kernel sees it; `name` is the argument's. Raises `UsageError` for one that isn't in GPU memory, or of a
        dtype that no kernel takes."""

    def views(self, held: Mapping[str, Any]) -> dict[str, View]:
        """Arrays by name as views, all on one GPU, without those that are None. Raises `UsageError`."""
        views = {name: self.view(name, x) for name, x in held.items() if x is not None}
        (first, like), *others = views.items()
        for name, x in others:
            if x.device != like.device:
                raise UsageError(f"{name}.device", x.device, f"GPU {like.device}, where {first} lies")
        return views

    @abstractmethod
    def read(self, given: Mapping[str, Any]) -> Read:
        """The arrays as `view` takes them, all that a call's checks depend on but for pointers, and the pointers.

        A warm call looks at its arrays here alone. So this judges nothing: it raises one of `UNREADABLE` where `view` may have
        something to say. What is None is left out.
        """

    @abstractmethod
    def maker(self, shape: tuple[int, ...], dtype: str, device: int) -> Callable[[], Any]:
        """What makes a new array, uninitialised and dense, while the device is current."""

    @abstractmethod
    def numbers(self, values: Array, like: Any) -> Any:
        """NumPy's array, a small one, where another array lies and in the order of the framework's stream there."""

    @abstractmethod
    def queue(self, device: int) -> int:
        """The pointer to the framework's current stream on a device, which is the current one."""

    @abstractmethod
    def stream(self, device: int) -> AbstractContextManager[Any]:
        """Makes the device and the framework's current stream there CuPy's."""

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        """Bytes for a call's workspaces: of the framework's own allocator, which knows its streams and its graphs."""
        return from_the_pool(nbytes)

    def hand_back(self, x: Any, like: Any) -> Any:
        """What a maker made, written by now, as an array of the kind of `like`, which came in."""
        del like
        return x


class _CupyArrays(Framework):
    pointer = operator.attrgetter("data.ptr")

    def __init__(self) -> None:
        self._runtime = cupy().cuda.runtime

    def read(self, given: Mapping[str, Any]) -> Read:
        layout: list[Any] = [self]
        pointers: list[int] = []
        for name, x in given.items():
            if x is not None:
                memory = x.data
                layout += name, x.shape, x.strides, x.dtype, memory.device_id
                pointers.append(memory.ptr)
        return given, layout, pointers

    def view(self, name: str, x: Any) -> View:
        return View(x.data.ptr, x.shape, x.strides, _dtype_name(name, x.dtype), x.data.device_id, x)

    def maker(self, shape: tuple[int, ...], dtype: str, device: int) -> Callable[[], Any]:
        return functools.partial(cupy().empty, shape, numpy_dtype(dtype))

    def numbers(self, values: Array, like: Any) -> Any:
        with self.stream(like.data.device_id):
            return cupy().asarray(values)

    def queue(self, device: int) -> int:
        return cupy().cuda.get_current_stream().ptr

    def stream(self, device: int) -> AbstractContextManager[Any]:
        return _ANYWHERE if self._runtime.getDevice() == device else cupy().cuda.Device(device)


class _DlpackArrays(_CupyArrays):
    """JAX and others: their buffers through DLPack, on CuPy's stream, and synchronised before they get one back."""

    writable = False

    def shared(self, given: dict[str, Any]) -> dict[str, Any]:
        return {name: self._shared(name, x) for name, x in given.items()}

    def read(self, given: Mapping[str, Any]) -> Read:
        return super().read(self.shared({name: x for name, x in given.items() if x is not None}))

    @staticmethod
    def _shared(name: str, x: Any) -> Any:
        try:
            kind, _ = x.__dlpack_device__()
            if kind not in (_CUDA, _CUDA_MANAGED):
                raise refused(name, f"{title_of(x)} array on the CPU", _ON_GPU)
            if ready := getattr(x, "block_until_ready", None):
                ready()
            return cupy().from_dlpack(x)
        except UNREADABLE as error:
            if isinstance(error, UsageError):
                raise
            raise refused(
                name, f"{title_of(x)} array without a buffer of its own ({first_line(error)})", _ON_GPU
            ) from error

    def hand_back(self, x: Any, like: Any) -> Any:
        cupy().cuda.get_current_stream().synchronize()
        if not hasattr(like, "__array_namespace__"):
            return x
        namespace = like.__array_namespace__()
        if not x.size:  # no memory to share
            return namespace.zeros(x.shape, dtype=getattr(namespace, x.dtype.name))
        return namespace.from_dlpack(x)


class _TorchArrays(Framework):
    pointer = operator.methodcaller("data_ptr")

    def __init__(self) -> None:
        self._torch: Any = sys.modules["torch"]
        self._names = {getattr(self._torch, name): name for name in WIDTH if hasattr(self._torch, name)}
        self._dtypes = {name: dtype for dtype, name in self._names.items()}
        self._here = self._torch.device("cuda")
        self._runtime = cupy().cuda.runtime
        self._forward = self._torch.autograd.forward_ad

    def view(self, name: str, x: Any) -> View:
        if not x.is_cuda:
            raise refused(name, f"torch tensor on {x.device}", _ON_GPU)
        check_no_grad(name, x)
        try:
            pointer, shape, steps = x.data_ptr(), tuple(x.shape), x.stride()
        except RuntimeError as error:  # sparse or nested, or traced by a transformation
            raise refused(name, f"torch tensor without a buffer of its own ({first_line(error)})", _ON_GPU) from error
        if (dtype := self._names.get(x.dtype)) is None:
            raise refused(f"{name}.dtype", str(x.dtype), _DTYPES)
        return View(pointer, shape, tuple([n * WIDTH[dtype] for n in steps]), dtype, x.get_device(), x)

    def read(self, given: Mapping[str, Any]) -> Read:
        layout: list[Any] = [self]
        pointers: list[int] = []
        lost = self._torch.is_grad_enabled()
        if self._forward._current_level >= 0:
            raise ValueError("a tangent")
        for name, x in given.items():
            if x is not None:
                if lost and x.requires_grad:
                    raise ValueError(name)
                layout += name, x.shape, x.stride(), x.dtype, x.get_device()
                pointers.append(x.data_ptr())
        return given, layout, pointers

    def maker(self, shape: tuple[int, ...], dtype: str, device: int) -> Callable[[], Any]:
        options = {"dtype": self._dtypes[dtype], "device": self._torch.device("cuda", device)}
        return functools.partial(self._torch.empty_strided, shape, dense(shape), **options)

    def numbers(self, values: Array, like: Any) -> Any:
        return self._torch.from_numpy(values).to(like.device)

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        memory = self._torch.empty_strided((nbytes,), (1,), dtype=self._torch.uint8, device=self._here)
        return memory.data_ptr(), memory

    def queue(self, device: int) -> int:
        # torch.cuda.current_stream() makes an object for each call, which takes ten times as long
        return self._torch._C._cuda_getCurrentRawStream(device)

    def stream(self, device: int) -> AbstractContextManager[Any]:
        if self._runtime.getDevice() == device:
            return _external_stream(self.queue(device), device)
        stack = ExitStack()
        stack.enter_context(cupy().cuda.Device(device))
        stack.enter_context(_external_stream(self.queue(device), device))
        return stack


class _Stream:
    """A CUDA stream by its handle, in the protocol that CuPy takes others' streams in."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


@functools.lru_cache(maxsize=256)
def _external_stream(pointer: int, device: int) -> Any:
    """CuPy's object for a framework's stream of the current device; handles repeat, and so does the object."""
    del device  # part of the key: the default stream's handle is the same everywhere
    streams = cupy().cuda.Stream
    return streams.from_external(_Stream(pointer)) if pointer else streams.null


@functools.cache
def _framework_named(root: str) -> Framework:
    return {"cupy": _CupyArrays, "torch": _TorchArrays}.get(root, _DlpackArrays)()


@functools.lru_cache(maxsize=256)
def _framework_of(kind: type[Any]) -> Framework | None:
    """The framework of a type of arrays. None for NumPy's, and for a type that isn't one of arrays."""
    if issubclass(kind, np.ndarray | np.generic) or not hasattr(kind, "__dlpack__"):
        return None
    return _framework_named(package_of(kind))


def framework(name: str, x: Any) -> Framework:
    """The framework of an array; `name` is the argument's, for the error.

    Raises `UsageError` for anything but an array on a GPU, and `Unavailable` without CuPy or a GPU.
    """
    try:
        found = _framework_of(cast(type[Any], type(x)))
    except Unavailable:
        if lies_on_a_cpu(x):  # a GPU would be of no use to it
            raise refused(name, f"{title_of(x)} array on the CPU", _ON_GPU) from None
        raise
    if found is None:
        raise refused(name, f"{title_of(x)} {'array' if isinstance(x, np.ndarray) else type(x).__name__}", _ON_GPU)
    return found


def framework_of(given: Mapping[str, Any]) -> Framework:
    """The one framework of arrays by name. Raises `UsageError` for arrays of several kinds, as `framework` does."""
    (first, like), *others = given.items()
    of = framework(first, like)
    for name, x in others:
        if type(x) is not type(like) and framework(name, x) is not of:
            raise UsageError(name, type(x).__name__, f"an array of the same kind as {first} ({type(like).__name__})")
    return of


def read(given: Mapping[str, Any]) -> Read | None:
    """What `Framework.read` says of a warm call's arrays. It is None where `checked` may have to refuse one."""
    try:
        return _framework_of(next(iter(given.values())).__class__).read(given)  # pyright: ignore[reportOptionalMemberAccess]
    except _NOT_READ:
        return None


def checked(given: Mapping[str, Any]) -> Read:
    """The same for a call's first time. Raises `UsageError` for arrays that aren't in GPU memory, or not all of one kind, and
    `Unavailable` without CuPy or a GPU."""
    found = {name: x for name, x in given.items() if x is not None}
    of = framework_of(found)
    of.views(of.shared(found))
    return of.read(found)


def with_state(found: Read, state: Array) -> Read:
    """The same with seed and offset of dropout, which are copied to where the other arrays lie."""
    held, layout, pointers = found
    x = layout[0].numbers(state, next(iter(held.values())))
    _, more, last = layout[0].read({"rng_state": x})
    return {**held, "rng_state": x}, layout + more[1:], pointers + last


@functools.cache
def _dtype_names() -> dict[Any, str]:
    # CuPy has no float8: its bits come as uint8
    return {numpy_dtype(name): name for name in WIDTH} | {np.dtype(np.uint8): FP8}


def _dtype_name(name: str, dtype: Any) -> str:
    if name == "mask" and dtype == np.uint8:  # bytes, and not the bits of floats
        return "uint8"
    if found := _dtype_names().get(dtype):
        return found
    raise refused(f"{name}.dtype", str(dtype), _DTYPES)


def dense(shape: tuple[int, ...], width: int = 1) -> tuple[int, ...]:
    """The strides of an array without gaps, in elements, or in bytes if `width` is an element's."""
    return tuple(width * math.prod(shape[i:]) for i in range(1, len(shape) + 1))


def is_aligned(view: View) -> bool:
    """Can a kernel take an array as it lies? Its last axis is contiguous, its base and strides are multiples of 16 bytes."""
    *outer, inner = view.strides
    if functools.reduce(int.__or__, outer, view.pointer) & 15:
        return 0 in view.shape
    return inner == WIDTH[view.dtype] or view.shape[-1] == 1 or 0 in view.shape


def padded_like(view: View, allocate: Allocate = from_the_pool) -> View:
    """A new buffer of an array's shape whose rows are padded to 16 bytes; uninitialised, on the current stream."""
    row = row_bytes(view.shape[-1], WIDTH[view.dtype])
    strides = [WIDTH[view.dtype], row]
    for n in view.shape[:0:-1][1:]:
        strides.append(strides[-1] * n)
    pointer, memory = allocate(strides[-1] * view.shape[0])
    return View(pointer, view.shape, tuple(strides[::-1]), view.dtype, view.device, memory)


def copy(source: View, target: View) -> None:
    """Copies values bit by bit, on the current stream."""
    if 0 not in source.shape:
        _bits(target)[...] = _bits(source)


@functools.cache
def warm_copies(dtype: str, device: int) -> None:
    """Copies dense rows into padded ones and back on the current `device`: CuPy compiles what does that at the first time."""
    row = cupy().zeros((1, 1, 2, 3), f"u{WIDTH[dtype]}")
    dense = View(row.data.ptr, row.shape, row.strides, dtype, device, row)
    padded = padded_like(dense)
    copy(dense, padded)
    copy(padded, dense)


def _bits(view: View) -> Any:
    """A view as CuPy's array of integers of the same width. Copies leave these as they are, NaNs too."""
    cuda = cupy().cuda
    low, high = view.span
    memory = cuda.MemoryPointer(cuda.UnownedMemory(low, high - low, view.owner, view.device), view.pointer - low)
    bits = np.dtype(f"u{WIDTH[view.dtype]}")
    return cupy().ndarray(view.shape, bits, memory, strides=view.strides)


def check_apart(outputs: Mapping[str, View], inputs: Mapping[str, View]) -> None:
    """Refuses an output that isn't apart from the inputs, from the other outputs and from itself. Raises `UsageError`."""
    others = dict(inputs)
    for name, output in outputs.items():
        if _overlaps_itself(output):
            raise UsageError(f"{name}.strides", output.strides, "elements that don't overlap each other")
        for other, x in others.items():
            if _overlap(output, x):
                apart = "inputs" if other in inputs else "other outputs"
                raise UsageError(name, f"memory shared with {other}", f"an array apart from the {apart}")
        others[name] = output


def check_contiguous(name: str, x: View) -> None:
    """Raises `UsageError` for an array that has gaps: of vectors, kernels get a pointer and no strides.

    An array without elements has none: frameworks differ in its strides.
    """
    if 0 in x.shape:
        return
    wanted = dense(x.shape, WIDTH[x.dtype])
    if any(n > 1 and has != want for n, has, want in zip(x.shape, x.strides, wanted, strict=True)):
        raise UsageError(f"{name}.strides", x.strides, "a contiguous array")


def _overlap(a: View, b: View) -> bool:
    """Do two arrays share an element? Interleaved ones don't. Where it takes too long to find out, the answer is yes."""
    (a_low, a_high), (b_low, b_high) = a.span, b.span
    if a_high <= b_low or b_high <= a_low:
        return False
    try:
        return np.shares_memory(_addresses(a), _addresses(b), max_work=100_000)  # pyright: ignore[reportArgumentType]
    except np.exceptions.TooHardError:
        return True


def _overlaps_itself(view: View) -> bool:
    """May two elements of an array lie at the same address, as after broadcasting?"""
    if 0 in view.shape:
        return False
    reach = 0
    axes: Sequence[tuple[int, int]] = [(abs(s), n) for n, s in zip(view.shape, view.strides, strict=True) if n > 1]
    for stride, n in sorted(axes):
        if stride < reach + WIDTH[view.dtype]:
            return True
        reach += stride * (n - 1)
    return False


class _Addresses:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _addresses(view: View) -> np.ndarray[Any, Any]:
    """A NumPy array at a view's addresses, for NumPy to compare. Its elements may not be read."""
    typestr = f"<u{WIDTH[view.dtype]}"
    return np.asarray(_Addresses({
        "data": (view.pointer, True), "shape": view.shape, "strides": view.strides, "typestr": typestr, "version": 3,
    }))  # fmt: skip


def host_view(name: str, x: Array) -> View:
    """NumPy's array as a view. Raises `UsageError` for a dtype that no operand has."""
    return View(x.ctypes.data, x.shape, x.strides, _dtype_name(name, x.dtype), 0, x)
