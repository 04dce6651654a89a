"""Keeps what compilers make in one folder, for all processes of a user: NVRTC's kernels, the emulator's libraries.

An entry is a folder, named by a digest of all that decides what is in it. So an entry never changes, and no process waits for
another: each makes the entry beside its place and moves it there in one step. What came first stays.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from flashlab.base.scratch import left_behind, scratch

__all__ = ["Held", "clean", "digest", "entry", "folder", "held"]

_KINDS = ("compiled", "emulator", "runtime", "survey", "told")
_DIGESTS = "digests.json"  # of an entry's files: what tells a damaged entry from a sound one
_NAME = re.compile(r"[0-9a-f]{32}")
_UNFINISHED = "unfinished-"

_locks: dict[Path, threading.Lock] = {}
_guard = threading.Lock()
_own: Path | None = None  # stands for the cache where that can't be written


@dataclass(frozen=True)
class Held:
    """What a cache holds, or held: its `folder`, the number of `entries` and their `bytes`."""

    folder: str
    entries: int
    bytes: int


def folder() -> Path:
    """The folder: `FLASHLAB_CACHE`, or the system's for a user's caches."""
    return Path(os.environ.get("FLASHLAB_CACHE") or user_cache_path("flashlab", appauthor=False))


def digest(*parts: str | bytes) -> str:
    """The name of an entry that these texts decide.

    >>> digest("ab", "c") == digest("ab", b"c"), digest("ab", "c") == digest("a", "bc")
    (True, False)
    """
    whole = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        whole.update(b"%d:" % len(content))  # keeps ("ab", "c") apart from ("a", "bc")
        whole.update(content)
    return whole.hexdigest()[:32]


def entry(kind: str, name: str, make: Callable[[Path], None]) -> Path:
    """The folder of an entry. Where it is missing or damaged, `make` is called with an empty folder, which it fills.

    Threads wait for the one that makes the entry. Where the cache can't be written, the entry lasts as long as the process,
    and a warning says so once.
    """
    assert kind in _KINDS, kind
    path = folder() / kind / name
    with _locks.setdefault(path, threading.Lock()):
        if _is_sound(path):
            return path
        try:
            return _made(path, make)
        except OSError as error:
            instead = _folder_of_this_process(error) / kind / name
            return instead if _is_sound(instead) else _made(instead, make)


def held() -> Held:
    """What the cache holds."""
    sizes = [_bytes_of(path) for path in _ours()]
    return Held(str(folder()), len(sizes), sum(sizes))


def clean() -> Held:
    """Deletes what the cache holds, and says what that was. Other files in its folder stay, and so does what is being made."""
    sizes: list[int] = []
    for path in _ours():
        size = _bytes_of(path)
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            sizes.append(size)
    return Held(str(folder()), len(sizes), sum(sizes))


def _made(path: Path, make: Callable[[Path], None]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with scratch(_UNFINISHED, within=path.parent) as beside:
        work = beside / "entry"
        work.mkdir()
        make(work)
        digests = {file.name: _digest_of(file) for file in sorted(work.iterdir())}
        (work / _DIGESTS).write_text(json.dumps(digests), encoding="utf-8")
        for attempt in range(8):  # between two of its steps another process may do the same
            with contextlib.suppress(OSError):
                return work.rename(path)
            if _is_sound(path):
                return path
            with contextlib.suppress(OSError):
                path.rename(beside / f"damaged-{attempt}")
    raise OSError(None, "a damaged entry can't be replaced", str(path))


def _is_sound(path: Path) -> bool:
    """Is an entry there, each file as it was made, and by whom one trusts? A library of the cache runs with this user's rights."""
    try:
        digests: dict[str, str] = json.loads((path / _DIGESTS).read_bytes())
        return _is_trusted(path) and all(_digest_of(path / name) == made for name, made in digests.items())
    except (OSError, ValueError, AttributeError):
        return False


def _is_trusted(path: Path) -> bool:
    """Is an entry this user's, or the system's? Anybody may write a digest beside a library of theirs."""
    if os.name == "nt":  # whose folders for caches are a user's own
        return True
    return all(each.lstat().st_uid in (0, os.geteuid()) for each in (path, *path.iterdir()))


def _digest_of(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _folder_of_this_process(error: OSError) -> Path:
    global _own
    with _guard:
        if _own is None:
            lasting = contextlib.ExitStack()
            _own = lasting.enter_context(scratch())
            atexit.register(lasting.close)
            why = f"can't keep compiled kernels in {folder()} ({error.strerror or error})"
            warnings.warn(f"{why}: set FLASHLAB_CACHE to a folder that can be written", RuntimeWarning, stacklevel=3)
        return _own


def _ours() -> Iterator[Path]:
    """The entries, and what processes left that ended before they had finished one."""
    for kind in _KINDS:
        with contextlib.suppress(OSError):  # there is none of that kind
            for path in sorted((folder() / kind).iterdir()):
                left = path.name.startswith(_UNFINISHED) and left_behind(path, _UNFINISHED)
                if path.is_dir() and (left or _NAME.fullmatch(path.name)):
                    yield path


def _bytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
