"""Several GPUs: attention whose rows, keys or heads lie on several ranks, and the bytes that pass between them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from flashlab.parallel import layouts

__all__ = ["layouts"]

_LAZY = dict[str, str]()
"""Public names, and the modules that they come from. A module is imported when it is asked for: some need torch."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'flashlab.parallel' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
