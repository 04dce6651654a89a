"""Takes superseded results out of docs/results: `python -m docs._site.archive`, then draw the pages and run the tests.

Git's history keeps them. docs/results/archive.jsonl has a line for each: its path there, its SHA-256 and size in bytes, a
commit that holds it, and the files that superseded it.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flashlab.base.files import replace_file
from flashlab.measure import results
from flashlab.measure.results import Result

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / results.FOLDER
MANIFEST = RESULTS / "archive.jsonl"

STAY = frozenset(("blind", "corpus", "found", "found-gpu", "programs", "revisions"))
"""Kinds of which all files stay: what was predicted, other people's kernels, and what a change was worth."""
NAME = r"([a-z0-9-]+/)?([A-Za-z0-9_.-]+_[0-9]{4}-[0-9]{2}-[0-9]{2})"
"""A file of results in a text: perhaps its kind, and its name without the suffix."""


def superseded(found: Sequence[Result]) -> list[tuple[Result, list[Result]]]:
    """Results, oldest first, of which every algorithm has a newer one of the same kind, condition and device, with those.

    One that failed supersedes none that passed, and a quick run none that was full.
    """
    old: list[tuple[Result, list[Result]]] = []
    for index, result in enumerate(found):
        newer = [each for each in found[index + 1 :] if _of(each) == _of(result) and _as_good(each, result)]
        by = [next((x for x in reversed(newer) if name in x.algorithms), None) for name in result.algorithms]
        by = by or newer[-1:]  # a machine's rates are no algorithm's
        if by and None not in by:
            old.append((result, list({each.path: each for each in by if each}.values())))
    return old


def _of(result: Result) -> tuple[Any, ...]:
    return result.kind, result.condition, results.device_name(results.title(result.content))


def _as_good(newer: Result, older: Result) -> bool:
    return all(newer.data.get(key, True) or not older.data.get(key, True) for key in ("passed", "full"))


def cited(texts: Iterable[str]) -> set[tuple[str, str]]:
    """The files that texts name: each one's kind, or nothing where the text doesn't say it, and its name without suffix.

    >>> cited(["see docs/results/bench/flash2_h200_2026-11-21.jsonl"])
    {('bench', 'flash2_h200_2026-11-21')}
    """
    return {(kind.rstrip("/"), name) for text in texts for kind, name in re.findall(NAME, text)}


def texts() -> str:
    """What the repository's texts say of results; what results and the archive say of each other is left out."""
    aside = (f":!{results.FOLDER.as_posix()}/{each}" for each in ("*/*", MANIFEST.name))
    return git("grep", "-IhoE", NAME, "--", *aside).decode()


def git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=True).stdout


def main() -> None:
    named, commit = cited([texts()]), git("rev-parse", "HEAD").decode().strip()
    rows: list[dict[str, Any]] = []
    for result, by in superseded(results.find(RESULTS)):
        if result.kind in STAY or named & {(result.kind, result.path.stem), ("", result.path.stem)}:
            continue
        path = result.path.relative_to(RESULTS).as_posix()
        content = git("show", f"{commit}:{results.FOLDER.as_posix()}/{path}")
        if content != result.path.read_bytes():
            raise SystemExit(f"{path} isn't committed as it is")
        rows.append({
            "path": path,
            "sha256": hashlib.sha256(content).hexdigest(),
            "bytes": len(content),
            "commit": commit,
            "superseded_by": [each.path.relative_to(RESULTS).as_posix() for each in by],
        })  # fmt: skip
    before = MANIFEST.read_text(encoding="utf-8") if MANIFEST.exists() else ""
    replace_file(MANIFEST, before + "".join(f"{json.dumps(row)}\n" for row in rows))
    for row in rows:
        (RESULTS / row["path"]).unlink()
        print(row["path"])


if __name__ == "__main__":
    main()
