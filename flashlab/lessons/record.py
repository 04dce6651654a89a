"""What the learner has done, kept on this computer: FLASHLAB_HOME, or the platform's folder for a user's data."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from platformdirs import user_data_path

from flashlab.base.files import parsed, replace_file
from simulator import UsageError

try:
    import fcntl
except ImportError:
    fcntl = None

SCHEMA = 1
_FILE = "progress.json"


def home() -> Path:
    """The folder that progress is kept in."""
    named = os.environ.get("FLASHLAB_HOME")
    return Path(named) if named else user_data_path("flashlab", appauthor=False)


def read() -> dict[str, dict[str, Any]]:
    """`{"predictions": {name: …}, "exercises": {name: …}}`; a file that can't be read is set aside, not mended.

    One that a newer version wrote is empty here, and kept.
    """
    return _read()[0]


def _read() -> tuple[dict[str, dict[str, Any]], bool]:
    """What was kept, and whether this version may write the file."""
    empty: dict[str, dict[str, Any]] = {"predictions": {}, "exercises": {}}
    path = home() / _FILE
    try:
        found = parsed(path.read_text(encoding="utf-8"))
        if found["schema"] != SCHEMA:
            return empty, False
        kept = {kind: cast("dict[str, Any]", found[kind]) for kind in empty}
        if not all(isinstance(entry, dict) for part in kept.values() for entry in part.values()):
            raise TypeError
        return kept, True
    except OSError:
        return empty, True
    except (ValueError, LookupError, TypeError, AttributeError):
        with suppress(OSError):
            path.replace(path.with_suffix(".broken"))
        return empty, True


def note(kind: str, name: str, **entry: Any) -> None:
    """Remember something; where nothing can be written, it is forgotten."""
    with suppress(OSError, UsageError):
        home().mkdir(parents=True, exist_ok=True)
        with _alone():
            done, ours = _read()
            done[kind][name] = done[kind].get(name, {}) | entry
            if ours:
                replace_file(home() / _FILE, json.dumps({"schema": SCHEMA, **done}, indent=1, sort_keys=True))


@contextmanager
def _alone() -> Generator[None]:
    """No other notebook reads and writes the file meanwhile. Windows has no such lock: there the last one wins."""
    if fcntl is None:
        yield
        return
    folder = os.open(home(), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


@dataclass(frozen=True)
class Progress:
    """What was answered and passed, lesson by lesson; it shows itself."""

    rows: tuple[tuple[str, str, int, int, int, int, int], ...]
    """Lesson, title, predictions answered, right and in all, exercises passed and in all."""

    def __repr__(self) -> str:
        return "\n".join(
            f"{lesson} {title:<34} predictions {answered} of {asked} answered, {right} right; exercises {passed} of {posed}"
            for lesson, title, answered, right, asked, passed, posed in self.rows
        )


def progress() -> Progress:
    """How far you are. Kept on this computer only, in FLASHLAB_HOME or the platform's folder for a user's data.

    >>> import os; os.environ["FLASHLAB_HOME"] = os.getcwd()
    >>> import flashlab as fl
    >>> print(str(fl.progress()).splitlines()[0])
    00 The memory hierarchy               predictions 0 of 3 answered, 0 right; exercises 0 of 4
    """
    from flashlab.lessons.catalogue import CLASS_EXERCISES, EXERCISES, KERNEL_EXERCISES, LESSONS, PREDICTIONS

    posed = [name for name, exercise in (EXERCISES | KERNEL_EXERCISES | CLASS_EXERCISES).items() if not exercise.extra]
    done = read()
    answered = {name for name in done["predictions"] if name in PREDICTIONS}
    right = {name for name in answered if done["predictions"][name].get("right")}
    passed = {name for name, entry in done["exercises"].items() if name in posed and entry.get("passed")}

    def of(lesson: str, names: Any) -> int:
        return sum(name.startswith(lesson + ".") for name in names)

    return Progress(
        tuple(
            (n, title, of(n, answered), of(n, right), of(n, PREDICTIONS), of(n, passed), of(n, posed))
            for n, title in LESSONS.items()
        )
    )
