"""What every kernel includes, compiled once: g++ loads it in a moment, where it would read 20,000 lines in each build."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Sequence
from pathlib import Path

import kernels_cu
from flashlab.base import cache

__all__ = ["options_of", "precompiled"]

_NOT_OF_HEADERS = ("-D", "-U", "-I", "-iquote", "-idirafter")
"""Options of the preprocessor. The text has been through it; g++ itself refuses a header that has a word which is a macro here."""
_NAME = "prefix.h"


def options_of(command: Sequence[str]) -> tuple[str, ...]:
    """Those options of a compiler's command that a precompiled header must share with what includes it."""
    return tuple(option for option in command[1:] if not option.startswith(_NOT_OF_HEADERS))


@functools.lru_cache(maxsize=16)
def precompiled(compiler: tuple[str, str], options: tuple[str, ...], text: str, folder: Path) -> Path | None:
    """A header with this text in the cache at `folder`, and beside it what g++ has made of it; None where it can't.

    `compiler` is the path of a compiler and what it says of its version. Where g++ finds that the header doesn't fit what includes
    it, it reads the text.
    """
    del folder  # a cache that is elsewhere now has none of the other's headers
    path, version = compiler
    if "clang" in version:
        return None
    keywords = kernels_cu.emulator_dir() / "keywords.h"

    def make(work: Path) -> None:
        (work / _NAME).write_text(f'#include "keywords.h"\n{text}', encoding="utf-8")
        command = [path, *options, f"-I{keywords.parent}", "-x", "c++-header", str(work / _NAME)]
        subprocess.run([*command, "-o", str(work / f"{_NAME}.gch")], capture_output=True, check=False)

    made = cache.entry("runtime", cache.digest(version, *options, keywords.read_bytes(), text), make)
    return made / _NAME if (made / f"{_NAME}.gch").is_file() else None
