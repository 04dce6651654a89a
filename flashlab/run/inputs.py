"""Real q, k, v: the sample that comes with flashlab, and the user's own from a file."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from flashlab.base.files import parsed, path_of
from simulator import UsageError
from simulator.memory import check_memory
from simulator.operations.attention import problem_of

Array = NDArray[Any]

_NAMES = ("q", "k", "v")
_SUFFIXES = (".npz", ".safetensors")
_FLOATS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.float16): np.dtype(np.float16),
    np.dtype(bfloat16): np.dtype(bfloat16),
    np.dtype(np.float32): np.dtype(np.float32),
    np.dtype(np.float64): np.dtype(np.float32),  # no kernel stores float64
}
"""What a file may hold, and what is made of it."""

_SAFETENSORS = {"F16": np.dtype("<f2"), "BF16": np.dtype(bfloat16), "F32": np.dtype("<f4"), "F64": np.dtype("<f8")}


class InputError(UsageError):
    """A file that holds no q, k, v that attention could take. One line: which file, what in it, what is accepted.

    >>> import flashlab as fl
    >>> fl.load_inputs("mine.npy")
    Traceback (most recent call last):
        ...
    flashlab.run.inputs.InputError: path = 'mine.npy': expected a file whose name ends in .npz or .safetensors
    """


@dataclass(frozen=True, eq=False)
class Inputs:
    """q, k and v, each (batch, heads, length, head_dim), with what is known about them; unpacks into the three.

    >>> import flashlab as fl
    >>> q, k, v = data = fl.sample()
    >>> q.shape, k.shape, str(q.dtype), data.causal
    ((1, 4, 1024, 64), (1, 2, 1024, 64), 'float16', True)
    """

    q: Array
    k: Array
    v: Array
    causal: bool | None = None
    """Whether the model that they are from masks the future; None where the file doesn't say."""
    tokens: NDArray[np.uint16] | None = None
    """The sample's token ids, (length,)."""
    pieces: tuple[str, ...] = ()
    """The sample's text, token by token."""
    note: dict[str, Any] = field(default_factory=dict[str, Any])
    """Where they are from: source, licence, model, layer and heads; and what was converted on loading."""

    def __iter__(self) -> Iterator[Array]:
        return iter((self.q, self.k, self.v))

    @property
    def text(self) -> str:
        """The text that the sample's queries and keys stand on."""
        return "".join(self.pieces)


def sample() -> Inputs:
    """Real q, k, v: four heads, over two KV heads, of a small trained transformer reading 1,024 tokens of Python.

    The model, how it was trained and on what: docs/capture.md; `.note` sums it up.

    >>> import flashlab as fl
    >>> data = fl.sample()
    >>> data.text.splitlines()[0]
    'def _nextmonth(year, month):'
    >>> data.note["titles"][3], data.note["scores"][3]["induction"] > 0.5
    ('induction', True)
    """
    with files("flashlab").joinpath("data", "sample.npz").open("rb") as file, np.load(file) as saved:
        note = json.loads(saved["note"].item())
        return Inputs(
            saved["q"],
            saved["k"],
            saved["v"],
            causal=note["causal"],
            tokens=saved["tokens"],
            pieces=tuple(saved["pieces"].tolist()),
            note=note,
        )


def load_inputs(path: str | PathLike[str]) -> Inputs:
    """The user's own q, k, v from a `.npz` or `.safetensors` file with arrays of these names.

    Each is (batch, heads, length, head_dim), or (heads, length, head_dim) for a batch of one; float16, bfloat16,
    float32, or float64, which is rounded to float32 and said so in `.note["converted"]`. The metadata of a `.safetensors`
    file, as `flashlab capture` writes it, is in `.note`, and its `causal` in `.causal`. Anything else is an `InputError`.

    >>> import flashlab as fl, numpy as np
    >>> x = np.random.default_rng(0).standard_normal((2, 5, 8))
    >>> np.savez("mine.npz", q=x, k=x[:1], v=x[:1])
    >>> q, k, v = data = fl.load_inputs("mine.npz")
    >>> q.shape, k.shape, data.note["converted"]
    ((1, 2, 5, 8), (1, 1, 5, 8), 'q, k, v: float64 to float32')
    """
    try:
        file = path_of("path", path)
        there = file.is_file()
    except (ValueError, OSError):
        raise InputError("path", path, "the name of a file") from None
    if file.suffix not in _SUFFIXES:
        raise InputError("path", str(file), f"a file whose name ends in {' or '.join(_SUFFIXES)}")
    if not there:
        raise InputError("path", str(file), "a file, and there is none of this name")
    found, note = _from_npz(file) if file.suffix == ".npz" else _from_safetensors(file)
    converted: dict[str, list[str]] = {}
    arrays: list[Array] = []
    for name in _NAMES:
        x = _checked(f"{file.name}: {name}", found[name])
        if x.dtype != found[name].dtype.newbyteorder("="):
            converted.setdefault(f"{_dtype_name(found[name].dtype)} to {x.dtype}", []).append(name)
        arrays.append(x)
    if converted:
        note["converted"] = "; ".join(f"{', '.join(names)}: {what}" for what, names in converted.items())
    try:
        problem_of(*arrays)
    except UsageError as error:
        raise InputError(f"{file.name}: {error.argument}", error.value, error.accepted) from None
    return Inputs(*arrays, causal={"true": True, "false": False}.get(str(note.get("causal")).lower()), note=note)


