"""Arrays between NumPy and the frameworks, bit by bit: what simulator and emulator take, and what they give back.

With `flashlab.run.arrays`, which makes them ready for a GPU, this is the one door for arrays. Nothing here imports a
framework before an array of it turns up.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import numpy as np

from simulator.dtypes import Array, as_numpy, numpy_dtype
from simulator.errors import Said, UsageError
from simulator.problem import FP8

__all__ = [
    "UNREADABLE",
    "Empty",
    "Poisoned",
    "asked_by_torch",
    "autocast",
    "check_no_grad",
    "check_no_tangent",
    "check_shared",
    "first_line",
    "fits_kind",
    "from_numpy",
    "is_array",
    "kind_of",
    "lies_on_a_cpu",
    "like",
    "no_tangent",
    "operand",
    "package_of",
    "refused",
    "traced",
    "title_of",
    "to_numpy",
    "wants_gradient",
]


@dataclass(frozen=True)
class Empty:
    """An array for a kernel to fill: its shape and dtype, with no element written yet.

    >>> Empty((2, 3), "float16").nbytes
    12
    """

    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if type(self.shape) is not tuple or any(type(n) is not int or n < 0 for n in self.shape):
            raise UsageError("shape", self.shape, "a tuple of sizes, as in (100,) or (4, 100)")
        try:
            known = isinstance(self.dtype, str) and not numpy_dtype(self.dtype).hasobject  # pyright: ignore[reportUnnecessaryIsInstance]
        except TypeError:
            known = False
        if not known:
            raise UsageError("dtype", self.dtype, "the name of a NumPy dtype or bfloat16")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Poisoned:
    """An array of which parts belong to nobody: each is a pair of elements, from and to, as `array.reshape(-1)[32:64]` has them.

    A kernel that reads or writes there is found.

    >>> Poisoned(np.zeros((2, 64), "float32"), [(32, 64)]).parts
    ((32, 64),)
    """

    values: Any
    parts: tuple[tuple[int, int], ...]

    def __init__(self, values: Any, parts: Iterable[tuple[int, int]]) -> None:
        if not isinstance(values, Empty) and not is_array(values):
            raise UsageError("values", values, _ACCEPTED)
        size = math.prod(values.shape)
        accepted = f"pairs from:to within the array's {size:,} elements"
        try:
            pairs = tuple((operator.index(start), operator.index(stop)) for start, stop in parts)
        except (TypeError, ValueError):
            raise UsageError("parts", parts, accepted) from None
        for start, stop in pairs:
            if not 0 <= start < stop <= size:
                raise UsageError("parts", f"{start}:{stop}", accepted)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "parts", pairs)


UNREADABLE = AttributeError, BufferError, TypeError, RuntimeError, ValueError
"""What frameworks raise for an array without memory of its own: a sparse or nested one, or one that a transformation
traces."""

_CPU = 1  # of DLPack's device types
_ACCEPTED = "an array of NumPy, torch, JAX or CuPy"
_PACKAGES = {"numpy": "numpy", "torch": "torch", "cupy": "cupy", "jax": "jax", "jaxlib": "jax"}
_BITS = {"bfloat16": "int16", FP8: "uint8"}
"""Dtypes that NumPy has from ml_dtypes only, and those as which torch hands over their bits."""


@functools.lru_cache(maxsize=256)
def package_of(kind: type[Any]) -> str:
    """The framework of a type of arrays, also of somebody's subclass. For any other type it is the type's package."""
    roots = [base.__module__.partition(".")[0] for base in kind.__mro__]
    return next((_PACKAGES[root] for root in roots if root in _PACKAGES), roots[0])


def kind_of(x: object) -> str:
    """The framework of an array: "numpy", "torch", "cupy" or "jax"; for anything else, the package of its type."""
    return package_of(cast(type[Any], type(x)))


def fits_kind(name: str, x: object, q: object) -> bool:
    """Is an operand of the framework of q? Seed and offset may be NumPy's, too."""
    return kind_of(x) == kind_of(q) or (name == "rng_state" and isinstance(x, np.ndarray))


def title_of(x: object) -> str:
    """The framework of an array, as people write it."""
    return {"numpy": "NumPy", "jax": "JAX", "builtins": "Python"}.get(kind_of(x), kind_of(x))


def is_array(x: object) -> bool:
    """Is it an array, of any framework?"""
    return hasattr(x, "__dlpack__")


def lies_on_a_cpu(x: Any) -> bool:
    """Does an array say that it lies in a CPU's memory?"""
    try:
        return x.__dlpack_device__()[0] == _CPU
    except UNREADABLE:
        return False


def refused(name: str, what: str, accepted: str) -> UsageError:
    """The error for an argument that `what` describes in words."""
    return UsageError(name, Said(what), accepted)


def first_line(error: Exception) -> str:
    """The first line of a framework's message."""
    return str(error).partition("\n")[0]


def to_numpy(name: str, x: Any) -> Array:
    """Any framework's array as NumPy's, from a GPU too. `name` is the argument's.

    Memory on the CPU is shared. A tensor that requires grad is read as any other is. Raises `UsageError` for what is no
    array, and for an array without values to read.
    """
    if isinstance(x, np.ndarray):
        return as_numpy(name, x)
    kind = kind_of(x)
    if kind == "cupy":
        return x.get()
    if kind == "torch" and x.is_cuda:
        x = x.cpu()  # outside of the try: a GPU's fault may surface here, and is no bad input
    try:
        if kind == "torch":
            dtype = str(x.dtype).removeprefix("torch.")
            if bits := _BITS.get(dtype):
                return x.detach().view(getattr(sys.modules["torch"], bits)).numpy().view(numpy_dtype(dtype))
            return x.numpy(force=True)
        if hasattr(x, "__array__"):
            return np.asarray(x)
        if lies_on_a_cpu(x):
            return np.from_dlpack(x)
    except UNREADABLE as error:
        what = f"{title_of(x)} array without values to read ({first_line(error)})"
        raise refused(name, what, _ACCEPTED) from error
    raise UsageError(name, type(x).__name__, _ACCEPTED)


