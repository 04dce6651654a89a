"""Temporary folders. What a process that was killed has left of them, the next one deletes."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:
    fcntl = None

__all__ = ["left_behind", "scratch"]

_PREFIX = "flashlab-scratch-"
_NAME = re.compile(r"[a-z0-9_]{8}")  # what tempfile puts behind it: no other folder of this prefix is ours
_ABANDONED = 86_400  # seconds after which nobody holds a folder any more, where there is no lock that says so
_FRESH = 10  # seconds in which whoever makes a folder surely has locked it


@contextmanager
def scratch(prefix: str = _PREFIX, *, within: Path | None = None) -> Generator[Path]:
    """A folder that is gone at the end, in the system's folder for such or `within` another.

    Folders of this prefix that nobody holds are deleted first. It is locked for as long as this process lives, however that
    ends. Windows has no such lock: there they are deleted when they are old.
    """
    within = Path(tempfile.gettempdir()) if within is None else within
    for path in within.glob(f"{prefix}*"):
        with suppress(OSError):
            if left_behind(path, prefix):
                shutil.rmtree(path, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=within, prefix=prefix, ignore_cleanup_errors=True) as name:
        with _held(Path(name)):
            yield Path(name)


def left_behind(path: Path, prefix: str) -> bool:
    """Is this a folder of `scratch` that nobody holds?"""
    if not _NAME.fullmatch(path.name.removeprefix(prefix)) or path.is_symlink() or not path.is_dir():
        return False
    age = time.time() - path.stat().st_mtime
    if fcntl is None or age < _FRESH:  # it may be about to be locked
        return age > _ABANDONED
    folder = os.open(path, os.O_RDONLY)  # another user's can't be opened
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(folder)
    return True


@contextmanager
def _held(path: Path) -> Generator[None]:
    if fcntl is None:
        yield
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
