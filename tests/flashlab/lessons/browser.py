"""Runs cells as a browser's Python would: `python tests/flashlab/lessons/browser.py CELLS.json`.

Pyodide calls its platform "emscripten". It starts no processes and no threads, and has no module `resource`. This bars
more than it does: `ctypes`, too. A cell is its source and what its last value has to say, or None. Exits with the first
cell that fails.
"""

from __future__ import annotations

import ast
import json
import linecache
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Any

BARRED = ("ctypes", "resource", "ipywidgets")
"""What isn't there. Sliders are the notebook's business."""


def refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("a browser's Python starts no process and no thread")


def bar() -> None:
    sysconfig.get_config_vars()  # while Python knows where its own are
    sys.platform = "emscripten"
    sys.modules.update(dict.fromkeys(BARRED))  # pyright: ignore[reportArgumentType, reportCallIssue]
    subprocess.Popen.__init__ = refuse
    threading.Thread.start = refuse


def run(source: str, file: str, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does: the value of its last line is what it shows."""
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), file, "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), file, "eval"), names)


if __name__ == "__main__":
    bar()
    names: dict[str, Any] = {"__name__": "__main__"}
    for n, (source, words) in enumerate(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))):
        shown = repr(run(source, f"<cell {n}>", names))
        if words is not None and words not in shown:
            sys.exit(f"cell {n}: {shown}")
