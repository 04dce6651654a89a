"""Does it fit into this machine's memory? That is looked at before arrays are made: a system without memory kills somebody."""

from __future__ import annotations

from pathlib import Path

from simulator.errors import Said, UsageError

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Files that say a control group's limit and what it uses, of versions 2 and 1."""
_LITTLE = 64 << 20


def free() -> int | None:
    """Bytes that this process may still take, or None where the system doesn't say: it is no Linux.

    That is what the system has available, and what is left to each control group that the process is in. What a group keeps
    of files counts as free, because the system drops it first.
    """
    try:
        lines = (_PROC / "meminfo").read_text(encoding="ascii").splitlines()
        most = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
    return min([most, *_left_to_groups()])


def _left_to_groups() -> list[int]:
    found: list[int] = []
    try:
        lines = (_PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return found
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        top = _GROUPS / kinds
        group = top / path.lstrip("/")
        for folder in (group, *(parent for parent in group.parents if top in (parent, *parent.parents))):
            for limit, used in _LIMITS:
                left = _left(folder, limit, used)
                found += [] if left is None else [left]
    return found


def _left(folder: Path, limit: str, used: str) -> int | None:
    """What is left of one limit, or None where there is none."""
    try:
        most, now = ((folder / name).read_text(encoding="ascii").strip() for name in (limit, used))
        files = [line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines()]
        dropped = next((int(n) for name, n in files if name == "inactive_file"), 0)
        return None if most == "max" else max(0, int(most) - int(now) + dropped)
    except (OSError, ValueError):
        return None


def check_memory(what: str, nbytes: int) -> None:
    """Raise `UsageError` if that many bytes aren't free. `what` needs them, in words.

    >>> check_memory("the scores of 10 million tokens", 8 * 10**14)
    Traceback (most recent call last):
        ...
    simulator.memory.NotEnoughMemory: memory = the scores of 10 million tokens, 728 TiB: expected at most the ...
    """
    if nbytes < _LITTLE:  # to look takes longer than to make it
        return
    left = free()
    if left is not None and nbytes > left:
        raise NotEnoughMemory(what, nbytes, left)


class NotEnoughMemory(UsageError, MemoryError):
    """What a call needs doesn't fit into this machine's memory. Nothing has been allocated."""

    def __init__(self, what: str, nbytes: int, left: int) -> None:
        super().__init__("memory", Said(f"{what}, {_said(nbytes)}"), f"at most the {_said(left)} that are free here")


def _said(nbytes: int) -> str:
    size, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.3g} {units[0]}"
