"""The child process of a check of a class: `python -m flashlab.lessons.class_child FOLDER`. It judges, and writes what it found."""

from __future__ import annotations

import json
import linecache
import pickle
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashlab.base.process import end_with_parent
from flashlab.lessons.catalogue import CLASS_EXERCISES
from flashlab.lessons.child import explain, limit_memory, limited


def main(folder: Path) -> None:
    """The whole of the process."""
    end_with_parent()
    limit_memory()
    seconds = pickle.loads((folder / "job.pickle").read_bytes())["seconds"]
    with (folder / "where.txt").open("w", encoding="utf-8") as where:
        (folder / "ready").touch()  # from here on its time counts
        with limited(seconds, where):
            work(folder)


def work(folder: Path) -> None:
    """The job in a folder, wherever it runs."""
    job: dict[str, Any] = pickle.loads((folder / "job.pickle").read_bytes())  # the parent's own, of this very moment
    sys.path[:] = job["path"]
    linecache.cache[job["file"]] = (len("".join(job["lines"])), None, job["lines"], job["file"])
    try:
        found = asdict(CLASS_EXERCISES[job["exercise"]].judge(pickle.loads(job["answer"])))
    except BaseException as error:  # whatever a learner's class raises where nothing else tells it
        found = explain(error, job["file"])
    (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    (folder / "done.json").write_text("{}", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
