"""Finds the source lines of places in machine code, with the tools of binutils."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import kernels_cu
from simulator.errors import Unavailable

__all__ = ["calls_of", "check_tools", "lines_of", "run"]

_TOOLS = ("addr2line", "c++filt", "objcopy", "readelf")
_CALL = re.compile(
    r"^([0-9a-f]+) +[0-9a-f]+ R_(?:X86_64_PLT32|X86_64_PC32|AARCH64_CALL26) .* (?:emu_|__tsan_)", re.MULTILINE
)
_DISCRIMINATOR = re.compile(r" \(discriminator \d+\)$")


def calls_of(library: Path) -> list[int]:
    """The return addresses of all calls into the emulator's runtime, for an access or a collective.

    The library keeps its relocations (`--emit-relocs`), of which each call has one: its last four bytes.
    """
    rows = run(["readelf", "--wide", "--relocs", str(library)])
    return sorted(int(match[1], 16) + 4 for match in _CALL.finditer(rows))


def lines_of(library: Path, returns: Sequence[int]) -> list[list[tuple[str, int]]]:
    """The (file, line) pairs that lead to each return address, innermost first, without the emulator's own lines."""
    if not returns:
        return []
    asked = "\n".join(f"{x - 1:#x}" for x in returns)  # an address inside the call; the return address lies behind it
    rows = run(["addr2line", "--addresses", "--inlines", "--exe", str(library)], asked).splitlines()
    chains: list[list[tuple[str, int]]] = []
    here = str(kernels_cu.emulator_dir())
    for row in rows:
        if row.startswith("0x"):
            chains.append([])
            continue
        file, _, number = _DISCRIMINATOR.sub("", row).rpartition(":")
        if number.isdecimal() and Path(file).name not in ("doors", "??") and not file.startswith(here):
            chains[-1].append((file, int(number)))
    return chains


def check_tools() -> None:
    """Raise `Unavailable` if a tool is missing, before anything is built."""
    if missing := [tool for tool in _TOOLS if not shutil.which(tool)]:
        raise Unavailable(
            f"no {', '.join(missing)}, which the emulator needs: apt install binutils, or as your system installs it"
        )


def run(command: Sequence[str], stdin: str = "") -> str:
    """Run a tool and return what it prints."""
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=True, errors="replace").stdout
