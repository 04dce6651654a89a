"""The child process of `apart`: `python -m flashlab.base.apart_child FOLDER` makes the call that it finds in the folder."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashlab.base.process import end_with_parent


def main(folder: Path) -> None:
    """Make the call, and leave what it returned or raised in the folder."""
    end_with_parent()
    (folder / "where.txt").touch()
    (folder / "ready").touch()
    job: Mapping[str, Any] = pickle.loads((folder / "job.pickle").read_bytes())  # the parent's own, of this very moment
    limit(job["memory"])
    os.chdir(job["folder"])
    sys.path[:] = job["path"]
    function, arguments, named = pickle.loads(job["call"])
    try:
        answer = "returned", function(*arguments, **named)
    except Exception as error:
        answer = "raised", error
    (folder / "answer.pickle").write_bytes(pickle.dumps(answer))
    (folder / "done.json").write_text("{}", encoding="utf-8")


def limit(memory: int | None) -> None:
    """From now on this process may use so many bytes of address space, and leaves no core file."""
    try:
        import resource
    except ImportError:  # Windows has none
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory is not None:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
