"""Files: written all or nothing, so that nobody ever reads half of one; text and JSON, read and shown as a stranger's."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from simulator.errors import UsageError

__all__ = ["check_file", "check_folder", "parsed", "path_of", "plain", "printable", "replace_file"]

_DEEPEST = 100
"""How deep a document may be. No command writes one half as deep, and Python's recursion ends at some depth."""
_COMMANDS = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's categories of what a terminal obeys or hides, rather than shows."""


def replace_file(path: str | os.PathLike[str], content: str | bytes, *, argument: str = "path") -> Path:
    """Write `content` (text as UTF-8) to the file `path`: all of it or, on any failure, nothing at all.

    `argument` is what an error calls the path: the name of an option or of a parameter. Folders are not created.
    Links are followed. A device such as /dev/null is written to directly, since it cannot be replaced.
    Raises `UsageError` where the file cannot be written.
    """
    check_file(path, argument=argument)
    target = Path(os.path.realpath(path))
    data = content.encode() if isinstance(content, str) else content
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return Path(path)
        try:
            with open(beside, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # otherwise a power cut could leave an empty file under the new name
            if target.exists():
                beside.chmod(target.stat().st_mode & 0o777)
            os.replace(beside, target)
        finally:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(argument, path, error.strerror or str(error)) from None
    return Path(path)


def check_file(path: str | os.PathLike[str], *, argument: str = "path") -> None:
    """Look, before there is anything to write, whether `replace_file` could write the file. Raises `UsageError`."""
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise _unwritable(argument, path, "is a folder")
        if not target.parent.is_dir():
            raise _unwritable(argument, path, "no such file or directory")
        if target.exists() and not os.access(target, os.W_OK):
            raise _unwritable(argument, path, "the file is write-protected")
        if not target.exists() and not os.access(target.parent, os.W_OK):
            raise _unwritable(argument, path, "the folder is write-protected")
    except (OSError, ValueError) as error:  # a name that is too long, or no name at all
        if isinstance(error, UsageError):
            raise
        raise _unwritable(argument, path, str(getattr(error, "strerror", None) or error)) from None


def check_folder(path: str | os.PathLike[str], *, argument: str) -> None:
    """Look, before there is anything to write, whether a folder can be made, or be written if it is there. Raises `UsageError`."""
    try:
        there = next(
            each for each in (Path(os.path.realpath(path)), *Path(os.path.realpath(path)).parents) if each.exists()
        )
        why = "" if os.access(there, os.W_OK) else f"{there} is write-protected"
        why = why if there.is_dir() else f"{there} is no folder"
    except (OSError, ValueError) as error:
        why = str(getattr(error, "strerror", None) or error)
    if why:
        raise UsageError(argument, str(path), f"a folder that can be written ({why})") from None


def _unwritable(argument: str, path: object, why: str) -> UsageError:
    return UsageError(argument, str(path), f"a file that can be written ({why.lower()})")


def path_of(argument: str, value: Any, accepted: str = "the name of a file") -> Path:
    """An argument as a path. Raises `UsageError` for what names none."""
    try:
        return Path(os.fsdecode(value) if isinstance(value, bytes) else value)
    except (TypeError, ValueError):
        raise UsageError(argument, value, accepted) from None


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text of anybody's. Raises `ValueError` for what is none, and for one that is too deep.

    >>> parsed("[" * 100_000)
    Traceback (most recent call last):
        ...
    ValueError: it is nested more than 100 deep
    """
    too_deep = ValueError(f"it is nested more than {_DEEPEST} deep")
    try:
        found: Any = json.loads(text)
    except RecursionError:
        raise too_deep from None
    if isinstance(text, str) and text.count("[") + text.count("{") <= _DEEPEST:
        return found  # as nearly all lines are, which aren't looked through
    depth, level = 0, [found]
    while level := [part for each in level for part in _parts(each)]:
        depth += 1
        if depth > _DEEPEST:
            raise too_deep
    return found


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast("dict[str, Any]", value).values())
    return cast("list[Any]", value) if isinstance(value, list) else []


def printable(text: str) -> str:
    r"""Text of anybody's as it may be shown: what a terminal would obey is spelt out. New lines and tabs stay.

    >>> printable("\x1b[2J×")
    '\\x1b[2J×'
    """
    if text.isprintable():
        return text
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in _COMMANDS else c.encode("unicode_escape").decode()
        for c in text
    )


def plain(value: Any) -> Any:
    """Return `value` as JSON can hold it: infinities and NaN become text that Python's `float` reads, keys become text.

    >>> plain({"worst": float("inf"), "rows": (1, 2)})
    {'worst': 'inf', 'rows': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in cast("list[Any]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