def operand(name: str, x: Any) -> Array:
    """An operand as NumPy's array. CuPy has no 8-bit floats: their bits come from it as uint8."""
    values = to_numpy(name, x)
    floats = kind_of(x) == "cupy" and values.dtype == np.uint8 and name != "mask"
    return values.view(numpy_dtype(FP8)) if floats else values


def writable(name: str, x: Any) -> Array:
    """An output that is written in place, as NumPy's. Raises `UsageError` for what mustn't be written, or can't be from a CPU."""
    check_shared(name, x)
    values = to_numpy(name, x)  # which refuses a masked array: a hard mask keeps what lies under it as it is
    if not values.flags.writeable:
        raise UsageError(name, "read-only array", "one that can be written")
    return values


def check_shared(name: str, x: Any) -> None:
    """Raises `UsageError` for an array that code on a CPU can't write in place: NumPy would get a copy of it."""
    if not is_array(x) or kind_of(x) not in ("numpy", "torch") or (kind_of(x) == "torch" and x.is_cuda):
        accepted = "a NumPy array or a torch tensor on a CPU: no other is written in place there"
        raise UsageError(name, type(x).__name__, accepted)


def from_numpy(values: Array, kind: str, device: Any = None) -> Any:
    """NumPy's array as one of "numpy", "torch", "cupy" or "jax", on one of the framework's devices (None: its default).

    CuPy gets 8-bit floats as uint8. Memory on the CPU may be shared.
    """
    if kind == "torch":
        torch: Any = import_module("torch")
        dtype, whole = values.dtype.name, np.require(values, requirements=("C", "W"))
        if bits := _BITS.get(dtype):
            return torch.from_numpy(whole.view(bits)).view(getattr(torch, dtype)).to(device=device)
        return torch.from_numpy(whole).to(device=device)
    if kind == "cupy":
        bits = values.view(np.uint8) if values.dtype == numpy_dtype(FP8) else values
        with nullcontext() if device is None else device:
            return import_module("cupy").asarray(bits)
    return import_module("jax").device_put(values, device) if kind == "jax" else values


def like(x: Any, values: Array) -> Any:
    """NumPy's array as one of the framework of `x`, on its device."""
    return from_numpy(values, kind_of(x), getattr(x, "device", None))


def wants_gradient(x: Any) -> bool:
    """Is it a torch tensor through which a gradient is to flow?"""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled()


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """Torch's tensors as `torch.autocast` would have them where the first lies, if it is on; anything else as it is.

    Torch's own attention does so, too: floats of 16 and 32 bits become autocast's dtype, and no others.
    """
    torch = _torch_of(tensors[0])
    if torch is None:
        return tensors
    device = "cuda" if tensors[0].is_cuda else "cpu"
    if not torch.is_autocast_enabled(device):
        return tensors
    floats, dtype = (torch.float32, torch.float16, torch.bfloat16), torch.get_autocast_dtype(device)
    return tuple([x.to(dtype) if getattr(x, "dtype", None) in floats else x for x in tensors])


def asked_by_torch(x: Any) -> bool:
    """Does torch compile, transform or cast what is called with this tensor? One look, because each warm call has it."""
    torch = _torch_of(x)
    return torch is not None and (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
    )


def traced(x: Any) -> bool:
    """Does torch compile or transform what is called with this tensor?"""
    torch = _torch_of(x)
    return torch is not None and (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


def _torch_of(tensor: Any) -> Any:
    """torch, if this is one of its tensors. Its compiler reads these lines, too: it would watch all of `sys.modules`, doesn't enter
    `import_module`, and not each version knows each method of a text."""
    if type(tensor).__module__[:5] != "torch":
        return None
    import torch  # pyright: ignore[reportMissingImports]

    return torch


def _has_tangent(x: Any) -> bool:
    """Is it a torch tensor whose derivative is carried along, by forward-mode differentiation?"""
    torch = _torch_of(x)
    if torch is None or torch.autograd.forward_ad._current_level < 0:  # no level is open in almost every call
        return False
    return torch.autograd.forward_ad.unpack_dual(x).tangent is not None


def check_no_tangent(name: str, x: Any) -> None:
    """Refuses a torch tensor that forward-mode differentiation carries a tangent with: it would be lost."""
    if _has_tangent(x):
        raise no_tangent(name)


def no_tangent(name: str) -> UsageError:
    """The error for a torch tensor that has one."""
    accepted = "one without: no kernel has forward-mode derivatives; reverse mode has them, as in torch.func.vjp"
    return refused(name, "torch tensor with a tangent", accepted)


def check_no_grad(name: str, x: Any) -> None:
    """Refuses a torch tensor whose gradient would be lost, because the result is a tensor without one."""
    if kind_of(x) != "torch":
        return
    check_no_tangent(name, x)
    if wants_gradient(x):
        accepted = "one that doesn't: no gradient flows through it here; call under torch.no_grad(), or on .detach()"
        raise refused(name, "torch tensor that requires grad", accepted)
