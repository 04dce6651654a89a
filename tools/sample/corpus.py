"""Makes the text: every module of CPython's standard library, some of them held out.

    python3.11 tools/sample/corpus.py corpus.npz

The text is all `.py` files below `Lib/` as CPython 3.11.7 installs them, each after one zero byte. The modules of
`HELD_OUT` and their tests are never trained on; attention is captured on them. Tokens are byte pairs learned on the
training text. The hash printed at the end is over every file's path and bytes. `sample_training.json` holds the hash of
the text that was trained on.
"""

import hashlib
import sys
import sysconfig
from pathlib import Path

import bpe
import numpy as np

VOCABULARY = 1024

HELD_OUT = "calendar csv fractions graphlib heapq queue sched shlex statistics string textwrap tomllib zipapp".split()
"""The modules kept for measurements: pure Python, by many authors and in many styles."""

LEFT_OUT = ("site-packages", "encodings", "pydoc_data", "config-", "_sysconfigdata")
"""Folders of tables, text and generated files, and of what is no part of Python."""


def library() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The training and the held-out files of the running interpreter's library, by path, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    train: dict[str, bytes] = {}
    held: dict[str, bytes] = {}
    for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix()):
        path = file.relative_to(root)
        text = file.read_bytes()
        if path.parts[0].startswith(LEFT_OUT) or not _is_text(text):
            continue
        first = path.parts[0].removesuffix(".py")
        if first in HELD_OUT:
            held[path.as_posix()] = text
        elif not set(HELD_OUT) & {part.removesuffix(".py").removeprefix("test_") for part in path.parts}:
            train[path.as_posix()] = text
    return train, held


def _is_text(text: bytes) -> bool:
    """True for UTF-8 without the zero byte that separates files. Some files of the library's tests are neither."""
    try:
        return "\0" not in text.decode()
    except UnicodeDecodeError:
        return False


def digest(*parts: dict[str, bytes]) -> str:
    """SHA-256 over the paths and bytes of all files."""
    total = hashlib.sha256()
    for files in parts:
        for path, text in files.items():
            total.update(f"{path}\0{len(text)}\0".encode() + text)
    return total.hexdigest()


def main(out: str) -> None:
    train, held = library()
    text = {name: b"".join(b"\0" + file for file in part.values()) for name, part in (("train", train), ("held", held))}
    merges = bpe.learn(text["train"], VOCABULARY)
    tokens = {name: np.array(bpe.encode(value, merges), np.uint16) for name, value in text.items()}
    version = sys.version.split()[0]
    np.savez_compressed(
        out, **tokens, merges=np.array(merges, np.uint16), paths=list(held), sha256=digest(train, held), python=version
    )
    for name, files in (("train", train), ("held", held)):
        print(f"{name}: {len(files)} files, {len(text[name]):,} bytes, {len(tokens[name]):,} tokens")
    print(f"CPython {version}, sha256 {digest(train, held)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
