"""A child process: started with limits, watched, ended with everything that it has started.

A browser's Python (Pyodide) has no processes. There a check runs in the notebook's own, without limits.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
IN_A_BROWSER = sys.platform == "emscripten"
START = 600.0
"""How long Python may take to start, and a compiler to compile."""
FLOOD = 100_000
"""Bytes that it may print."""
SHOWN = 2_000
"""Bytes of that which are shown."""
PARENT = "FLASHLAB_PARENT"
"""The variable that tells a child who started it."""
LOOK = 2.0
"""Seconds between two looks at what a child has had of the processors. Even on a very busy machine it has some in each."""
_ASLEEP = 0.02
"""Seconds of processor time between two looks under which a process sleeps."""
ONE_THREAD: Mapping[str, str] = {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL")}
"""For a child with little address space: each thread of a library takes its share."""


@dataclass(frozen=True)
class Outcome:
    """What is left of a child: why it ended ("done", or a kind of verdict), what it printed, and the files it wrote."""

    kind: str
    message: str
    printed: str


def run_child(
    folder: Path, seconds: float, module: str, environment: Mapping[str, str] = ONE_THREAD, *, own_time: bool = False,
    flood: int = FLOOD, poll: Callable[[], object] = lambda: None,
) -> Outcome:  # fmt: skip
    """Run a module on the job in a folder; when this returns, none of its processes is left.

    It hangs if it writes so in `where.txt`, for it knows its processor time. `seconds` are by the clock, where a busy machine
    counts too: that they end says nothing of the program, but it is asked where it is. With `own_time` they are those of a
    `Stopwatch`. It may print `flood` bytes. `poll` is called over and over while it runs. If this process is killed, the child
    ends too, on Linux.
    """
    if IN_A_BROWSER:
        return _run_here(folder, module, flood)
    printed = folder / "printed.txt"
    with printed.open("wb") as sink:
        child = start_child(folder, module, environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
    kind, started, limit, end = "done", False, START, time.monotonic() + START
    watch: Stopwatch | None = None
    ready, where = folder / "ready", folder / "where.txt"
    try:
        while child.poll() is None:
            now = time.monotonic()
            if not started and ready.exists():  # on a busy machine Python takes its time to start: that is not counted
                started, limit, end = True, seconds, now + seconds
                watch = Stopwatch(child.pid) if own_time else None
            poll()
            if _size(printed) > flood:
                kind = "flood"
                break
            if started and _size(where):  # when its time is up, it writes down which line it is in
                kind = "hang"
                break
            if (now > end) if watch is None else watch.seconds > limit:
                kind = "no end"
                _ask_where(child, where)
                break
            time.sleep(0.01)
    finally:
        end_child(child)
    text = printed.read_bytes() if printed.exists() else b""  # the child may have deleted its folder
    if len(text) > flood:
        return _flooded(text, flood)
    if kind != "done":
        return Outcome(kind, "still running" if kind == "hang" else f"no end within {limit:g} seconds", _start(text))
    if not (folder / "done.json").exists():
        return Outcome("crash" if child.returncode < 0 else "exit", how_it_ended(child.returncode), _start(text))
    return Outcome("done", "", _start(text))


def start_child(folder: Path, module: str, environment: Mapping[str, str], **streams: Any) -> subprocess.Popen[Any]:
    """Start `python -m module folder` there, with limits on what it inherits. `streams` are those of `Popen`."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSTARTUP")}
    own = {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUTF8": "1", "MPLBACKEND": "Agg"}
    temporary = dict.fromkeys(("TMPDIR", "TMP", "TEMP"), str(folder))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(folder)],
        cwd=folder,
        env={**kept, **own, **temporary, **environment, PARENT: str(os.getpid())},
        start_new_session=os.name != "nt",
        **streams,
    )


def how_it_ended(status: int) -> str:
    """What became of a child that left before its time, by its exit status."""
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"it ended its process (status {status}) instead of returning"


class Stopwatch:
    """The seconds that a process has had: of the processor while it works, and by the clock while it sleeps.

    So a busy machine counts for nothing. While it works, they are those of its busiest thread, or of all threads together what
    each core has. What it has started belongs to it. Where the system doesn't say (on anything but Linux), all are by the clock.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self._cores, self._counted = pid, os.cpu_count() or 1, 0.0
        self._at, self._had = time.monotonic(), _processor_time(pid)

    @property
    def seconds(self) -> float:
        """What it shows now. It looks every few seconds."""
        now = time.monotonic()
        if now - self._at >= LOOK:
            had = _processor_time(self._pid)
            self._counted += self._between(now - self._at, had)
            self._at, self._had = now, had
        return self._counted

    def _between(self, passed: float, had: Mapping[str, float]) -> float:
        grown = {who: n - self._had.get(who, 0) for who, n in had.items()}
        every = grown.pop("", 0.0)
        if every < _ASLEEP:
            return passed
        return min(passed, max(every / self._cores, *grown.values()))


def _processor_time(pid: int) -> dict[str, float]:
    """Seconds of processor time of each thread of a process, and of all it is and has started under "". Zero where none says."""
    tasks = Path(f"/proc/{pid}/task")  # which only Linux has
    found = {"": _times(Path(f"/proc/{pid}/stat"), 4)}
    for task in _read(lambda: list(tasks.iterdir()), []):
        found[task.name] = _times(task / "stat", 2)
        for started in _read((task / "children").read_text, "").split():
            below = _processor_time(int(started))
            found[""] += below.pop("")
            found |= below
    return found


def _times(stat: Path, kinds: int) -> float:
    """The user's and the system's seconds; of 4 kinds also those of the children that have ended."""
    fields = _read(stat.read_text, "").rpartition(")")[2].split()
    return sum(map(int, fields[11 : 11 + kinds])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _read(read: Callable[[], T], otherwise: T) -> T:
    """What is read, of a process that may end meanwhile."""
    try:
        return read()
    except OSError:
        return otherwise


def end_with_parent() -> None:
    """Called in a child: it is to end when the process that started it is killed, and can't end it. Linux sees to that."""
    if sys.platform != "linux" or PARENT not in os.environ:
        return
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(os.environ[PARENT]):  # it was killed before
        os._exit(1)


def _run_here(folder: Path, module: str, flood: int) -> Outcome:
    """The same without a process. A program that doesn't end is the reader's to interrupt."""
    printed, path = io.StringIO(), sys.path[:]
    try:
        with chdir(folder), redirect_stdout(printed), redirect_stderr(printed):
            import_module(module).work(folder)
    finally:
        sys.path[:] = path
    text = printed.getvalue().encode()
    return _flooded(text, flood) if len(text) > flood else Outcome("done", "", _start(text))


def _flooded(text: bytes, flood: int) -> Outcome:
    return Outcome("flood", f"it printed more than {flood:,} bytes", _start(text))


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _ask_where(child: subprocess.Popen[Any], where: Path) -> None:
    """Has a child that began `where.txt` write its lines there, as it does when its processor time is up."""
    if os.name == "nt" or not where.exists():
        return
    child.send_signal(signal.SIGPROF)
    for _ in range(100):
        if _size(where) or child.poll() is not None:
            return
        time.sleep(0.01)


def _start(text: bytes) -> str:
    shown = text[:SHOWN].decode("utf-8", "replace")
    return shown + ("\n[…]" if len(text) > SHOWN else "")


def end_child(child: subprocess.Popen[Any]) -> None:
    """End a child and whatever it has started."""
    if os.name == "nt":
        child.kill()
    else:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    child.wait()
