"""The CUDA sources, one `.cu` per algorithm: this package only says where they lie.

>>> source("flash2").name
'flash2.cu'
"""

from pathlib import Path

__all__ = ["emulator_dir", "include_dir", "source"]

_HERE = Path(__file__).resolve().parent


def source(name: str) -> Path:
    """The `.cu` of an algorithm; of one that isn't ours, the file that its row names by its path.

    >>> source("standard").is_file()
    True
    """
    path = Path(name) if name.endswith(".cu") else _HERE / f"{name}.cu"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in _HERE.glob("*.cu")))
        raise ValueError(f"name={name!r}: no such kernel; there are {known}")
    return path


def include_dir() -> Path:
    """The folder of the headers that every `.cu` includes by name.

    >>> include_dir().is_dir()
    True
    """
    return _HERE / "include"


def emulator_dir() -> Path:
    """The folder of the C++ that runs the kernels on a CPU.

    >>> emulator_dir().is_dir()
    True
    """
    return _HERE / "emulator"
