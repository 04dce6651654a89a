"""The errors that a user meets. Each is one line that names the argument, its value and what is accepted."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, cast


class Said(str):
    """Text that an error message shows without quotes."""

    __repr__ = str.__str__


class UsageError(ValueError):
    """Bad input. The message is one line: the argument, the value, what is accepted. It shows an array by dtype and
    shape, also within a list, a tuple or a dictionary.

    >>> str(UsageError("heads", 0, "an integer of at least 1"))
    'heads = 0: expected an integer of at least 1'
    >>> import numpy as np
    >>> str(UsageError("heads", np.zeros((1000, 3)), "an integer of at least 1"))
    'heads = array of float64, (1000, 3): expected an integer of at least 1'
    >>> str(UsageError("window", (np.zeros(7), None), "a pair"))
    'window = (array of float64, (7,), None): expected a pair'
    """

    def __init__(self, argument: str, value: object, accepted: str) -> None:
        self.argument, self.value, self.accepted = argument, value, accepted
        super().__init__(f"{argument} = {_shown(value)}: expected {accepted}")

    def __reduce__(self) -> tuple[Any, ...]:
        # an exception is pickled by its message alone otherwise; its value may be known to this process only
        return _remade, (type(self), *self.args), self.__dict__ | {"value": Said(_shown(self.value))}


def _remade(kind: type[UsageError], *args: str) -> UsageError:
    return kind.__new__(kind, *args)


class SramOverflow(UsageError):
    """A block needs more shared memory than the device gives to one block. `needed` and `limit` are bytes.

    >>> str(SramOverflow("tile", "256x256", needed=262144, limit=166912, device="a100-40"))
    "tile = '256x256': expected a smaller tile: this one needs 262,144 bytes of SRAM per block, and a100-40 has 166,912"
    """

    def __init__(self, argument: str, value: object, *, needed: int, limit: int, device: str) -> None:
        self.needed, self.limit, self.device = needed, limit, device
        super().__init__(
            argument,
            value,
            f"a smaller tile: this one needs {needed:,} bytes of SRAM per block, and {device} has {limit:,}",
        )


_MOST_SHOWN = 300


def _shown(value: object) -> str:
    """A value for an error message: one short line, and each array as its dtype and shape."""
    try:
        text = repr(_without_values(value)).replace("\n", " ")
    except ValueError:  # Python writes no integer of thousands of digits
        text = f"{type(value).__name__} of thousands of digits"
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 10]} … {text[-5:]}"


def _without_values(value: Any) -> Any:
    """The value with words in place of arrays: of the value itself, or of those within a list, a tuple or a dictionary."""
    if not isinstance(value, type) and getattr(value, "shape", ()) and hasattr(value, "dtype"):
        return Said(array_in_words(value))
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {key: _without_values(x) for key, x in items}
    if isinstance(value, list | tuple):
        parts = [_without_values(x) for x in cast("Sequence[Any]", value)]
        if isinstance(value, list):
            return parts
        return value._make(parts) if hasattr(value, "_make") else tuple(parts)  # pyright: ignore
    return value


def dtype_name(x: Any) -> str:
    """The name of the dtype of any framework's array, without a prefix: "float16"."""
    return str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch.")


def array_in_words(x: Any) -> str:
    """An array for an error message: its dtype and shape, never its values."""
    shape = getattr(x, "shape", None)
    return type(x).__name__ if shape is None else f"array of {dtype_name(x)}, {tuple(shape)}"


def unknown(argument: str, value: object, known: Iterable[str]) -> UsageError:
    """The error for a name that is not one of the known ones. It suggests the nearest.

    >>> str(unknown("device", "h10", ["a100", "h100"]))
    "device = 'h10': expected one of a100, h100 (did you mean h100?)"
    """
    names = list(known)
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return UsageError(argument, value, f"one of {', '.join(names)}{hint}")


class Misnamed(UsageError, AttributeError):
    """A name that an object of a tile program doesn't have."""


def misnamed(of: str, x: object, name: str, accepted: str | None = None) -> AttributeError:
    """The error for a name that `x`, which a program calls `of`, doesn't have. It suggests the nearest.

    >>> str(misnamed("text", "", "spilt"))
    'text.spilt = unknown: expected text.split'
    """
    if name.startswith("__"):  # Python and NumPy ask for these to learn what an object can do
        return AttributeError(name)
    names = [each for each in dir(x) if not each.startswith("_")]
    near = [f"{of}.{each}" for each in difflib.get_close_matches(name, names, n=1)]
    return Misnamed(f"{of}.{name}", Said("unknown"), accepted or ", ".join(near) or f"one of {', '.join(names)}")


def among(argument: str, value: Any, known: Iterable[str]) -> str:
    """An argument that is one of these names. Raises the error for any other, and for what is no text."""
    names = list(known)
    if not isinstance(value, str) or value not in names:
        raise unknown(argument, value, names)
    return value


class Unavailable(RuntimeError):
    """This machine lacks something that the call needs (GPU, compiler, ncu). One line says what, and how to get it.

    >>> raise Unavailable("no GPU here: pip install 'cupy-cuda12x[ctk]' on a machine with one")
    Traceback (most recent call last):
        ...
    simulator.errors.Unavailable: no GPU here: pip install 'cupy-cuda12x[ctk]' on a machine with one
    """