def _checked(name: str, x: Array) -> Array:
    """An array that is fit for attention, in C order and the machine's byte order."""
    if x.ndim not in (3, 4):
        raise InputError(f"{name}.shape", x.shape, "(batch, heads, length, head_dim) or (heads, length, head_dim)")
    if 0 in x.shape:
        raise InputError(f"{name}.shape", x.shape, "at least one element")
    dtype = _FLOATS.get(x.dtype.newbyteorder("="))
    if dtype is None:
        raise InputError(f"{name}.dtype", _dtype_name(x.dtype), f"one of {', '.join(map(str, _FLOATS))}")
    # float64 may hold what float32 cannot: that is an infinity from here on, and refused below with its place
    with np.errstate(over="ignore"):
        kept = np.ascontiguousarray(x, dtype)
    bad = ~np.isfinite(kept)
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        raise InputError(f"{name}[{', '.join(map(str, place))}]", float(x[place]), f"finite numbers within {dtype}")
    return kept if kept.ndim == 4 else kept[None]


def _from_npz(file: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    if not zipfile.is_zipfile(file):
        raise InputError("path", str(file), "an archive as numpy.savez writes it")
    found: dict[str, Array] = {}
    with _readable("path", str(file)), file.open("rb") as opened, np.load(opened, allow_pickle=False) as archive:
        _need_all(file, archive.files)
        sizes = [
            member.file_size for member in archive.zip.infolist() if member.filename.removesuffix(".npy") in _NAMES
        ]
        check_memory(
            f"q, k and v of {file.name}", sum(sizes) + max(sizes)
        )  # of one at a time, which numbers are finite
        for name in _NAMES:
            with _readable(f"{file.name}: {name}", "unreadable"):
                x: Array | bytes = archive[name]
            if isinstance(x, bytes):  # a member that is no .npy
                raise InputError(f"{file.name}: {name}", "bytes", "an array")
            found[name] = x.view(bfloat16) if x.dtype == np.dtype("V2") else x  # what NumPy makes of it on saving
    return found, {}


def _from_safetensors(file: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    import safetensors

    with _readable("path", str(file)):
        raw = file.read_bytes()
        tensors: dict[str, dict[str, Any]] = dict(safetensors.deserialize(raw))  # pyright: ignore  (it has no types)
        header = parsed(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    _need_all(file, tensors)
    found: dict[str, Array] = {}
    for name in _NAMES:
        # not safetensors.numpy, which reads bfloat16 in some versions only
        tensor = tensors[name]
        dtype = _SAFETENSORS.get(tensor["dtype"])
        if dtype is None:
            raise InputError(f"{file.name}: {name}.dtype", tensor["dtype"], f"one of {', '.join(_SAFETENSORS)}")
        found[name] = np.frombuffer(tensor["data"], dtype).reshape(tensor["shape"])
    said: dict[str, Any] = header.get("__metadata__") or {}
    return found, {
        name: text for name, text in said.items() if name != "converted"
    }  # that is what this module says itself


def _need_all(file: Path, names: Iterable[str]) -> None:
    names = sorted(names)  # safetensors gives them in any order
    if missing := [name for name in _NAMES if name not in names]:
        shown = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
        raise InputError(
            "path", str(file), f"arrays q, k and v in it; {', '.join(missing)} missing among: {shown or 'none'}"
        )


@contextmanager
def _readable(argument: str, value: object) -> Generator[None, None, None]:
    """Whatever is wrong with a stranger's file, said in one line: its parsers raise a dozen kinds of errors."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(argument, value, f"what can be read without pickle ({reason})") from None


def _dtype_name(dtype: np.dtype[Any]) -> str:
    return str(dtype.newbyteorder("="))
