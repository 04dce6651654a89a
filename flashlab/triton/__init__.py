"""The kernels in Triton, a module for each algorithm: this package only says where they lie.

It imports nothing. A kernel's module imports Triton, and `flashlab.run.tritonc` imports the module.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["source"]

_HERE = Path(__file__).resolve().parent


def source(name: str) -> Path:
    """The module of an algorithm's kernel; of one that isn't ours, the file that its row names by its path.

    >>> source("flash2_triton").name
    'flash2_triton.py'
    """
    path = Path(name) if name.endswith(".py") else _HERE / f"{name}.py"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in _HERE.glob("*_triton.py")))
        raise ValueError(f"name={name!r}: no such kernel; there are {known}")
    return path
