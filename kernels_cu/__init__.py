"""The CUDA sources, one `.cu` per algorithm: this package only says where they lie.

>>> source("flash2").name
'flash2.cu'
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

__all__ = ["emulator_dir", "include_dir", "source", "sources_in"]

_HERE = Path(__file__).resolve().parent
_root = ContextVar("root", default=_HERE)


@contextmanager
def sources_in(folder: Path) -> Generator[None]:
    """Inside the block, kernels and their headers are those of another revision's `kernels_cu`.

    >>> with sources_in(Path("/old/kernels_cu")):
    ...     include_dir() == Path("/old/kernels_cu/include")
    True
    """
    token = _root.set(folder)
    try:
        yield
    finally:
        _root.reset(token)


def source(name: str) -> Path:
    """The `.cu` of an algorithm; of one that isn't ours, the file that its row names by its path.

    >>> source("standard").is_file()
    True
    """
    path = Path(name) if name.endswith(".cu") else _root.get() / f"{name}.cu"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in _root.get().glob("*.cu")))
        raise ValueError(f"name={name!r}: no such kernel; there are {known}")
    return path


def include_dir() -> Path:
    """The folder of the headers that every `.cu` includes by name.

    >>> include_dir().is_dir()
    True
    """
    return _root.get() / "include"


def emulator_dir() -> Path:
    """The folder of the C++ that runs the kernels on a CPU.

    >>> emulator_dir().is_dir()
    True
    """
    return _HERE / "emulator"
